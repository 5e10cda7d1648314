"""A decoder over packed sequences: keys and values of earlier tokens lie in a paged cache.

Shape suffixes: T tokens of all sequences, packed; S sequences; D hidden size; W width of the seam; V vocabulary;
N query heads; K key/value heads; H head size; B pages; P tokens of a page.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.attention.paged import PagedBackend
from toolkit.compile import supports_torch_compile
from toolkit.nn.attention import Attention, Pages, Places
from toolkit.nn.few_rows import FewRowsBlock, can_fuse
from toolkit.nn.head import Head, build_head
from toolkit.nn.model import LayerStack
from toolkit.spec import AttentionSpec, EncoderSpec
from toolkit.steps import HeadSpec

__all__ = ["Decoder", "StepOutput", "build_decoder"]


Ropes = tuple[tuple[Tensor, Tensor], ...]


class StepOutput(NamedTuple):
    """Token states [T, D], the logits of each sequence's last token [S, V], and its likeliest next token int64 [S]."""

    states: Tensor
    logits: Tensor
    best: Tensor

    def cut(self, tokens: int, sequences: int) -> "StepOutput":
        """Views of what belongs to the first so many tokens and sequences."""
        return StepOutput(self.states[:tokens], self.logits[:sequences], self.best[:sequences])


class PagedAttention(Attention):
    """Causal attention with a paged cache of its own, `k_cache` and `v_cache` [B, P, K, H], that it appends to."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, hidden: int, spec: AttentionSpec, backend: PagedBackend, rope: int | None) -> None:
        super().__init__(hidden, spec, backend, rope)  # type: ignore[arg-type]
        self.paged = backend

    def attach(self, pages: int, page: int, device: torch.device, dtype: torch.dtype) -> None:
        """Allocate a cache of `pages` pages of `page` tokens."""
        shape = (pages, page, self.spec.kv_heads, self.spec.head_dim)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def _attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, places: Places) -> Tensor:
        assert places.pages is not None, "a decoder's places have pages"
        return self.paged.attend_paged(
            q_TNH,
            k_TKH,
            v_TKH,
            self.k_cache,
            self.v_cache,
            *places.pages,
            places.cu_seqlens,
            places.max_len,
            self.spec.scale,
            -1 if self.spec.reach is None else self.spec.reach,
            self.spec.softcap or 0.0,
        )


@supports_torch_compile(
    entry_points=("forward_ids", "forward_embeds", "forward_few_rows"),
    dynamic_first_dim=("ids", "positions", "slots", "cu_seqlens", "starts", "lanes", "embeds", "is_embed"),
)
class Decoder(LayerStack):
    """A causal decoder with its language-model head; `attach_cache` before the first call.

    Both entry points return the token states [T, D] and the logits [S, V] of each sequence's last token. A step brings
    each sequence's next tokens, one or many; its earlier ones are in the cache. Rows beyond the last sequence's end are
    undefined and reach no other row; an empty sequence's logits are undefined. Inputs: `ids` int32 [T], below 0 for
    what `latest` (int32 [lanes], written between the steps) holds for lane -1 - id; `positions` int32 [T];
    `slots` int32 [T], `starts`, `lanes` int32 [S], see `toolkit.nn.attention.Pages`; `cu_seqlens` int32 [S + 1];
    `max_len` int32 [1] on the CPU, an upper bound of the sequences' new tokens; `embeds` [T, W] in the weights' dtype;
    `is_embed` bool [T].
    """

    tables: Tensor
    latest: Tensor

    def __init__(self, spec: EncoderSpec, head: HeadSpec, backend: PagedBackend) -> None:
        super().__init__(spec, lambda attention, rope: PagedAttention(spec.hidden, attention, backend, rope))
        self.head: Head = build_head(head, torch.device("cpu"))
        self.few_rows = nn.ModuleDict()

    def attach_cache(self, pages: int, page: int, tables: Tensor) -> None:
        """Allocate every layer's cache; `tables` is what `Pages.tables` will be, and is written by its owner."""
        weight = self.embeddings.token.weight
        for module in self.modules():
            if isinstance(module, PagedAttention):
                module.attach(pages, page, weight.device, weight.dtype)
        self.register_buffer("tables", tables, persistent=False)
        latest = torch.zeros(tables.shape[0], dtype=torch.int32, device=tables.device)
        self.register_buffer("latest", latest, persistent=False)

    def forward_ids(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        starts: Tensor,
        lanes: Tensor,
        max_len: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Token ids in, embedding lookup inside."""
        x_TD = self.embeddings.from_ids(self._known(ids), positions, ids)
        return self._layers(x_TD, positions, slots, cu_seqlens, starts, lanes, max_len)

    def forward_embeds(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        starts: Tensor,
        lanes: Tensor,
        max_len: Tensor,
        embeds: Tensor,
        is_embed: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings where `is_embed`, looked-up ids elsewhere."""
        x_TD = self.embeddings.from_embeds(embeds, is_embed, self._known(ids), positions, ids)
        return self._layers(x_TD, positions, slots, cu_seqlens, starts, lanes, max_len)

    def serve_few_rows(self) -> bool:
        """Make `forward_few_rows` ready, if it can stand for `forward_ids`; say whether it can."""
        if all(map(can_fuse, self.spec.blocks)):
            self.few_rows.update({name: FewRowsBlock(block) for name, block in self.blocks.items()})  # type: ignore[arg-type]
        return bool(self.few_rows)

    def forward_few_rows(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        starts: Tensor,
        lanes: Tensor,
        max_len: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`forward_ids` for at most `toolkit.nn.gemv.MOST_ROWS` tokens, one a sequence; on CUDA, in 16 bits."""
        x_TD = self.embeddings.from_ids(self._known(ids), positions, ids)
        ropes: Ropes = tuple((rope.cos, rope.sin) for rope in self.ropes)  # type: ignore[misc]
        places = self._places(ropes, slots, cu_seqlens, starts, lanes, max_len)
        for name in self.spec.schedule:
            x_TD = self.few_rows[name](x_TD, places, positions)
        return self._finish(x_TD, cu_seqlens)

    def _known(self, ids: Tensor) -> Tensor:
        """An id below 0 stands for the latest token of lane -1 - id."""
        return torch.where(ids < 0, self.latest[(-1 - ids).clamp(min=0)], ids)

    def _layers(
        self,
        x_TD: Tensor,
        positions: Tensor,
        slots: Tensor,
        cu_seqlens: Tensor,
        starts: Tensor,
        lanes: Tensor,
        max_len: Tensor,
    ) -> tuple[Tensor, Tensor]:
        places = self._places(self.turns(positions), slots, cu_seqlens, starts, lanes, max_len)
        for name in self.spec.schedule:
            x_TD = self.blocks[name](x_TD, places)
        return self._finish(x_TD, cu_seqlens)

    def _places(
        self, ropes: Ropes, slots: Tensor, cu_seqlens: Tensor, starts: Tensor, lanes: Tensor, max_len: Tensor
    ) -> Places:
        none = cu_seqlens.new_empty(0)
        pages = Pages(slots=slots, starts=starts, lanes=lanes, tables=self.tables)
        return Places(cu_seqlens, max_len, ropes, distance=none, bucket_of=none, pages=pages)

    def _finish(self, x_TD: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Token states, and the logits of each sequence's last one."""
        x_TD = self.finish(x_TD)
        last_S = (cu_seqlens[1:] - 1).clamp(min=0)
        return x_TD, self.head.per_token(x_TD[last_S])


def build_decoder(spec: EncoderSpec, head: HeadSpec, backend: PagedBackend) -> Decoder:
    """Build the module on the meta device: shapes without memory, to be filled by `toolkit.nn.model.fill`."""
    with torch.device("meta"):
        return Decoder(spec, head, backend).eval().requires_grad_(False)

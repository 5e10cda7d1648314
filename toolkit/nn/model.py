"""The layers of encoders and decoders, and the whole encoder behind entry points with fixed signatures.

Blocks add with `torch.add`, whose `alpha` multiplies what is added within the one kernel.

Shape suffixes: T tokens of all sequences, packed; D hidden size; S sequences; W width of the seam.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from toolkit.attention import AttentionBackend
from toolkit.compile import supports_torch_compile
from toolkit.nn.attention import Attention, Places, build_attention
from toolkit.nn.distance import DistanceTable, build_distance
from toolkit.nn.embeddings import Embeddings
from toolkit.nn.grouped import GroupedLinear
from toolkit.nn.linear import FusedLinear
from toolkit.nn.mlp import build_mlp
from toolkit.nn.norm import build_norm
from toolkit.nn.rope import RopeTable
from toolkit.spec import AttentionSpec, BlockSpec, EncoderSpec, LayerMixSpec

__all__ = ["Encoder", "LayerStack", "build_encoder", "fill", "part_groups", "part_shapes"]


class PostNormBlock(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, hidden: int, spec: BlockSpec, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.attention_norm = build_norm(hidden, spec.norm)
        self.mlp = build_mlp(hidden, spec.mlp)
        self.mlp_norm = build_norm(hidden, spec.norm)
        self.scale = spec.residual_scale

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        x_TD = self.attention_norm(torch.add(x_TD, self.attention(x_TD, places), alpha=self.scale))
        return self.mlp_norm(torch.add(x_TD, self.mlp(x_TD), alpha=self.scale))


class PostTwiceNormBlock(PostNormBlock):
    """Like PostNormBlock, but the layer's input is added a second time, to the normalised sum, and normalised again."""

    def __init__(self, hidden: int, spec: BlockSpec, attention: nn.Module) -> None:
        super().__init__(hidden, spec, attention)
        self.attention_norm_again = build_norm(hidden, spec.norm)

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        once_TD = self.attention_norm(torch.add(x_TD, self.attention(x_TD, places), alpha=self.scale))
        x_TD = self.attention_norm_again(x_TD + once_TD)
        return self.mlp_norm(torch.add(x_TD, self.mlp(x_TD), alpha=self.scale))


class PreNormBlock(nn.Module):
    """Attention and feed-forward, each over the normalised input and then added to it."""

    def __init__(self, hidden: int, spec: BlockSpec, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = build_norm(hidden, spec.norm) if spec.attention_norm else nn.Identity()
        self.attention = attention
        self.mlp_norm = build_norm(hidden, spec.norm)
        self.mlp = build_mlp(hidden, spec.mlp)
        self.scale = spec.residual_scale

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        x_TD = torch.add(x_TD, self.attention(self.attention_norm(x_TD), places), alpha=self.scale)
        return torch.add(x_TD, self.mlp(self.mlp_norm(x_TD)), alpha=self.scale)


class SandwichBlock(PreNormBlock):
    """Like PreNormBlock, with a norm after each branch too, before it is added."""

    def __init__(self, hidden: int, spec: BlockSpec, attention: nn.Module) -> None:
        super().__init__(hidden, spec, attention)
        self.attention_out_norm = build_norm(hidden, spec.norm)
        self.mlp_out_norm = build_norm(hidden, spec.norm)

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        branch_TD = self.attention_out_norm(self.attention(self.attention_norm(x_TD), places))
        x_TD = torch.add(x_TD, branch_TD, alpha=self.scale)
        return torch.add(x_TD, self.mlp_out_norm(self.mlp(self.mlp_norm(x_TD))), alpha=self.scale)


class ParallelBlock(PreNormBlock):
    """Like PreNormBlock, but the feed-forward reads the layer's input too, not the sum after attention."""

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        attended_TD = self.attention(self.attention_norm(x_TD), places)
        return torch.add(x_TD, self.mlp(self.mlp_norm(x_TD)) + attended_TD, alpha=self.scale)


class PostBranchBlock(nn.Module):
    """Attention and feed-forward, the output of each normalised and then added to its input."""

    def __init__(self, hidden: int, spec: BlockSpec, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.attention_out_norm = build_norm(hidden, spec.norm)
        self.mlp = build_mlp(hidden, spec.mlp)
        self.mlp_out_norm = build_norm(hidden, spec.norm)
        self.scale = spec.residual_scale

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        x_TD = torch.add(x_TD, self.attention_out_norm(self.attention(x_TD, places)), alpha=self.scale)
        return torch.add(x_TD, self.mlp_out_norm(self.mlp(x_TD)), alpha=self.scale)


class LayerMix(nn.Module):
    """Weighted mean of several depths' states, summed in float32."""

    def __init__(self, spec: LayerMixSpec) -> None:
        super().__init__()
        self.start = spec.start
        self.layer_weights = nn.Parameter(torch.ones(spec.count))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        """[T, D] of every depth → [T, D]."""
        weights = self.layer_weights.float()
        sum_TD = torch.zeros_like(states[0], dtype=torch.float32)
        for weight, x_TD in zip(weights, states[self.start :], strict=True):
            sum_TD = sum_TD + weight * x_TD.float()
        return (sum_TD / weights.sum()).to(states[0].dtype)


_BLOCKS = {
    "parallel": ParallelBlock,
    "post": PostNormBlock,
    "post_branch": PostBranchBlock,
    "post_twice": PostTwiceNormBlock,
    "pre": PreNormBlock,
    "sandwich": SandwichBlock,
}


class LayerStack(nn.Module):
    """Embedding layer, blocks, final norm and projection: what encoders and decoders share.

    `make_attention` builds a block's attention from its spec and the place of its rope among `Places.ropes`.
    """

    def __init__(self, spec: EncoderSpec, make_attention: Callable[[AttentionSpec, int | None], nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = Embeddings(spec.embedding, spec.hidden)
        kinds = list(dict.fromkeys(a.rope for a in spec.attentions if a.rope is not None))
        self.ropes = nn.ModuleList(RopeTable(rope, spec.usable_length) for rope in kinds)
        self.blocks = nn.ModuleDict()
        for block in spec.blocks:
            rope = kinds.index(block.attention.rope) if block.attention.rope is not None else None
            attention = make_attention(block.attention, rope)
            self.blocks[block.name] = _BLOCKS[block.arrangement](spec.hidden, block, attention)
        self.final_norm = build_norm(spec.hidden, spec.final_norm) if spec.final_norm is not None else nn.Identity()
        self.projection = nn.Linear(spec.hidden, spec.projected, bias=False) if spec.projected else nn.Identity()

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """The seam: int [T] → [T, W], what `embeds` callers must pass for these ids."""
        return self.embeddings.look_up(ids)

    def finish(self, x_TD: Tensor) -> Tensor:
        """The last layer's [T, D] → the token states."""
        return self.projection(self.final_norm(x_TD))

    def turns(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """Cosines and sines of each rope of the model, for int32 [T]."""
        return tuple(rope(positions) for rope in self.ropes)


@supports_torch_compile(
    entry_points=("forward_ids", "forward_embeds", "forward_ids_keyed", "forward_embeds_keyed"),
    dynamic_first_dim=("ids", "positions", "segments", "cu_seqlens", "keys", "embeds", "is_embed"),
)
class Encoder(LayerStack):
    """A bidirectional encoder over packed sequences, without padding and without a KV cache.

    All entry points return the token states, [T, D]: those of the last layer, or the mean of several layers' that
    `spec.mix` describes. Rows beyond the last sequence's end are undefined and reach no other row. Inputs: `ids`,
    `positions`, `segments` int32 [T]; `cu_seqlens` int32 [S + 1], ascending from 0 (equal neighbours are empty
    sequences); `max_len` int32 [1] on the CPU, an upper bound of the sequence lengths; `embeds` [T, W] in the
    weights' dtype; `is_embed` bool [T]. Those called `keyed` take `keys` int32 [S], how many tokens at the start of
    each sequence are attended to; the others attend to all.
    """

    def __init__(self, spec: EncoderSpec, backend: AttentionBackend) -> None:
        super().__init__(spec, lambda attention, rope: build_attention(spec.hidden, attention, backend, rope))
        first = spec.attentions[0]
        assert all(a.distance == first.distance for a in spec.attentions), "layers share what they know of distances"
        self.distance = (
            build_distance(first.distance, spec.hidden, first.heads, spec.usable_length) if first.distance else None
        )
        self.mix = LayerMix(spec.mix) if spec.mix is not None else None

    def forward_ids(
        self, ids: Tensor, positions: Tensor, segments: Tensor, cu_seqlens: Tensor, max_len: Tensor
    ) -> Tensor:
        """Token ids in, embedding lookup inside."""
        return self._layers(self.embeddings.from_ids(ids, positions, segments), positions, cu_seqlens, max_len)

    def forward_embeds(
        self,
        ids: Tensor,
        positions: Tensor,
        segments: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        embeds: Tensor,
        is_embed: Tensor,
    ) -> Tensor:
        """Embeddings where `is_embed`, looked-up ids elsewhere."""
        x_TD = self.embeddings.from_embeds(embeds, is_embed, ids, positions, segments)
        return self._layers(x_TD, positions, cu_seqlens, max_len)

    def forward_ids_keyed(
        self, ids: Tensor, positions: Tensor, segments: Tensor, cu_seqlens: Tensor, max_len: Tensor, keys: Tensor
    ) -> Tensor:
        """Like `forward_ids`, with `keys`."""
        return self._layers(self.embeddings.from_ids(ids, positions, segments), positions, cu_seqlens, max_len, keys)

    def forward_embeds_keyed(
        self,
        ids: Tensor,
        positions: Tensor,
        segments: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        keys: Tensor,
        embeds: Tensor,
        is_embed: Tensor,
    ) -> Tensor:
        """Like `forward_embeds`, with `keys`."""
        x_TD = self.embeddings.from_embeds(embeds, is_embed, ids, positions, segments)
        return self._layers(x_TD, positions, cu_seqlens, max_len, keys)

    def _layers(
        self, x_TD: Tensor, positions: Tensor, cu_seqlens: Tensor, max_len: Tensor, keys: Tensor | None = None
    ) -> Tensor:
        none = x_TD.new_empty(0)
        places = Places(
            cu_seqlens=cu_seqlens,
            max_len=max_len,
            ropes=self.turns(positions),
            distance=self.distance() if self.distance is not None else none,
            bucket_of=self.distance.bucket_of if isinstance(self.distance, DistanceTable) else none,
            keys=keys,
        )
        earlier: list[Tensor] = []
        for name in self.spec.schedule:
            if self.mix is not None:
                earlier.append(x_TD)
            x_TD = self.blocks[name](x_TD, places)
        x_TD = self.finish(x_TD)
        return x_TD if self.mix is None else self.mix([*earlier, x_TD])


def build_encoder(spec: EncoderSpec, backend: AttentionBackend) -> Encoder:
    """Build the module on the meta device: shapes without memory, to be filled by `fill`."""
    with torch.device("meta"):
        return Encoder(spec, backend).eval().requires_grad_(False)


def fill(model: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
    """Give a module that was built on the meta device its weights, compute its tables, and move it to `device`."""
    model.load_state_dict(weights, strict=True, assign=True)
    for module in model.modules():
        if hasattr(module, "compute_buffers"):
            module.compute_buffers()  # type: ignore[operator]
    model.to(device)


def part_shapes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Every parameter's name, and the shapes of the parts that it is fused from (one part if it is not fused)."""
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(prefix=prefix, recurse=False):
            rows = child.parts if isinstance(child, FusedLinear | GroupedLinear) else (parameter.shape[0],)
            shapes[name] = tuple((n, *parameter.shape[1:]) for n in rows)
    return shapes


def part_groups(module: nn.Module) -> dict[str, int]:
    """How many groups of rows parameters have: heads of keys and values, or layers of a GroupedLinear."""
    groups: dict[str, int] = {}
    for prefix, child in module.named_modules():
        if isinstance(child, Attention):
            groups |= {f"{prefix}.qkv.{name}": child.spec.kv_heads for name, _ in child.qkv.named_parameters()}
        if isinstance(child, GroupedLinear):
            groups[f"{prefix}.weight"] = child.count
    return groups

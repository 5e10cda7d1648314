"""The whole encoder: embedding layer and layer stack, behind two entry points with fixed signatures.

Shape suffixes: T tokens of all sequences, packed; D hidden size; S sequences.
"""

import torch
from torch import Tensor, nn

from toolkit.attention import AttentionBackend
from toolkit.compile import supports_torch_compile
from toolkit.nn.attention import Attention
from toolkit.nn.embeddings import Embeddings
from toolkit.nn.linear import FusedLinear
from toolkit.nn.mlp import Mlp
from toolkit.spec import EncoderSpec

__all__ = ["Encoder", "build_encoder", "part_shapes"]


class PostNormBlock(nn.Module):
    """Attention and feed-forward, each added to its input and then normalised."""

    def __init__(self, spec: EncoderSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.attention = Attention(spec.hidden, spec.attention, backend)
        self.attention_norm = nn.LayerNorm(spec.hidden, eps=spec.norm.eps)
        self.mlp = Mlp(spec.hidden, spec.mlp)
        self.mlp_norm = nn.LayerNorm(spec.hidden, eps=spec.norm.eps)

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, max_len: Tensor) -> Tensor:
        """[T, D] → [T, D]."""
        x_TD = self.attention_norm(self.attention(x_TD, cu_seqlens, max_len) + x_TD)
        return self.mlp_norm(self.mlp(x_TD) + x_TD)


@supports_torch_compile(
    entry_points=("forward_ids", "forward_embeds"),
    dynamic_first_dim=("ids", "positions", "segments", "cu_seqlens", "embeds", "is_embed"),
)
class Encoder(nn.Module):
    """A bidirectional encoder over packed sequences, without padding and without a KV cache.

    Both entry points return the token states of the last layer, [T, D]. Rows beyond the last sequence's end
    are undefined and reach no other row. Inputs: `ids`, `positions`, `segments` int32 [T]; `cu_seqlens` int32
    [S + 1], ascending from 0 (equal neighbours are empty sequences); `max_len` int32 [1] on the CPU, an upper
    bound of the sequence lengths; `embeds` [T, D] in the weights' dtype; `is_embed` bool [T].
    """

    def __init__(self, spec: EncoderSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.spec = spec
        self.embeddings = Embeddings(spec.embedding)
        self.blocks = nn.ModuleList(PostNormBlock(spec, backend) for _ in range(spec.layers))

    def forward_ids(
        self, ids: Tensor, positions: Tensor, segments: Tensor, cu_seqlens: Tensor, max_len: Tensor
    ) -> Tensor:
        """Token ids in, embedding lookup inside."""
        return self._layers(self.embeddings.from_ids(ids, positions, segments), cu_seqlens, max_len)

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
        return self._layers(x_TD, cu_seqlens, max_len)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """The seam: int [T] → [T, D], what `embeds` callers must pass for these ids."""
        return self.embeddings.token(ids)

    def _layers(self, x_TD: Tensor, cu_seqlens: Tensor, max_len: Tensor) -> Tensor:
        for block in self.blocks:
            x_TD = block(x_TD, cu_seqlens, max_len)
        return x_TD


def build_encoder(spec: EncoderSpec, backend: AttentionBackend) -> Encoder:
    """Build the module on the meta device: shapes without memory, to be filled by `load_state_dict(assign=True)`."""
    with torch.device("meta"):
        return Encoder(spec, backend).eval().requires_grad_(False)


def part_shapes(module: nn.Module) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Every parameter's name, and the shapes of the parts that it is fused from (one part if it is not fused)."""
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(prefix=prefix, recurse=False):
            rows = child.parts if isinstance(child, FusedLinear) else (parameter.shape[0],)
            shapes[name] = tuple((n, *parameter.shape[1:]) for n in rows)
    return shapes

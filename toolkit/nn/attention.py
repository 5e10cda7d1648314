"""The attention block around a backend that is handed in.

Shape suffixes: T tokens, D hidden size, N query heads, K key/value heads, H head size, S sequences, B buckets of
distances.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.attention import AttentionBackend
from toolkit.nn.linear import FusedLinear
from toolkit.nn.norm import build_norm
from toolkit.nn.rope import rotate
from toolkit.spec import AttentionSpec, DisentangledSpec

__all__ = ["Attention", "DisentangledAttention", "Pages", "Places", "build_attention", "match_rows"]


class Pages(NamedTuple):
    """Where a decoder keeps keys and values.

    `slots` int32 [T], each token's place in the cache, -1 for none; `starts` int32 [S], how many tokens of each
    sequence are in the cache already; `lanes` int32 [S], each sequence's row of `tables`; `tables` int32 [lanes, pages
    of a sequence], the numbers of a sequence's pages in their order.
    """

    slots: Tensor
    starts: Tensor
    lanes: Tensor
    tables: Tensor


class Places(NamedTuple):
    """Where the tokens are, computed once for all layers.

    `cu_seqlens` int32 [S + 1]; `max_len` int32 [1] on the CPU; `keys` int32 [S] how many tokens at the start of each
    sequence are attended to, None for all; `ropes` cosines and sines of each rope of the model;
    `distance` what a bias by distance needs, an empty tensor if there is none; `bucket_of` likewise; `pages` None for
    an encoder.
    """

    cu_seqlens: Tensor
    max_len: Tensor
    ropes: tuple[tuple[Tensor, Tensor], ...]
    distance: Tensor
    bucket_of: Tensor
    keys: Tensor | None = None
    pages: Pages | None = None


class Attention(nn.Module):
    """Self-attention over packed sequences: one matrix product for q, k and v, the backend, one for the output.

    `rope` is the place of this block's rotation among `Places.ropes`.
    """

    def __init__(self, hidden: int, spec: AttentionSpec, backend: AttentionBackend, rope: int | None) -> None:
        super().__init__()
        self.spec, self.backend, self.rope = spec, backend, rope
        query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = FusedLinear(hidden, (query, key_value, key_value), spec.bias)
        self.out = nn.Linear(query, hidden, spec.out_bias)
        self.q_norm = self.k_norm = None
        if spec.qk_norm is not None:
            whole = spec.qk_norm_over == "all"
            self.q_norm = build_norm(query if whole else spec.head_dim, spec.qk_norm)
            self.k_norm = build_norm(key_value if whole else spec.head_dim, spec.qk_norm)

    def forward(self, x_TD: Tensor, places: Places) -> Tensor:
        """[T, D] → [T, D]."""
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv_TNH = self.qkv(x_TD).view(-1, heads + 2 * kv_heads, size)
        q_TNH, k_TKH, v_TKH = qkv_TNH.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self._normalise(self.q_norm, q_TNH), self._normalise(self.k_norm, k_TKH)
        if self.rope is not None:
            cos, sin = places.ropes[self.rope]
            q_TNH, k_TKH = rotate(q_TNH, cos, sin), rotate(k_TKH, cos, sin)
        return self.out(self._attend(q_TNH, k_TKH, v_TKH, places).flatten(1))

    def _normalise(self, norm: nn.Module, x_TNH: Tensor) -> Tensor:
        if self.spec.qk_norm_over == "all":
            return norm(x_TNH.flatten(1)).view(x_TNH.shape)
        return norm(x_TNH)

    def _attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, places: Places) -> Tensor:
        args = (q_TNH, k_TKH, v_TKH, places.cu_seqlens, places.max_len, self.spec.scale)
        if self.spec.distance is not None:
            return self.backend.attend_biased(*args, places.distance)
        reach = -1 if self.spec.reach is None else self.spec.reach
        return self.backend.attend(*args, reach, places.keys, self.spec.causal, self.spec.softcap or 0.0)


@torch.library.custom_op("toolkit::match_rows", mutates_args=())
def match_rows(x_TNH: Tensor, rows_BNH: Tensor) -> Tensor:
    """Dot products of each token with each row, head by head: [T, N, B], contiguous, as the backends want it.

    An op of our own: the compiler's batched product would ask whether there is just one token.
    """
    out_TNB = x_TNH.new_empty(x_TNH.shape[0], x_TNH.shape[1], rows_BNH.shape[0])
    torch.bmm(x_TNH.transpose(0, 1), rows_BNH.permute(1, 2, 0), out=out_TNB.transpose(0, 1))
    return out_TNB


@match_rows.register_fake
def _(x_TNH: Tensor, rows_BNH: Tensor) -> Tensor:
    return x_TNH.new_empty(x_TNH.shape[0], x_TNH.shape[1], rows_BNH.shape[0])


class DisentangledAttention(Attention):
    """DeBERTa's attention (He et al., 2021): content against content, distance, and both ways round.

    `places.distance` are the rows of the table of distances. They go through this layer's projections, which are
    the queries' and keys' own if the layer shares them.
    """

    def __init__(self, hidden: int, spec: AttentionSpec, distance: DisentangledSpec, backend: AttentionBackend) -> None:
        super().__init__(hidden, spec, backend, None)
        self.distance = distance
        width = spec.heads * spec.head_dim
        own = not distance.shared
        self.distance_key = nn.Linear(hidden, width) if own and distance.c2p else None
        self.distance_query = nn.Linear(hidden, width) if own and distance.p2c else None

    def _attend(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, places: Places) -> Tensor:
        rows_BD = places.distance
        shared_BNH = self.qkv(rows_BD).unflatten(1, (3, self.spec.heads, -1)) if self.distance.shared else None
        content_q_TNB = content_k_TNB = None
        if self.distance.c2p:
            rows_BNH = shared_BNH[:, 1] if shared_BNH is not None else self._split(self.distance_key, rows_BD)
            content_q_TNB = match_rows(q_TNH, rows_BNH * self.spec.scale)
        if self.distance.p2c:
            rows_BNH = shared_BNH[:, 0] if shared_BNH is not None else self._split(self.distance_query, rows_BD)
            content_k_TNB = match_rows(k_TKH, rows_BNH * self.spec.scale)
        return self.backend.attend_disentangled(
            q_TNH,
            k_TKH,
            v_TKH,
            places.cu_seqlens,
            places.max_len,
            self.spec.scale,
            content_q_TNB,
            content_k_TNB,
            places.bucket_of,
        )

    def _split(self, projection: nn.Module | None, rows_BD: Tensor) -> Tensor:
        assert projection is not None
        return projection(rows_BD).unflatten(1, (self.spec.heads, -1))


def build_attention(hidden: int, spec: AttentionSpec, backend: AttentionBackend, rope: int | None) -> Attention:
    """Build the block that an AttentionSpec describes."""
    if isinstance(spec.distance, DisentangledSpec):
        return DisentangledAttention(hidden, spec, spec.distance, backend)
    return Attention(hidden, spec, backend, rope)

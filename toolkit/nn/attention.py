"""The attention block around a backend that is handed in.

Shape suffixes: T tokens, D hidden size, N query heads, K key/value heads, H head size, S sequences.
"""

from torch import Tensor, nn

from toolkit.attention import AttentionBackend
from toolkit.nn.linear import FusedLinear
from toolkit.spec import AttentionSpec

__all__ = ["Attention"]


class Attention(nn.Module):
    """Self-attention over packed sequences: one matrix product for q, k and v, the backend, one for the output."""

    def __init__(self, hidden: int, spec: AttentionSpec, backend: AttentionBackend) -> None:
        super().__init__()
        self.spec = spec
        query, key_value = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.qkv = FusedLinear(hidden, (query, key_value, key_value), spec.bias)
        self.out = nn.Linear(query, hidden, spec.bias)
        self.backend = backend

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor, max_len: Tensor) -> Tensor:
        """[T, D] → [T, D]; `cu_seqlens` int32 [S + 1], `max_len` int32 [1] on the CPU."""
        heads, kv_heads, size = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        qkv_TNH = self.qkv(x_TD).view(-1, heads + 2 * kv_heads, size)
        q_TNH, k_TKH, v_TKH = qkv_TNH.split((heads, kv_heads, kv_heads), dim=1)
        o_TNH = self.backend(q_TNH, k_TKH, v_TKH, cu_seqlens, max_len, self.spec.scale)
        return self.out(o_TNH.flatten(1))

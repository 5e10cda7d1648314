"""Layers of a decoder for a step with a handful of tokens, one a sequence: five kernels a layer.

Such a step reads every weight once and computes next to nothing; what it costs beyond that is the number of kernels.
So norms, activations and residual additions move into the matrix products, and everything between the projections
into the attention.

Shape suffixes: T tokens, D hidden size, I input features, O output features, X queries, keys and values side by side;
N query heads, K key/value heads, H head size, R half of the rotated values; L positions.
"""

from typing import Any

import torch
from torch import Tensor, nn

from toolkit.nn.attention import Places
from toolkit.nn.gemv import MOST_ROWS
from toolkit.nn.mlp import GatedMlp
from toolkit.nn.model import PreNormBlock
from toolkit.spec import Activation, BlockSpec

__all__ = ["FewRowsBlock", "attend_step", "can_fuse", "fused_linear"]

_GROUP = 8  # query heads of a key/value head, each of which is computed on its own
_ACTIVATIONS: tuple[Activation, ...] = ("gelu", "gelu_tanh", "silu")


@torch.library.custom_op("toolkit::fused_linear", mutates_args=())
def fused_linear(
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_I: Tensor | None,
    eps: float,
    offset: bool,
    gate: str,
    activation: str,
    residual_TO: Tensor | None,
    alpha: float,
) -> Tensor:
    """A linear layer with what stands around it in a block, [T, O]; see `toolkit.nn.gemv_kernel.multiply`."""
    from toolkit.nn.gemv_kernel import multiply

    return multiply(
        x_TI,
        weight,
        bias,
        norm_I=norm_I,
        eps=eps,
        offset=offset,
        gate=gate,
        activation=activation,
        residual_TO=residual_TO,
        alpha=alpha,
    )


@fused_linear.register_fake
def _(
    x_TI: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_I: Tensor | None,
    eps: float,
    offset: bool,
    gate: str,
    *rest: object,
) -> Tensor:
    return x_TI.new_empty(x_TI.shape[0], weight.shape[0] // (1 if gate == "none" else 2))


@torch.library.custom_op("toolkit::attend_step", mutates_args=("k_cache", "v_cache", "arrived"))
def attend_step(
    qkv_TX: Tensor,
    q_norm_H: Tensor | None,
    k_norm_H: Tensor | None,
    eps: float,
    offset: bool,
    cos_LR: Tensor | None,
    sin_LR: Tensor | None,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    arrived: Tensor,
    slots: Tensor,
    starts: Tensor,
    lanes: Tensor,
    tables: Tensor,
    cu_seqlens: Tensor,
    heads: int,
    scale: float,
    reach: int,
    softcap: float,
) -> Tensor:
    """Norms of queries and keys, rotation, storing and attention, for one new token a sequence: [T, N × H].

    Rotation is by the rows of the tables for `positions` int32 [T]. `arrived` int32 [T × K] is all zeros, and is so
    again afterwards. The rest is as in `toolkit.attention.paged.PagedBackend.attend_paged`.
    """
    from toolkit.attention.paged_step_kernel import attend_step

    return attend_step(
        qkv_TX,
        q_norm_H,
        k_norm_H,
        eps,
        offset,
        cos_LR,
        sin_LR,
        positions,
        k_cache,
        v_cache,
        arrived,
        slots,
        starts,
        lanes,
        tables,
        cu_seqlens,
        heads,
        scale,
        reach,
        softcap,
    )


@attend_step.register_fake
def _(qkv_TX: Tensor, *rest: Any) -> Tensor:
    k_cache, heads = rest[7], rest[15]
    return qkv_TX.new_empty(qkv_TX.shape[0], heads * k_cache.shape[3])


def can_fuse(spec: BlockSpec) -> bool:
    """Whether `FewRowsBlock` can stand for a block of this kind."""
    attention, norms = spec.attention, (spec.norm, spec.attention.qk_norm or spec.norm)
    return (
        spec.arrangement == "pre"
        and spec.attention_norm
        and all(norm.kind == "rms" for norm in norms)
        and attention.distance is None
        and attention.heads <= _GROUP * attention.kv_heads
        and (attention.qk_norm is None or attention.qk_norm_over == "head")
        and spec.mlp.experts is None
        and spec.mlp.gate != "none"
        and spec.mlp.activation in _ACTIVATIONS
    )


class FewRowsBlock(nn.Module):
    """A block for steps of at most `MOST_ROWS` tokens, one a sequence. It shares the weights and the cache of `block`.

    `can_fuse` must hold for its spec.
    """

    arrived: Tensor

    def __init__(self, block: PreNormBlock) -> None:
        super().__init__()
        assert isinstance(block.mlp, GatedMlp)
        self.attention, self.mlp, self.scale = block.attention, block.mlp, block.scale
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        spec: Any = self.attention.spec
        arrived = torch.zeros(MOST_ROWS * spec.kv_heads, dtype=torch.int32, device=self.mlp.down.weight.device)
        self.register_buffer("arrived", arrived, persistent=False)

    def forward(self, x_TD: Tensor, places: Places, positions: Tensor) -> Tensor:
        """[T, D] → [T, D]. The ropes of `places` are tables for all positions, of which `positions` int32 [T] are."""
        attended_TX = self._attend(_linear(x_TD, self.attention.qkv, self.attention_norm), places, positions)
        x_TD = _linear(attended_TX, self.attention.out, residual_TO=x_TD, alpha=self.scale)
        inner_TM = _linear(x_TD, self.mlp.up, self.mlp_norm, self.mlp.gate, self.mlp.activation)
        return _linear(inner_TM, self.mlp.down, residual_TO=x_TD, alpha=self.scale)

    def _attend(self, qkv_TX: Tensor, places: Places, positions: Tensor) -> Tensor:
        attention: Any = self.attention
        spec, q_norm, k_norm = attention.spec, attention.q_norm, attention.k_norm
        cos_LR, sin_LR = places.ropes[attention.rope] if attention.rope is not None else (None, None)
        assert places.pages is not None, "a decoder's places have pages"
        return attend_step(
            qkv_TX,
            _read_norm(q_norm)[0],
            *_read_norm(k_norm),  # both are of one spec
            cos_LR,
            sin_LR,
            positions,
            attention.k_cache,
            attention.v_cache,
            self.arrived,
            *places.pages,
            places.cu_seqlens,
            spec.heads,
            spec.scale,
            -1 if spec.reach is None else spec.reach,
            spec.softcap or 0.0,
        )


def _read_norm(norm: Any) -> tuple[Tensor | None, float, bool]:
    """Weight, eps and offset of a root-mean-square norm; None for none."""
    return (None, 0.0, False) if norm is None else (norm.weight, norm.eps, norm.offset)


def _linear(
    x_TI: Tensor,
    linear: Any,
    norm: Any = None,
    gate: str = "none",
    activation: str = "identity",
    residual_TO: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Call `fused_linear` with a layer's and a norm's own weights."""
    return fused_linear(
        x_TI,
        linear.weight,
        linear.bias,
        *_read_norm(norm),
        gate,
        activation,
        residual_TO,
        alpha,
    )

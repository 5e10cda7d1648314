"""Every arrangement of norms and branches beside its formula, written out, with and without a residual scale."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from toolkit.nn.model import _BLOCKS
from toolkit.spec import BlockSpec, MlpSpec, NormSpec, self_attention

Branch = Callable[[Tensor], Tensor]


class Mixing(nn.Linear):
    """In the place of attention: a layer that takes places."""

    def forward(self, x: Tensor, places: object) -> Tensor:  # type: ignore[override]
        return super().forward(x.roll(1, 0))


def post(m: Any, x: Tensor, attend: Branch, by: float) -> Tensor:
    x = m.attention_norm(x + by * attend(x))
    return m.mlp_norm(x + by * m.mlp(x))


def post_branch(m: Any, x: Tensor, attend: Branch, by: float) -> Tensor:
    x = x + by * m.attention_out_norm(attend(x))
    return x + by * m.mlp_out_norm(m.mlp(x))


def post_twice(m: Any, x: Tensor, attend: Branch, by: float) -> Tensor:
    x = m.attention_norm_again(x + m.attention_norm(x + by * attend(x)))
    return m.mlp_norm(x + by * m.mlp(x))


def pre(m: Any, x: Tensor, attend: Branch, by: float) -> Tensor:
    x = x + by * attend(m.attention_norm(x))
    return x + by * m.mlp(m.mlp_norm(x))


def sandwich(m: Any, x: Tensor, attend: Branch, by: float) -> Tensor:
    x = x + by * m.attention_out_norm(attend(m.attention_norm(x)))
    return x + by * m.mlp_out_norm(m.mlp(m.mlp_norm(x)))


def parallel(m: Any, x: Tensor, attend: Branch, by: float) -> Tensor:
    return x + by * (attend(m.attention_norm(x)) + m.mlp(m.mlp_norm(x)))


FORMULAS: dict[str, Callable[[Any, Tensor, Branch, float], Tensor]] = {
    "post": post,
    "post_branch": post_branch,
    "post_twice": post_twice,
    "pre": pre,
    "sandwich": sandwich,
    "parallel": parallel,
}


def test_every_arrangement_has_a_formula() -> None:
    assert set(FORMULAS) == set(_BLOCKS)


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("arrangement", sorted(FORMULAS))
def test_a_block_is_its_formula(arrangement: Any, scale: float) -> None:
    spec = BlockSpec(
        arrangement=arrangement,
        attention=self_attention(2, 4, bias=True),
        mlp=MlpSpec(width=12, activation="silu", bias=True, out_bias=True),
        norm=NormSpec(eps=1e-3, kind="rms", bias=False),
        residual_scale=scale,
    )
    torch.manual_seed(0)
    block = _BLOCKS[arrangement](8, spec, Mixing(8, 8)).double()
    x = torch.randn(5, 8, dtype=torch.float64)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        expected = FORMULAS[arrangement](block, x, lambda y: block.attention(y, None), scale)
        assert (block(x, None) - expected).abs().max() < 1e-6  # the norms compute in float32
        assert (block(x, None) - x).abs().max() > 0.1

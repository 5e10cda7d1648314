"""Poolings, and the steps behind them."""

import math
from itertools import pairwise

import pytest
import torch

from toolkit.nn.head import Head, build_head
from toolkit.nn.model import fill
from toolkit.nn.pooling import POOLINGS, select
from toolkit.spec import NormSpec
from toolkit.steps import (
    DenseStep,
    DifferenceStep,
    HeadSpec,
    NormalizeStep,
    NormStep,
    PoolingStep,
    Step,
    WordsStep,
)

CPU = torch.device("cpu")
OFFSETS = torch.tensor([0, 3, 3, 4, 3990, 3990], dtype=torch.int32)


def head_of(*steps: Step, width: int = 8, token_width: int = 0, skips: bool = False) -> Head:
    head = build_head(HeadSpec(steps=steps, width=width, token_width=token_width), CPU, skips=skips)
    draw = torch.Generator().manual_seed(2)
    fill(head, {name: torch.randn(p.shape, generator=draw) for name, p in head.named_parameters()}, CPU)
    return head


def by_hand(mode: str, rows: torch.Tensor, first: int) -> torch.Tensor:
    """The pooling of rows that begin at place `first` of their sequence, in float64."""
    rows = rows.double()
    if len(rows) == 0:
        return torch.zeros(rows.shape[1]).double()
    places = torch.arange(first + 1, first + len(rows) + 1).double()[:, None]
    return {
        "mean": rows.mean(0),
        "sum": rows.sum(0),
        "mean_sqrt_len_tokens": rows.sum(0) / math.sqrt(len(rows)),
        "weightedmean": (rows * places).sum(0) / places.sum(),
        "max": rows.amax(0),
        "cls": rows[0],
        "lasttoken": rows[-1],
    }[mode]


@pytest.mark.parametrize("skip", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", sorted(POOLINGS))
def test_pooling_per_sequence_in_float32(mode: str, dtype: torch.dtype, skip: int | None) -> None:
    """M1, B2, D2: float32 accumulation, garbage in the tail and empty sequences reach nothing; prompts left out."""
    states = (torch.randn(4000, 8, generator=torch.Generator().manual_seed(0)) + 50).to(dtype)
    states[3990:] = float("nan")
    skips = None if skip is None else torch.full((5,), skip, dtype=torch.int32)
    vectors = POOLINGS[mode](states, select(OFFSETS, skips))
    assert vectors.dtype == torch.float32
    for k, (begin, end) in enumerate(pairwise(OFFSETS.tolist())):
        left = min(skip or 0, end - begin)
        rows, first = states[begin + left : end], left
        if mode == "cls" and not len(rows):
            rows = states[begin:end]  # the first token, as sentence-transformers has it
        exact = by_hand(mode, rows, first)
        assert torch.allclose(vectors[k].double(), exact, atol=1e-4, rtol=3e-7 if mode == "sum" else 1e-5), k


def test_a_prompt_is_left_out_of_its_own_sequence_only() -> None:
    states = torch.randn(7, 8)
    offsets, skip = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    vectors = head_of(PoolingStep(modes=("mean",)), skips=True)(states, offsets, skip).vectors
    assert torch.allclose(vectors, torch.stack([states[2], states[3:].mean(0)]), atol=1e-6)
    whole = head_of(PoolingStep(modes=("mean",)))(states, offsets, skip).vectors
    assert torch.allclose(whole[0], states[:3].mean(0), atol=1e-6)


def test_poolings_side_by_side() -> None:
    """D4: in the order of the modes."""
    states = torch.randn(7, 8)
    offsets, skip = torch.tensor([0, 3, 7], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    vectors = head_of(PoolingStep(modes=("max", "cls", "mean")), width=24)(states, offsets, skip).vectors
    parts = [by_hand(mode, states[3:], 0) for mode in ("max", "cls", "mean")]
    assert torch.allclose(vectors[1].double(), torch.cat(parts), atol=1e-6)


@pytest.mark.parametrize("mode", sorted(POOLINGS))
def test_pooling_of_no_sequences(mode: str) -> None:
    head = head_of(PoolingStep(modes=(mode,)), NormalizeStep(on="vectors"))
    offsets = torch.zeros(1, dtype=torch.int32)
    assert head(torch.randn(3, 8), offsets, torch.zeros(0, dtype=torch.int32)).vectors.shape == (0, 8)
    offsets = torch.zeros(3, dtype=torch.int32)
    vectors = head(torch.randn(0, 8), offsets, torch.zeros(2, dtype=torch.int32)).vectors
    assert torch.equal(vectors, torch.zeros(2, 8))


def test_normalisation_keeps_zero_vectors_finite() -> None:
    """E3."""
    head = head_of(PoolingStep(modes=("mean",)), NormalizeStep(on="vectors"))
    offsets = torch.tensor([0, 0, 2], dtype=torch.int32)
    vectors = head(torch.randn(2, 8), offsets, torch.zeros(2, dtype=torch.int32)).vectors
    assert vectors[0].tolist() == [0] * 8
    assert vectors[1].norm().item() == pytest.approx(1)


ACTIVATIONS = {"identity": lambda x: x, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu}


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("outputs", [8, 5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_dense_and_norm_steps(activation, outputs: int, residual: bool) -> None:
    """E1: on vectors in float32 whatever the states' dtype, activation and residual as configured."""
    dense = DenseStep(on="vectors", inputs=8, outputs=outputs, bias=True, activation=activation, residual=residual)
    norm = NormStep(on="vectors", width=outputs, norm=NormSpec(eps=1e-5))
    head = head_of(PoolingStep(modes=("cls",)), dense, norm, width=outputs)
    weights = {name: p.clone() for name, p in head.named_parameters()}
    head.to(torch.bfloat16)
    head.use_float32_for_vectors()
    assert {p.dtype for p in head.parameters()} == {torch.float32}
    states = torch.randn(4, 8).bfloat16()
    offsets, skip = torch.tensor([0, 3, 4], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    vectors = head(states, offsets, skip).vectors
    rounded = {name: w.bfloat16().float() for name, w in weights.items()}
    x = states[[0, 3]].float()
    y = ACTIVATIONS[activation](x @ rounded["steps.1.linear.weight"].T + rounded["steps.1.linear.bias"])
    if residual:
        y = y + (x @ rounded["steps.1.residual.weight"].T if outputs != 8 else x)
    exact = torch.nn.functional.layer_norm(y, (outputs,), rounded["steps.2.weight"], rounded["steps.2.bias"], 1e-5)
    assert vectors.dtype == torch.float32
    assert (vectors - exact).abs().max() < 1e-4


def test_steps_on_tokens_give_each_token_a_result() -> None:
    dense = DenseStep(on="tokens", inputs=8, outputs=3, bias=False)
    head = head_of(dense, NormalizeStep(on="tokens"), width=0, token_width=3)
    states = torch.randn(4, 8)
    offsets, skip = torch.tensor([0, 3, 4], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    output = head(states, offsets, skip)
    weight = dict(head.named_parameters())["steps.0.linear.weight"]
    exact = torch.nn.functional.normalize(states @ weight.T, dim=-1)
    assert (output.tokens - exact).abs().max() < 1e-6
    assert output.vectors.shape == (2, 0)
    assert output.states is states


def test_vectors_are_scaled_once() -> None:
    """The pooling scales in the place of the step that follows it; a later one stands for itself."""
    dense = DenseStep(on="vectors", inputs=8, outputs=8, bias=False)
    scale = NormalizeStep(on="vectors")
    kinds = [type(step).__name__ for step in head_of(PoolingStep(modes=("mean",)), scale, dense, scale).steps.values()]
    assert kinds == ["Pooling", "Identity", "Dense", "Normalize"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_two_words(tied: bool, dtype: torch.dtype) -> None:
    """G5, M1: rows of the token table or of a weight of their own; in float32, the second from the first."""
    step = WordsStep(name="out", on="vectors", inputs=8, words=(4, 1), tied=tied)
    head = head_of(PoolingStep(modes=("lasttoken",)), step, DifferenceStep(on="vectors"), width=1)
    assert [name for name, _ in head.named_parameters()] == ([] if tied else ["steps.out.linear.weight"])
    table = torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).to(dtype)
    rows = table[[4, 1]].float() if tied else dict(head.named_parameters())["steps.out.linear.weight"]
    head.to(dtype)
    head.tie(table)
    head.use_float32_for_vectors()
    states = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    found = head(states, offsets, torch.zeros(2, dtype=torch.int32)).vectors
    assert found.dtype == torch.float32
    logits = states[[2, 4]].double() @ rows.to(dtype).double().T
    assert torch.allclose(found[:, 0].double(), logits[:, 0] - logits[:, 1], atol=1e-5)

"""Which tokens can be drawn, and how often: as transformers' own processors say."""

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as reference

from toolkit.decoding.sampling import SamplingParams, penalise, sample, top_logprobs
from toolkit.errors import InputError

GRID = 1000


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 1, **settings})


def logits(seed: int, words: int = 24, spread: float = 2.5) -> Tensor:
    return torch.randn(words, generator=torch.Generator().manual_seed(seed)) * spread


def expected(logits_V: Tensor, settings: SamplingParams, seen: list[int]) -> Tensor:
    """The probabilities of transformers' `generate`, float32 [V]."""
    scores, ids = logits_V[None].clone(), torch.tensor([seen])
    steps: list[Any] = []
    if settings.repetition_penalty != 1:
        steps.append(reference.RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature != 1:
        steps.append(reference.TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        steps.append(reference.TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        steps.append(reference.TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        steps.append(reference.MinPLogitsWarper(settings.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores[0].softmax(dim=-1)


def drawn(logits_V: Tensor, settings: SamplingParams, count: int = GRID) -> Tensor:
    """How often each token is drawn by `count` evenly spread numbers: float32 [V]."""
    numbers = [(k + 0.5) / count for k in range(count)]
    tokens = sample(logits_V.expand(count, -1), [settings] * count, numbers)
    return torch.bincount(tokens, minlength=len(logits_V)) / count


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 24},
    {"top_k": 10**400},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"top_k": 7, "top_p": 0.7},
    {"temperature": 1.8, "top_k": 9, "top_p": 0.9, "min_p": 0.12},
    {"temperature": 0.6, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
    {"temperature": 3.0, "top_k": 12, "top_p": 0.6, "repetition_penalty": 2.0},
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: str(settings)[:80])
def test_tokens_and_their_shares_are_those_of_transformers(settings: dict[str, Any], seed: int) -> None:
    given, seen = params(**{"temperature": 1.0, **settings}), [0, 3, 3, 17]
    raw_V = logits(seed)
    if given.top_k >= 24:  # the reference's filter takes no more than there are
        given_V = expected(raw_V, dataclasses.replace(given, top_k=0), seen)
    else:
        given_V = expected(raw_V, given, seen)
    seen_V = torch.zeros(24, dtype=torch.bool).index_fill_(0, torch.tensor(seen), True)
    found_V = drawn(penalise(raw_V, seen_V, given.repetition_penalty), given)
    assert not found_V[given_V == 0].any(), "no other token can be drawn"
    assert (found_V[given_V > 2 / GRID] > 0).all(), "each of these can be drawn"
    torch.testing.assert_close(found_V, given_V, atol=1.5 / GRID, rtol=0)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.8])
def test_penalties(penalty: float) -> None:
    """Also of a logit that is 0."""
    raw_V = torch.tensor([2.0, -2.0, 0.0, 1.0, -1.0])
    seen_V = torch.tensor([True, True, True, False, False])
    theirs: Any = reference.RepetitionPenaltyLogitsProcessor(penalty)
    theirs = theirs(torch.tensor([[0, 1, 2]]), raw_V[None].clone())
    assert torch.equal(penalise(raw_V, seen_V, penalty), theirs[0])


def test_company_does_not_matter() -> None:
    """Every row alone, and all of them together in another order."""
    draw = random.Random(0)
    rows_SV = torch.stack([logits(seed) for seed in range(40)])
    kinds = [{"temperature": 1.0, **draw.choice(SETTINGS)} for _ in range(40)]
    chosen = [params(**{**kind, "temperature": draw.choice([0.0, kind["temperature"]])}) for kind in kinds]
    numbers = [draw.random() for _ in range(40)]
    alone = [int(sample(rows_SV[k : k + 1], [chosen[k]], [numbers[k]])) for k in range(40)]
    order = draw.sample(range(40), 40)
    together = sample(rows_SV[order], [chosen[k] for k in order], [numbers[k] for k in order])
    assert together.tolist() == [alone[k] for k in order]
    assert together.dtype == torch.int64


def test_temperature_zero_takes_the_likeliest() -> None:
    """Whatever else is asked for; of equal ones the first."""
    rows_SV = torch.stack([logits(seed) for seed in range(8)])
    settings = params(top_k=3, top_p=0.1, min_p=0.9)
    assert torch.equal(sample(rows_SV, [settings] * 8, [0.99] * 8), rows_SV.argmax(dim=-1))
    assert sample(torch.tensor([[1.0, 2.0, 2.0]]), [settings], [0.0]).tolist() == [1]
    mixed = sample(rows_SV, [settings, *[params(temperature=9.0)] * 7], [0.999] * 8)
    assert mixed[0] == rows_SV[0].argmax()
    assert (mixed[1:] != rows_SV[1:].argmax(dim=-1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_a_number_close_to_one_does_not_lead_outside(seed: int) -> None:
    """Sums of many small probabilities are rounded."""
    raw_V = logits(seed, words=20_000, spread=0.3)
    nearly = math.nextafter(1, 0)
    for settings in (params(temperature=1.0, top_k=50), params(temperature=1.0, top_p=0.5)):
        allowed = set(expected(raw_V, settings, []).nonzero()[:, 0].tolist())
        assert int(sample(raw_V[None], [settings], [nearly])) in allowed
    last = int(sample(raw_V[None], [params(temperature=1.0)], [nearly]))
    assert raw_V[last] < raw_V.sort().values[200]
    assert int(sample(raw_V[None], [params(temperature=1.0)], [0.0])) == raw_V.argmax()


def test_logits_that_rule_tokens_out() -> None:
    raw_V = logits(0)
    raw_V[[2, 5]] = -torch.inf
    found_V = drawn(raw_V, params(temperature=1.5))
    assert not found_V[[2, 5]].any()
    torch.testing.assert_close(found_V, (raw_V / 1.5).softmax(-1), atol=1.5 / GRID, rtol=0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-300])
def test_the_smallest_temperatures_take_the_likeliest(temperature: float) -> None:
    rows_SV = torch.stack([logits(seed, spread=30) for seed in range(8)])
    found = sample(rows_SV, [params(temperature=temperature)] * 8, [0.999] * 8)
    assert torch.equal(found, rows_SV.argmax(dim=-1))


@pytest.mark.parametrize("temperature", [1e6, 1e30, 1e300])
def test_the_largest_temperatures_make_all_alike(temperature: float) -> None:
    torch.testing.assert_close(
        drawn(logits(0), params(temperature=temperature)), torch.full((24,), 1 / 24), atol=1.5 / GRID, rtol=0
    )


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_give_some_token(value: float) -> None:
    """A model that overflows spoils its own request: the token is of the vocabulary, its neighbour's is untouched."""
    rows_SV = torch.stack([logits(0), logits(1)])
    rows_SV[0, 3] = value
    settings = [params(temperature=1.0)] * 2
    found = sample(rows_SV, settings, [0.5, 0.5])
    assert 0 <= int(found[0]) < 24
    assert int(found[1]) == int(sample(rows_SV[1:], settings[1:], [0.5]))


def test_logits_are_left_as_they_are() -> None:
    rows_SV = torch.stack([logits(seed) for seed in range(3)])
    before = rows_SV.clone()
    sample(rows_SV, [params(temperature=0.7, top_k=3, top_p=0.5, min_p=0.2)] * 3, [0.1, 0.5, 0.9])
    penalise(rows_SV[0], torch.ones(24, dtype=torch.bool), 2.0)
    assert torch.equal(rows_SV, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 4, 24, 99])
def test_logprobs(count: int, dtype: torch.dtype) -> None:
    rows_SV = torch.stack([logits(seed) for seed in range(3)]).to(dtype)
    tokens = [5, 0, 23]
    theirs = rows_SV.float().log_softmax(dim=-1)
    for row, (own, tops) in enumerate(top_logprobs(rows_SV, torch.tensor(tokens), count)):
        assert own == theirs[row, tokens[row]].item()
        values = theirs[row].sort(descending=True, stable=True).values[:count]
        assert list(tops.values()) == values.tolist(), "the likeliest first"
        assert all(theirs[row, token] == value for token, value in tops.items())
        assert len(tops) == min(count, 24)


WHOLE = [True, False, -1, 1.0, "1", math.nan, [1]]
NUMBERS = [True, False, "1", None, math.nan, math.inf, -math.inf, -0.1, [0.5], 1j]
BAD: list[tuple[str, Any]] = [
    *(("max_new_tokens", value) for value in [*WHOLE, 0, None]),
    *(("top_k", value) for value in [*WHOLE, None]),
    *((name, value) for name in ("seed", "logprobs", "prompt_logprobs") for value in WHOLE),
    *((name, value) for name in ("temperature", "top_p", "min_p", "repetition_penalty") for value in NUMBERS),
    *((name, value) for name in ("top_p", "repetition_penalty") for value in (0, 0.0)),
    *((name, value) for name in ("top_p", "min_p") for value in (1.0001, 2)),
    *(("stop", value) for value in ["a", ["a"], ("",), (1,), (b"a",), ("a", ""), (None,), None]),
    *(("stop_token_ids", value) for value in [1, [1], (-1,), (True,), (1.0,), ("1",), (1, -1), (None,), None]),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value))
def test_bad_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^{name} = "):
        params(**{name: value})


def test_ends_of_ranges_are_allowed() -> None:
    whole = {"max_new_tokens": 1, "top_k": 0, "seed": 0, "logprobs": 0, "prompt_logprobs": 0}
    params(**whole, temperature=0, top_p=1, min_p=0, repetition_penalty=1e-3, stop=("a",), stop_token_ids=(0,))
    params(temperature=0.0, top_p=1e-9, min_p=1.0, repetition_penalty=100)
    params(min_p=1, seed=2**100, max_new_tokens=10**9)

"""From logits to the next token: penalties, temperature, filters, and one random number a token.

The order is that of transformers' `generate`: repetition penalty, temperature, top-k, top-p, min-p. What is drawn for a
request depends on its logits, its settings and its seed only, never on its company in the batch.

Shape suffixes: S sequences, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import InputError

__all__ = ["SamplingParams", "penalise", "sample", "top_logprobs"]

_COLDEST = 1e-30  # smaller ones make infinities of logits, or are 0 in float32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request is continued.

    Attributes:
        max_new_tokens: at most so many tokens are generated.
        temperature: 0 takes the likeliest token; above, logits are divided by it and a token is drawn.
        top_k: draw among the so many likeliest tokens; 0 for all.
        top_p: draw among the likeliest tokens that together have this probability.
        min_p: draw among tokens with at least this share of the likeliest one's probability.
        repetition_penalty: logits of ids that the prompt or the result holds are divided by it if positive, else
            multiplied (Keskar et al., 2019). Tokens given as embeddings have no id and do not count.
        seed: of the request's random numbers; None for a fresh one.
        stop: texts that end the generation; they and what follows are not part of the result's text.
        stop_token_ids: ids that end the generation, besides the model's own.
        ignore_eos: do not stop at the model's own end tokens.
        logprobs: for each generated token its log-probability, and those of so many likeliest; None for none.
        prompt_logprobs: the same for each token of the prompt but the first.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raise InputError if a value is out of its range."""
        self._whole("max_new_tokens", 1)
        self._whole("top_k", 0)
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0)
        self._number("temperature", 0, math.inf)
        self._number("top_p", 0, 1, above=True)
        self._number("min_p", 0, 1)
        self._number("repetition_penalty", 0, math.inf, above=True)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise InputError(f"stop = {self.stop!r}, expected texts that are not empty")
        ids = self.stop_token_ids
        if not isinstance(ids, tuple) or not all(type(token) is int and token >= 0 for token in ids):
            raise InputError(f"stop_token_ids = {ids!r}, expected token ids")

    @property
    def draws(self) -> bool:
        """Whether a random number is needed."""
        return self.temperature > 0

    def _whole(self, name: str, low: int) -> None:
        value: Any = getattr(self, name)
        if type(value) is not int or value < low:
            raise InputError(f"{name} = {value!r}, expected a whole number from {low} on")

    def _number(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value: Any = getattr(self, name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not low <= value <= high or (above and value == low):
            bounds = f"above {low:g}" if above else f"from {low:g} on"
            upto = f", at most {high:g}" if high != math.inf else ""
            raise InputError(f"{name} = {value!r}, expected a number {bounds}{upto}")


def penalise(logits_V: Tensor, seen_V: Tensor, penalty: float) -> Tensor:
    """Make ids that were seen (bool [V]) less likely, or more if `penalty` is below 1; float32 [V] → [V]."""
    return torch.where(seen_V, torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty), logits_V)


def sample(logits_SV: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float]) -> Tensor:
    """Choose each sequence's next token.

    Args:
        logits_SV: float32, penalties applied.
        params: of each sequence.
        uniform: a number from [0, 1) for each sequence; not looked at where nothing is drawn.

    Returns:
        int64 [S], on the device of the logits.
    """
    best_S = logits_SV.argmax(dim=-1)
    drawn = [k for k, settings in enumerate(params) if settings.draws]
    if not drawn:
        return best_S
    chosen = [params[k] for k in drawn]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits_SV.device)[:, None]

    rows_SV = logits_SV[torch.tensor(drawn, device=logits_SV.device)]
    rows_SV = rows_SV / column([max(settings.temperature, _COLDEST) for settings in chosen])
    sorted_SV, order_SV = rows_SV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(sorted_SV.shape[1], device=logits_SV.device)
    words = sorted_SV.shape[1]
    limits = [min(settings.top_k or words, words) for settings in chosen]
    sorted_SV = sorted_SV.masked_fill(ranks_V >= column(limits), -torch.inf)
    probabilities_SV = sorted_SV.softmax(dim=-1)
    before_SV = probabilities_SV.cumsum(dim=-1) - probabilities_SV
    shares = [settings.top_p if settings.top_p < 1 else math.inf for settings in chosen]  # sums are rounded
    outside_SV = (before_SV >= column(shares)) & (ranks_V > 0)
    faint_SV = probabilities_SV < column([settings.min_p for settings in chosen]) * probabilities_SV[:, :1]
    probabilities_SV = probabilities_SV.masked_fill(outside_SV | faint_SV, 0)
    # the number falls into one of the intervals that the probabilities, one after another, span
    ends_SV = probabilities_SV.cumsum(dim=-1)
    target_S1 = column([uniform[k] for k in drawn]) * ends_SV[:, -1:]
    place_S = (ends_SV <= target_S1).sum(dim=-1, keepdim=True)
    last_S = (probabilities_SV > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not lead behind the last interval
    tokens_S = order_SV.gather(1, torch.minimum(place_S, last_S).clamp(min=0))[:, 0]  # 0 where logits are not finite
    best_S[torch.tensor(drawn, device=best_S.device)] = tokens_S
    return best_S


def top_logprobs(logits_SV: Tensor, tokens_S: Tensor, count: int) -> list[tuple[float, dict[int, float]]]:
    """Log-probabilities under the model's own logits: of each row's token, and of its `count` likeliest tokens."""
    logprobs_SV = logits_SV.float().log_softmax(dim=-1)
    own_S = logprobs_SV.gather(1, tokens_S[:, None])[:, 0].tolist()
    values, ids = logprobs_SV.topk(min(count, logprobs_SV.shape[1]), dim=-1)
    tops = (dict(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True))
    return list(zip(own_S, tops, strict=True))

"""From token states to one vector a sequence, in float32 whatever the states' dtype.

A sequence's tokens are selected by offset, never multiplied by a mask. Empty selections give zero vectors, but for
`cls`, which then takes the first token of all.
Shape suffixes: T tokens (rows beyond the last sequence's end are garbage), S sequences, D hidden size.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["POOLINGS", "Selection", "select"]


_BLOCK = 64


class Selection(NamedTuple):
    """Which tokens are pooled: of each sequence those from `begin` up to `end`, int64 [S] both.

    `start` is where the sequence itself begins; `bounds` int64 are alternating begins and ends, for reductions.
    """

    start: Tensor
    begin: Tensor
    end: Tensor
    bounds: Tensor
    whole: bool


def select(cu_seqlens: Tensor, skip_S: Tensor | None) -> Selection:
    """Select all tokens, or all but the first `skip` (int32 [S]) of each sequence."""
    offsets = cu_seqlens.long()
    start, end = offsets[:-1], offsets[1:]
    if skip_S is None:
        return Selection(start=start, begin=start, end=end, bounds=offsets, whole=True)
    begin = torch.minimum(start + skip_S, end)
    bounds = torch.stack((begin, end), dim=1).flatten()
    return Selection(start=start, begin=begin, end=end, bounds=bounds, whole=False)


def _reduce(states_TD: Tensor, chosen: Selection, how: str, initial: float) -> Tensor:
    result = torch.segment_reduce(states_TD.float(), how, offsets=chosen.bounds, axis=0, unsafe=True, initial=initial)
    return result if chosen.whole else result[::2]


def _sum(states_TD: Tensor, chosen: Selection) -> Tensor:
    return _reduce(states_TD, chosen, "sum", 0.0)


def _counts(chosen: Selection) -> Tensor:
    return (chosen.end - chosen.begin).clamp(min=1)[:, None]


def _take(states_TD: Tensor, index_S: Tensor, there_S: Tensor) -> Tensor:
    """Rows of the states where `there`, zeros elsewhere."""
    if states_TD.shape[0] == 0:
        return states_TD.new_zeros(index_S.shape[0], states_TD.shape[1], dtype=torch.float32)
    rows_SD = states_TD[index_S.clamp(min=0, max=states_TD.shape[0] - 1)].float()
    return torch.where(there_S[:, None], rows_SD, 0.0)


def mean(states_TD: Tensor, chosen: Selection) -> Tensor:
    """Mean of the selected tokens."""
    return _sum(states_TD, chosen) / _counts(chosen)


def mean_sqrt_len_tokens(states_TD: Tensor, chosen: Selection) -> Tensor:
    """Sum of the selected tokens, over the root of their number."""
    return _sum(states_TD, chosen) / _counts(chosen).float().sqrt()


def weightedmean(states_TD: Tensor, chosen: Selection) -> Tensor:
    """Mean of the selected tokens, weighted by their place in the sequence: 1, 2, 3, …"""
    tokens_T = torch.arange(states_TD.shape[0], device=states_TD.device)
    sequence_T = torch.searchsorted(chosen.end, tokens_T, right=True).clamp(max=max(chosen.end.shape[0] - 1, 0))
    weights_T = (tokens_T - chosen.start[sequence_T] + 1).float() if chosen.end.shape[0] else tokens_T.float()
    weighted_SD = _sum(states_TD.float() * weights_T[:, None], chosen)
    first, last = chosen.begin - chosen.start + 1, chosen.end - chosen.start
    return weighted_SD / ((first + last) * (last - first + 1) / 2).clamp(min=1)[:, None]


def total(states_TD: Tensor, chosen: Selection) -> Tensor:
    """Sum of the selected tokens, by blocks first: one by one, a long sum of positive numbers loses digits."""
    blocks = torch.arange(0, states_TD.shape[0], _BLOCK, device=states_TD.device)
    cuts = torch.cat((chosen.bounds, blocks)).sort().values
    parts = torch.segment_reduce(states_TD.float(), "sum", offsets=cuts, axis=0, unsafe=True, initial=0.0)
    return _sum(parts, chosen._replace(bounds=torch.searchsorted(cuts, chosen.bounds)))


def maximum(states_TD: Tensor, chosen: Selection) -> Tensor:
    """Largest value of each feature among the selected tokens."""
    largest_SD = _reduce(states_TD, chosen, "max", float("-inf"))
    return torch.where((chosen.end > chosen.begin)[:, None], largest_SD, 0.0)


def cls(states_TD: Tensor, chosen: Selection) -> Tensor:
    """State of the first selected token; of the first token at all if none is selected."""
    first_S = torch.where(chosen.begin < chosen.end, chosen.begin, chosen.start)
    return _take(states_TD, first_S, chosen.end > chosen.start)


def lasttoken(states_TD: Tensor, chosen: Selection) -> Tensor:
    """State of the last selected token."""
    return _take(states_TD, chosen.end - 1, chosen.end > chosen.begin)


POOLINGS: Mapping[str, Callable[[Tensor, Selection], Tensor]] = {
    "cls": cls,
    "max": maximum,
    "mean": mean,
    "mean_sqrt_len_tokens": mean_sqrt_len_tokens,
    "weightedmean": weightedmean,
    "lasttoken": lasttoken,
    "sum": total,
}

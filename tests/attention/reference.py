"""Softmax attention written out, in float64: what every backend is compared with."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    reach: int = -1,
    keys: Sequence[int] | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    content_q: Tensor | None = None,
    content_k: Tensor | None = None,
    bucket_of: Tensor | None = None,
) -> Tensor:
    """Within each sequence, with key/value heads repeated."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    groups = q.shape[1] // k.shape[1]
    offsets = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    for number, (begin, end) in enumerate(pairwise(offsets)):
        places = torch.arange(end - begin, device=q.device)
        distance = places[:, None] - places[None, :]
        a, b, c = (x[begin:end].double().transpose(0, 1) for x in (q, k, v))
        b, c = b.repeat_interleave(groups, 0), c.repeat_interleave(groups, 0)
        scores = a @ b.transpose(1, 2) * scale
        if bias is not None:
            scores = scores + bias.double()[:, distance + bias.shape[1] // 2]
        if bucket_of is not None:
            bucket = bucket_of.long()[distance + bucket_of.shape[0] // 2]
            row, column = places[:, None], places[None, :]
            if content_q is not None:
                scores = scores + content_q.double()[begin:end][row, :, bucket].permute(2, 0, 1)
            if content_k is not None:
                scores = scores + content_k.double()[begin:end][column, :, bucket].permute(2, 0, 1)
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        if reach >= 0:
            scores = scores.masked_fill(distance.abs() > reach, float("-inf"))
        if causal:
            scores = scores.masked_fill(distance < 0, float("-inf"))
        if keys is not None:
            scores[:, :, keys[number] :] = float("-inf")
        out[begin:end] = (scores.softmax(-1) @ c).transpose(0, 1)
    return out


def offsets_of(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def extras(kind: str, tokens: int, heads: int, longest: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Any]:
    """Random tables for a kind of scores: keyword arguments of `dense`."""
    draw = torch.Generator().manual_seed(3)
    distances, buckets = 2 * longest - 1, 7
    if kind == "bias":
        return {"bias": torch.randn(heads, distances, generator=draw).to(device)}
    content: dict[str, Any] = {}
    for name in ("content_q", "content_k"):
        if kind in (name, "disentangled"):
            content[name] = torch.randn(tokens, heads, buckets, generator=draw).to(device, dtype)
    bucket_of = torch.randint(buckets, (distances,), generator=draw, dtype=torch.int32).to(device)
    return content | {"bucket_of": bucket_of}

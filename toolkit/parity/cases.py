"""The sequences that are compared: random ids, embeddings and mixtures of both, from fixed seeds."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.inputs import MixedPrompt, PromptEmbeds, RowInput, TokenIds
from toolkit.spec import EncoderSpec

__all__ = ["PATHS", "Case", "make_cases"]

PATHS = ("ids", "embeds", "mixed")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One sequence: what we are given, and the ids or embeddings that mean the same to the reference."""

    name: str
    given: RowInput
    same: list[int] | Tensor
    segments: list[int] | None


def make_cases(
    spec: EncoderSpec,
    dtype: torch.dtype,
    table: Callable[[list[int]], Tensor],
    path: str,
    lengths: Sequence[int],
) -> list[Case]:
    """Make a sequence of each length for one of `PATHS`.

    Args:
        spec: the model.
        dtype: of the embeddings.
        table: the float64 reference's own embedding of ids, [tokens, width].
        path: how the sequences are given.
        lengths: in tokens.
    """
    draw = random.Random(path)
    noise = torch.Generator().manual_seed(draw.randrange(2**31))
    cases: list[Case] = []
    for length in lengths:
        ids = [draw.randrange(spec.embedding.vocab_size) for _ in range(length)]
        segments = [draw.randrange(max(spec.embedding.segments, 1)) for _ in range(length)]
        theirs = segments if spec.embedding.segments else None
        rows = table(ids)
        jitter = torch.randn(rows.shape, generator=noise, dtype=rows.dtype) * rows.std()
        free = (rows + 0.5 * jitter).to(dtype)  # what the caller passes, exactly representable
        if path == "ids":
            given, same = TokenIds(ids, segments), ids
        elif path == "embeds":
            given, same = PromptEmbeds(free, segments), free.double()
        else:
            a, b = sorted(draw.sample(range(length + 1), 2)) if length > 1 else (0, 1)
            parts: list[TokenIds | PromptEmbeds] = []
            if a > 0:
                parts.append(TokenIds(ids[:a], segments[:a]))
            parts.append(PromptEmbeds(free[a:b], segments[a:b]))
            if b < length:
                parts.append(TokenIds(ids[b:], segments[b:]))
            given, same = MixedPrompt(parts), torch.cat([rows[:a], free[a:b].double(), rows[b:]])
        cases.append(Case(name=f"{length} tokens", given=given, same=same, segments=theirs))
    return cases

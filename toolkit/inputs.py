"""What callers pass: texts, token ids, embeddings, and mixtures of ids and embeddings within one sequence.

Everything is checked here, on the host, before any kernel runs. The result is one `Row` a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import InputError

__all__ = ["Limits", "MixedPrompt", "PromptEmbeds", "Row", "RowInput", "TokenIds", "check_row"]

_EMBED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TokenIds:
    """Token ids of one sequence, used as they are: no special token is added, none is cut off.

    `segments` (token type ids) are as long as `ids`; None means zeros.
    """

    ids: Sequence[int]
    segments: Sequence[int] | None = None


@dataclass(frozen=True)
class PromptEmbeds:
    """Embeddings of one sequence in the place of the token table's output: [tokens, seam width].

    The dtype is float32, float16 or bfloat16, on the CPU or on the runner's device; values are finite.
    `runner.embed_tokens(ids)` gives the table's own. Positions, segments and norms are applied after them.
    """

    embeds: Tensor
    segments: Sequence[int] | None = None


@dataclass(frozen=True)
class MixedPrompt:
    """One sequence made of parts, ids and embeddings in any order."""

    parts: Sequence[TokenIds | PromptEmbeds]


RowInput = TokenIds | PromptEmbeds | MixedPrompt


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a model accepts: ids below `vocab_size`, segments below `segments`, `width` wide embeds that are
    finite in `dtype`, and `length` tokens a sequence.
    """

    vocab_size: int
    segments: int
    width: int
    length: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checked sequence. `ids` and `segments` are int32 [n]; `embeds` holds (start, [m, width]) pieces.

    `skip` is how many tokens at the start belong to a prompt that pooling may leave out; to the last `unattended` ones
    no token attends.
    """

    ids: np.ndarray
    segments: np.ndarray
    embeds: tuple[tuple[int, Tensor], ...]
    skip: int = 0
    unattended: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def check_row(item: RowInput, limits: Limits, where: str) -> Row:
    """Check one non-text input and bring it into the common form.

    Args:
        item: what the caller passed.
        limits: what the model accepts.
        where: how to name this input in an error, e.g. "input 3".

    Raises:
        InputError: naming the input, the defect and the limit.
    """
    parts = item.parts if isinstance(item, MixedPrompt) else (item,)
    if not isinstance(parts, Sequence) or len(parts) == 0:
        raise InputError(f"{where}: a MixedPrompt needs at least one part")
    ids: list[np.ndarray] = []
    segments: list[np.ndarray] = []
    embeds: list[tuple[int, Tensor]] = []
    start = 0
    for part in parts:
        if isinstance(part, TokenIds):
            values = _integers(part.ids, limits.vocab_size, f"{where}: token ids", "the vocabulary")
        elif isinstance(part, PromptEmbeds):
            tensor = _check_embeds(part.embeds, limits, where)
            values = np.zeros(len(tensor), np.int32)
            embeds.append((start, tensor))
        else:
            raise InputError(f"{where}: a part is a {type(part).__name__}, expected TokenIds or PromptEmbeds")
        ids.append(values)
        segments.append(_check_segments(part.segments, len(values), limits, where))
        start += len(values)
    if start > limits.length:
        raise InputError(f"{where}: {start} tokens, the model takes at most {limits.length}")
    return Row(ids=np.concatenate(ids), segments=np.concatenate(segments), embeds=tuple(embeds))


def _check_segments(segments: Sequence[int] | None, length: int, limits: Limits, where: str) -> np.ndarray:
    if segments is None:
        return np.zeros(length, np.int32)
    values = _integers(segments, max(limits.segments, 1), f"{where}: segments", "the segment table")
    if len(values) != length:
        raise InputError(f"{where}: {len(values)} segments for {length} tokens")
    return values


def _integers(values: object, bound: int, what: str, table: str) -> np.ndarray:
    """A non-empty 1-d sequence of integers in [0, bound) as int32."""
    if isinstance(values, Tensor):
        if values.layout != torch.strided or values.is_meta or values.is_nested:
            raise InputError(f"{what} are a {values.layout} tensor on {values.device}, expected a plain one")
        if values.is_floating_point() or values.is_complex():
            raise InputError(f"{what} have dtype {values.dtype}, expected flat integers")
        values = values.detach().cpu().numpy()
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        raise InputError(f"{what} are a {type(values).__name__}, expected a sequence of integers")
    if isinstance(values, np.ndarray) and values.ndim != 1:
        raise InputError(f"{what} have {values.ndim} dimensions, expected flat integers")
    if len(values) == 0:
        raise InputError(f"{what} are empty: a sequence needs at least one token")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{what} are no flat sequence of integers ({error})") from None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InputError(f"{what} have dtype {array.dtype} and {array.ndim} dimensions, expected flat integers")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= bound:
        bad = low if low < 0 else high
        raise InputError(f"{what}: {bad} is outside {table}, which has {bound} rows (0 … {bound - 1})")
    return array.astype(np.int32)


def _check_embeds(embeds: object, limits: Limits, where: str) -> Tensor:
    """Shape, dtype and layout first: nothing is densified, moved or read before they are known to be small."""
    if not isinstance(embeds, Tensor):
        raise InputError(f"{where}: embeds are a {type(embeds).__name__}, expected a torch.Tensor")
    if embeds.layout != torch.strided or embeds.is_quantized or embeds.is_meta or embeds.is_nested:
        raise InputError(f"{where}: embeds must be a dense tensor, not {embeds.layout} on {embeds.device}")
    if embeds.dim() != 2 or embeds.shape[1] != limits.width:
        raise InputError(f"{where}: embeds have shape {tuple(embeds.shape)}, expected [tokens, {limits.width}]")
    if embeds.dtype not in _EMBED_DTYPES:
        raise InputError(f"{where}: embeds have dtype {embeds.dtype}, expected float32, float16 or bfloat16")
    if embeds.shape[0] == 0:
        raise InputError(f"{where}: embeds are empty: a sequence needs at least one token")
    if embeds.shape[0] > limits.length:
        raise InputError(f"{where}: {embeds.shape[0]} tokens, the model takes at most {limits.length}")
    embeds = embeds.detach().to(limits.dtype)
    if not bool(torch.isfinite(embeds).all()):
        raise InputError(f"{where}: embeds hold values that are not finite in the model's {limits.dtype}")
    return embeds

"""What callers pass, as rows: texts are tokenized, ids and embeddings checked, in the caller's order."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeGuard

import numpy as np

from toolkit.errors import InputError
from toolkit.inputs import Limits, MixedPrompt, PromptEmbeds, Row, RowInput, TokenIds, check_row
from toolkit.tokenizer import Pair, TextEncoder, check_unicode

__all__ = ["Input", "Pairs", "Rows", "group_rows", "listed", "read_rows", "without_padding"]

Input = str | RowInput
Pairs = Literal["no", "allowed", "only"]
Encode = Callable[[Mapping[int, str | Pair]], dict[int, Row]]

# Texts are tokenized in chunks of at least so many characters and texts: about a batch, and work for all cores.
_CHUNK_CHARACTERS = 65536
_CHUNK_TEXTS = 64
# Up to so many tokens a forward pass costs about the same, so one mixed batch beats two.
_ONE_BATCH_TOKENS = 1024


class Rows:
    """Inputs on their way to the model, by their number. Texts are tokenized when their turn comes, longest first.

    So a device can work on the first batch while the host tokenizes the next.
    """

    def __init__(self, given: Mapping[int, Row], texts: Mapping[int, str | Pair], encode: Encode, empty: bool) -> None:
        self._given, self._texts, self._encode, self._empty = given, texts, encode, empty

    def __len__(self) -> int:
        return len(self._given) + len(self._texts)

    def chunks(self) -> Iterator[dict[int, Row]]:
        """All rows: first those that were given as ids or embeddings, together with the longest texts.

        Raises:
            InputError: a text is not acceptable, or gives no tokens where that is not allowed.
        """
        order = sorted(self._texts, key=lambda number: _characters(self._texts[number]), reverse=True)
        chunk, characters, rows = [], 0, dict(self._given)
        for number in order:
            chunk.append(number)
            characters += _characters(self._texts[number])
            if characters >= _CHUNK_CHARACTERS and len(chunk) >= _CHUNK_TEXTS:
                yield self._checked(rows | self._encode({number: self._texts[number] for number in chunk}))
                chunk, characters, rows = [], 0, {}
        yield self._checked(rows | self._encode({number: self._texts[number] for number in chunk}))

    def all(self) -> list[Row]:
        """All rows in the callers' order."""
        rows = {number: row for chunk in self.chunks() for number, row in chunk.items()}
        return [rows[number] for number in range(len(rows))]

    def _checked(self, rows: dict[int, Row]) -> dict[int, Row]:
        missing = next((number for number, row in rows.items() if not len(row)), None)
        if missing is not None and not self._empty:
            raise InputError(f"input {missing} has no tokens: there is nothing to score")
        return rows


def read_rows(
    inputs: Input | Pair | Sequence[Input | Pair],
    prompt: str,
    texts: TextEncoder,
    limits: Limits,
    *,
    pairs: Pairs = "no",
    skip: int = 0,
    empty: bool = True,
) -> Rows:
    """Sort inputs by their kind, and check those that are no texts.

    Args:
        inputs: one input, or a sequence of them.
        prompt: goes with each text and each pair of texts, as `texts` has it.
        texts: the tokenizer, and what is done to texts before it.
        limits: what the model takes.
        pairs: whether an item may be a pair of texts: "no", "allowed", or "only" (no single texts). A tuple of two
            texts in the place of a sequence of inputs is one pair where pairs are allowed.
        skip: how many of a text's first tokens pooling leaves out.
        empty: whether a text may give no tokens.

    Raises:
        InputError: an input is of another kind, or not acceptable; the message names its number.
    """
    check_unicode("prompt", prompt)
    items = listed(inputs, pairs)
    found: dict[int, str | Pair] = {}
    given: dict[int, Row] = {}
    for number, item in enumerate(items):
        if isinstance(item, str) and pairs != "only":
            found[number] = item
        elif pairs != "no" and _is_pair(item):
            found[number] = (item[0], item[1])
        elif isinstance(item, TokenIds | PromptEmbeds | MixedPrompt):
            given[number] = check_row(item, limits, f"input {number}")
        else:
            texts_are = {"no": "str", "allowed": "str, a pair of texts", "only": "a pair of texts"}[pairs]
            raise InputError(
                f"input {number} is a {type(item).__name__}, expected {texts_are}, TokenIds, PromptEmbeds or "
                "MixedPrompt"
            )

    def encode(chosen: Mapping[int, str | Pair]) -> dict[int, Row]:
        rows = texts.encode(chosen, prompt)
        return {n: replace(row, skip=min(skip, len(row))) for n, row in rows.items()} if skip else rows

    return Rows(given, found, encode, empty)


def _characters(text: str | Pair) -> int:
    return len(text) if isinstance(text, str) else len(text[0]) + len(text[1])


def without_padding(row: Row, pad: int) -> Row:
    """The row without the tokens of this id at its end; one token is left, and rows with embeddings stay whole.

    This is how transformers' classifiers of the last token look for it. Their models are causal, so that the token
    does not know what came after it.
    """
    if row.embeds or not len(row) or row.ids[-1] != pad:
        return row
    others = np.flatnonzero(row.ids != pad)
    end = int(others[-1]) + 1 if len(others) else 1
    return replace(row, ids=row.ids[:end], segments=row.segments[:end])


def group_rows(chunks: Iterable[dict[int, Row]], most: int) -> Iterator[dict[int, Row]]:
    """Put rows of similar length together; a group comes as soon as it is full.

    Rows that hold embeddings get groups of their own, so that the others never pay for the embeds graph, except where
    all that is left fits into one small batch. Rows without tokens are left out.

    Args:
        chunks: rows by number.
        most: tokens in a group; a row that is longer makes one of its own.
    """
    waiting: tuple[list[tuple[int, Row]], list[tuple[int, Row]]] = ([], [])
    first = True
    for chunk in chunks:
        for number, row in sorted(chunk.items(), key=lambda item: len(item[1]), reverse=True):
            if len(row):
                waiting[bool(row.embeds)].append((number, row))
        for rows in waiting:
            for group in _full_groups(rows, most):
                first = False
                yield dict(group)
    rest = [*waiting[0], *waiting[1]]
    together = first and sum(len(row) for _, row in rest) <= min(_ONE_BATCH_TOKENS, most)
    yield from (dict(rows) for rows in ([rest] if together else waiting) if rows)


def _full_groups(rows: list[tuple[int, Row]], most: int) -> Iterator[list[tuple[int, Row]]]:
    """Take from the front what fills groups; what does not fill one is left."""
    tokens, begin = 0, 0
    for k, (_, row) in enumerate(rows):
        if k > begin and tokens + len(row) > most:
            yield rows[begin:k]
            tokens, begin = 0, k
        tokens += len(row)
    del rows[:begin]


def listed(inputs: Any, pairs: Pairs) -> list[Any]:
    """One input, or a sequence of them, as a list."""
    if not isinstance(inputs, RowInput | Iterable):
        raise InputError(f"inputs are a {type(inputs).__name__}, expected an input or a sequence of them")
    one = isinstance(inputs, str | RowInput) or (pairs != "no" and isinstance(inputs, tuple) and _is_pair(inputs))
    return [inputs] if one else list(inputs)  # type: ignore[arg-type]


def _is_pair(item: object) -> TypeGuard[Pair]:
    return isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(text, str) for text in item)

"""What callers pass, as rows: texts are tokenized, ids and embeddings checked, in the caller's order."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeGuard

from toolkit.errors import InputError
from toolkit.inputs import Limits, MixedPrompt, PromptEmbeds, Row, RowInput, TokenIds, check_row
from toolkit.tokenizer import Pair, TextEncoder

__all__ = ["Input", "Pairs", "listed", "read_rows"]

Input = str | RowInput
Pairs = Literal["no", "allowed", "only"]


def read_rows(
    inputs: Input | Pair | Sequence[Input | Pair],
    prompt: str,
    texts: TextEncoder,
    limits: Limits,
    *,
    pairs: Pairs = "no",
    skip: int = 0,
) -> list[Row]:
    """Tokenize and check.

    Args:
        inputs: one input, or a sequence of them.
        prompt: put in front of each text, and of the first text of each pair.
        texts: the tokenizer.
        limits: what the model takes.
        pairs: whether an item may be a pair of texts: "no", "allowed", or "only" (no single texts). A tuple of two
            texts in the place of a sequence of inputs is one pair where pairs are allowed.
        skip: how many of a text's first tokens pooling leaves out.

    Raises:
        InputError: an input is of another kind, or not acceptable; the message names its number.
    """
    items = listed(inputs, pairs)
    found: dict[int, str | Pair] = {}
    rows: list[Row | None] = [None] * len(items)
    for number, item in enumerate(items):
        if isinstance(item, str) and pairs != "only":
            found[number] = prompt + item
        elif pairs != "no" and _is_pair(item):
            found[number] = (prompt + item[0], item[1])
        elif isinstance(item, TokenIds | PromptEmbeds | MixedPrompt):
            rows[number] = check_row(item, limits, f"input {number}")
        else:
            texts_are = {"no": "str", "allowed": "str, a pair of texts", "only": "a pair of texts"}[pairs]
            raise InputError(
                f"input {number} is a {type(item).__name__}, expected {texts_are}, TokenIds, PromptEmbeds or "
                "MixedPrompt"
            )
    for number, row in texts.encode(found).items():
        rows[number] = replace(row, skip=min(skip, len(row))) if skip else row
    return [row for row in rows if row is not None]


def listed(inputs: Any, pairs: Pairs) -> list[Any]:
    """One input, or a sequence of them, as a list."""
    if not isinstance(inputs, RowInput | Iterable):
        raise InputError(f"inputs are a {type(inputs).__name__}, expected an input or a sequence of them")
    one = isinstance(inputs, str | RowInput) or (pairs != "no" and isinstance(inputs, tuple) and _is_pair(inputs))
    return [inputs] if one else list(inputs)  # type: ignore[arg-type]


def _is_pair(item: object) -> TypeGuard[Pair]:
    return isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(text, str) for text in item)

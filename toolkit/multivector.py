"""Late interaction (ColBERT): which tokens' vectors of a query or a document are kept, and how they are scored.

Shape suffixes: Q tokens of a query, N tokens of all documents, V vector size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.inputs import Limits, Row
from toolkit.tokenizer import Pair, TextEncoder, TokenizerSpec, text_limit

__all__ = [
    "KINDS",
    "Expansion",
    "Kind",
    "MaskOptions",
    "MultiVector",
    "MultiVectorOptions",
    "Side",
    "SideEncoder",
    "maxsim",
    "read_mask",
    "read_options",
]

Kind = Literal["query", "document"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Similarity = Literal["maxsim", "meanmaxsim"]

_EMPTY_DOCUMENT = -1e9  # what sentence-transformers gives a document without vectors


def maxsim(query: Tensor, documents: Sequence[Tensor], similarity: Similarity = "maxsim") -> Tensor:
    """Score documents for a query: for each vector of the query its best product with a document's, added up.

    Args:
        query: [tokens, dim].
        documents: [tokens, dim] each, on the query's device.
        similarity: "meanmaxsim" divides by the number of the query's tokens.

    Returns:
        float32 [documents], on the query's device; a document without tokens scores -1e9.

    Raises:
        InputError: shapes do not fit, or there is no such similarity.
    """
    if similarity not in get_args(Similarity):
        raise InputError(f"similarity {similarity!r} is unknown; use {', '.join(get_args(Similarity))}")
    documents = list(documents)
    for name, vectors in (("query", query), *((f"document {k}", x) for k, x in enumerate(documents))):
        if not isinstance(vectors, Tensor):
            raise InputError(f"{name} is a {type(vectors).__name__}, expected a tensor")
        if vectors.dim() != 2 or vectors.shape[1] != query.shape[-1]:
            raise InputError(f"{name}: vectors of shape {tuple(vectors.shape)}, expected [tokens, {query.shape[-1]}]")
    if not documents:
        return query.new_empty(0, dtype=torch.float32)
    products_QN = query.float() @ torch.cat([document.float() for document in documents]).T
    scores = torch.stack(
        [
            part.amax(dim=1).sum() if part.shape[1] else part.new_tensor(_EMPTY_DOCUMENT)
            for part in products_QN.split([len(document) for document in documents], dim=1)
        ]
    )
    return scores / max(len(query), 1) if similarity == "meanmaxsim" else scores


@dataclass(frozen=True, kw_only=True)
class Expansion:
    """A shorter query is filled up to `length` tokens with the token `id`.

    Those see the query's own tokens; they are seen themselves only if the encoder is to `attend` to them.
    """

    length: int
    id: int
    attend: bool


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is done to queries, or to documents.

    Attributes:
        limit: the most tokens of a text, special tokens included; not counting an expansion.
        skip_ids: tokens whose vectors are left out.
        keep_ids: the only tokens whose vectors are kept; None for all.
        expansion: how short texts are filled up, None if they are not.
    """

    limit: int
    skip_ids: tuple[int, ...]
    keep_ids: tuple[int, ...] | None
    expansion: Expansion | None

    @property
    def longest(self) -> int:
        """The most tokens that a text may become."""
        return max(self.limit, self.expansion.length) if self.expansion is not None else self.limit

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Side":
        """Inverse of `dataclasses.asdict`; missing or unknown keys raise TypeError or KeyError."""
        parts = {
            "skip_ids": tuple(data["skip_ids"]),
            "keep_ids": tuple(data["keep_ids"]) if data["keep_ids"] is not None else None,
            "expansion": Expansion(**data["expansion"]) if data["expansion"] is not None else None,
        }
        return cls(**{**data, **parts})

    def expand(self, row: Row) -> Row:
        """A text's row, filled up."""
        missing = self.expansion.length - len(row) if self.expansion is not None else 0
        if self.expansion is None or missing <= 0:
            return row
        ids = np.pad(row.ids, (0, missing), constant_values=self.expansion.id)
        unattended = 0 if self.expansion.attend else missing
        return replace(row, ids=ids, segments=np.pad(row.segments, (0, missing)), unattended=unattended)

    def kept(self, row: Row) -> Tensor:
        """bool [tokens]: whose vectors are kept. Tokens given as embeddings have no ids and are always kept."""
        kept = ~np.isin(row.ids, self.skip_ids)
        if self.keep_ids is not None:
            kept &= np.isin(row.ids, self.keep_ids)
        for start, embeds in row.embeds:
            kept[start : start + len(embeds)] = True
        return torch.from_numpy(kept)


@dataclass(frozen=True, kw_only=True)
class MultiVector:
    """Both sides of a late interaction model, and how their vectors are scored; see `maxsim`."""

    query: Side
    document: Side
    similarity: Similarity

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "MultiVector":
        """Inverse of `dataclasses.asdict`; missing or unknown keys raise TypeError or KeyError."""
        return cls(**{**data, **{kind: Side.from_dict(data[kind]) for kind in KINDS}})

    @property
    def unattended(self) -> int:
        """The longest sequence that may have tokens which are not attended to, 0 if none has."""
        expansion = self.query.expansion
        return expansion.length if expansion is not None and not expansion.attend else 0

    def side(self, kind: str) -> Side:
        """The side of that name.

        Raises:
            InputError: there is none.
        """
        if kind not in KINDS:
            raise InputError(f"kind {kind!r} is unknown; use {' or '.join(KINDS)}")
        return self.query if kind == "query" else self.document


class SideEncoder(TextEncoder):
    """Texts of one side to rows: cut at its limit, and filled up."""

    def __init__(self, file: Path, spec: TokenizerSpec, limits: Limits, side: Side) -> None:
        super().__init__(file, replace(spec, limit=side.limit), limits)
        self._side = side

    def encode(self, texts: Mapping[int, str | Pair], prompt: str = "") -> dict[int, Row]:
        """As a TextEncoder's.

        Raises:
            InputError: also if a text gives no token that its expansion could attend to.
        """
        rows = super().encode(texts, prompt)
        if self._side.expansion is not None and not self._side.expansion.attend:
            for number, row in rows.items():
                if not len(row):
                    raise InputError(f"input {number} has no tokens for its expansion to attend to")
        return {number: self._side.expand(row) for number, row in rows.items()}


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """What a MultiVectorMask leaves out: words, on some sides; and of documents all but `keep_ids`, None for none."""

    skip_words: tuple[str, ...] = ()
    skip_on: tuple[str, ...] = ("document",)
    keep_ids: tuple[int, ...] | None = None


def read_mask(name: str, config: Mapping[str, Any]) -> MaskOptions:
    """Read a MultiVectorMask's configuration, whose file is called `name`.

    Raises:
        CheckpointError: a field is malformed.
    """
    words, on, keep = (config.get(key) for key in ("skiplist_words", "skiplist_tasks", "keep_only_token_ids"))
    on = [on] if isinstance(on, str) else on
    fields = {"skiplist_words": (words, str), "skiplist_tasks": (on, str), "keep_only_token_ids": (keep, int)}
    for key, (value, kind) in fields.items():
        if value is not None and (not isinstance(value, list) or not all(type(item) is kind for item in value)):
            raise CheckpointError(f"{name}: {key} = {value!r}, expected a list of {kind.__name__}")
    return MaskOptions(
        skip_words=tuple(words or ()),
        skip_on=tuple(on) if on is not None else ("document",),
        keep_ids=tuple(keep) if keep else None,
    )


@dataclass(frozen=True, kw_only=True)
class _ExpansionOptions:
    fixed: bool
    attend: bool
    token: str | None
    length: int


@dataclass(frozen=True, kw_only=True)
class MultiVectorOptions:
    """What a checkpoint's files say, before they are resolved with its tokenizer.

    Lengths are None if not stated, `mask` if there is no module of that kind.
    """

    query_length: int | None
    document_length: int | None
    expansion: _ExpansionOptions | None
    mask: MaskOptions | None
    similarity: Similarity

    def resolve(self, tokenizer: Any, *, limit: int, usable: int) -> tuple[MultiVector, list[str]]:
        """Turn words into ids and settle the limits.

        Args:
            tokenizer: the checkpoint's, of transformers.
            limit: of texts in general.
            usable: the longest sequence that the model can process.

        Returns:
            The result, and warnings.

        Raises:
            CheckpointError: a token is not in the vocabulary, or an expansion is longer than the model can take.
            UnsupportedError: an expansion goes to the left.
        """
        mask, expansion = self.mask or MaskOptions(), self._expansion(tokenizer, usable)
        query_length = self.query_length
        if self.expansion is not None and self.expansion.fixed:
            query_length = self.expansion.length
        query_limit, query_notes = text_limit(query_length, limit, limit, usable)
        document_limit, document_notes = text_limit(self.document_length, limit, limit, usable)
        skip_ids, unknown = _skip_ids(tokenizer, mask.skip_words)
        query = Side(
            limit=query_limit,
            skip_ids=skip_ids if "query" in mask.skip_on else (),
            keep_ids=None,
            expansion=expansion,
        )
        document = Side(
            limit=document_limit,
            skip_ids=skip_ids if "document" in mask.skip_on else (),
            keep_ids=mask.keep_ids,
            expansion=None,
        )
        warnings = [f"queries: {note}" for note in query_notes] + [f"documents: {note}" for note in document_notes]
        if unknown:
            warnings.append(f"skiplist_words: {unknown} are no single tokens and have no effect")
        return MultiVector(query=query, document=document, similarity=self.similarity), warnings

    def _expansion(self, tokenizer: Any, usable: int) -> Expansion | None:
        if self.expansion is None:
            return None
        token, length = self.expansion.token, self.expansion.length
        if token is None:
            id = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.eos_token_id
        else:
            id = _token_id(tokenizer, token)
        if id is None:
            raise CheckpointError(f"query_expansion: token = {token!r} is not in the tokenizer's vocabulary")
        if length > usable:
            raise CheckpointError(f"query_expansion: length = {length}, the model takes at most {usable} tokens")
        if tokenizer.padding_side != "right":
            raise UnsupportedError(
                f"tokenizer_config.json: padding_side = {tokenizer.padding_side!r} is not supported with a "
                "query_expansion"
            )
        if self.mask is None and not self.expansion.attend:
            return None  # what is not attended to is kept by the mask alone
        return Expansion(length=length, id=id, attend=self.expansion.attend)


def _skip_ids(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """The ids of the words to skip, and the words that have none of their own."""
    ids = {word: _token_id(tokenizer, word) for word in words}
    unknown = [word for word, id in ids.items() if id is None]
    if unknown and tokenizer.unk_token_id is None:
        raise CheckpointError(f"skiplist_words: {unknown[0]!r} is not in the tokenizer's vocabulary")
    return tuple(id for id in ids.values() if id is not None), unknown


def _token_id(tokenizer: Any, token: str) -> int | None:
    """The token's own id, None if it would become the unknown token."""
    id = tokenizer.convert_tokens_to_ids(token)
    return None if id == tokenizer.unk_token_id and token != tokenizer.unk_token else id


def read_options(options: Mapping[str, Any], mask: MaskOptions | None, similarity: str | None) -> MultiVectorOptions:
    """Read what the Transformer module says of queries and documents.

    Args:
        options: its options; `query_length`, `document_length` and `query_expansion` are read.
        mask: what the mask leaves out; None if there is no mask.
        similarity: the checkpoint's similarity function; one for single vectors counts as "maxsim".

    Raises:
        CheckpointError: a field is malformed, or contradicts another.
    """
    lengths = {name: options.get(name) for name in ("query_length", "document_length")}
    for name, value in lengths.items():
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"{name} = {value!r}, expected a positive integer")
    expansion = _read_expansion(options.get("query_expansion"))
    query_length = lengths["query_length"]
    if expansion is not None and query_length is not None and query_length < expansion.length:
        raise CheckpointError(
            f"query_length = {query_length} is smaller than query_expansion's length = {expansion.length}: correct one"
        )
    return MultiVectorOptions(
        query_length=query_length,
        document_length=lengths["document_length"],
        expansion=expansion,
        mask=mask,
        similarity="meanmaxsim" if similarity == "meanmaxsim" else "maxsim",
    )


def _read_expansion(stated: Any) -> _ExpansionOptions | None:
    if stated is None:
        return None
    known = ("strategy", "attend", "token", "length")
    if not isinstance(stated, dict) or not set(stated) <= set(known):
        raise CheckpointError(f"query_expansion = {stated!r}, expected an object with {', '.join(known)}")
    strategy, attend, token, length = (stated.get(key) for key in known)
    if strategy not in ("fixed", "min"):
        raise CheckpointError(f"query_expansion: strategy = {strategy!r}, expected fixed or min")
    if type(length) is not int or length < 1:
        raise CheckpointError(f"query_expansion: length = {length!r}, expected a positive integer")
    if not isinstance(token, str | None):
        raise CheckpointError(f"query_expansion: token = {token!r}, expected a text")
    if not isinstance(stated.get("attend", False), bool):
        raise CheckpointError(f"query_expansion: attend = {attend!r}, expected true or false")
    return _ExpansionOptions(fixed=strategy == "fixed", attend=bool(attend), token=token, length=length)

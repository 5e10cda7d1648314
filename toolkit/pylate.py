"""Late interaction checkpoints that PyLate wrote, read as sentence-transformers' `MultiVectorEncoder` reads them."""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckpointError

__all__ = ["ALIASES", "PyLate", "read_pylate", "register_prefixes"]

# its own classes, and what they are to sentence-transformers
ALIASES: Mapping[str, str] = {"pylate.models.Dense.Dense": "sentence_transformers.base.modules.dense.Dense"}

_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
_LENGTHS = ("query_length", "document_length")
_MARKERS = (
    *_LENGTHS,
    "query_expansion",
    *_PREFIXES.values(),
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "skiplist_words",
)
_EXPANSION_LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class PyLate:
    """What PyLate's fields of config_sentence_transformers.json say.

    Attributes:
        options: of the Transformer module, where its own file does not state them.
        prefixes: what stands in front of a query's or document's prompt, by kind.
        skip_words: the words to skip, None if not stated.
    """

    options: Mapping[str, Any]
    prefixes: Mapping[str, str]
    skip_words: tuple[str, ...] | None

    @property
    def words(self) -> tuple[str, ...]:
        """The words to skip; PyLate's default is punctuation."""
        return self.skip_words if self.skip_words is not None else tuple(string.punctuation)

    def prompts(self, saved: Mapping[str, str]) -> dict[str, str]:
        """The prompts with their prefixes in front."""
        prefixed = {kind: prefix + saved.get(kind, "").removeprefix(prefix) for kind, prefix in self.prefixes.items()}
        return {**saved, **prefixed}


def is_pylate(config: Mapping[str, Any]) -> bool:
    """Whether config_sentence_transformers.json has fields that only PyLate writes."""
    return any(key in config for key in _MARKERS)


def read_pylate(name: str, config: Mapping[str, Any]) -> PyLate:
    """Read the fields of the file called `name`; there may be none.

    Raises:
        CheckpointError: a field is malformed.
    """
    prefixes = {kind: config[key] or "" for kind, key in _PREFIXES.items() if key in config}
    for kind, prefix in prefixes.items():
        if not isinstance(prefix, str):
            raise CheckpointError(f"{name}: {_PREFIXES[kind]} = {prefix!r}, expected a text")
    words = config.get("skiplist_words")
    if words is not None and (not isinstance(words, list) or not all(isinstance(word, str) for word in words)):
        raise CheckpointError(f"{name}: skiplist_words = {words!r}, expected a list of texts")
    lengths = {key: config[key] for key in _LENGTHS if config.get(key) is not None}
    stated = {"query_expansion": config["query_expansion"]} if "query_expansion" in config else {}
    options = {**lengths, **stated}
    if "query_expansion" not in options and is_pylate(config):
        options["query_expansion"] = None
        if config.get("do_query_expansion") is not False:
            attend = config.get("attend_to_expansion_tokens", config.get("attend_to_mask_tokens"))
            length = lengths.get("query_length", _EXPANSION_LENGTH)
            options.pop("query_length", None)
            options["query_expansion"] = {"strategy": "fixed", "attend": bool(attend), "length": length}
    return PyLate(options=options, prefixes=prefixes, skip_words=tuple(words) if words is not None else None)


def register_prefixes(tokenizer: Any, prefixes: Mapping[str, str]) -> None:
    """Let prefixes that the vocabulary knows become one token each, as PyLate put them in by their ids.

    A prefix is tried whole, then as its first word. The tokenizer is one of transformers, and is changed.
    """
    from tokenizers import AddedToken

    known = {*tokenizer.added_tokens_encoder, *tokenizer.get_vocab()}
    wanted: list[AddedToken] = []
    for prefix in prefixes.values():
        token = next((part for part in (prefix, *prefix.split(None, 1)[:1]) if prefix.strip() and part in known), None)
        if token is not None and tokenizer.tokenize(token) != [token]:
            wanted.append(AddedToken(token, normalized=False, special=True))
    if wanted:
        tokenizer.add_special_tokens({"additional_special_tokens": wanted})

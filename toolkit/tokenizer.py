"""Tokenization: the checkpoint's fast tokenizer, stripped of padding and truncation that were stored with it.

transformers reads the checkpoint's tokenizer files at conversion; afterwards only the `tokenizers` library
is needed.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from toolkit.checkpoint import Checkpoint
from toolkit.errors import ArtifactError, CheckpointError, InputError, UnsupportedError
from toolkit.inputs import Limits, Row

Pair = tuple[str, str]
UNLIMITED = 10**30  # what transformers stores for "no limit"

__all__ = ["Pair", "Place", "TextEncoder", "TokenizerSpec", "read_tokenizer", "text_limit"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec:
    """How texts become ids: at most `limit` tokens, special tokens included, cut at `side`.

    `segments` says whether the tokenizer emits segment ids; if not, they are zeros. `special_ids` are the ids of
    special tokens.
    """

    limit: int
    side: str
    segments: bool
    special_ids: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "TokenizerSpec":
        """Inverse of `to_dict`; missing or unknown keys raise TypeError or KeyError."""
        return cls(**{**data, "special_ids": tuple(data["special_ids"])})


def text_limit(configured: int | None, tokenizer_limit: int, positions: int, usable: int) -> tuple[int, list[str]]:
    """Return the length limit for texts that sentence-transformers uses, clamped to what the model can take.

    Args:
        configured: `max_seq_length` of the checkpoint's sentence-transformers configuration; it rules if set.
        tokenizer_limit: `model_max_length` of the tokenizer.
        positions: `max_position_embeddings`.
        usable: the longest sequence that the model can process.

    Returns:
        The limit, and a warning if it was clamped.
    """
    wanted = configured if configured is not None else min(tokenizer_limit, positions)
    if wanted <= usable:
        return wanted, []
    return usable, [f"the checkpoint asks for texts of {wanted} tokens; the model takes {usable}: longer ones are cut"]


def read_tokenizer(checkpoint: Checkpoint, *, lower_case: bool) -> tuple[Any, int]:
    """Load the checkpoint's tokenizer as transformers does, and clear its stored padding and truncation.

    Args:
        checkpoint: where the files are.
        lower_case: put a lower-casing step in front, unless the tokenizer has one of its own.

    Returns:
        The transformers tokenizer, and its length limit as stored.

    Raises:
        CheckpointError: there is none, or its files are broken.
        UnsupportedError: it has no fast implementation, or needs code from the checkpoint.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # every file that transformers might read is looked at first: a link that leaves the folder is refused
    templates = (checkpoint.root / "additional_chat_templates").glob("*")
    extra = [str(file.relative_to(checkpoint.root)) for file in templates]
    if not [name for name in (*TOKENIZER_FILES, *extra) if checkpoint.has(name)]:
        raise CheckpointError(f"{checkpoint.source} has no tokenizer files: looked for {', '.join(TOKENIZER_FILES)}")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if checkpoint.has(name):
            checkpoint.json(name)
    if checkpoint.has("tokenizer_config.json") and checkpoint.json("tokenizer_config.json").get("auto_map"):
        raise UnsupportedError("tokenizer_config.json: auto_map names code in the checkpoint; it is never executed")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.root), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many kinds for broken files
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"the tokenizer of {checkpoint.source} cannot be loaded ({reason})") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UnsupportedError(f"tokenizer class {type(tokenizer).__name__} has no fast implementation")
    limit: Any = tokenizer.model_max_length
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 1:
        raise CheckpointError(f"tokenizer_config.json: model_max_length = {limit!r}, expected a positive number")
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    if lower_case:
        _add_lower_case(backend)
    return tokenizer, int(min(limit, UNLIMITED))


def _add_lower_case(backend: Tokenizer) -> None:
    """Put Lowercase in front, unless the normalizer is one or is a sequence that holds one.

    Like sentence-transformers, which does not look into a normalizer's own options.
    """
    from tokenizers.normalizers import Lowercase, Sequence

    old = backend.normalizer
    steps: list[Any] = [] if old is None else [old]
    if isinstance(old, Sequence):
        steps = list(old)  # pyright: ignore[reportArgumentType]
    if not any(isinstance(step, Lowercase) for step in steps):
        backend.normalizer = Sequence([Lowercase(), *steps])


class Place(NamedTuple):
    """Where a token comes from: characters `start` to `end` of the text, and the number of its word, if it has one."""

    start: int
    end: int
    word: int | None
    special: bool


def check_unicode(where: str, text: str | Pair) -> None:
    """Check that a text, or each text of a pair, is valid Unicode.

    Raises:
        InputError: it is not; `where` is how the message calls it.
    """
    try:
        for part in (text,) if isinstance(text, str) else text:
            part.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: not valid Unicode ({error.reason})") from None


class TextEncoder:
    """Texts to rows of token ids, with the artifact's tokenizer.

    With `truncate` texts are cut at the limit, without it longer ones are refused.

    Raises:
        ArtifactError: the tokenizer file is missing or damaged.
    """

    def __init__(self, file: Path, spec: TokenizerSpec, limits: Limits, *, truncate: bool = True) -> None:
        if not file.is_file():
            raise ArtifactError(f"{file.name} is missing from the artifact: convert it again")
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare exceptions for damaged files
            raise ArtifactError(f"{file.name} is damaged ({error}): convert again") from None
        if truncate:
            self.tokenizer.enable_truncation(spec.limit, direction=spec.side)
        self._spec, self._limits = spec, limits

    def encode(self, texts: Mapping[int, str | Pair], prompt: str = "") -> dict[int, Row]:
        """Tokenize texts and pairs of texts, given by their number among the inputs.

        The prompt is put in front of each text, and of the first text of each pair. A text may give an empty row if
        the tokenizer adds no special tokens.

        Raises:
            InputError: naming the input: it is no valid Unicode, or the tokenizer yields an id, a segment or a
                length that the model has no room for.
        """
        for number, text in texts.items():
            check_unicode(f"input {number}", text)
        given = [prompt + text if isinstance(text, str) else (prompt + text[0], text[1]) for text in texts.values()]
        encodings = self.tokenizer.encode_batch_fast(given)
        return dict(zip(texts, self._rows(list(texts), encodings), strict=True))

    def places(self, texts: Mapping[int, str]) -> dict[int, list[Place]]:
        """Where each token of each text comes from, by the text's number."""
        encodings = self.tokenizer.encode_batch(list(texts.values()))
        return {
            number: [
                Place(start=start, end=end, word=word, special=bool(special))
                for (start, end), word, special in zip(
                    encoding.offsets, encoding.word_ids, encoding.special_tokens_mask, strict=True
                )
            ]
            for number, encoding in zip(texts, encodings, strict=True)
        }

    def prompt_length(self, prompt: str) -> int:
        """How many tokens of a text that begins with `prompt` are the prompt's, as sentence-transformers counts.

        Those of the prompt alone, less a special token at their end.
        """
        check_unicode("prompt", prompt)
        ids = self.tokenizer.encode(prompt).ids if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in self._spec.special_ids)

    def _rows(self, numbers: list[int], encodings: list[Encoding]) -> list[Row]:
        """Check all at once; the rows are views of one array."""
        lengths = [len(encoding) for encoding in encodings]
        bounds = np.cumsum([0, *lengths])
        ids = _flat((encoding.ids for encoding in encodings), bounds[-1])
        segments = np.zeros_like(ids)
        if self._spec.segments:
            segments = _flat((encoding.type_ids for encoding in encodings), bounds[-1])
        words, kinds, most = self._limits.vocab_size, self._limits.segments, self._limits.length

        def number_of(place: np.intp) -> int:
            return numbers[np.searchsorted(bounds, place, side="right") - 1]

        if ids.max(initial=0) >= words:
            where = number_of(ids.argmax())
            raise InputError(f"input {where}: the tokenizer yields id {ids.max()}, the model's vocabulary has {words}")
        if segments.max(initial=0) >= max(kinds, 1):
            raise InputError(
                f"input {number_of(segments.argmax())}: the tokenizer yields segment {segments.max()}, the model's "
                f"table has {kinds} rows"
            )
        if max(lengths, default=0) > most:
            where = lengths.index(max(lengths))
            raise InputError(f"input {numbers[where]}: {lengths[where]} tokens, the model takes at most {most}")
        ends = zip(bounds.tolist(), bounds[1:].tolist(), strict=False)
        return [Row(ids=ids[begin:end], segments=segments[begin:end], embeds=()) for begin, end in ends]


def _flat(lists: Iterable[list[int]], count: int) -> np.ndarray:
    """The numbers of all lists, int32 [count]."""
    return np.fromiter(itertools.chain.from_iterable(lists), np.int32, count)

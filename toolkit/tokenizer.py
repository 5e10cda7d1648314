"""Tokenization: the checkpoint's fast tokenizer, stripped of padding and truncation that were stored with it.

transformers reads the checkpoint's tokenizer files at conversion; afterwards only the `tokenizers` library
is needed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from toolkit.checkpoint import Checkpoint
from toolkit.errors import ArtifactError, CheckpointError, InputError, UnsupportedError
from toolkit.inputs import Row

__all__ = ["TextEncoder", "TokenizerSpec", "read_tokenizer", "text_limit"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
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

    `segments` says whether the tokenizer emits segment ids; if not, they are zeros.
    """

    limit: int
    side: str
    segments: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)


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

    if not any(checkpoint.has(name) for name in TOKENIZER_FILES):  # also refuses links that leave the folder
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
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    if lower_case:
        _add_lower_case(backend)
    return tokenizer, int(tokenizer.model_max_length)


def _add_lower_case(backend: Tokenizer) -> None:
    from tokenizers.normalizers import Lowercase, Sequence

    old = backend.normalizer
    if old is None:
        backend.normalizer = Lowercase()
    elif "Lowercase" not in repr(old) and "lowercase=True" not in repr(old):
        backend.normalizer = Sequence([Lowercase(), old])


class TextEncoder:
    """Texts to rows of token ids, with the artifact's tokenizer."""

    def __init__(self, file: Path, spec: TokenizerSpec, vocab_size: int) -> None:
        if not file.is_file():
            raise ArtifactError(f"{file.name} is missing from the artifact: convert it again")
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.enable_truncation(spec.limit, direction=spec.side)
        self._spec = spec
        self._vocab_size = vocab_size

    def encode(self, texts: Sequence[str]) -> list[Row]:
        """Tokenize; a text may give an empty row if the tokenizer adds no special tokens.

        Raises:
            InputError: the tokenizer yields an id that the model's token table lacks.
        """
        rows: list[Row] = []
        for number, encoding in enumerate(self._tokenizer.encode_batch_fast(list(texts))):
            ids = np.array(encoding.ids, np.int32)
            if ids.max(initial=0) >= self._vocab_size:
                raise InputError(
                    f"text {number}: the tokenizer yields id {ids.max()}, the model's vocabulary has {self._vocab_size}"
                )
            segments = np.array(encoding.type_ids, np.int32) if self._spec.segments else np.zeros_like(ids)
            rows.append(Row(ids=ids, segments=segments, embeds=()))
        return rows

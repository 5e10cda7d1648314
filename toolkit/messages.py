"""Texts as messages of a chat: what sentence-transformers makes of them where the tokenizer has a chat template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.inputs import Limits, Row
from toolkit.tokenizer import Pair, TextEncoder, TokenizerSpec, check_unicode

__all__ = ["MessageEncoder", "Messages", "check_pairs", "read_messages"]

Render = Callable[..., str]

ROLES = ("query", "document")
# Signs of a template that wants contents as lists of parts.
_STRUCTURED = ("content[0]", ".type", "'type'", '"type"', "message.content[")
# Arguments of transformers' apply_chat_template that are no variables of the template.
_ARGUMENTS = frozenset(
    """
    chat_template continue_final_message documents max_length messages padding return_assistant_tokens_mask return_dict
    return_tensors sanitize_control_tokens tokenize tokenizer_kwargs tools truncation
    """.split()
)
# Two contents without a token in common: what renders of both end with is the template's own.
_FILLERS = ("0", "1 2 3 4")


@dataclass(frozen=True, kw_only=True)
class Messages:
    """How texts become messages. A pair is a query and a document, a single text is the user's, a prompt the system's.

    Attributes:
        structured: whether contents are lists of parts instead of texts.
        variables: what else the template looks at.
        restore: whether the tokens that the template puts behind the texts take the place of a cut text's last ones.
    """

    structured: bool
    variables: Mapping[str, Any]
    restore: bool

    def of(self, text: str | Pair, prompt: str) -> list[dict[str, Any]]:
        """The messages for a text or a pair of texts; an empty prompt is none."""
        said = [("user", text)] if isinstance(text, str) else list(zip(ROLES, text, strict=True))
        roles = [*([("system", prompt)] if prompt else []), *said]
        return [{"role": role, "content": self._content(content)} for role, content in roles]

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.structured else text


def read_messages(checkpoint: Checkpoint, options: Mapping[str, Any], tokenizer: Any) -> Messages | None:
    """How sentence-transformers turns texts into messages; None if it does not.

    It does where its Transformer module says so, and where there is no module but the tokenizer has a chat template.

    Args:
        checkpoint: where the files are.
        options: the Transformer module's.
        tokenizer: of transformers.

    Raises:
        CheckpointError: a field is malformed, or there is no template.
        UnsupportedError: an option is not supported.
    """
    processing = options.get("processing_kwargs") or {}
    if not isinstance(processing, dict) or not isinstance(processing.get("chat_template", {}), dict):
        raise CheckpointError(f"processing_kwargs = {processing!r}, expected an object of objects")
    variables = dict(processing.get("chat_template", {}))
    for name in (*(name for name in processing if name != "chat_template"), *sorted(_ARGUMENTS & set(variables))):
        raise UnsupportedError(f"processing_kwargs: {name!r} is not supported")
    template = tokenizer.chat_template
    if checkpoint.has("modules.json"):
        stated = (options.get("modality_config") or {}).get("message")
        if stated is None:
            return None
        if template is None:
            raise CheckpointError("modality_config has messages, but the tokenizer has no chat template")
    elif template is None:
        return None
    else:
        stated = {}
    form = stated.get("format", "auto")
    if form not in ("auto", "flat", "structured"):
        raise CheckpointError(f"modality_config: format = {form!r}, expected auto, flat or structured")
    if form == "auto":
        plain = isinstance(template, str) and template and not any(sign in template for sign in _STRUCTURED)
        form = "flat" if plain else "structured"
    restore = variables.pop("restore_suffix", True)
    for name, value in variables.items():
        if not isinstance(value, bool | int | float | str | None):
            raise UnsupportedError(f"processing_kwargs: chat_template.{name} = {value!r} is not supported")
    return Messages(structured=form == "structured", variables=variables, restore=bool(restore))


def check_pairs(messages: Messages, tokenizer: Any) -> None:
    """Check that both texts of a pair get through the chat template.

    Raises:
        UnsupportedError: they do not: sentence-transformers would refuse every pair.
    """
    pairs = [("alpha", "bravo"), ("charlie", "bravo"), ("alpha", "foxtrot")]
    try:
        base, *others = [
            tokenizer.apply_chat_template(messages.of(pair, ""), tokenize=False, **messages.variables) for pair in pairs
        ]
    except Exception as error:  # templates are programs, which fail in any way
        raise UnsupportedError(f"the chat template refuses pairs of texts ({error})") from None
    lost = [role for role, other in zip(ROLES, others, strict=True) if other == base]
    if lost:
        raise UnsupportedError(
            f"the chat template leaves out messages of the role {' and '.join(map(repr, lost))}, which a reranker's "
            "pairs have: store one that has both, or none"
        )


class MessageEncoder(TextEncoder):
    """Texts to rows by way of a chat template, which brings its own special tokens.

    Args:
        file, spec, limits: as for a TextEncoder.
        messages: how texts become messages.
        render: the template: messages and variables → a text.
    """

    def __init__(self, file: Path, spec: TokenizerSpec, limits: Limits, messages: Messages, render: Render) -> None:
        super().__init__(file, spec, limits, truncate=False)
        self._messages, self._render = messages, render
        self._endings: dict[tuple[bool, str], np.ndarray] = {}

    def encode(self, texts: Mapping[int, str | Pair], prompt: str = "") -> dict[int, Row]:
        """As a TextEncoder's; the prompt is a message of its own.

        Raises:
            InputError: also if the template refuses a text.
        """
        for number, text in texts.items():
            check_unicode(f"input {number}", text)
        rendered = [self._text(text, prompt) for text in texts.values()]
        encodings = self.tokenizer.encode_batch_fast(rendered, add_special_tokens=False)
        for encoding in encodings:
            encoding.truncate(self._spec.limit, direction=self._spec.side)
        rows = dict(zip(texts, self._rows(list(texts), encodings), strict=True))
        for number, row in rows.items():
            if self._messages.restore and len(row) >= self._spec.limit:
                ending = self._ending(isinstance(texts[number], str), prompt)[-len(row) :]
                row.ids[len(row) - len(ending) :] = ending
        return rows

    def _text(self, text: str | Pair, prompt: str) -> str:
        variables = {"add_generation_prompt": False, **self._messages.variables}
        return self._render(self._messages.of(text, prompt), **variables)

    def _ending(self, single: bool, prompt: str) -> np.ndarray:
        """The tokens that stand behind every text, or pair of texts: none if nothing but them stands there."""
        if (single, prompt) not in self._endings:
            try:
                texts = [self._text(filler if single else (filler, filler), prompt) for filler in _FILLERS]
            except InputError:
                texts = ["", ""]
            ids = [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            self._endings[single, prompt] = self._checked(_common_ending(*ids))
        return self._endings[single, prompt]

    def _checked(self, ids: list[int]) -> np.ndarray:
        words = self._limits.vocab_size
        if max(ids, default=0) >= words:
            raise InputError(f"the chat template ends with id {max(ids)}, the model's vocabulary has {words}")
        return np.array(ids, np.int32)


def _common_ending(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """What both end with; nothing if that is one of them as a whole."""
    shortest, count = min(len(first), len(second)), 0
    while count < shortest and first[-1 - count] == second[-1 - count]:
        count += 1
    return list(first[len(first) - count :]) if count < shortest else []

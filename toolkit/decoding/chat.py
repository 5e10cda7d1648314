"""Chat templates, as transformers' tokenizers store them: Jinja, in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import InputError, UnsupportedError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class ChatTemplate:
    """The chat template of an artifact.

    Args:
        folder: the artifact, with `chat_template.jinja` or a template in `tokenizer_config.json`.

    Raises:
        UnsupportedError: it has none, or several and none of them is called "default".
    """

    def __init__(self, folder: Path) -> None:
        config = _read(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if not isinstance(source, str):
            raise UnsupportedError(f"{folder} has no chat template: give a plain prompt")
        self._names = {name: _text(config[name]) for name in _TOKENS if config.get(name) is not None}
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UnsupportedError(f"the chat template cannot be used ({error})") from None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The conversation as the text that the model was trained on.

        Args:
            messages: each with `role` and `content`.
            add_generation_prompt: end with the beginning of the assistant's answer.
            variables: what else the template looks at (`enable_thinking`, `tools` …).

        Raises:
            InputError: the template refuses the conversation.
        """
        wrong = next((m for m in messages if not isinstance(m, Mapping) or "role" not in m), None)
        if wrong is not None or not messages:
            raise InputError(f"messages: {wrong!r}, expected mappings with role and content")
        values = {**self._names, "tools": None, "documents": None, **variables}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses the messages ({error})") from None


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _text(token: Any) -> str:
    """A special token, which older files store with its properties."""
    return token["content"] if isinstance(token, dict) else str(token)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

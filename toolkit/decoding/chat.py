"""Chat templates, as transformers' tokenizers store them: Jinja, in a sandbox."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import InputError, UnsupportedError

__all__ = ["ChatTemplate", "Message"]

Message = Mapping[str, Any]
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")


class _Generation(Extension):
    """The tags around what the assistant said, `{% generation %}` … `{% endgeneration %}`: of use in training only."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """The chat template of an artifact. One that is called "tool_use" takes its place where there are tools.

    Args:
        folder: the artifact, with `chat_template.jinja` or templates in `tokenizer_config.json`.

    Raises:
        UnsupportedError: it has none, or several and none of them is called "default".
    """

    def __init__(self, folder: Path) -> None:
        config = _read(folder / "tokenizer_config.json")
        sources = _sources(folder, config.get("chat_template"))
        if "default" not in sources:
            raise UnsupportedError(f"{folder} has no chat template: give a plain prompt")
        self._names = {name: _text(config[name]) for name in _TOKENS if config.get(name) is not None}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            used = [name for name in ("default", "tool_use") if name in sources]
            self._templates = {name: environment.from_string(sources[name]) for name in used}
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
        listed = isinstance(messages, Sequence) and len(messages) > 0
        wrong = (
            next((m for m in messages if not isinstance(m, Mapping) or "role" not in m), None) if listed else messages
        )
        if not listed or wrong is not None:
            raise InputError(f"messages: {wrong!r}, expected mappings with role and content")
        values = {**self._names, "tools": None, "documents": None, **variables}
        # None stands for nothing, as in what OpenAI's interface returns
        values["messages"] = [{key: value for key, value in m.items() if value is not None} for m in messages]
        kind = "tool_use" if values["tools"] is not None and "tool_use" in self._templates else "default"
        try:
            return self._templates[kind].render(add_generation_prompt=add_generation_prompt, **values)
        except Exception as error:  # templates are programs: contents of another kind make them fail in any way
            raise InputError(f"the chat template refuses the messages ({error})") from None


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _sources(folder: Path, stored: Any) -> dict[str, str]:
    """Templates by name. Files rule over `stored`, which is one template or a list of them with their names."""
    named = stored if isinstance(stored, list) else [{"name": "default", "template": stored}]
    sources = {entry["name"]: entry["template"] for entry in named if isinstance(entry["template"], str)}
    for file in (folder / "additional_chat_templates").glob("*.jinja"):
        sources[file.stem] = file.read_text(encoding="utf-8")
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return sources


def _text(token: Any) -> str:
    """A special token, which older files store with its properties."""
    return token["content"] if isinstance(token, dict) else str(token)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes HTML. The order of arguments is that of transformers' filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

"""Chats become the texts that transformers makes of them; templates are not trusted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny import make_tokenizer
from toolkit.decoding.chat import ChatTemplate, Message
from toolkit.errors import InputError, UnsupportedError

CHATML = """\
{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not loop.first or message.role != "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content|trim + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}\
{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}\
{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}\
{% endfor %}"""

TOOLS = """\
{%- set ns = namespace(last=-1) %}
{%- if tools is not none %}
# Tools
    {%- for tool in tools %}
{{ tool | tojson }}
{{ tool.function.parameters | tojson(indent=2) }}
{{ tool | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
  {%- set ns.last = loop.index0 %}
  {%- if message.content is defined %}
[{{ message.role }}] {{ message.content }}
  {%- endif %}
  {%- if message.tool_calls %}
    {%- for call in message.tool_calls %}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
    {%- endfor %}
  {%- endif %}
{%- endfor %}
{{ ns.last }}{{ documents is none }}
"""

LOOPS = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- if message.role == 'end' %}{% break %}{% endif %}
    {%- generation %}{{ message.content }}
{% endgeneration %}
  {{ loop.index }} {{ message.content.split('a') | join('-') | upper }}
{%- endfor %}
{{ messages | map(attribute='role') | list | tojson(4) }}
"""

TALK: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is 2 < 3 & 4? é€😀 "},
    {"role": "assistant", "content": "<b>'true'</b>\n"},
    {"role": "user", "content": "And then?\n\n"},
]
CALLS: list[Message] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich <'&\">"}}}],
    },
    {"role": "tool", "content": "sunny", "name": "weather"},
    {"role": "assistant", "content": "Sunny.", "tool_calls": None},
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says <what> it's like & more: é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def tokenizer(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    made = make_tokenizer()
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    made.chat_template = template  # type: ignore[assignment]
    return made


def both(folder: Path, template: str | dict[str, str], messages: Sequence[Message], **options: Any) -> tuple[str, str]:
    """What ours and transformers' make of a chat."""
    theirs: Any = tokenizer(template)
    theirs.save_pretrained(folder)
    options = {"add_generation_prompt": True, **options}
    return ChatTemplate(folder).render(messages, **options), theirs.apply_chat_template(
        messages, tokenize=False, **options
    )


CASES: dict[str, tuple[str, list[Message], dict[str, Any]]] = {
    "chatml": (CHATML, TALK, {}),
    "chatml, no system": (CHATML, TALK[1:], {"add_generation_prompt": False}),
    "chatml, no thinking": (CHATML, TALK, {"enable_thinking": False}),
    "llama 2": (LLAMA2, TALK, {}),
    "llama 2, no system": (LLAMA2, TALK[1:], {}),
    "tools": (TOOLS, CALLS, {"tools": [WEATHER]}),
    "no tools": (TOOLS, CALLS, {}),
    "loop controls": (LOOPS, [*CALLS[:1], *CALLS[2:], *TALK[1:], {"role": "end"}, *TALK], {}),
    "special tokens": ("{{ bos_token }}{{ eos_token }}{{ cls_token }}{{ other_token }}|", TALK, {}),
    "own special token": ("{{ bos_token }}{{ x }}", TALK, {"bos_token": "<other>", "x": 3}),
    "the year": ("{{ strftime_now('%Y') }}", TALK, {}),
    "white space": ("  {% if true %}\n a \n  {% endif %}\n\n b\n", TALK, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    template, messages, options = CASES[name]
    ours, theirs = both(tmp_path, template, messages, **options)
    assert ours == theirs
    assert ours


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER]}, {"tools": []}, {"tools": None}])
def test_named_templates(options: dict[str, Any], tmp_path: Path) -> None:
    """As the installed transformers stores them, and as a list in the tokenizer's configuration."""
    named = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ tools | tojson }}", "rag": "{% broken"}
    ours, theirs = both(tmp_path, named, TALK, **options)
    assert ours == theirs
    assert ours[0] == ("T" if options.get("tools") is not None else "D")
    listed = tmp_path / "listed"
    write(listed, chat_template=[{"name": name, "template": template} for name, template in named.items()])
    assert ChatTemplate(listed).render(TALK, **options) == theirs


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def chat(folder: Path, template: str) -> ChatTemplate:
    return ChatTemplate(write(folder, chat_template=template))


def test_the_file_rules_over_the_configuration(tmp_path: Path) -> None:
    write(tmp_path, chat_template="old")
    assert ChatTemplate(tmp_path).render(TALK) == "old"
    (tmp_path / "chat_template.jinja").write_text("new é", encoding="utf-8")
    assert ChatTemplate(tmp_path).render(TALK) == "new é"


def test_special_tokens_with_properties(tmp_path: Path) -> None:
    token = {"content": "<s>", "lstrip": False, "special": True, "__type": "AddedToken"}
    write(tmp_path, chat_template="{{ bos_token }}|{{ eos_token }}|{{ pad_token }}", bos_token=token, eos_token="</s>")
    assert ChatTemplate(tmp_path).render(TALK) == "<s>|</s>|"


@pytest.mark.parametrize(
    "config",
    [{}, {"chat_template": None}, {"chat_template": []}, {"chat_template": [{"name": "rag", "template": "x"}]}],
)
def test_no_template(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no chat template: give a plain prompt"):
        ChatTemplate(write(tmp_path, **config))
    with pytest.raises(UnsupportedError, match="has no chat template"):
        ChatTemplate(tmp_path / "nowhere")


@pytest.mark.parametrize("template", ["{% if %}", "{{ x | no_such_filter }}", "{% audio %}{% endaudio %}", "{{"])
def test_templates_that_cannot_be_read(template: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="the chat template cannot be used"):
        chat(tmp_path, template)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__name__ }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ raise_exception.__globals__.jinja2 }}",
        "{{ strftime_now.__code__.co_consts }}",
        "{{ ('' | attr('__class__')).mro() }}",
        "{{ '{0.__class__}'.format(messages).x() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{% include 'tokenizer_config.json' %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_templates_reach_nothing(template: str, tmp_path: Path) -> None:
    messages = [dict(message) for message in TALK]
    with pytest.raises(InputError, match="the chat template refuses the messages"):
        chat(tmp_path, template).render(messages)
    assert messages == TALK


def test_what_is_kept_from_a_template_is_empty(tmp_path: Path) -> None:
    assert chat(tmp_path, "{{ messages.__class__ }}|{{ raise_exception.__globals__ }}").render(TALK) == "|"


def test_a_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"refuses the messages .Conversation roles must alternate"):
        chat(tmp_path, LLAMA2).render(TALK[2:])
    theirs: Any = tokenizer(LLAMA2)
    with pytest.raises(jinja2.TemplateError, match="must alternate"):
        theirs.apply_chat_template(TALK[2:], tokenize=False)


@pytest.mark.parametrize("content", [["a part"], 3, {"type": "text"}, ...])
def test_contents_that_a_template_is_not_made_for(content: Any, tmp_path: Path) -> None:
    message = {"role": "user", "content": content} if content is not ... else {"role": "user"}
    with pytest.raises(InputError, match="refuses the messages"):
        chat(tmp_path, CHATML.replace("|trim", "")).render([message])


@pytest.mark.parametrize("messages", [[], (), "hello", ["hello"], [{"content": "x"}], [*TALK, 3], None, TALK[0], 7])
def test_what_is_no_conversation(messages: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"messages: .*, expected mappings with role and content"):
        chat(tmp_path, CHATML).render(messages)

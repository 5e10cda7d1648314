"""`toolkit generate`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import toolkit
from tests.test_cli import EAGER, Result, assert_one_error_line, run
from tests.tiny import make_decoder
from toolkit.errors import UnsupportedError
from toolkit.registry import find_recipe

__all__ = ["run"]  # a fixture

PROMPTS = "the quick brown\na b c\n"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    make_decoder(folder / "source", find_recipe("llama").recipe)
    toolkit.convert(str(folder / "source"), folder / "out", verify=False)
    return folder / "out"


def test_prompts_go_on(run: Callable[..., Result], decoder: Path) -> None:
    plain = run("generate", decoder, *EAGER, "--max-new-tokens", "6", stdin=PROMPTS)
    texts = [json.loads(line) for line in plain.out.splitlines()]
    document = json.loads(run("generate", decoder, *EAGER, "--max-new-tokens", "6", "--json", stdin=PROMPTS).out)
    assert document["prompts"] == PROMPTS.splitlines()
    assert [result["text"] for result in document["results"]] == texts
    runner = toolkit.load(decoder, device="cpu", mode="eager")
    assert texts == [x.text for x in runner.generate(PROMPTS.splitlines(), 6)]


def test_one_prompt_is_streamed(run: Callable[..., Result], decoder: Path) -> None:
    found = run("generate", decoder, *EAGER, "--max-new-tokens", "8", stdin="the fox\n")
    runner = toolkit.load(decoder, device="cpu", mode="eager")
    assert found.out == runner.generate("the fox", 8)[0].text + "\n"


def test_chat_and_settings_reach_the_runner(run: Callable[..., Result], decoder: Path) -> None:
    drawn = ("--temperature", "1.5", "--seed", "3", "--top-k", "9", "--repetition-penalty", "1.3", "--stop", "dog")
    args = ("--chat", "--system", "query", "--max-new-tokens", "7", *drawn)
    found = json.loads(run("generate", decoder, *EAGER, *args, "--json", stdin="the fox\n").out)
    runner = toolkit.load(decoder, device="cpu", mode="eager")
    messages = [{"role": "system", "content": "query"}, {"role": "user", "content": "the fox"}]
    settings = {"temperature": 1.5, "seed": 3, "top_k": 9, "repetition_penalty": 1.3, "stop": "dog"}
    (ours,) = runner.generate(runner.chat_prompt(messages), 7, **settings)
    assert found["results"] == [ours.to_dict()]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--system", "x"), ("--chat",)),
        (("--top-p", "0"), ("top_p",)),
        (("--temperature", "-1"), ("temperature",)),
        (("--max-new-tokens", "1000"), ("max_new_tokens", "1000")),
    ],
)
def test_bad_settings(run: Callable[..., Result], decoder: Path, args: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_one_error_line(run("generate", decoder, *EAGER, *args, stdin="the fox\n"), *words)


def test_of_another_task(run: Callable[..., Result], bert_artifact: Path) -> None:
    assert_one_error_line(run("generate", bert_artifact, *EAGER, stdin="the fox\n"), "task 'generate'")


@pytest.mark.parametrize("method", ["embed", "multi_vectors", "score", "classify", "classify_tokens"])
def test_what_others_do_is_refused_by_name(method: str, decoder: Path) -> None:
    runner = toolkit.load(decoder, device="cpu", mode="eager")
    with pytest.raises(UnsupportedError, match=f"{method} needs an artifact of task .* converted for 'generate'"):
        getattr(runner, method)(["the fox"])

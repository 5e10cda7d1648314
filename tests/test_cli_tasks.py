"""The commands of rerankers and classifiers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import toolkit
from tests.test_cli import EAGER, Result, assert_one_error_line, run
from tests.test_logit_score import make_reranker
from tests.test_messages import RERANKER
from tests.test_scoring import make_classifier
from toolkit.registry import find_recipe

__all__ = ["run"]  # a fixture

BERT = find_recipe("bert").recipe
PAIRS = "the fox\tquery doc\na b\tlazy dog\n"


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tasks")
    made: dict[str, Path] = {}
    for task, name, labels in (
        ("rerank", "BertForSequenceClassification", 1),
        ("classify", "BertForSequenceClassification", 3),
        ("token-classify", "BertForTokenClassification", 3),
    ):
        source = make_classifier(folder / f"{task}-source", BERT, name, labels)
        report = toolkit.convert(str(source), folder / task, verify=False)
        assert report.manifest.task == task
        made[task] = folder / task
    return made


def test_score(run: Callable[..., Result], artifacts: dict[str, Path]) -> None:
    plain = run("score", artifacts["rerank"], *EAGER, stdin=PAIRS)
    scores = [json.loads(line) for line in plain.out.splitlines()]
    assert plain.status == 0
    assert len(scores) == 2
    assert all(0 < score < 1 for score in scores)
    document = json.loads(run("score", artifacts["rerank"], *EAGER, "--json", stdin=PAIRS).out)
    assert document == {"pairs": [["the fox", "query doc"], ["a b", "lazy dog"]], "scores": scores}
    raw = [
        json.loads(line) for line in run("score", artifacts["rerank"], *EAGER, "--raw", stdin=PAIRS).out.splitlines()
    ]
    ours = toolkit.load(artifacts["rerank"], device="cpu", mode="eager").score(document["pairs"], activation=False)
    assert raw == pytest.approx(ours.tolist())


@pytest.mark.parametrize("text", ["the fox\n", "a\tb\tc\n", "a\tb\nc\n"])
def test_score_wants_pairs(run: Callable[..., Result], artifacts: dict[str, Path], text: str) -> None:
    assert_one_error_line(run("score", artifacts["rerank"], *EAGER, stdin=text), "line ", "tab")


def test_score_of_another_task(run: Callable[..., Result], artifacts: dict[str, Path]) -> None:
    assert_one_error_line(run("score", artifacts["classify"], *EAGER, stdin=PAIRS), "task 'rerank'", "'classify'")


def test_classify(run: Callable[..., Result], artifacts: dict[str, Path]) -> None:
    texts = "the fox\nquery doc\tlazy dog\n"
    lines = [json.loads(line) for line in run("classify", artifacts["classify"], *EAGER, stdin=texts).out.splitlines()]
    assert [sorted(line["probabilities"]) for line in lines] == [["LABEL_0", "LABEL_1", "LABEL_2"]] * 2
    assert [sum(line["probabilities"].values()) for line in lines] == pytest.approx([1, 1])
    for line in lines:
        assert line["predicted"] == [max(line["probabilities"], key=line["probabilities"].get)]
    document = json.loads(run("classify", artifacts["classify"], *EAGER, "--json", stdin=texts).out)
    assert document == {"texts": ["the fox", ["query doc", "lazy dog"]], "results": lines}


def test_classify_tokens(run: Callable[..., Result], artifacts: dict[str, Path]) -> None:
    assert run("classify", artifacts["token-classify"], *EAGER, stdin="a\tb\n").status == 0  # a text with a tab in it
    (line,) = run("classify", artifacts["token-classify"], *EAGER, stdin="the quick fox\n").out.splitlines()
    found = json.loads(line)
    assert [(token["start"], token["end"]) for token in found] == [(0, 3), (4, 9), (10, 13)]
    assert all(token["label"].startswith("LABEL_") and 1 / 3 < token["probability"] <= 1 for token in found)


def test_decoders(run: Callable[..., Result], tmp_path: Path) -> None:
    """What CrossEncoder saves of a language model is a reranker; a classifier of the last token classifies."""
    qwen3 = find_recipe("qwen3").recipe
    make_reranker(tmp_path / "reranker", template=RERANKER, prompts={"q": "query doc"})
    make_classifier(tmp_path / "classifier", qwen3, "Qwen3ForSequenceClassification", 3)
    for name, task in (("reranker", "rerank"), ("classifier", "classify")):
        done = run("convert", tmp_path / name, tmp_path / task, "--no-verify", "--json")
        assert json.loads(done.out)["manifest"]["task"] == task
    scores = [json.loads(line) for line in run("score", tmp_path / "rerank", *EAGER, stdin=PAIRS).out.splitlines()]
    ours = toolkit.load(tmp_path / "rerank", device="cpu", mode="eager")
    assert scores == pytest.approx(ours.score([("the fox", "query doc"), ("a b", "lazy dog")]).tolist())
    (line,) = run("classify", tmp_path / "classify", *EAGER, stdin="the fox\n").out.splitlines()
    assert sorted(json.loads(line)["probabilities"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    listed = {entry["model_type"]: entry for entry in json.loads(run("recipes", "--json").out)}
    assert {"generate", "rerank", "classify"} <= set(listed["qwen3"]["tasks"])
    assert "Qwen3ForSequenceClassification" in listed["qwen3"]["classes"]

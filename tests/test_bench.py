"""The benchmark runs and compares like with like; it is never timed here."""

import json
import random
from pathlib import Path

import pytest

from toolkit.artifact import Artifact
from toolkit.bench import lognormal_lengths, random_texts, run_bench
from toolkit.runner import load


def test_lengths_are_those_of_the_published_figures() -> None:
    draw = random.Random(0)
    expected = [int(min(256, max(8, draw.lognormvariate(3.9, 0.8)))) for _ in range(20)]
    assert lognormal_lengths(20, None, 256, 3.9) == expected
    packed = lognormal_lengths(None, 4096, 256, 3.9)
    assert packed[:20] == expected
    assert 4096 - 8 < sum(packed) <= 4096


def test_texts_tokenize_to_the_lengths_asked_for(bert_artifact: Path) -> None:
    lengths = [8, 9, 24, 12]
    rows = load(bert_artifact, device="cpu", mode="eager").rows(random_texts(Artifact.open(bert_artifact), lengths), "")
    assert [len(row) for row in rows] == lengths


@pytest.fixture(scope="module")
def result(bert_artifact: Path) -> dict:
    return run_bench(bert_artifact, texts=12, device="cpu", mode="eager", packed_tokens=96).to_dict()


def test_every_peer_is_in_the_same_run_with_the_same_vectors(result: dict) -> None:
    who = {m["who"] for m in result["measurements"]}
    assert who == {"toolkit", "sentence-transformers", "transformers", "onnxruntime"}
    assert set(result["max_difference"]) == {"sentence-transformers", "onnxruntime"}
    assert max(result["max_difference"].values()) < 1e-5


def test_transformers_runs_the_attention_that_is_claimed(result: dict) -> None:
    assert result["peer_attention"] == "sdpa"


def test_ratios_compare_with_ours(result: dict) -> None:
    groups: dict[str, list[dict]] = {}
    for m in result["measurements"]:
        groups.setdefault(m["what"], []).append(m)
    for members in groups.values():
        ours = members[0]
        assert ours["who"] == "toolkit"
        assert ours["ratio"] == 1
        for m in members:
            faster = ours["value"] / m["value"] if m["unit"] == "tokens/s" else m["value"] / ours["value"]
            assert m["ratio"] == pytest.approx(faster)


def test_the_result_is_json_and_says_what_it_ran_on(result: dict) -> None:
    data = json.loads(json.dumps(result))
    assert data["hardware"]
    assert {"torch", "transformers", "sentence-transformers"} <= set(data["versions"])
    assert data["texts"]["count"] == 12

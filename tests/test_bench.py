"""The benchmark runs and compares like with like; it is never timed here."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from toolkit.artifact import Artifact
from toolkit.bench import lognormal_lengths, random_texts, run_bench, run_suite, suite
from toolkit.bench.models import SUITES, Shape
from toolkit.bench.suite import SuiteRun, measure_shape
from toolkit.errors import InputError
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


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def small(shape: Shape) -> Shape:
    return replace(shape, config={**shape.config, **SMALL})


@pytest.fixture(scope="module")
def suite_runs() -> dict[str, SuiteRun]:
    cpu = torch.device("cpu")
    shapes = [small(shape) for shape in SUITES["encoders"]]
    return {s.name: measure_shape(s, texts=9, device=cpu, mode="eager", dtype="float32") for s in shapes}


@pytest.mark.parametrize("shape", SUITES["encoders"], ids=lambda shape: shape.name)
def test_a_suite_measures_every_model_beside_its_peer(shape: Shape, suite_runs: dict[str, SuiteRun]) -> None:
    run = suite_runs[shape.name]
    assert run.task == shape.task
    assert run.texts["count"] == 9
    assert max(run.max_difference.values()) < 1e-5
    assert run.not_measured == {}
    ours, *peers = run.measurements
    assert (ours.who, ours.ratio) == ("toolkit", 1)
    assert {m.setting for m in peers} == {"padded, SDPA, batch 8", "padded, SDPA, batch 32"}
    assert all(m.ratio == pytest.approx(ours.value / m.value) for m in peers)


def test_a_suite_has_the_sizes_that_its_names_promise() -> None:
    """Counted from the published configurations of these models."""
    shapes = {shape.name: shape for shape in SUITES["encoders"]}
    with torch.device("meta"):
        counts = {
            name: sum(p.numel() for p in transformers.AutoModel.from_config(config_of(shapes[name])).parameters())
            for name in ("BERT-base", "RoBERTa-large", "ModernBERT-base")
        }
    assert counts == {"BERT-base": 109_482_240, "RoBERTa-large": 355_359_744, "ModernBERT-base": 149_014_272}


def config_of(shape: Shape) -> Any:
    return getattr(transformers, shape.model).config_class(**shape.config)


def test_tokens_are_counted_with_special_tokens_and_both_texts(suite_runs: dict[str, SuiteRun]) -> None:
    queries = lognormal_lengths(9, None, 32, 2.3)
    passages = lognormal_lengths(9, None, 256, 4.4, seed=1)
    assert suite_runs["BERT-base"].texts["tokens"] == sum(lognormal_lengths(9, None, 256, 3.4))
    # [CLS] query [SEP] passage [SEP]: both lengths count two special tokens, a pair has three
    assert suite_runs["BERT-base reranker"].texts["tokens"] == sum(queries) + sum(passages) - 9


def test_a_peer_that_cannot_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("no such kernel\nand more")

    def silent() -> Any:
        raise ValueError

    monkeypatch.setattr(suite, "_peers", lambda *args: {"unpadded": broken, "padded": silent})
    shape = small(SUITES["encoders"][0])
    run = measure_shape(shape, texts=8, device=torch.device("cpu"), mode="eager", dtype="float32")
    assert run.not_measured == {"unpadded": "RuntimeError: no such kernel", "padded": "ValueError: no message"}
    assert [m.who for m in run.measurements] == ["toolkit"]


def test_a_suite_is_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tuple(small(shape) for shape in SUITES["encoders"])
    monkeypatch.setattr(suite, "SUITES", {"encoders": shapes})
    result = run_suite("encoders", ["BERT-base"], texts=8, device="cpu", mode="eager")
    data = json.loads(json.dumps(result.to_dict()))
    assert (data["suite"], data["dtype"], [run["model"] for run in data["runs"]]) == (
        "encoders",
        "float32",
        ["BERT-base"],
    )
    assert data["hardware"].endswith("threads")
    assert len(result.tables()) == 1


@pytest.mark.parametrize(
    ("name", "models", "message"),
    [("decoders", [], "no suite named 'decoders'"), ("encoders", ["BERT-huge"], "no model 'BERT-huge'")],
)
def test_unknown_suites_and_models_are_refused(name: str, models: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_suite(name, models, device="cpu")


@pytest.mark.parametrize("dtype", ["fp16", "float64"])
def test_a_suite_in_another_dtype_is_refused(dtype: str) -> None:
    with pytest.raises(InputError, match=f"dtype '{dtype}' is not supported"):
        run_suite("encoders", device="cpu", dtype=dtype)

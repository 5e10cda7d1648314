"""Rerankers and classifiers: each head, the activation, labels, pairs and segments."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

import toolkit
from tests.tiny import edit_json, heat, make_tokenizer, why_no_reference, write_json
from toolkit import PromptEmbeds, TokenIds
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes, find_recipe
from toolkit.runner import Runner

BERT = find_recipe("bert").recipe
PAIRS = [("the quick fox", "query doc"), ("", "a b c"), ("text", ""), ("one two three", "lazy dog " * 20)]
HEADS = [
    (entry.recipe, head.classes[0], head.tasks)
    for entry in all_recipes()
    for head in entry.recipe.heads
    if why_no_reference(entry.recipe) is None and "generate" not in head.tasks
]


def make_classifier(
    folder: Path, recipe: Recipe, name: str = "BertForSequenceClassification", labels: int = 1, **config: Any
) -> Path:
    """A heated checkpoint of a transformers class with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    raw = AutoConfig.for_model(**{**recipe.tiny, **config})
    raw.num_labels = labels
    model = getattr(transformers, name)(raw)
    heat(model)
    with torch.no_grad():  # logits of some size
        for parameter_name, parameter in model.named_parameters():
            if (
                parameter_name.startswith(("classifier", "head", "dense", "pre_classifier", "score"))
                or "pooler" in parameter_name
            ):
                parameter.mul_(4)
    model.save_pretrained(folder)
    make_tokenizer(segments=getattr(raw, "type_vocab_size", 0) > 1).save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> Runner:
    out = folder.parent / f"{folder.name}-out"
    toolkit.convert(str(folder), out, verify=False, force=out.exists(), **options)
    return toolkit.load(out, device="cpu", mode="eager")


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize(("recipe", "name", "tasks"), HEADS, ids=lambda v: v if isinstance(v, str) else "")
def test_every_head_passes_the_gate(
    recipe: Recipe, name: str, tasks: tuple[str, ...], labels: int, tmp_path: Path
) -> None:
    """G6: each family's own head, biases and activation included."""
    folder = make_classifier(tmp_path / "c", recipe, name, labels)
    for task in tasks:
        report = toolkit.convert(str(folder), tmp_path / task, task=task, verify=False)
        assert report.manifest.task == task
        from toolkit.parity import verify_folder

        found = verify_folder(tmp_path / task, folder, device="cpu", modes=["eager"])
        assert found.passed, found.summary()
        assert {cell.path for cell in found.cells} == {"ids", "embeds", "mixed", "text"}


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("saved", [True, False])
def test_scores_equal_cross_encoder(tmp_path: Path, labels: int, saved: bool) -> None:
    """G1, G3: pairs with segments, truncation, activation; a plain checkpoint and what CrossEncoder.save writes."""
    folder = make_classifier(tmp_path / "c", BERT, labels=labels)
    if saved:
        CrossEncoder(str(folder), device="cpu").save(str(tmp_path / "saved"))
        folder = tmp_path / "saved"
    model = CrossEncoder(str(folder), device="cpu")
    runner = load(folder, task="rerank")
    for activation, function in ((True, None), (False, torch.nn.Identity())):
        theirs = torch.as_tensor(model.predict(PAIRS, activation_fn=function))
        ours = runner.score(PAIRS, activation=activation)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-5
    assert runner.score([]).shape == ((0,) if labels == 1 else (0, 3))


@pytest.mark.parametrize("place", ["saved file", "config", "old config"])
@pytest.mark.parametrize("function", ["Identity", "Sigmoid"])
def test_the_activation_that_the_checkpoint_names(tmp_path: Path, function: str, place: str) -> None:
    """G3: new and old places; the default is sigmoid for one label only."""
    module = {"Identity": "linear", "Sigmoid": "activation"}[function]
    path = f"torch.nn.modules.{module}.{function}"
    folder = make_classifier(tmp_path / "c", BERT)
    if place == "saved file":
        CrossEncoder(str(folder), device="cpu", activation_fn=getattr(torch.nn, function)()).save(str(tmp_path / "s"))
        folder = tmp_path / "s"
        assert json.loads((folder / "config_sentence_transformers.json").read_text())["activation_fn"] == path
    elif place == "config":
        edit_json(folder / "config.json", sentence_transformers={"activation_fn": path})
    else:
        edit_json(folder / "config.json", sbert_ce_default_activation_function=path)
    theirs = torch.as_tensor(CrossEncoder(str(folder), device="cpu").predict(PAIRS))
    runner = load(folder)
    assert runner.artifact.manifest.task == "rerank"
    assert (runner.score(PAIRS) - theirs).abs().max() < 1e-5
    assert (runner.score(PAIRS) - runner.score(PAIRS, activation=False)).abs().max() > 0.1 or function == "Identity"


def test_large_logits_in_bfloat16_are_no_ties(tmp_path: Path) -> None:
    """G3: the sigmoid runs once, in float32, outside of the low-precision graph."""
    folder = make_classifier(tmp_path / "c", BERT)
    runner = load(folder, dtype="bfloat16")
    raw = runner.score(PAIRS, activation=False)
    assert torch.equal(runner.score(PAIRS), torch.sigmoid(raw))
    assert raw.dtype == torch.float32
    assert len(set(raw.tolist())) == len(PAIRS)


@pytest.mark.parametrize("path", ["builtins.eval", "torch.nn.modules.activation.Tanh", "os.system", 3])
def test_foreign_activations_are_refused(tmp_path: Path, path: object) -> None:
    """O2: a name is compared with a list and never imported."""
    folder = make_classifier(tmp_path / "c", BERT)
    edit_json(folder / "config.json", sentence_transformers={"activation_fn": path})
    with pytest.raises(UnsupportedError, match=r"sentence_transformers.activation_fn = .* is not supported"):
        load(folder)


def test_pairs_as_ids_and_as_embeddings(tmp_path: Path) -> None:
    """G1: segment ids travel through both paths."""
    runner = load(make_classifier(tmp_path / "c", BERT))
    row = runner.rows([PAIRS[0]], "", pairs="only")[0]
    ids, segments = row.ids.tolist(), row.segments.tolist()
    assert set(segments) == {0, 1}
    soft = PromptEmbeds(runner.embed_tokens(ids), segments)
    scores = runner.score([PAIRS[0], TokenIds(ids, segments), soft], activation=False)
    assert (scores - scores[0]).abs().max() < 1e-5
    assert (runner.score([TokenIds(ids)], activation=False) - scores[0]).abs().max() > 1e-3


@pytest.mark.parametrize("bad", [["text"], [("a", "b", "c")], [("a", 1)], [None], "ab", ["ab"]])
def test_what_is_no_pair(tmp_path_factory: pytest.TempPathFactory, bad: Any) -> None:
    runner = load(make_classifier(tmp_path_factory.mktemp("pairs") / "c", BERT))
    with pytest.raises(InputError, match="expected a pair of texts"):
        runner.score(bad)


def test_a_prompt_goes_in_front_of_the_first_text(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "c", BERT)
    CrossEncoder(str(folder), device="cpu", prompts={"q": "query doc "}, default_prompt_name="q").save(
        str(tmp_path / "s")
    )
    model, runner = CrossEncoder(str(tmp_path / "s"), device="cpu"), load(tmp_path / "s")
    options: dict[str, Any]
    for options in ({}, {"prompt": "one two "}, {"prompt_name": "q"}):
        theirs = torch.as_tensor(model.predict(PAIRS, **options))
        assert (runner.score(PAIRS, **options) - theirs).abs().max() < 1e-5
    assert (runner.score(PAIRS) - runner.score(PAIRS, prompt="")).abs().max() > 1e-3


@pytest.mark.parametrize("problem", [None, "single_label_classification", "multi_label_classification"])
@pytest.mark.parametrize("labels", [2, 3])
def test_classify(tmp_path: Path, labels: int, problem: str | None) -> None:
    """Single and several labels, named by id2label."""
    names = {k: f"name {k}" for k in range(labels)}
    folder = make_classifier(tmp_path / "c", BERT, labels=labels, id2label=names, problem_type=problem)
    runner = load(folder)
    assert runner.artifact.manifest.task == "classify"
    texts = ["the quick fox", ("query doc", "lazy dog"), "a"]
    found = runner.classify(texts)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        theirs = torch.cat(
            [model(**tokenizer(*([t] if isinstance(t, str) else t), return_tensors="pt")).logits for t in texts]
        )
    assert (found.logits - theirs).abs().max() < 1e-5
    several = problem == "multi_label_classification"
    expected = theirs.sigmoid() if several else theirs.softmax(-1)
    assert (found.probabilities - expected).abs().max() < 1e-5
    assert found.labels == tuple(names.values())
    if several:
        assert found.predicted == [tuple(names[k] for k in range(labels) if row[k] > 0) for row in theirs]
    else:
        assert found.predicted == [(names[int(row.argmax())],) for row in theirs]
    assert runner.classify(["the quick fox", "a"]).logits.shape == (2, labels)
    assert runner.classify("the quick fox").logits.shape == (1, labels)
    assert runner.classify(("query doc", "lazy dog")).logits.shape == (1, labels)


def test_classify_tokens(tmp_path: Path) -> None:
    """Logits of each token, with the place in the text and the word that it comes from."""
    names = {0: "O", 1: "B", 2: "I"}
    folder = make_classifier(tmp_path / "c", BERT, "BertForTokenClassification", 3, id2label=names)
    runner = load(folder)
    text = "the quick  brown fox"
    first, second = runner.classify_tokens([text, TokenIds([2, 6, 3])])
    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        theirs = model(**tokenizer(text, return_tensors="pt")).logits[0]
    assert (first.logits - theirs).abs().max() < 1e-5
    assert (first.probabilities - theirs.softmax(-1)).abs().max() < 1e-5
    assert first.predicted == [names[k] for k in theirs.argmax(-1).tolist()]
    assert first.places is not None
    assert [text[p.start : p.end] for p in first.places] == ["", "the", "quick", "brown", "fox", ""]
    assert [p.word for p in first.places] == [None, 0, 1, 2, 3, None]
    assert [p.special for p in first.places] == [True, False, False, False, False, True]
    assert second.logits.shape == (3, 3)
    assert second.places is None


def test_a_regression_has_no_probabilities(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "c", BERT, labels=3, problem_type="regression")
    with pytest.raises(UnsupportedError, match="problem_type = 'regression'"):
        load(folder, task="classify")
    assert load(folder, task="rerank").score(PAIRS).shape == (4, 3)


@pytest.mark.parametrize("nested", [{"activation_fn": None}, None])
def test_where_an_activation_is_looked_for(tmp_path: Path, nested: object) -> None:
    """G3: the library's file counts only beside a modules.json, and the old field only without the new one."""
    folder = make_classifier(tmp_path / "c", BERT)
    identity = "torch.nn.modules.linear.Identity"
    if nested is None:
        write_json(folder / "config_sentence_transformers.json", {"activation_fn": identity})
    else:
        edit_json(folder / "config.json", sentence_transformers=nested, sbert_ce_default_activation_function=identity)
    theirs = torch.as_tensor(CrossEncoder(str(folder), device="cpu").predict(PAIRS))
    assert (load(folder).score(PAIRS) - theirs).abs().max() < 1e-5


def test_pairs_are_pairs_where_they_are_meant(tmp_path: Path, bert_artifact: Path) -> None:
    """A tuple of two texts is two inputs to `embed`, and one pair to `classify`; a pair is no input to `embed`."""
    embedder = toolkit.load(bert_artifact, device="cpu", mode="eager")
    assert embedder.embed(("the fox", "a dog")).shape == (2, 40)
    assert len(embedder.token_states(("the fox", "a dog"))) == 2
    with pytest.raises(InputError, match="expected str"):
        embedder.embed([("the fox", "a dog")])  # type: ignore[list-item]
    tagger = load(make_classifier(tmp_path / "c", BERT, "BertForTokenClassification", 3))
    assert len(tagger.classify_tokens(("the fox", "a dog"))) == 2
    for bad in (5, None, [("a", "b")]):
        with pytest.raises(InputError):
            tagger.classify_tokens(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_labels": 10**12, "id2label": ...}, "num_labels = 1000000000000"),
        ({"problem_type": "dream"}, "problem_type = 'dream'"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must number its labels 0 … 1"),
        ({"id2label": {"0": 1}}, "id2label must map"),
        ({"id2label": []}, "id2label must map"),
        ({"num_labels": 4}, "num_labels = 4, but id2label has 3 labels"),
        ({"num_labels": 0}, "num_labels = 0"),
        ({"id2label": {"0": "a", "1": "b"}}, "has shape"),
    ],
)
def test_labels_that_contradict(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_classifier(tmp_path / "c", BERT, labels=3)
    edit_json(folder / "config.json", **change)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert message in str(caught.value)


def test_methods_of_another_task(tmp_path: Path, bert_artifact: Path) -> None:
    embedder = toolkit.load(bert_artifact, device="cpu", mode="eager")
    reranker = load(make_classifier(tmp_path / "c", BERT))
    for call in (
        lambda: embedder.score(PAIRS),
        lambda: embedder.classify("a"),
        lambda: embedder.classify_tokens("a"),
        lambda: embedder.generate("a", 1),
        lambda: reranker.embed("a"),
        lambda: reranker.classify("a"),
    ):
        with pytest.raises(UnsupportedError, match="needs an artifact of task"):
            call()
    assert reranker.token_states(["the fox"])[0].shape == (4, 40)


def test_a_missing_head_tensor_is_named(tmp_path: Path) -> None:
    """H2: fine for embeddings, an error where it is needed."""
    from safetensors.torch import load_file, save_file

    folder = make_classifier(tmp_path / "c", BERT)
    weights = load_file(folder / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "pooler" not in n}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing tensor: 'pooler\.dense"):
        load(folder)
    assert load(folder, task="embed").artifact.manifest.task == "embed"


def test_a_task_that_the_class_has_no_head_for(tmp_path: Path) -> None:
    folder = make_classifier(tmp_path / "c", BERT, "BertForTokenClassification", 3)
    with pytest.raises(UnsupportedError, match="task 'rerank', but BertForSequenceClassification have"):
        load(folder, task="rerank")
    CrossEncoder(str(make_classifier(tmp_path / "d", BERT)), device="cpu").save(str(tmp_path / "s"))
    write_json(tmp_path / "s" / "config_sentence_transformers.json", {"model_type": "StaticEncoder"})
    with pytest.raises(UnsupportedError, match="model_type = 'StaticEncoder' is not supported"):
        load(tmp_path / "s")

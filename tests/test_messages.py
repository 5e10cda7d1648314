"""Texts that a chat template turns into what a reranker reads, as sentence-transformers does it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder

import toolkit
from tests.test_logit_score import PAIRS, QWEN3, assert_scores, load, make_language_model, make_reranker
from tests.test_scoring import make_classifier
from tests.tiny import edit_json, make_tokenizer
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.parity import verify_folder
from toolkit.runner import Runner

# Each message behind its role's own special token, as in ChatML.
PLAIN = "{% for m in messages %}[CLS] {{ m.role }} {{ m.content }} [SEP] {% endfor %}"
QUERY = '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
DOCUMENT = '{{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}'
SYSTEM = '{% for m in messages if m.role == "system" %}[MASK] {{ m.content }} {% endfor %}'
# The beginning of the answer that is to be scored.
ANSWER = "{% if add_generation_prompt %} a b{% if thinking %} c{% endif %} [MASK]{% endif %}"
RERANKER = f"{SYSTEM}[CLS] {QUERY} [SEP] {DOCUMENT} [SEP]{ANSWER}"
PROMPT_LAST = f"[CLS] {QUERY} [SEP] {DOCUMENT} [SEP] {SYSTEM}[MASK]"
PARTS = (
    "{% for m in messages %}[CLS] {{ m.role }} {% for part in m.content if part.type == 'text' %}{{ part.text }} "
    "{% endfor %}[SEP]{% endfor %}"
)
TEXTS_ALONE = f"{QUERY} {DOCUMENT}"
TEMPLATES = {"plain": PLAIN, "reranker": RERANKER, "prompt last": PROMPT_LAST, "parts": PARTS}
GENERATION = {"chat_template": {"add_generation_prompt": True}}
WORDS = "one two three four the quick brown fox"
ONE_MORE = " ".join(WORDS.split()[k % 8] for k in range(40)).split()


def ids(runner: Runner, pair: tuple[str, str], prompt: str = "") -> list[int]:
    return runner.rows([pair], prompt, pairs="only")[0].ids.tolist()


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_kind_of_template_passes_the_gate(name: str, tmp_path: Path) -> None:
    """G5, E6: roles, prompts as messages, contents in parts, what the template ends with; texts at the limit too."""
    prompts = {"q": "query doc", "other": "one two"}
    folder = make_reranker(tmp_path / "m", template=TEMPLATES[name], processing=GENERATION, prompts=prompts)
    report = toolkit.convert(str(folder), tmp_path / "out", verify=False)
    messages = report.manifest.pipeline.messages
    assert messages is not None
    assert (messages.structured, messages.variables, messages.restore) == (
        name == "parts",
        {"add_generation_prompt": True},
        True,
    )
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("processing", [GENERATION, {"chat_template": {"restore_suffix": False}}, None])
@pytest.mark.parametrize("template", [RERANKER, PROMPT_LAST, PLAIN, TEXTS_ALONE])
def test_what_the_template_ends_with_survives_a_cut(
    template: str, processing: dict[str, Any] | None, side: str, tmp_path: Path
) -> None:
    """F2: the document is cut, at every length around the limit, and the total is never above it."""
    folder = make_reranker(tmp_path / "m", template=template, processing=processing)
    edit_json(folder / "tokenizer_config.json", model_max_length=14, truncation_side=side)
    model, runner = CrossEncoder(str(folder), device="cpu"), load(folder)
    for prompt in ("", "a b", "a b c d e f " * 2):
        for count in (1, *range(3, 14), 30):
            for pair in (("query", " ".join(ONE_MORE[:count])), (" ".join(ONE_MORE[:count]), "doc")):
                theirs = model.preprocess([pair], prompt=prompt)["input_ids"][0].tolist()
                assert ids(runner, pair, prompt) == theirs, (pair, prompt)
                assert len(theirs) <= 14
    long = ids(runner, ("query", " ".join(ONE_MORE)))
    if template == RERANKER and processing == GENERATION:
        assert long[-4:] == [3, 13, 14, 4]  # [SEP] a b [MASK]


def test_an_ending_longer_than_the_limit(tmp_path: Path) -> None:
    """F2: then nothing else is left."""
    folder = make_reranker(tmp_path / "m", template=RERANKER, processing=GENERATION)
    edit_json(folder / "tokenizer_config.json", model_max_length=3)
    model, runner = CrossEncoder(str(folder), device="cpu"), load(folder)
    theirs = model.preprocess([("the fox", "a dog")])["input_ids"][0].tolist()
    assert ids(runner, ("the fox", "a dog")) == theirs == [13, 14, 4]


def test_prompts_are_messages(tmp_path: Path) -> None:
    """E6: the default, another, one of the caller's, none."""
    prompts = {"q": "query doc", "other": "one two"}
    folder = make_reranker(tmp_path / "m", template=RERANKER, prompts=prompts)
    model, runner = CrossEncoder(str(folder), device="cpu"), load(folder)
    options: dict[str, Any]
    for options in ({}, {"prompt": ""}, {"prompt": "three"}, {"prompt_name": "other"}):
        theirs = torch.as_tensor(model.predict(PAIRS, **options))
        assert (runner.score(PAIRS, **options) - theirs).abs().max() < 1e-5
    assert ids(runner, ("the fox", "a"), "three")[:3] == [4, 24, 2]  # [MASK] three [CLS]


def test_variables_of_the_template(tmp_path: Path) -> None:
    variables = {"add_generation_prompt": True, "thinking": True}
    folder = make_reranker(tmp_path / "m", template=RERANKER, processing={"chat_template": variables})
    runner = load(folder)
    assert ids(runner, ("the", "fox"))[-3:] == [14, 15, 4]  # b c [MASK]
    assert_scores(folder, runner)


@pytest.mark.parametrize("template", [PLAIN, PARTS])
def test_a_language_model_alone_with_a_template(tmp_path: Path, template: str) -> None:
    """G5: sentence-transformers uses the template, and tells from its text in which form contents are."""
    folder = make_language_model(tmp_path / "m", template=template)
    runner = load(folder, task="rerank")
    messages = runner.artifact.manifest.pipeline.messages
    assert messages is not None
    assert messages.structured == (template == PARTS)
    assert_scores(folder, runner)


def test_a_classifier_with_a_template(tmp_path: Path) -> None:
    """Pairs to score go through it, texts to classify do not; neither do they where the modules know of no messages."""
    folder = make_classifier(tmp_path / "m", QWEN3, "Qwen3ForSequenceClassification")
    tokenizer = make_tokenizer(segments=False)
    tokenizer.chat_template = RERANKER
    tokenizer.save_pretrained(folder)
    runner = load(folder)
    assert runner.artifact.manifest.pipeline.messages is not None
    assert_scores(folder, runner)
    CrossEncoder(str(folder), device="cpu").save_pretrained(str(tmp_path / "saved"))
    assert load(tmp_path / "saved").artifact.manifest.pipeline == runner.artifact.manifest.pipeline
    assert_scores(tmp_path / "saved", load(tmp_path / "saved"))
    for changes in ({"modality_config": ...}, {"modality_config": {"text": TEXT}}):
        edit_json(tmp_path / "saved" / "sentence_bert_config.json", **changes)
        plain = load(tmp_path / "saved")
        assert plain.artifact.manifest.pipeline.messages is None
        assert ids(plain, ("the", "fox")) == [2, 5, 3, 8, 3]
        assert_scores(tmp_path / "saved", plain)
    classifier = load(folder, task="classify")
    assert classifier.artifact.manifest.pipeline.messages is None


TEXT = {"method": "forward", "method_output_name": "logits"}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "the role 'query' and 'document'"),
        (QUERY + " a b", "leaves out messages of the role 'document'"),
        ("{{ raise_exception('roles must alternate') }}", "refuses pairs of texts .roles must alternate"),
    ],
)
def test_templates_that_lose_a_text_are_refused(tmp_path: Path, template: str, message: str) -> None:
    """G5: sentence-transformers refuses every pair."""
    folder = make_language_model(tmp_path / "m", template=template)
    with pytest.raises(UnsupportedError, match=message):
        load(folder, task="rerank")
    with pytest.raises(ValueError, match="cannot carry a 'query'/'document' pair"):
        CrossEncoder(str(folder), device="cpu").predict(PAIRS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"processing_kwargs": []}, None),
        ({"processing_kwargs": [1]}, r"processing_kwargs = \[1\], expected"),
        ({"processing_kwargs": {"chat_template": 1}}, "processing_kwargs = .*, expected an object of objects"),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, "'text' is not supported"),
        ({"processing_kwargs": {"common": {}}}, "'common' is not supported"),
        ({"processing_kwargs": {"chat_template": {"max_length": 9}}}, "'max_length' is not supported"),
        ({"processing_kwargs": {"chat_template": {"tools": []}}}, "'tools' is not supported"),
        ({"processing_kwargs": {"chat_template": {"x": [1]}}}, r"chat_template.x = \[1\] is not supported"),
        ({"modality_config": {"text": TEXT, "message": {**TEXT, "format": "xml"}}}, "modality_config = .* is not supp"),
        ({"modality_config": {"text": TEXT, "image": TEXT}}, "modality_config = .* is not supported"),
        ({"modality_config": {"text": TEXT, "message": TEXT}}, None),
        ({"modality_config": {"text": TEXT, "message": {**TEXT, "format": "auto"}}}, None),
    ],
)
def test_options(tmp_path: Path, changes: dict[str, Any], message: str | None) -> None:
    folder = make_reranker(tmp_path / "m", template=PLAIN)
    edit_json(folder / "sentence_bert_config.json", **changes)
    if message is None:
        assert_scores(folder, load(folder))
        return
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        load(folder)


def test_messages_without_a_template(tmp_path: Path) -> None:
    folder = make_reranker(tmp_path / "m", template=PLAIN)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="modality_config has messages, but the tokenizer has no chat template"):
        load(folder)


def test_a_text_that_the_template_refuses(tmp_path: Path) -> None:
    refuses = PLAIN + "{% if 'lazy' in messages[-1].content %}{{ raise_exception('no laziness') }}{% endif %}"
    runner = load(make_reranker(tmp_path / "m", template=refuses))
    with pytest.raises(InputError, match="no laziness"):
        runner.score(PAIRS)
    with pytest.raises(InputError, match="input 0: not valid Unicode"):
        runner.score([("\ud800", "a")])
    assert runner.score(PAIRS[:2]).shape == (2,)


def test_an_ending_outside_of_the_vocabulary(tmp_path: Path) -> None:
    """F4: what takes the place of a cut text's last tokens is looked at as well."""
    folder = make_reranker(tmp_path / "m", template=PLAIN)
    tokenizer = make_tokenizer(segments=False)
    tokenizer.add_tokens([f"w{k}" for k in range(40)] + ["far"])
    tokenizer.chat_template = f"[CLS] {QUERY} [SEP] {DOCUMENT} far"
    tokenizer.model_max_length = 8
    tokenizer.save_pretrained(folder)
    runner = load(folder)
    with pytest.raises(InputError, match="the chat template ends with id 65, the model's vocabulary has 61"):
        runner.score([("the", "fox " * 20)])

"""Causal language models as rerankers: the last token's logits of one or two words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import AutoModelForCausalLM

import toolkit
from tests.tiny import decoder_recipes, edit_json, make_decoder, make_tokenizer, why_no_reference, write_json
from toolkit import TokenIds
from toolkit.errors import CheckpointError, ToolkitError, UnsupportedError
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.runner import Runner
from toolkit.steps import DifferenceStep, PoolingStep, WordsStep

YES, NO = 12, 9
PAIRS = [("the quick fox", "query doc"), ("", "a b c"), ("text", "one two three"), ("one two", "lazy dog " * 20)]
QWEN3 = find_recipe("qwen3").recipe
RECIPES = [recipe for recipe in decoder_recipes() if why_no_reference(recipe) is None]


def make_language_model(folder: Path, recipe: Recipe = QWEN3, *, template: str | None = None, **options: Any) -> Path:
    """A heated causal language model, whose tokenizer knows "yes" and "no" and has this chat template."""
    make_decoder(folder, recipe, **options)
    (folder / "chat_template.jinja").unlink()
    tokenizer = make_tokenizer(segments=False)
    tokenizer.add_tokens(["no", "yes"])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def make_reranker(
    folder: Path,
    recipe: Recipe = QWEN3,
    *,
    words: tuple[int, int | None] = (YES, NO),
    template: str | None = None,
    processing: dict[str, Any] | None = None,
    activation: str | None = None,
    prompts: dict[str, str] | None = None,
    **options: Any,
) -> Path:
    """What sentence-transformers saves of a language model with a LogitScore."""
    source = make_language_model(folder.parent / f"{folder.name}-model", recipe, template=template, **options)
    model = CrossEncoder(
        modules=[
            Transformer(str(source), transformer_task="text-generation", processing_kwargs=processing),  # type: ignore[arg-type]
            LogitScore(true_token_id=words[0], false_token_id=words[1]),
        ],
        device="cpu",
        activation_fn=getattr(torch.nn, activation)() if activation is not None else None,
        prompts=prompts,
        default_prompt_name=next(iter(prompts)) if prompts else None,
    )
    model.save_pretrained(str(folder))
    return folder


def load(folder: Path, **options: Any) -> Runner:
    out = folder.parent / f"{folder.name}-out"
    toolkit.convert(str(folder), out, verify=False, force=out.exists(), **options)
    return toolkit.load(out, device="cpu", mode="eager")


def assert_scores(folder: Path, runner: Runner) -> None:
    """Alone and together, as logits and as scores."""
    model = CrossEncoder(str(folder), device="cpu")
    for activation, function in ((True, None), (False, torch.nn.Identity())):
        theirs = torch.as_tensor([model.predict([pair], activation_fn=function)[0] for pair in PAIRS])
        assert (runner.score(PAIRS, activation=activation) - theirs).abs().max() < 1e-5
        assert (torch.cat([runner.score([pair], activation=activation) for pair in PAIRS]) - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.model_type)
def test_every_language_model_passes_the_gate(recipe: Recipe, tied: bool, tmp_path: Path) -> None:
    """G5: rows of the token table or of the output layer; caps and divisions of logits come before the difference."""
    folder = make_reranker(tmp_path / "m", recipe, tied=tied)
    report = toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert (report.manifest.task, report.manifest.head.width) == ("rerank", 1)
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()
    (words,) = (step for step in report.manifest.head.steps if isinstance(step, WordsStep))
    assert (words.words, words.tied) == ((YES, NO), tied)
    stored = [name for file in (tmp_path / "out").glob("model*.safetensors") for name in load_file(file)]
    assert [name for name in stored if "head" in name] == ([] if tied else ["head.steps.out.linear.weight"])


@pytest.mark.parametrize("activation", [None, "Identity", "Sigmoid"])
@pytest.mark.parametrize("words", [(YES, NO), (NO, YES), (YES, None)])
def test_scores_equal_cross_encoder(tmp_path: Path, words: tuple[int, int | None], activation: str | None) -> None:
    """G3, G5: one word or two, and sigmoid where nothing is said."""
    folder = make_reranker(tmp_path / "m", words=words, activation=activation)
    runner = load(folder)
    assert_scores(folder, runner)
    plain = activation == "Identity"
    assert torch.equal(runner.score(PAIRS), runner.score(PAIRS, activation=False)) == plain


def test_a_score_is_the_probability_of_one_of_two_words(tmp_path: Path) -> None:
    """G5: the sigmoid of a difference of logits is the softmax over both."""
    runner = load(make_reranker(tmp_path / "m"))
    ids = [2, 6, 30, 44, 3]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    with torch.inference_mode():
        both = model(torch.tensor([ids])).logits[0, -1, [YES, NO]]
    assert (runner.score([TokenIds(ids)]) - both.softmax(-1)[0]).abs() < 1e-6
    assert (runner.score([TokenIds(ids)], activation=False) - (both[0] - both[1])).abs() < 1e-5


def test_the_last_token_is_the_last_one_whatever_it_is(tmp_path: Path) -> None:
    """G5: padding stands on the left there, so that a token with the id of padding is scored behind."""
    folder = make_reranker(tmp_path / "m", overrides={"pad_token_id": 3})  # the tokenizer's [SEP]
    runner = load(folder)
    assert runner.artifact.manifest.head.steps[0] == PoolingStep(modes=("lasttoken",), pad=None)
    assert_scores(folder, runner)


def test_a_bidirectional_language_model(tmp_path: Path) -> None:
    """B4: `is_causal` counts here too."""
    folder = make_reranker(tmp_path / "m", find_recipe("llama").recipe, overrides={"is_causal": False})
    runner = load(folder)
    assert not any(attention.causal for attention in runner.artifact.manifest.spec.attentions)
    assert_scores(folder, runner)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_gate(tmp_path: Path, dtype: str) -> None:
    """M1: the difference is formed in float32."""
    folder = make_reranker(tmp_path / "m")
    toolkit.convert(str(folder), tmp_path / "out", dtype=dtype, verify=False)
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()
    scores = toolkit.load(tmp_path / "out", device="cpu", mode="eager").score(PAIRS, activation=False)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.to(getattr(torch, dtype)).float())


def test_every_mode_passes_the_gate(tmp_path: Path) -> None:
    """J1: compiled, and from graphs."""
    folder = make_reranker(tmp_path / "m", seed=1)
    report = toolkit.convert(str(folder), tmp_path / "out", device="cpu")
    assert {cell.mode for cell in report.parity.cells} == {"eager", "compile", "graph"}


def test_prompts_go_in_front_of_the_first_text(tmp_path: Path) -> None:
    """E6: without a chat template they are no messages."""
    folder = make_reranker(tmp_path / "m", prompts={"q": "query doc ", "other": "one two "})
    model, runner = CrossEncoder(str(folder), device="cpu"), load(folder)
    options: dict[str, Any]
    for options in ({}, {"prompt": ""}, {"prompt": "three "}, {"prompt_name": "other"}):
        theirs = torch.as_tensor(model.predict(PAIRS, **options))
        assert (runner.score(PAIRS, **options) - theirs).abs().max() < 1e-5
    assert (runner.score(PAIRS) - runner.score(PAIRS, prompt="")).abs().max() > 1e-3


@pytest.mark.parametrize("kind", [..., "SentenceTransformer"])
def test_modules_that_are_no_cross_encoders(tmp_path: Path, kind: object) -> None:
    """sentence-transformers would not read them, but compare "yes" and "no"."""
    folder = make_reranker(tmp_path / "m")
    edit_json(folder / "config_sentence_transformers.json", model_type=kind)
    with pytest.raises(UnsupportedError, match="transformer_task = 'text-generation' is not supported"):
        load(folder)
    with pytest.raises(UnsupportedError, match=r"model_type = .*: only a CrossEncoder's LogitScore is read"):
        load(folder, task="rerank")


def test_a_language_model_alone_is_asked_for_yes_and_no(tmp_path: Path) -> None:
    """G5: as sentence-transformers does it; by itself such a checkpoint generates."""
    folder = make_language_model(tmp_path / "m")
    report = toolkit.convert(str(folder), tmp_path / "generates", verify=False)
    assert report.manifest.task == "generate"
    runner = load(folder, task="rerank")
    ids = runner.artifact.manifest.head.steps[1]
    assert isinstance(ids, WordsStep)
    assert ids.words == (26, 25)
    assert_scores(folder, runner)


def test_a_language_model_alone_without_these_words(tmp_path: Path) -> None:
    """G5: sentence-transformers would compare the unknown token with itself."""
    folder = make_language_model(tmp_path / "m")
    make_tokenizer(segments=False).save_pretrained(folder)
    with pytest.raises(UnsupportedError, match=r"no token 'yes' .* save it as a CrossEncoder with a LogitScore"):
        load(folder, task="rerank")


def test_a_language_model_by_another_name(tmp_path: Path) -> None:
    """G5: sentence-transformers goes by the name, and would put a random classifier behind this one."""
    folder = make_language_model(tmp_path / "m", find_recipe("gpt2").recipe)
    with pytest.raises(UnsupportedError, match="takes GPT2LMHeadModel for no causal language model"):
        load(folder, task="rerank")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"true_token_id": 61}, "token id 61, expected one below 61"),
        ({"true_token_id": -1}, "token id -1, expected"),
        ({"true_token_id": True}, "token id True, expected"),
        ({"true_token_id": None}, "token id None, expected"),
        ({"true_token_id": "yes"}, "token id 'yes', expected"),
        ({"false_token_id": 2.5}, "token id 2.5, expected"),
        ({"module_input_name": "scores"}, "module_input_name = 'scores' is not supported"),
        ({"softmax": True}, "unknown field 'softmax'"),
    ],
)
def test_words_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """G5: a word is one id."""
    folder = make_reranker(tmp_path / "m")
    edit_json(folder / "1_LogitScore" / "config.json", **changes)
    with pytest.raises(ToolkitError, match=f"1_LogitScore/config.json: {message}"):
        load(folder)


def set_modules(folder: Path, *kinds: str) -> None:
    names = [("", "base.modules.transformer.Transformer"), *((f"{k}_{kind}", kind) for k, kind in enumerate(kinds, 1))]
    library = "sentence_transformers."
    write_json(
        folder / "modules.json",
        [{"idx": k, "name": str(k), "path": path, "type": library + kind} for k, (path, kind) in enumerate(names)],
    )


def test_modules_that_do_not_fit(tmp_path: Path) -> None:
    folder = make_reranker(tmp_path / "m")
    options = json.loads((folder / "sentence_bert_config.json").read_text())
    cases: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        ((), {}, "there is no LogitScore module"),
        (("LogitScore", "LogitScore"), {}, "a second LogitScore"),
        (("LogitScore", "Dense"), {}, "a Dense module is not supported for task 'rerank'"),
        (("LogitScore",), {"transformer_task": "sequence-classification"}, "transformer_task = 'sequence-class"),
        (("LogitScore",), {"module_output_name": "scores"}, "module_output_name = 'scores'"),
        (("LogitScore",), {"processing_kwargs": {"text": {"max_length": 9}}}, "'text' is not supported"),
    ]
    for kinds, changes, message in cases:
        set_modules(folder, *kinds)
        write_json(folder / "sentence_bert_config.json", {**options, **changes})
        with pytest.raises(UnsupportedError, match=message):
            load(folder)
    for task in ("embed", "classify"):
        with pytest.raises(UnsupportedError):
            load(folder, task=task)


def test_an_output_layer_of_another_size(tmp_path: Path) -> None:
    """H2: only two of its rows are read, but they must be rows of this vocabulary."""
    folder = make_reranker(tmp_path / "m", tied=False)
    weights = load_file(folder / "model.safetensors")
    wrong = {**weights, "lm_head.weight": weights["lm_head.weight"][:50].clone()}
    save_file(wrong, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight' has shape \(50, 40\), config\.json asks"):
        load(folder)


def test_steps_are_stored(tmp_path: Path) -> None:
    runner = load(make_reranker(tmp_path / "m", find_recipe("granite").recipe, tied=True))
    stored = json.loads((runner.artifact.folder / "toolkit.json").read_text())["head"]["steps"]
    assert [step["kind"] for step in stored] == ["pooling", "words", "divide", "difference"]
    assert runner.artifact.manifest.head.steps[-1] == DifferenceStep(on="vectors")
    audit = {entry["source"]: entry for entry in runner.artifact.manifest.audit}
    assert "lm_head.weight" not in audit


def test_which_rows_were_taken_is_in_the_audit(tmp_path: Path) -> None:
    runner = load(make_reranker(tmp_path / "m", tied=False))
    (entry,) = (e for e in runner.artifact.manifest.audit if e["source"] == "lm_head.weight")
    assert (entry["action"], entry["why"]) == ("loaded", f"only rows {YES}, {NO}")

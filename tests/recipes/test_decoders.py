"""What is particular to decoders that serve as encoders: causality, windows to one side, scaled rotary positions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoConfig, AutoModelForCausalLM

import toolkit
from tests.recipes.compare import assert_parity, both_reaches, checkpoint, encoder, packed, read
from tests.tiny import edit_json, heat, make_checkpoint, make_decoder, make_tokenizer
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.recipe import ConfigReader, Recipe
from toolkit.registry import find_recipe
from toolkit.spec import Llama3Scaling, YarnScaling

LLAMA, QWEN2, QWEN3 = (find_recipe(name).recipe for name in ("llama", "qwen2", "qwen3"))
SMOLLM3, GRANITE, OLMO2 = (find_recipe(name).recipe for name in ("smollm3", "granite", "olmo2"))
MISTRAL, PHI3 = (find_recipe(name).recipe for name in ("mistral", "phi3"))
DECODERS = [LLAMA, QWEN2, QWEN3, SMOLLM3, GRANITE, OLMO2, MISTRAL, PHI3]
SLIDES = {"qwen2": [1, 2], "qwen3": [1, 2], "smollm3": [1, 3], "mistral": [0, 1, 2], "phi3": [0, 1, 2]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16}


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with another tiny configuration; `...` removes a field."""
    raw = {**recipe.tiny, **changes}
    return replace(recipe, tiny={name: value for name, value in raw.items() if value is not ...})


def assert_states(recipe: Recipe, folder: Path, lengths: tuple[int, ...] = (1, 2, 5, 6, 7, 13, 26)) -> None:
    assert_parity(recipe, checkpoint(folder, recipe), lengths)


@pytest.mark.parametrize("recipe", DECODERS, ids=lambda recipe: recipe.model_type)
def test_states_around_the_window(recipe: Recipe, tmp_path: Path) -> None:
    """B3, I1: a window of 6 is a token and the five before it."""
    assert_states(recipe, tmp_path / "m")


@pytest.mark.parametrize("recipe", DECODERS, ids=lambda recipe: recipe.model_type)
def test_what_each_layer_sees(recipe: Recipe, tmp_path: Path) -> None:
    """B4, B5: nothing that comes later, and windows in the layers in which the reference has them."""
    folder = checkpoint(tmp_path / "m", recipe)
    ours, theirs = both_reaches(recipe, folder, "self_attn", 20)
    assert ours == theirs
    full, window = list(range(10)), list(range(6))
    slides = SLIDES.get(recipe.model_type, [])
    assert ours == [window if layer in slides else full for layer in range(len(ours))]


@pytest.mark.parametrize("recipe", DECODERS, ids=lambda recipe: recipe.model_type)
def test_causality_is_read(recipe: Recipe, tmp_path: Path) -> None:
    """B4: by default the last token changes no other; with `is_causal` false (gte-Qwen2) it changes all."""
    for causal in (None, True, False):
        fields = {} if causal is None else {"is_causal": causal}
        plain = changed(recipe, sliding_window=None, use_sliding_window=False, **fields)
        folder = checkpoint(tmp_path / str(causal), plain)
        assert_parity(plain, folder, [1, 2, 13, 26])
        model, inputs = encoder(plain, folder), packed(9)
        before = model.forward_ids(**inputs)
        inputs["ids"] = inputs["ids"].clone()
        inputs["ids"][-1] += 1
        moved = (model.forward_ids(**inputs) != before).any(-1)
        assert moved.tolist() == ([True] * 9 if causal is False else [False] * 8 + [True])


def test_a_window_to_both_sides_is_refused() -> None:
    """B4: transformers would make it a window of another width."""
    with pytest.raises(UnsupportedError, match="is_causal = False is not supported together with sliding_window"):
        read(QWEN2, is_causal=False)


@pytest.mark.parametrize("recipe", [QWEN2, QWEN3], ids=lambda recipe: recipe.model_type)
def test_which_layers_slide(recipe: Recipe, tmp_path: Path) -> None:
    """B5: by `layer_types`, else from `max_window_layers` on, and only with `use_sliding_window`."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    for number, (changes, slide) in enumerate(
        [
            ({}, [1, 2]),
            ({"max_window_layers": 0}, [0, 1, 2]),
            ({"max_window_layers": 3}, []),
            ({"max_window_layers": ...}, []),
            ({"use_sliding_window": False}, []),
            ({"use_sliding_window": ...}, []),
            ({"sliding_window": None}, []),
            ({"layer_types": kinds}, [0, 2]),
        ]
    ):
        spec = read(recipe, **changes)
        assert [k for k, a in enumerate(spec.attentions) if a.reach is not None] == slide
        assert {a.reach for a in spec.attentions} <= {None, 5}
        assert_states(changed(recipe, **changes), tmp_path / str(number))
    with pytest.raises(UnsupportedError, match="layer_types has sliding_attention, but use_sliding_window"):
        read(recipe, layer_types=kinds, use_sliding_window=False)


@pytest.mark.parametrize("recipe", [LLAMA, QWEN3], ids=lambda recipe: recipe.model_type)
@pytest.mark.parametrize(
    "rope",
    [
        LLAMA3,
        LLAMA3 | {"low_freq_factor": 0.5, "high_freq_factor": 2.0},
        YARN,
        YARN | {"attention_factor": 1.0},
        YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 3.0},
    ],
)
@pytest.mark.parametrize("form", ["new", "old"])
def test_scaled_rotary_positions(recipe: Recipe, rope: dict[str, Any], form: str, tmp_path: Path) -> None:
    """C1, C3, C4: below and above the original length, in both forms of the field."""
    new = {"rope_parameters": {**rope, "rope_theta": 300.0}, "rope_theta": ...}
    assert_states(changed(recipe, **(new if form == "new" else {"rope_scaling": rope})), tmp_path / "m")


@pytest.mark.parametrize(
    ("fields", "magnitude"),
    [
        ({}, 1.27726),
        ({"attention_factor": 1.0}, 1.0),
        ({"mscale": 1, "mscale_all_dim": 1}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.0}, 0.93488),
        ({"mscale": 0.7}, 1.27726),
    ],
)
def test_the_magnitude_of_yarn(fields: dict[str, Any], magnitude: float) -> None:
    """C1."""
    rope = read(LLAMA, rope_scaling=YARN | fields).attentions[0].rope
    assert rope is not None
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.magnitude == pytest.approx(magnitude, abs=1e-5)


@pytest.mark.parametrize(
    ("rope", "error", "message"),
    [
        (YARN | {"surprise": 1}, UnsupportedError, "rope parameter 'surprise' is not supported for type 'yarn'"),
        (YARN | {"factor": None}, CheckpointError, "factor = None, expected a positive number"),
        (YARN | {"factor": 0.5}, CheckpointError, "factor = 0.5 and original"),
        (YARN | {"original_max_position_embeddings": 16.5}, CheckpointError, "expected at least 1 and a whole number"),
        (YARN | {"truncate": 1}, CheckpointError, "truncate = 1, expected true or false"),
        (YARN | {"beta_fast": 1.0, "beta_slow": 2.0}, CheckpointError, "beta_fast = 1.0 must be above beta_slow = 2.0"),
        (LLAMA3 | {"high_freq_factor": 1.0}, CheckpointError, "low_freq_factor = 1.0 must be below"),
        (LLAMA3 | {"low_freq_factor": "1"}, CheckpointError, "low_freq_factor = '1', expected a positive number"),
        ({"rope_type": "longrope", "factor": 2.0}, UnsupportedError, "rope type 'longrope' is not supported"),
        ({"rope_type": "ntk", "factor": 2.0}, UnsupportedError, "rope type 'ntk' is not supported"),
    ],
)
def test_rotary_positions_that_are_refused(rope: dict[str, Any], error: type[Exception], message: str) -> None:
    """C1, C3: keys that nobody knows, and values for which the formulas are not made."""
    with pytest.raises(error, match=message):
        read(LLAMA, rope_scaling=rope)


def test_scaling_is_stored_in_the_artifact(tmp_path: Path) -> None:
    """C4: the effective configuration comes back as it was."""
    recipe = changed(LLAMA, rope_scaling=LLAMA3)
    source = checkpoint(tmp_path / "m", recipe)
    report = toolkit.convert(str(source), tmp_path / "out", task="embed", verify=False)
    rope = toolkit.load(tmp_path / "out", device="cpu", mode="eager").artifact.manifest.spec.attentions[0].rope
    assert rope == report.manifest.spec.attentions[0].rope
    assert rope is not None
    assert rope.scaling == Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=16)


@pytest.mark.parametrize(
    "recipe", [r for r in DECODERS if "embed" in r.all_tasks], ids=lambda recipe: recipe.model_type
)
def test_a_language_model_as_an_embedding_model(recipe: Recipe, tmp_path: Path) -> None:
    """D2: Qwen3-Embedding's form: a causal language model's class and tensors, the last token pooled."""
    folder = make_checkpoint(tmp_path / "m", recipe, pooling="lasttoken", tokenizer=make_tokenizer(segments=False))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**recipe.tiny))
    heat(model)
    model.save_pretrained(folder)
    report = toolkit.convert(str(folder), tmp_path / "out")
    assert report.manifest.task == "embed"
    assert report.parity.passed, report.parity.summary()
    dropped = [entry["action"] for entry in report.manifest.audit if entry["source"] == "lm_head.weight"]
    assert dropped == ([] if AutoConfig.for_model(**recipe.tiny).tie_word_embeddings else ["dropped"])
    texts = ["the fox", "the quick brown fox jumps over the lazy dog", ""]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    assert (runner.embed(texts) - theirs).abs().max() < 1e-5


def test_a_language_model_without_a_pipeline_generates(tmp_path: Path) -> None:
    """By default it does what its class is for; the task says what else."""
    folder = make_decoder(tmp_path / "m", QWEN3)
    assert toolkit.convert(str(folder), tmp_path / "a", verify=False).manifest.task == "generate"
    assert toolkit.convert(str(folder), tmp_path / "b", "embed", verify=False).manifest.task == "embed"


@pytest.mark.parametrize("causal", [True, False])
def test_a_language_model_pools_its_last_token(causal: bool, tmp_path: Path) -> None:
    """D4: where nothing is said, as the library does; a bidirectional one takes the mean."""
    recipe = changed(QWEN3, sliding_window=None, use_sliding_window=False, is_causal=causal)
    folder = make_checkpoint(tmp_path / "m", recipe, pooling=None, tokenizer=make_tokenizer(segments=False))
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    report = toolkit.convert(str(folder), tmp_path / "out", "embed")
    assert report.parity.passed, report.parity.summary()
    mode = "lasttoken" if causal else "mean"
    assert f"no modules.json: {mode} pooling without normalisation" in report.manifest.warnings[0]
    texts = ["the fox", "the quick brown fox"]
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
    assert (toolkit.load(tmp_path / "out", device="cpu", mode="eager").embed(texts) - theirs).abs().max() < 1e-5


def test_an_absent_window_is_the_default_one() -> None:
    """Null is none; transformers' default applies where the field is missing."""
    for value, expected in ((..., {None, 4095}), (None, {None})):
        assert {a.reach for a in read(QWEN2, sliding_window=value).attentions} == expected


@pytest.mark.parametrize("value", [None, 1.0])
def test_a_neutral_share_of_rotated_values(value: float | None) -> None:
    assert read(LLAMA, rope_parameters={"rope_theta": 300.0, "partial_rotary_factor": value}).attentions[0].rope
    with pytest.raises(UnsupportedError, match="partial_rotary_factor"):
        read(LLAMA, rope_parameters={"rope_theta": 300.0, "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("recipe", DECODERS, ids=lambda recipe: recipe.model_type)
def test_head_sizes_that_are_not_stated(recipe: Recipe) -> None:
    """I1: hidden size / heads, but 128 in Qwen3."""
    (attention, *_) = read(recipe, head_dim=...).attentions
    assert attention.head_dim == (128 if recipe is QWEN3 else 10)


@pytest.mark.parametrize("recipe", DECODERS, ids=lambda recipe: recipe.model_type)
def test_defaults_are_those_of_transformers(recipe: Recipe) -> None:
    """I1: a configuration that says nothing is the one that says what transformers' class has."""
    said, nothing = AutoConfig.for_model(recipe.model_type).to_dict(), {"model_type": recipe.model_type}
    assert recipe.read_config(nothing)[0] == recipe.read_config(said)[0]
    spec = recipe.read_config(nothing)[0]
    for head in recipe.heads:
        assert head.steps(ConfigReader(nothing), spec, 1) == head.steps(ConfigReader(said), spec, 1)

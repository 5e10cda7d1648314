"""WeightedLayerPooling of sentence-transformers: a weighted mean of several layers' states before the pooling."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    Normalize,
    Pooling,
    Transformer,
    WeightedLayerPooling,
)
from torch import nn

import toolkit
from tests.converted import load, reference
from tests.tiny import edit_json, embedding_recipes, make_checkpoint, write_json
from toolkit import PromptEmbeds, TokenIds
from toolkit.artifact import Artifact
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.nn import model
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.spec import LayerMixSpec

HIDDEN = 40
TEXTS = ["the quick fox", "query doc text one two three", "a"]
RECIPES = [recipe for recipe in embedding_recipes() if recipe.reference is not None]
# one norm behind the layers or none, layers that share weights, a table of positions or rotary ones
FAMILIES = ["bert", "albert", "modernbert", "t5"]
MIX = "1_WeightedLayerPooling"
# The library cannot mix states of different widths, and a projection makes the last ones narrower.
UNPROJECTED: dict[str, dict[str, Any]] = {"opt": {"word_embed_proj_dim": HIDDEN}}


def saved(folder: Path, family: str, start: int | None, *, shown: bool | None = True, **overrides: Any) -> Path:
    """What the library writes, with random positive weights; layer `start` or, for None, the last."""
    recipe = find_recipe(family).recipe
    source = make_checkpoint(folder / "source", recipe, pooling=None, overrides=overrides)
    layers = depth(recipe)
    start = layers if start is None else start
    mix = WeightedLayerPooling(HIDDEN, num_hidden_layers=layers, layer_start=start)
    draw = torch.Generator().manual_seed(start)
    mix.layer_weights = nn.Parameter(torch.rand(layers + 1 - start, generator=draw) + 0.1)
    options: dict[str, Any] = {} if shown is None else {"config_kwargs": {"output_hidden_states": shown}}
    modules = [Transformer(str(source), **options), mix, Pooling(HIDDEN, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "saved"))
    return folder / "saved"


def depth(recipe: Recipe) -> int:
    return len(recipe.read_config(recipe.tiny)[0].schedule)


def encode(folder: Path) -> torch.Tensor:
    return torch.as_tensor(reference(folder).encode(TEXTS, convert_to_tensor=True))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("start", [0, 2, None])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.model_type)
def test_vectors_and_states_equal_sentence_transformers(recipe: Recipe, start: int | None, tmp_path: Path) -> None:
    folder = saved(tmp_path, recipe.model_type, start, **UNPROJECTED.get(recipe.model_type, {}))
    runner = load(folder)
    assert_close(runner.embed(TEXTS), encode(folder))
    theirs = reference(folder).encode(TEXTS, output_value="token_embeddings")
    for ours, states in zip(runner.token_states(TEXTS), theirs, strict=True):
        assert_close(ours, torch.as_tensor(states))
    assert not [warning for warning in runner.artifact.manifest.warnings if MIX in warning]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mode_and_path(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family, 1)
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()
    assert all(cell.reference_error < 1e-4 for cell in report.cells)  # like with like
    for mode in ("eager", "compile", "graph"):
        runner = toolkit.load(tmp_path / "out", device="cpu", mode=mode)
        vectors = runner.embed(TEXTS)
        assert_close(vectors, encode(folder))
        ids = TokenIds([2, 9, 3])
        assert_close(runner.embed(PromptEmbeds(runner.embed_tokens([2, 9, 3]))), runner.embed(ids))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_the_gate(dtype: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 0)
    toolkit.convert(str(folder), tmp_path / "out", dtype=dtype, verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_the_mean_is_rounded_once() -> None:
    """Weights and states in bfloat16, products and sums in float32."""
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(50, 8, generator=draw).bfloat16() for _ in range(13)]
    mix = model.LayerMix(LayerMixSpec(start=1, count=12)).bfloat16()
    mix.layer_weights.data = (torch.rand(12, generator=draw) + 0.1).bfloat16()
    weights = mix.layer_weights.detach().double()
    exact = sum((w * x.double() for w, x in zip(weights, states[1:], strict=True)), torch.zeros(50, 8)) / weights.sum()
    assert mix(states).dtype == torch.bfloat16
    assert (mix(states) != exact.float().bfloat16()).sum() <= 2  # where float32 falls on the other side of a half


@pytest.mark.parametrize("wrong", ["weights", "start", "norm"])
def test_the_gate_sees_a_wrong_mean(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are compared with the mean too, not with the last layer's states."""
    folder = saved(tmp_path, "modernbert", 1)
    original = model.LayerMix.forward

    def forward(self: model.LayerMix, states: list[torch.Tensor]) -> torch.Tensor:
        if wrong == "start":
            states = [states[0], *states[:-1]]
        elif wrong == "norm":
            states = [*states[:-1], states[-1] * 1.1]
        else:
            self.layer_weights.data = self.layer_weights.data.flip(0)
        return original(self, states)

    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    monkeypatch.setattr(model.LayerMix, "forward", forward)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    failed = {cell.quantity for cell in report.cells if not cell.passed}
    assert "token states" in failed
    assert len(failed) > 1


def test_the_weights_are_in_the_audit(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 1)
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    manifest = Artifact.open(tmp_path / "out").manifest
    entries = [entry for entry in manifest.audit if entry["target"] == "mix.layer_weights"]
    assert [(entry["source"], entry["action"]) for entry in entries] == [(f"{MIX}/layer_weights", "loaded")]
    assert f"{MIX}/model.safetensors" in manifest.source["sha256"]
    assert manifest.spec.mix is not None
    assert (manifest.spec.mix.start, manifest.spec.mix.count) == (1, 3)


@pytest.mark.parametrize("shown", [False, None])
def test_without_hidden_states_it_does_nothing(shown: bool | None, tmp_path: Path) -> None:
    """As in the library, where nothing says so."""
    folder = saved(tmp_path, "bert", 1, shown=shown)
    (folder / MIX / "model.safetensors").unlink()
    plain = tmp_path / "plain"
    modules = [Transformer(str(folder)), Pooling(HIDDEN, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(plain))
    runner = load(folder)
    assert_close(runner.embed(TEXTS), encode(plain))
    assert runner.artifact.manifest.spec.mix is None
    assert [w for w in runner.artifact.manifest.warnings if f"{MIX}: " in w and "output_hidden_states" in w]


def test_that_is_what_the_library_does(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 1, shown=False)
    assert_close(load(folder).embed(TEXTS), encode(folder))


def test_dense_modules_find_their_weights_behind_it(tmp_path: Path) -> None:
    """Steps are counted without it, modules with it."""
    source = make_checkpoint(tmp_path / "source", find_recipe("bert").recipe, pooling=None)
    mix = WeightedLayerPooling(HIDDEN, num_hidden_layers=3, layer_start=2)
    mix.layer_weights = nn.Parameter(torch.tensor([0.3, 1.1]))
    transformer = Transformer(str(source), config_kwargs={"output_hidden_states": True})
    modules = [transformer, mix, Pooling(HIDDEN, "cls"), Dropout(0.5), Dense(HIDDEN, 7)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "saved"))
    assert_close(load(tmp_path / "saved").embed(TEXTS), encode(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"num_hidden_layers": 4}, CheckpointError, "num_hidden_layers = 4, but the model runs 3 layers"),
        ({"num_hidden_layers": 2}, CheckpointError, "num_hidden_layers = 2, but the model runs 3 layers"),
        ({"num_hidden_layers": ...}, CheckpointError, "num_hidden_layers = 12, but the model runs 3 layers"),
        ({"layer_start": ...}, CheckpointError, "layer_start = 4"),
        ({"num_hidden_layers": True}, CheckpointError, "num_hidden_layers = True"),
        ({"layer_start": -1}, CheckpointError, "layer_start = -1"),
        ({"layer_start": 4}, CheckpointError, "layer_start = 4"),
        ({"layer_start": 1.0}, CheckpointError, "layer_start = 1.0"),
        ({"embedding_dimension": 41}, CheckpointError, "the pooling is 41 wide"),
        ({"embedding_dimension": ...}, CheckpointError, "the pooling is None wide"),
        ({"surprise": 1}, UnsupportedError, "unknown field 'surprise'"),
    ],
)
def test_contradictions_are_refused(
    change: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, "bert", 1)
    edit_json(folder / MIX / "config.json", **change)
    with pytest.raises(kind) as caught:
        load(folder)
    assert message in str(caught.value)
    assert f"{MIX}/config.json" in str(caught.value)


def test_the_old_name_of_the_width(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 1)
    edit_json(folder / MIX / "config.json", embedding_dimension=..., word_embedding_dimension=HIDDEN)
    assert_close(load(folder).embed(TEXTS), encode(folder))


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 1)
    file = folder / MIX / "model.safetensors"
    weights = load_file(file)["layer_weights"]
    for tensors, message in (
        ({"layer_weights": weights[:2].clone()}, "'layer_weights' has shape"),
        ({"layer_weights": weights, "other": weights.clone()}, "unexpected tensor: 'other'"),
        ({"other": weights}, "missing tensor: 'layer_weights'"),
        ({"layer_weights": weights * float("nan")}, "NaN"),
    ):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=message):
            load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"no weights in {MIX}"):
        load(folder)


@pytest.mark.parametrize("shown", [2, [1, 2], "yes"])
def test_a_selection_of_hidden_states_is_refused(shown: Any, tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 1)
    edit_json(folder / "config.json", output_hidden_states=shown)
    with pytest.raises(UnsupportedError, match="output_hidden_states = "):
        load(folder)


@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 1, 2]])
def test_it_comes_once_and_before_the_pooling(order: list[int], tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert", 1)
    modules = json.loads((folder / "modules.json").read_text())
    changed = [{**modules[k], "idx": place} for place, k in enumerate(order)]
    write_json(folder / "modules.json", changed)
    with pytest.raises(UnsupportedError, match="a WeightedLayerPooling behind another pooling"):
        load(folder)

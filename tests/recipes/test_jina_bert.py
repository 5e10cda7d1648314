"""JinaBERT v2 against a reference of a few lines, written from what is published about it; its code is never run.

Facts: tokens and segments are summed and normalised, without positions; scores are scaled by the root of the head size
and lowered by slope × distance; norms follow the residual sums; the gated layer has no bias. The variant of the code
model normalises whole queries and keys, adds the layer's input twice around attention, and gates with the second half.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import toolkit
from tests.recipes.stored import assert_identical, load, prefixed, rewrite
from tests.tiny import NORM, make_tokenizer, write_json
from toolkit.conversion import convert
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.runner import Runner

ALIBI = {"model_type": "bert", "position_embedding_type": "alibi"}
PLAIN = find_recipe("bert", None, ALIBI).recipe
QK = find_recipe("bert", None, ALIBI, lambda: ["0.attention.self.layer_norm_q.weight"]).recipe
RECIPES = {"plain": PLAIN, "qk": QK}
KINDS = ("original", "geglu", "reglu")

Tensors = dict[str, Tensor]


# The reference


def slopes_of(heads: int) -> list[float]:
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (k + 1) / heads) for k in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes_of(below) + slopes_of(2 * below)[::2][: heads - below]


class Reference:
    """One text at a time, in float64."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors) -> None:
        self.config, self.tensors = config, {name: tensor.double() for name, tensor in tensors.items()}
        self.qk = any("layer_norm_q" in name for name in tensors)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return F.layer_norm(x, weight.shape, weight, bias, self.config["layer_norm_eps"])

    def states(self, ids: list[int], segments: list[int]) -> Tensor:
        words = self.tensors["embeddings.word_embeddings.weight"][ids]
        x = self.norm("embeddings.LayerNorm", words + self.tensors["embeddings.token_type_embeddings.weight"][segments])
        for k in range(self.config["num_hidden_layers"]):
            x = self.layer(f"encoder.layer.{k}.", x)
        return x

    def layer(self, at: str, x: Tensor) -> Tensor:
        once = self.norm(at + "attention.output.LayerNorm", self.attention(at + "attention.", x) + x)
        if not self.qk:
            name = "mlp.layernorm" if self.config["feed_forward_type"] != "original" else "output.LayerNorm"
            return self.norm(at + name, self.mlp(at, once) + once)
        twice = self.norm(at + "layer_norm_1", x + once)
        return self.norm(at + "layer_norm_2", twice + self.mlp(at, twice))

    def attention(self, at: str, x: Tensor) -> Tensor:
        q, k, v = (self.linear(f"{at}self.{name}", x) for name in ("query", "key", "value"))
        if self.qk:
            q, k = self.norm(at + "self.layer_norm_q", q), self.norm(at + "self.layer_norm_k", k)
        heads = self.config["num_attention_heads"]
        q, k, v = (y.view(len(x), heads, -1).transpose(0, 1) for y in (q, k, v))
        places = torch.arange(len(x))
        bias = -torch.tensor(slopes_of(heads)).double()[:, None, None] * (places[:, None] - places[None, :]).abs()
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[2]) + bias
        return self.linear(at + "output.dense", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))

    def mlp(self, at: str, x: Tensor) -> Tensor:
        kind = self.config["feed_forward_type"]
        activate = F.relu if kind == "reglu" else F.gelu
        if kind == "original":
            up, down = ("mlp.up_layer", "mlp.down_layer") if self.qk else ("intermediate.dense", "output.dense")
            return self.linear(at + down, activate(self.linear(at + up, x)))
        up, down = ("mlp.up_gated_layer", "mlp.down_layer") if self.qk else ("mlp.gated_layers", "mlp.wo")
        a, b = self.linear(at + up, x).chunk(2, dim=-1)
        return self.linear(at + down, a * activate(b) if self.qk else activate(a) * b)


# Checkpoints


def shapes_of(config: Mapping[str, Any], qk: bool) -> dict[str, tuple[int, ...]]:
    """The names and shapes that published checkpoints have."""
    hidden, inner, kind = config["hidden_size"], config["intermediate_size"], config["feed_forward_type"]
    wide = 2 * inner if kind != "original" else inner
    linears = {
        f"attention.{name}": (hidden, hidden) for name in ("self.query", "self.key", "self.value", "output.dense")
    }
    norms = ["attention.output.LayerNorm"]
    if qk:
        norms += ["attention.self.layer_norm_q", "attention.self.layer_norm_k", "layer_norm_1", "layer_norm_2"]
        up, down, bias = "mlp.up_layer" if kind == "original" else "mlp.up_gated_layer", "mlp.down_layer", False
    elif kind == "original":
        up, down, bias = "intermediate.dense", "output.dense", True
        norms.append("output.LayerNorm")
    else:
        up, down, bias = "mlp.gated_layers", "mlp.wo", False
        norms.append("mlp.layernorm")
    linears |= {up: (wide, hidden), down: (hidden, inner)}
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in linears.items() if bias or name != up}
    layer |= {f"{name}.{part}": (hidden,) for name in norms for part in ("weight", "bias")}
    return {
        "embeddings.word_embeddings.weight": (config["vocab_size"], hidden),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
        "pooler.dense.weight": (hidden, hidden),
        **{f"encoder.layer.{k}.{n}": s for k in range(config["num_hidden_layers"]) for n, s in layer.items()},
    }


def make(folder: Path, variant: str, **changes: Any) -> Path:
    """A heated checkpoint: scores, and what goes into the MLP, are far from zero."""
    config = {**PLAIN.tiny, "architectures": ["JinaBertForMaskedLM"], "emb_pooler": "mean", **changes}
    generator = torch.Generator().manual_seed(0)
    tensors: Tensors = {}
    for name, shape in shapes_of(config, variant == "qk").items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 0.3 * noise + (1 if NORM.search(name) and name.endswith("weight") else 0)
        else:
            tensors[name] = noise * (0.5 if "embeddings" in name else 0.25)
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer().save_pretrained(folder)
    return folder


def reference_of(folder: Path) -> Reference:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Reference(config, load_file(folder / "model.safetensors"))


def converted(folder: Path) -> Runner:
    out = folder.parent / f"{folder.name}-out"
    convert(str(folder), out, verify=False)
    return toolkit.load(out, device="cpu", mode="eager")


def draw(length: int) -> toolkit.TokenIds:
    generator = torch.Generator().manual_seed(length)
    ids, segments = (torch.randint(n, (length,), generator=generator).tolist() for n in (61, 3))
    return toolkit.TokenIds(ids, segments)


# Equality


@pytest.mark.parametrize("heads", [1, 4, 5, 10])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", RECIPES)
def test_states_are_the_references(variant: str, kind: str, heads: int, tmp_path: Path) -> None:
    """I4: every variant, also with head counts that are not powers of two; alone and packed; lengths 1 to the limit."""
    folder = make(tmp_path / "jina", variant, feed_forward_type=kind, num_attention_heads=heads)
    reference, runner = reference_of(folder), converted(folder)
    rows = [draw(length) for length in (1, 2, 5, 16, 24)]
    for row, packed in zip(rows, runner.token_states(list(rows)), strict=True):
        theirs = reference.states(list(row.ids), list(row.segments or ()))
        (alone,) = runner.token_states([row])
        assert (alone.double() - theirs).abs().max() < 2e-5
        assert (packed.double() - theirs).abs().max() < 2e-5


def test_embeds_path_equals_ids_path(tmp_path: Path) -> None:
    runner, row = converted(make(tmp_path / "jina", "qk")), draw(9)
    embeds = toolkit.PromptEmbeds(runner.embed_tokens(list(row.ids)), row.segments)
    ours, theirs = runner.token_states([embeds])[0], runner.token_states([row])[0]
    assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("variant", RECIPES)
def test_distance_is_symmetric_and_counts(variant: str, tmp_path: Path) -> None:
    """I4: reversing mirrors the states; exchanging two far tokens changes those between them."""
    runner = converted(make(tmp_path / "jina", variant))
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    swapped = [12, *ids[1:-1], 5]
    plain, mirrored, other = runner.token_states([toolkit.TokenIds(x, None) for x in (ids, ids[::-1], swapped)])
    assert torch.allclose(mirrored.flip(0), plain, atol=2e-5)
    assert (other[3] - plain[3]).abs().max() > 1e-3


def test_there_is_nothing_to_verify_with(tmp_path: Path) -> None:
    """Remote code is never run, so a conversion without --no-verify fails and says so."""
    folder = make(tmp_path / "jina", "plain")
    with pytest.raises(UnsupportedError, match=r"remote code is never run.*--no-verify"):
        convert(str(folder), tmp_path / "out", device="cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["jina"]


# Which variant it is


def test_the_inventory_tells_the_variant(tmp_path: Path) -> None:
    """I4: the same config.json, told by its tensors."""
    folders = [make(tmp_path / variant, variant) for variant in RECIPES]
    outs = [tmp_path / f"{variant}-out" for variant in RECIPES]
    specs = [convert(str(a), b, verify=False).manifest.spec for a, b in zip(folders, outs, strict=True)]
    plain, qk = (spec.blocks[0] for spec in specs)
    assert (plain.arrangement, plain.attention.qk_norm, plain.mlp.gate) == ("post", None, "first")
    assert (qk.arrangement, qk.attention.qk_norm_over, qk.mlp.gate) == ("post_twice", "all", "second")
    assert [spec.embedding.positions for spec in specs] == [0, 0]
    assert [spec.usable_length for spec in specs] == [24, 24]


@pytest.mark.parametrize("variant", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stored", KINDS)
def test_feed_forward_type_must_fit_the_tensors(variant: str, stored: str, kind: str, tmp_path: Path) -> None:
    """I4: a variant is refused by what is stored, never guessed (relu and gelu are stored alike)."""
    folder = make(tmp_path / "jina", variant, feed_forward_type=stored)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", {**config, "feed_forward_type": kind})
    if (stored == "original") == (kind == "original"):
        load(folder, RECIPES[variant])
    else:
        with pytest.raises(CheckpointError, match=r"tensor:? '.*encoder\.layer\.0\.(mlp|intermediate|output)"):
            load(folder, RECIPES[variant])


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("plain", "embeddings.position_embeddings.weight"),
        ("plain", "encoder.layer.0.attention.self.layer_norm_k.weight"),
        ("plain", "encoder.layer.0.layer_norm_1.weight"),
        ("plain", "encoder.layer.0.mlp.gated_layers.bias"),
        ("plain", "encoder.layer.0.attention.self.Wqkv.weight"),
        ("qk", "embeddings.position_embeddings.weight"),
        ("qk", "encoder.layer.0.mlp.layernorm.weight"),
        ("qk", "encoder.layer.0.mlp.up_gated_layer.bias"),
        ("qk", "encoder.layer.0.output.LayerNorm.bias"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(variant: str, name: str, tmp_path: Path) -> None:
    """I4: refused by inventory."""
    folder = make(tmp_path / "jina", variant)
    rewrite(folder, lambda tensors: {**tensors, name: torch.ones(40)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{name}'"):
        convert(str(folder), tmp_path / "out", verify=False)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("plain", "encoder.layer.1.mlp.gated_layers.weight"),
        ("plain", "encoder.layer.1.mlp.wo.bias"),
        ("plain", "encoder.layer.2.mlp.layernorm.bias"),
        ("qk", "encoder.layer.1.attention.self.layer_norm_q.bias"),
        ("qk", "encoder.layer.2.attention.self.layer_norm_k.weight"),
        ("qk", "encoder.layer.0.layer_norm_1.bias"),
        ("qk", "encoder.layer.0.attention.output.LayerNorm.weight"),
        ("qk", "encoder.layer.0.mlp.down_layer.bias"),
    ],
)
def test_missing_tensor_stops_the_conversion(variant: str, name: str, tmp_path: Path) -> None:
    """H2."""
    folder = make(tmp_path / "jina", variant)
    rewrite(folder, lambda tensors: {k: t for k, t in tensors.items() if k != name})
    with pytest.raises(CheckpointError, match="missing tensor: '"):
        convert(str(folder), tmp_path / "out", verify=False)


def test_alibi_weights_are_no_plain_bert(tmp_path: Path) -> None:
    """I4: where the config forgets its field, the tensors do not fit BERT."""
    for variant in RECIPES:
        folder = make(tmp_path / variant, variant, position_embedding_type="absolute", architectures=["BertModel"])
        with pytest.raises(CheckpointError, match=r"missing tensor: 'embeddings\.position_embeddings\.weight'"):
            convert(str(folder), tmp_path / "out", verify=False)


@pytest.mark.parametrize("recipe", [PLAIN, QK], ids=lambda recipe: recipe.label)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "absolute"),
        ("position_embedding_type", "relative_key"),
        ("feed_forward_type", "glu"),
        ("feed_forward_type", "swiglu"),
        ("feed_forward_type", None),
        ("is_decoder", True),
    ],
)
def test_unsupported_value_is_named(recipe: Recipe, name: str, value: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        recipe.read_config({**recipe.tiny, name: value})
    assert f"config.json: {name} = {value!r} is not supported" in str(caught.value)


def test_positions_are_absolute_where_nothing_is_said() -> None:
    """The field's default is plain BERT's."""
    for recipe in RECIPES.values():
        with pytest.raises(UnsupportedError, match="position_embedding_type = 'absolute' is not supported"):
            recipe.read_config({k: v for k, v in recipe.tiny.items() if k != "position_embedding_type"})


@pytest.mark.parametrize("value", ["relative_key", "Alibi", None])
def test_other_position_types_do_not_reach_this_recipe(value: object, tmp_path: Path) -> None:
    folder = make(tmp_path / "jina", "plain", position_embedding_type=value, architectures=["BertModel"])
    with pytest.raises(UnsupportedError, match=f"position_embedding_type = {value!r} is not supported"):
        convert(str(folder), tmp_path / "out", verify=False)


# Stored forms


@pytest.mark.parametrize("variant", RECIPES)
def test_prefix_and_heads(variant: str, tmp_path: Path) -> None:
    """H1, H2: with and without the base model's prefix, with a masked language model's head."""
    plain, other = make(tmp_path / "plain", variant), make(tmp_path / "other", variant)
    rewrite(other, lambda tensors: prefixed(tensors, "bert.") | {"cls.predictions.bias": torch.ones(61)})
    assert_identical(load(other, RECIPES[variant]), load(plain, RECIPES[variant]))
    chosen = convert(str(other), tmp_path / "out", verify=False).manifest.spec
    assert chosen == RECIPES[variant].read_config(RECIPES[variant].tiny)[0]

"""What single families of decoders have that Llama has not."""

from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit
from tests.recipes.compare import assert_parity, checkpoint, encoder, read, rewrite
from tests.recipes.test_decoders import GRANITE, LLAMA, MISTRAL, OLMO2, PHI3, SMOLLM3, assert_states, changed
from tests.tiny import make_decoder
from toolkit.errors import CheckpointError, ToolkitError, UnsupportedError
from toolkit.nn.head import build_head
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.spec import EncoderSpec
from toolkit.steps import DivideStep, HeadSpec

WINDOWS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


def rotating(spec: EncoderSpec) -> list[int]:
    return [k for k, attention in enumerate(spec.attentions) if attention.rope is not None]


def sliding(spec: EncoderSpec) -> list[int]:
    return [k for k, attention in enumerate(spec.attentions) if attention.reach is not None]


@pytest.mark.parametrize(
    ("changes", "rotates", "slides"),
    [
        ({}, [0, 2], [1, 3]),
        ({"sliding_window": None}, [0, 2], []),
        ({"sliding_window": ...}, [0, 2], []),
        ({"use_sliding_window": ...}, [0, 2], []),
        ({"no_rope_layers": [1, 0, 0, 1]}, [0, 3], [1, 2]),
        ({"no_rope_layers": None, "no_rope_layer_interval": 3}, [0, 1, 3], [2]),
        ({"no_rope_layer_interval": 1}, [], [0, 1, 2, 3]),
        ({"no_rope_layer_interval": ...}, [0, 1, 2], [3]),
        ({"layer_types": WINDOWS}, [0, 2], [0, 3]),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 0], "layer_types": WINDOWS}, [1, 2], [0, 3]),
    ],
)
def test_layers_without_rotation(
    changes: dict[str, Any], rotates: list[int], slides: list[int], tmp_path: Path
) -> None:
    """C6: by the list, which may be longer than there are layers, else by the interval; windows follow them."""
    spec = read(SMOLLM3, **changes)
    assert (rotating(spec), sliding(spec)) == (rotates, slides)
    assert_states(changed(SMOLLM3, **changes), tmp_path / "m")


@pytest.mark.parametrize("value", [[1, 0, 1], [1, 0, 1, 2], [1, 0, 1, None], "1011", 3])
def test_a_list_of_layers_that_says_something_else(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"no_rope_layers = .*, expected at least 4 zeros and ones"):
        read(SMOLLM3, no_rope_layers=value)


def test_windows_that_are_switched_off_and_named_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="layer_types has sliding_attention, but use_sliding_window"):
        read(SMOLLM3, use_sliding_window=False, layer_types=WINDOWS)


@pytest.mark.parametrize(
    "field", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_each_multiplier_is_one_by_default(field: str, tmp_path: Path) -> None:
    recipe = changed(GRANITE, **{field: ...})
    assert_states(recipe, tmp_path / "m")
    if field != "logits_scaling":
        assert read(recipe) != read(GRANITE)


@pytest.mark.parametrize("value", [0, -1.0, "1", None, True])
@pytest.mark.parametrize(
    "field", ["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"]
)
def test_multipliers_that_make_no_sense(field: str, value: object, tmp_path: Path) -> None:
    folder = make_decoder(tmp_path / "m", GRANITE)
    rewrite(folder, lambda tensors: tensors, **{field: value})
    with pytest.raises(CheckpointError, match=f"{field} = .*, expected a positive number"):
        toolkit.convert(str(folder), tmp_path / "out", verify=False)


def test_the_seam_is_the_plain_token_table(tmp_path: Path) -> None:
    """A3: what callers pass is multiplied, as it is in the reference."""
    model = encoder(GRANITE, checkpoint(tmp_path / "m", GRANITE))
    ids = torch.arange(5, dtype=torch.int32)
    assert torch.equal(model.embed_tokens(ids), model.embeddings.token.weight[:5])
    x = model.embeddings.from_embeds(model.embed_tokens(ids), torch.ones(5, dtype=torch.bool), ids, ids, ids)
    assert torch.equal(x, model.embeddings.token.weight[:5] * 3)


def test_logits_are_divided() -> None:
    head = build_head(HeadSpec(steps=(DivideStep(on="tokens", by=2.5),), width=0, token_width=4), torch.device("cpu"))
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.per_token(logits), logits / 2.5)


@pytest.mark.parametrize("window", [1, 3, None])
@pytest.mark.parametrize("recipe", [MISTRAL, PHI3], ids=lambda recipe: recipe.model_type)
def test_one_window_for_all_layers(recipe: Recipe, window: int | None, tmp_path: Path) -> None:
    spec = read(recipe, sliding_window=window)
    assert {attention.reach for attention in spec.attentions} == {None if window is None else window - 1}
    assert_states(changed(recipe, sliding_window=window), tmp_path / "m")


def test_an_absent_window() -> None:
    """Null is none; where the field is missing, transformers' default applies."""
    assert {attention.reach for attention in read(MISTRAL, sliding_window=...).attentions} == {4095}
    assert {attention.reach for attention in read(PHI3, sliding_window=...).attentions} == {None}


def test_windows_in_some_layers_are_another_architecture() -> None:
    with pytest.raises(UnsupportedError, match=r"layer_types = .* is not supported"):
        read(MISTRAL, layer_types=WINDOWS[1:])


@pytest.mark.parametrize("recipe", [MISTRAL, LLAMA], ids=lambda recipe: recipe.model_type)
def test_an_absent_head_size(recipe: Recipe, tmp_path: Path) -> None:
    for value in (..., None):
        assert {attention.head_dim for attention in read(recipe, head_dim=value).attentions} == {10}
    assert_states(changed(recipe, head_dim=...), tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "dims"),
    [
        ({}, 10),
        ({"partial_rotary_factor": ...}, 12),
        ({"partial_rotary_factor": 0.5}, 6),
        ({"partial_rotary_factor": ..., "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}}, 6),
        ({"rope_parameters": {"rope_theta": 300.0}}, 10),
    ],
)
def test_rotation_of_a_part_of_each_head(changes: dict[str, Any], dims: int, tmp_path: Path) -> None:
    """C2: the share is stated beside the rope parameters or among them."""
    assert {attention.rope and attention.rope.dims for attention in read(PHI3, **changes).attentions} == {dims}
    assert_states(changed(PHI3, **changes), tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor = 0.85 and 0.5 in rope_parameters",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5, expected a number from 0 to 1"),
        ({"partial_rotary_factor": True}, "partial_rotary_factor = True, expected"),
        ({"partial_rotary_factor": 0.8}, "rotary positions need an even head size, not 9"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope type 'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn' is not supported; supported: default"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            "rope type 'longrope' is not supported .it has two tables, and a text's length chooses between them",
        ),
        ({"rope_scaling": {"type": "su"}}, "rope type 'su' is not supported .it has two tables"),
    ],
)
def test_rotations_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolkitError, match=message):
        read(PHI3, **changes)


def test_stored_parts_stay_together(tmp_path: Path) -> None:
    """H2: one tensor for queries, keys and values, and one for both halves of the gated layer."""
    folder = checkpoint(tmp_path / "m", PHI3)
    assert_parity(PHI3, folder, [1, 2, 13, 26])
    rewrite(folder, lambda t: {n: v[:-1] if n == "layers.1.self_attn.qkv_proj.weight" else v for n, v in t.items()})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.qkv_proj\.weight' has shape"):
        encoder(PHI3, folder)


def test_norms_stand_behind_the_branches(tmp_path: Path) -> None:
    """D3: none before attention or the feed-forward layers; queries and keys as wholes."""
    model = encoder(OLMO2, checkpoint(tmp_path / "m", OLMO2))
    names = {name.split(".", 2)[2] for name, _ in model.blocks.named_parameters(prefix="blocks") if "norm" in name}
    assert names == {
        f"{n}.weight" for n in ("attention.q_norm", "attention.k_norm", "attention_out_norm", "mlp_out_norm")
    }
    assert model.state_dict()["blocks.0.attention.k_norm.weight"].shape == (24,)


@pytest.mark.parametrize("name", ["smollm3", "granite", "olmo2", "mistral", "phi3"])
def test_a_field_that_nobody_knows_is_reported(name: str) -> None:
    recipe = find_recipe(name).recipe
    assert recipe.read_config({**recipe.tiny, "surprise": 1})[1] == ["surprise"]

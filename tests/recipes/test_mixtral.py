"""What is particular to Mixtral."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.recipes.compare import assert_parity, assert_same_weights, checkpoint, encoder, read, rewrite
from toolkit.errors import CheckpointError
from toolkit.registry import find_recipe
from toolkit.spec import ExpertsSpec

RECIPE = find_recipe("mixtral").recipe
FIRST = "layers.0.block_sparse_moe."


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the hub's layout as transformers has them in memory."""
    others = {name: tensor for name, tensor in tensors.items() if ".block_sparse_moe." not in name}
    for layer in range(3):
        old, new = f"layers.{layer}.block_sparse_moe.", f"layers.{layer}.mlp."
        each = [{name: tensors[f"{old}experts.{e}.{name}.weight"] for name in ("w1", "w2", "w3")} for e in range(7)]
        others[new + "gate.weight"] = tensors[old + "gate.weight"]
        others[new + "experts.gate_up_proj"] = torch.stack([torch.cat((one["w1"], one["w3"])) for one in each])
        others[new + "experts.down_proj"] = torch.stack([one["w2"] for one in each])
    return others


def test_both_layouts_are_one_module(tmp_path: Path) -> None:
    """H2: the names of the hub, which save_pretrained writes too, and those of the module in transformers."""
    folder = checkpoint(tmp_path / "m", RECIPE)
    tensors = load_file(folder / "model.safetensors")
    assert FIRST + "experts.6.w3.weight" in tensors
    one_by_one = encoder(RECIPE, folder)
    ups, downs = (one_by_one.state_dict()[f"blocks.0.mlp.experts_{part}.weight"] for part in ("up", "down"))
    for name, ours in (("w1", ups.view(7, 2, 24, 40)[3, 0]), ("w3", ups.view(7, 2, 24, 40)[3, 1])):
        assert torch.equal(ours, tensors[f"{FIRST}experts.3.{name}.weight"])
    assert torch.equal(downs.view(7, 40, 24)[3], tensors[FIRST + "experts.3.w2.weight"])
    rewrite(folder, stacked)
    assert_same_weights(encoder(RECIPE, folder), one_by_one)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_local_experts": 3, "num_experts_per_tok": 1},
        {"num_local_experts": 3, "num_experts_per_tok": 3},
        {"sliding_window": None},
        {"num_key_value_heads": 4},
    ],
)
def test_shapes(changes: dict[str, Any], tmp_path: Path) -> None:
    assert_parity(RECIPE, checkpoint(tmp_path / "m", RECIPE, **changes), [1, 2, 13, 26])


def test_defaults() -> None:
    """Weights sum to one in any case, and without a word there is no window."""
    assert {b.mlp.experts for b in read(RECIPE).blocks} == {ExpertsSpec(count=7, chosen=3, normalise=True)}
    absent = read(RECIPE, num_local_experts=..., num_experts_per_tok=..., sliding_window=...)
    assert {b.mlp.experts for b in absent.blocks} == {ExpertsSpec(count=8, chosen=2, normalise=True)}
    assert {attention.reach for attention in absent.attentions} == {None}
    with pytest.raises(CheckpointError, match="num_experts_per_tok = 8, but num_local_experts = 7"):
        read(RECIPE, num_experts_per_tok=8)

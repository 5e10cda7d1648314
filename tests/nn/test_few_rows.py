"""Which models' decoding steps of few rows have kernels of their own, and what the compiler is told of their shapes."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import toolkit
from tests.tiny import decoder_recipes, make_decoder
from toolkit.artifact import Artifact
from toolkit.nn.few_rows import attend_step, can_fuse, fused_linear
from toolkit.recipe import Recipe

FUSED = {"gemma", "granite", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"}


@pytest.mark.parametrize("recipe", decoder_recipes(), ids=lambda recipe: recipe.label)
def test_blocks_like_llamas_are_fused(recipe: Recipe, tmp_path: Path) -> None:
    """Other norms, arrangements, plain feed-forwards and mixtures of experts go the general way."""
    toolkit.convert(str(make_decoder(tmp_path / "checkpoint", recipe)), tmp_path / "out", verify=False)
    blocks = Artifact.open(tmp_path / "out").manifest.spec.blocks
    assert all(map(can_fuse, blocks)) == (recipe.label in FUSED)


def test_shapes_for_the_compiler() -> None:
    with FakeTensorMode():
        x, weight = torch.empty(3, 8, dtype=torch.float16), torch.empty(10, 8, dtype=torch.float16)
        for gate, outputs in (("none", 10), ("first", 5), ("second", 5)):
            y = fused_linear(x, weight, None, None, 0.0, False, gate, "silu", None, 1.0)
            assert (y.shape, y.dtype) == ((3, outputs), torch.float16)
        qkv, cache = torch.empty(3, (6 + 2 * 2) * 4), torch.empty(9, 16, 2, 4)
        count = torch.empty(3, dtype=torch.int32)
        tables = torch.empty(5, 7, dtype=torch.int32)
        norm, turns = torch.empty(4), torch.empty(20, 2)
        heads = attend_step(
            qkv,
            norm,
            norm,
            1e-6,
            False,
            turns,
            turns,
            count,
            cache,
            cache.clone(),
            count.clone(),
            count,
            count,
            count,
            tables,
            count,
            6,
            0.5,
            -1,
            0.0,
        )
        assert heads.shape == (3, 6 * 4)

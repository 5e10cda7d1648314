"""M1: a conversion to float16 looks at the sizes of values first."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit
from tests.test_sparse import make_mlm
from tests.tiny import add_layer_mix, make_checkpoint
from toolkit.errors import UnsupportedError
from toolkit.registry import find_recipe


def change(folder: Path, name: str, edit: Callable[[torch.Tensor], object]) -> Path:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights[name])
    save_file(weights, file, {"format": "pt"})
    return folder


def grow(row: int, factor: float) -> Callable[[torch.Tensor], object]:
    def edit(tensor: torch.Tensor) -> None:
        tensor[row] *= factor

    return edit


def test_a_residual_beyond_float16_is_refused_by_name(tmp_path: Path) -> None:
    """ModernBERT-like pre-norm streams are not normalised between layers, so one row of an MLP can fill them."""
    folder = make_checkpoint(tmp_path / "source", find_recipe("modernbert").recipe)
    change(folder, "layers.0.mlp.Wo.weight", grow(3, 5e4))
    with pytest.raises(UnsupportedError, match=r"blocks\.\d\.?\S* reaches \d+,\d+, the largest float16 is 65,504"):
        toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)
    assert not (tmp_path / "out").exists()
    for dtype in ("bfloat16", "float32"):
        report = toolkit.convert(str(folder), tmp_path / dtype, dtype=dtype)
        assert report.parity.passed
        assert report.manifest.warnings == [w for w in report.manifest.warnings if "float16" not in w]


def test_values_near_the_limit_are_a_warning(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "source", find_recipe("modernbert").recipe)
    change(folder, "layers.0.mlp.Wo.weight", grow(3, 5e3))
    report = toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)
    (warning,) = [w for w in report.manifest.warnings if "float16" in w]
    assert warning.startswith("float16 is near its limit with this model: blocks.")


def test_ordinary_values_are_not_mentioned(bert_checkpoint: Path, tmp_path: Path) -> None:
    report = toolkit.convert(str(bert_checkpoint), tmp_path / "out", dtype="float16", verify=False)
    assert not [w for w in report.manifest.warnings if "float16" in w]


def test_values_before_an_activation_count(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A large negative value is gone behind a gelu; minus infinity there would be NaN."""
    folder = checkpoint()

    def edit(bias: torch.Tensor) -> None:
        bias[5] = -6.5e4  # float16 holds the bias, but not the sum

    change(folder, "encoder.layer.1.intermediate.dense.bias", edit)
    change(folder, "encoder.layer.1.intermediate.dense.weight", grow(5, 1e4))
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.mlp\.up reaches"):
        toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)


def test_what_experts_compute_counts(tmp_path: Path) -> None:
    """Before the activation of a gate that multiplies nothing."""
    folder = make_checkpoint(tmp_path / "source", find_recipe("qwen3_moe").recipe)
    for expert in range(7):
        change(folder, f"layers.3.mlp.experts.{expert}.up_proj.weight", grow(5, 0))
        change(folder, f"layers.3.mlp.experts.{expert}.gate_proj.weight", grow(5, 4e4))
    with pytest.raises(UnsupportedError, match=r"blocks\.3\.mlp\.experts_up reaches"):
        toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)


def fill_table(folder: Path, rows: slice) -> None:
    """float16 holds each table, but not the sum of these words with segment 0."""
    change(folder, "embeddings.word_embeddings.weight", lambda table: table[rows].fill_(5e4))
    change(folder, "embeddings.token_type_embeddings.weight", lambda table: table[0].fill_(2e4))


def test_special_tokens_are_looked_at(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Among random ids of a large vocabulary they do not turn up."""
    folder = checkpoint(overrides={"vocab_size": 5000})
    fill_table(folder, slice(2, 3))
    with pytest.raises(UnsupportedError, match="embeddings reaches"):
        toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)


def test_random_ids_are_looked_at(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Words that stand in no text of the probe."""
    folder = checkpoint()
    fill_table(folder, slice(40, None))
    with pytest.raises(UnsupportedError, match="embeddings reaches"):
        toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)


def test_a_head_on_tokens_counts(tmp_path: Path) -> None:
    folder = make_mlm(tmp_path / "mlm")
    change(folder, "cls.predictions.transform.LayerNorm.weight", grow(0, 6e4))
    change(folder, "bert.embeddings.word_embeddings.weight", grow(7, 1.5))
    with pytest.raises(UnsupportedError, match=r"head\.steps\.out reaches"):
        toolkit.convert(str(folder), tmp_path / "out", "sparse", "float16", verify=False)


def test_a_mean_over_layers_is_not_taken_for_a_value(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """It sums in float32: large weights are no large states."""
    folder = checkpoint()
    add_layer_mix(folder, [3e4, 2e4, 1e4])
    report = toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)
    assert not [w for w in report.manifest.warnings if "float16" in w]


def test_ids_beyond_the_table_are_left_out(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(overrides={"vocab_size": 10})
    report = toolkit.convert(str(folder), tmp_path / "out", dtype="float16", verify=False)
    assert report.manifest.dtype == "float16"

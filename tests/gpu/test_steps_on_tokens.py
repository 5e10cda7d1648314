"""On CUDA: sums over tokens of sparse embeddings, and means over layers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

import toolkit
from tests.tiny import add_layer_mix, heat, make_tokenizer, write_json
from toolkit.registry import find_recipe

TEXTS = ["the quick fox", "query doc text one two three", "a", "jumps over the lazy dog"]


def compare(folder: Path, out: Path, task: str) -> None:
    """Graphs on CUDA against plain execution on the CPU, in float32."""
    toolkit.convert(str(folder), out, task=task, verify=False)
    exact = toolkit.load(out, device="cpu", mode="eager").embed(TEXTS)
    for mode in ("eager", "graph"):
        runner = toolkit.load(out, device="cuda", mode=mode)
        for _ in range(2):
            assert (runner.embed(TEXTS) - exact).abs().max() < 1e-4 * exact.abs().max()
        assert torch.equal(runner.embed(TEXTS[:1]), runner.embed(TEXTS[:1]))
    assert runner.stats.graph_hits > 0
    assert runner.stats.eager_fallbacks == 0


@pytest.mark.parametrize("how", ["max", "sum"])
def test_sparse_embeddings(how: str, tmp_path: Path) -> None:
    recipe = find_recipe("bert").recipe
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**recipe.tiny))
    heat(model)
    model.save_pretrained(tmp_path / "mlm")
    make_tokenizer().save_pretrained(tmp_path / "mlm")
    kinds = [("", "Transformer"), ("1_SpladePooling", "SpladePooling")]
    modules = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for k, (path, kind) in enumerate(kinds)
    ]
    write_json(tmp_path / "mlm" / "modules.json", modules)
    write_json(tmp_path / "mlm" / "1_SpladePooling" / "config.json", {"pooling_strategy": how})
    compare(tmp_path / "mlm", tmp_path / "out", "sparse")


def test_a_mean_over_layers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint()
    add_layer_mix(folder, [0.5, 2.0, 0.1])
    compare(folder, tmp_path / "out", "embed")

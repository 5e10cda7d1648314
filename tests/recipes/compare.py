"""Converted modules beside the reference, without artifact, runner or tokenizer: checks of one family's quirks."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny import edit_json, make_checkpoint
from toolkit.attention import choose_backend
from toolkit.checkpoint import open_checkpoint
from toolkit.nn.model import Encoder, build_encoder, fill, part_groups, part_shapes
from toolkit.parity.references import TransformersReference
from toolkit.parity.rule import bound, max_abs
from toolkit.recipe import Recipe
from toolkit.spec import EncoderSpec
from toolkit.weights import load_weights

CPU = torch.device("cpu")


def read(recipe: Recipe, **changes: Any) -> EncoderSpec:
    """The specification of the tiny configuration after `changes`; `...` removes a field."""
    raw = {**recipe.tiny, **changes}
    return recipe.read_config({name: value for name, value in raw.items() if value is not ...})[0]


def read_all(recipe: Recipe, raw: Mapping[str, Any]) -> tuple[EncoderSpec, list[str]]:
    """The specification, and the fields that nobody knows."""
    result = recipe.read_config(raw)
    return result[0], result[-1]


def checkpoint(folder: Path, recipe: Recipe, **changes: Any) -> Path:
    """A heated checkpoint of the tiny configuration after `changes`."""
    return make_checkpoint(folder, recipe, overrides=changes, pooling=None)


def encoder(recipe: Recipe, folder: Path, dtype: torch.dtype = torch.float32) -> Encoder:
    """The module that the recipe makes of a checkpoint."""
    source = open_checkpoint(str(folder))
    spec = recipe.read_config(source.config)[0]
    model = build_encoder(spec, choose_backend(spec.attentions, CPU, dtype)[1])
    loaded = load_weights(
        source.tensors,
        rules=recipe.rules,
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected=part_shapes(model),
        dtype=dtype,
        groups=part_groups(model),
    )
    fill(model, loaded.state, CPU)
    return model


def packed(length: int) -> dict[str, Tensor]:
    """One sequence of random ids, as `Encoder.forward_ids` takes it."""
    ids = torch.randint(0, 61, (length,), generator=torch.Generator().manual_seed(length), dtype=torch.int32)
    return {
        "ids": ids,
        "positions": torch.arange(length, dtype=torch.int32),
        "segments": torch.zeros(length, dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
        "max_len": torch.tensor([length], dtype=torch.int32),
    }


def assert_parity(recipe: Recipe, folder: Path, lengths: Iterable[int]) -> None:
    """Token states are those of the reference, by the rule of the parity gate."""
    exact = TransformersReference(folder, torch.float64, CPU)
    same = TransformersReference(folder, torch.float32, CPU)
    model = encoder(recipe, folder)
    inputs = [packed(length) for length in lengths]
    expected = [exact.states(each["ids"].tolist(), None) for each in inputs]
    error, _ = max_abs([same.states(each["ids"].tolist(), None) for each in inputs], expected)
    with torch.inference_mode():
        ours, worst = max_abs([model.forward_ids(**each) for each in inputs], expected)
    assert ours <= bound(torch.float32, error, expected), f"case {worst}: {ours} against {error}"


def reaches(attentions: Iterable[nn.Module], run: Callable[[], object], token: int) -> list[list[int]]:
    """For each attention: the offsets at which its output changes when its input changes at `token` alone."""
    found: list[list[int]] = []
    for attention in attentions:
        seen: list[Tensor] = []
        for amount in (0.0, 1.0):
            hooks = _watch(attention, token, amount, seen)
            with torch.inference_mode():
                run()
            for hook in hooks:
                hook.remove()
        changed = (seen[0] != seen[1]).flatten(0, -2).any(-1)
        found.append([int(place) - token for place in changed.nonzero()])
    return found


def _watch(module: nn.Module, token: int, amount: float, seen: list[Tensor]) -> list[Any]:
    """Add `amount` to the module's input at `token`, and note its output."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = (kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]).clone()
        x[..., token, :] += amount
        return (x, *args[1:]), kwargs

    def after(_: nn.Module, args: object, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def both_reaches(recipe: Recipe, folder: Path, theirs: str, length: int) -> tuple[list[list[int]], list[list[int]]]:
    """The reach of each layer from the middle token: ours, and the reference's, whose layers hold `theirs`."""
    model, inputs = encoder(recipe, folder), packed(length)
    reference = TransformersReference(folder, torch.float32, CPU)
    ours = [getattr(model.blocks[name], "attention") for name in model.spec.schedule]  # noqa: B009
    expected = [getattr(layer, theirs) for layer in reference.model.layers]
    ids = inputs["ids"].tolist()
    return (
        reaches(ours, lambda: model.forward_ids(**inputs), length // 2),
        reaches(expected, lambda: reference.states(ids, None), length // 2),
    )


def rewrite(folder: Path, change: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], **fields: Any) -> Path:
    """Change the stored tensors and fields of the configuration."""
    file = folder / "model.safetensors"
    save_file({name: value.contiguous() for name, value in change(load_file(file)).items()}, file)
    edit_json(folder / "config.json", **fields)
    return folder


def assert_same_weights(ours: Encoder, other: Encoder) -> None:
    """Two modules are one, bit for bit."""
    mine, theirs = ours.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []

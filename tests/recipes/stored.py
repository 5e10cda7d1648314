"""Checkpoints rewritten into other stored forms, and the modules that come of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from toolkit.attention import choose_backend
from toolkit.batch import pack
from toolkit.checkpoint import open_checkpoint
from toolkit.inputs import Row
from toolkit.nn.model import Encoder, build_encoder, fill, part_shapes
from toolkit.recipe import Recipe
from toolkit.weights import load_weights

CPU = torch.device("cpu")

Tensors = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Tensors], Mapping[str, Tensor]]) -> None:
    """Store what `change` makes of the tensors."""
    file = folder / "model.safetensors"
    changed = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    file.unlink()
    save_file(changed, file, {"format": "pt"})


def respell(tensors: Tensors, names: Mapping[str, str], split: Mapping[str, tuple[str, ...]]) -> Tensors:
    """Replace parts of names, and cut tensors into equal parts whose names the mapping gives."""
    changed: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in names.items():
            name = name.replace(old, new)
        parts = next((p for p in split if f".{p}." in name), None)
        if parts is None:
            changed[name] = tensor
        else:
            for part, piece in zip(split[parts], tensor.chunk(len(split[parts])), strict=True):
                changed[name.replace(parts, part)] = piece
    return changed


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def load(folder: Path, recipe: Recipe) -> Encoder:
    """The module of a checkpoint, without an artifact."""
    checkpoint = open_checkpoint(str(folder))
    spec, _ = recipe.read_config(checkpoint.config)
    model = build_encoder(spec, choose_backend(spec.attentions, CPU, torch.float32)[1])
    weights = load_weights(
        checkpoint.tensors,
        rules=recipe.rules,
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected=part_shapes(model),
        dtype=torch.float32,
    )
    fill(model, weights.state, CPU)
    return model


def everything(model: Encoder) -> Tensors:
    """Parameters and all buffers, stored or not."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def assert_identical(ours: Encoder, theirs: Encoder) -> None:
    """One module, bitwise."""
    assert ours.spec == theirs.spec
    a, b = everything(ours), everything(theirs)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def states(model: Encoder, ids: Sequence[int], segments: Sequence[int] | None = None) -> Tensor:
    """Token states of one sequence."""
    row = Row(ids=np.array(ids, np.int32), segments=np.array(segments or [0] * len(ids), np.int32), embeds=())
    batch = pack([row], model.spec.embedding.position_start, model.spec.embedding.position_pad)
    with torch.inference_mode():
        return model.forward_ids(batch.ids, batch.positions, batch.segments, batch.cu_seqlens, batch.max_len)


def assert_inference_changes_nothing(model: Encoder) -> None:
    """Addresses and values of parameters and buffers, over forwards of growing length."""
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in everything(model).items()}
    for length in (1, 5, model.spec.usable_length):
        states(model, range(length))
    after = everything(model)
    assert after.keys() == before.keys()
    assert [k for k, (at, t) in before.items() if after[k].data_ptr() != at or not torch.equal(after[k], t)] == []

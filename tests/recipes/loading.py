"""A recipe's module beside the reference, from the same tensors, without folders in between."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig

from tests.tiny import build_model, heat
from toolkit.attention import choose_backend
from toolkit.batch import PackedBatch, pack, pack_embeds
from toolkit.checkpoint import TensorSet
from toolkit.errors import CheckpointError
from toolkit.inputs import Row
from toolkit.nn.model import Encoder, build_encoder, fill, part_groups, part_shapes
from toolkit.recipe import Recipe
from toolkit.spec import EncoderSpec
from toolkit.tensorfile import TensorInfo
from toolkit.weights import LoadedWeights, load_weights

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
LENGTHS = (5, 1, 9)


def read(recipe: Recipe, **config: Any) -> EncoderSpec:
    """The specification that the tiny configuration gives, with changes."""
    return recipe.read_config({**recipe.tiny, **config})[0]


def make_reference(recipe: Recipe, name: str | None = None, **config: Any) -> Any:
    """The heated reference in float64; `name` is another transformers class around the same base model."""
    torch.manual_seed(0)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    full = AutoConfig.for_model(**{**recipe.tiny, **config, **plain})
    maker: Any = getattr(transformers, name) if name else None
    model = maker(full) if maker is not None else build_model(recipe, full)
    heat(model)
    return model.double().eval()


def tensors_of(model: Any) -> Tensors:
    """What a checkpoint of the model would store; tied tensors stand under one name, as save_pretrained does it."""
    kept: Tensors = {}
    for name, tensor in model.state_dict().items():
        if all(tensor.data_ptr() != other.data_ptr() for other in kept.values()):
            kept[name] = tensor
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in kept.items()}


def load(recipe: Recipe, tensors: Mapping[str, Tensor], **config: Any) -> LoadedWeights:
    """Apply the recipe's rules."""
    info = {
        name: TensorInfo(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), file=None)  # type: ignore[arg-type]
        for name, tensor in tensors.items()
    }
    module = build(read(recipe, **config))
    return load_weights(
        TensorSet(info=info, read=dict(tensors).__getitem__),
        rules=recipe.rules,
        prefixes=recipe.prefixes,
        aliases=recipe.aliases,
        expected=part_shapes(module),
        dtype=torch.float32,
        groups=part_groups(module),
    )


def build(spec: EncoderSpec) -> Encoder:
    return build_encoder(spec, choose_backend(spec.attentions, CPU, torch.float32)[1])


def make_module(recipe: Recipe, tensors: Mapping[str, Tensor], **config: Any) -> Encoder:
    """Our module, filled."""
    module = build(read(recipe, **config))
    fill(module, load(recipe, tensors, **config).state, CPU)
    return module


def difference(reference: Any, module: Encoder, ids: Sequence[Sequence[int]], *, embeds: bool = False) -> float:
    """Max-abs difference between sequences packed together here and alone there, over ids or their embeddings.

    Segments go round through the table, if there is one.
    """
    spec, errors = module.spec.embedding, []
    segments = [[k % spec.segments if spec.segments else 0 for k in range(len(one))] for one in ids]
    pieces = [reference.get_input_embeddings()(torch.tensor(one)) for one in ids]
    rows = [
        Row(
            ids=np.array(one, np.int32),
            segments=np.array(kind, np.int32),
            embeds=((0, piece.detach().float()),) if embeds else (),
        )
        for one, kind, piece in zip(ids, segments, pieces, strict=True)
    ]
    with torch.inference_mode():
        if embeds:
            batch = pack_embeds(rows, spec.position_start, spec.width, torch.float32, CPU, spec.position_pad)
            packed = module.forward_embeds(*_places(batch), batch.embeds, batch.is_embed)
        else:
            packed = module.forward_ids(*_places(pack(rows, spec.position_start, spec.position_pad)))
        for one, kind, piece, ours in zip(ids, segments, pieces, packed.split([len(o) for o in ids]), strict=True):
            inputs: dict[str, Tensor] = {"attention_mask": torch.ones(1, len(one), dtype=torch.long)}
            inputs |= {"inputs_embeds": piece[None]} if embeds else {"input_ids": torch.tensor([list(one)])}
            if spec.segments:
                inputs["token_type_ids"] = torch.tensor([kind])
            errors.append(float((reference(**inputs).last_hidden_state[0] - ours).abs().max()))
    return max(errors)


def _places(batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return batch.ids, batch.positions, batch.segments, batch.cu_seqlens, batch.max_len


def some_ids(spec: EncoderSpec, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, spec.embedding.vocab_size, n).tolist() for n in lengths]


def matches(recipe: Recipe, lengths: Sequence[int] = LENGTHS, **config: Any) -> Encoder:
    """Check that our module and the reference agree on both paths, and return ours."""
    reference = make_reference(recipe, **config)
    module = make_module(recipe, tensors_of(reference), **config)
    ids = some_ids(module.spec, lengths)
    assert difference(reference, module, ids) < 1e-4
    assert difference(reference, module, ids, embeds=True) < 1e-4
    return module


def check_stored_forms(recipe: Recipe, *, prefix: str, others: Mapping[str, Tensor]) -> None:
    """Every class's names, wrappers, old spellings and `others` beside them give one identical module."""
    base = tensors_of(make_reference(recipe))
    expected = load(recipe, base).state
    plain = {name: t for name, t in base.items() if "pooler" not in name}
    old = {re.sub(r"LayerNorm\.(weight|bias)", _legacy, name): t for name, t in base.items()}
    forms: dict[str, Tensors] = {
        "plain": base,
        "no pooler": plain,
        "prefix": {prefix + name: t for name, t in base.items()},
        "module.": {"module." + name: t for name, t in base.items()},
        "_orig_mod. and prefix": {f"_orig_mod.{prefix}{name}": t for name, t in base.items()},
        "others": {**base, **others},
        "others and prefix": {prefix + name: t for name, t in {**base, **others}.items()},
    }
    if old.keys() != base.keys():
        forms["gamma and beta"] = old
    for name in recipe.classes:
        if hasattr(transformers, name):
            inside = tensors_of(make_reference(recipe, name))
            forms[name] = {key: base.get(key.removeprefix(prefix), tensor) for key, tensor in inside.items()}
    for form, tensors in forms.items():
        found = load(recipe, tensors)
        assert found.state.keys() == expected.keys(), form
        assert all(torch.equal(found.state[key], expected[key]) for key in expected), form
        assert sorted(entry.source for entry in found.audit) == sorted(tensors), form


def _legacy(found: re.Match[str]) -> str:
    return "LayerNorm." + {"weight": "gamma", "bias": "beta"}[found[1]]


def check_each_tensor_is_needed(recipe: Recipe) -> None:
    """A tensor that is missing is named; one that is left out on purpose may be missing."""
    tensors = tensors_of(make_reference(recipe))
    left_out = {entry.source for entry in load(recipe, tensors).audit if entry.action == "dropped"}
    for name in tensors.keys() - left_out:
        with pytest.raises(CheckpointError, match=re.escape(f"missing tensor: '{name}'")):
            load(recipe, {key: tensor for key, tensor in tensors.items() if key != name})
    for name in left_out:
        load(recipe, {key: tensor for key, tensor in tensors.items() if key != name})

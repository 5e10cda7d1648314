"""DeBERTa v2 and v3: the terms by distance at every length, stored forms, and what is refused."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from tests.recipes.stored import Tensors, assert_identical, load, prefixed, rewrite
from tests.tiny import heat, make_checkpoint
from toolkit.attention import choose_backend
from toolkit.checkpoint import TensorSet
from toolkit.conversion import convert
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.nn.model import Encoder, build_encoder, fill, part_shapes
from toolkit.parity import verify_folder
from toolkit.registry import find_recipe
from toolkit.spec import AttentionSpec, DisentangledSpec
from toolkit.tensorfile import TensorInfo
from toolkit.toolchain import why_no_compiler
from toolkit.weights import load_weights

RECIPE = find_recipe("deberta-v2").recipe
CPU = torch.device("cpu")
LENGTHS = (1, 5, 16, 30, 60)
TERMS = (["c2p"], ["p2c"], ["c2p", "p2c"])
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-12}


def reference_of(dtype: torch.dtype, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(**{**RECIPE.tiny, **changes})
    model = transformers.AutoModel.from_config(config)
    heat(model)
    return model.to(dtype).eval()


def ours_of(reference: Any, dtype: torch.dtype, **changes: Any) -> Encoder:
    spec = RECIPE.read_config({**RECIPE.tiny, **changes})[0]
    model = build_encoder(spec, choose_backend(spec.attentions, CPU, dtype)[1])
    stored = reference.state_dict()
    info = {k: TensorInfo(name=k, dtype=t.dtype, shape=tuple(t.shape), file=Path(k)) for k, t in stored.items()}
    tensors = TensorSet(info=info, read=lambda name: stored[name])
    rules = {"rules": RECIPE.rules, "prefixes": RECIPE.prefixes, "aliases": RECIPE.aliases}
    fill(model, load_weights(tensors, **rules, expected=part_shapes(model), dtype=dtype).state, CPU)
    return model


def draw(length: int, segments: int = 3) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(61, (length,), generator=generator)
    return ids.tolist(), torch.randint(segments, (length,), generator=generator).tolist()


def states(model: Encoder, rows: Sequence[tuple[list[int], list[int]]]) -> list[Tensor]:
    """Packed, in one batch."""
    ids, segments = ([x for row in rows for x in row[k]] for k in (0, 1))
    lengths = [len(row[0]) for row in rows]
    positions = [k for length in lengths for k in range(length)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = [torch.as_tensor(x).to(torch.int32) for x in (ids, positions, segments, offsets, [max(lengths)])]
    with torch.inference_mode():
        return list(model.forward_ids(*inputs).split(lengths))


def expected(reference: Any, row: tuple[list[int], list[int]], pad_to: int = 0) -> Tensor:
    length = len(row[0])
    ids, segments = ([*x, *[0] * (pad_to - length)] for x in row)
    mask = [1] * length + [0] * (pad_to - length)
    inputs = {"input_ids": ids, "token_type_ids": segments, "attention_mask": mask}
    with torch.inference_mode():
        return reference(**{k: torch.tensor([v]) for k, v in inputs.items()}).last_hidden_state[0, :length]


def assert_equal_at_every_length(dtype: torch.dtype, **changes: Any) -> None:
    reference = reference_of(dtype, **changes)
    model = ours_of(reference, dtype, **changes)
    rows = [draw(length) for length in LENGTHS]
    for row, packed in zip(rows, states(model, rows), strict=True):
        theirs = expected(reference, row)
        (alone,) = states(model, [row])
        assert (alone - theirs).abs().max() < BOUNDS[dtype], len(row[0])
        assert (packed - theirs).abs().max() < BOUNDS[dtype], len(row[0])


# The terms


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("buckets", [8, 9, -1])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("terms", TERMS, ids=" ".join)
def test_terms_by_distance(terms: list[str], shared: bool, buckets: int, dtype: torch.dtype) -> None:
    """I5: in float64 a wrong bucket, transposed index or scale cannot hide behind rounding."""
    assert_equal_at_every_length(dtype, pos_att_type=terms, share_att_key=shared, position_buckets=buckets)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_rel_ebd": "none"},
        {"max_relative_positions": -1},
        {"max_relative_positions": 0, "position_buckets": -1},
        {"max_relative_positions": 7, "position_buckets": -1},
        {"max_relative_positions": 500},
        {"position_biased_input": True},
        {"embedding_size": 40},
        {"hidden_act": "gelu_new"},
        {"attention_head_size": 8},
        {"relative_attention": False},
        {"relative_attention": False, "pos_att_type": ["p2c"], "position_biased_input": True},
        {"relative_attention": False, "pos_att_type": None},
        {"pos_att_type": None},
        {"pos_att_type": []},
        {"pos_att_type": ""},
        {"pos_att_type": " C2P |p2c"},
    ],
    ids=str,
)
def test_variants(changes: Mapping[str, Any]) -> None:
    """I5: the terms count in the scale even where relative attention is off."""
    assert_equal_at_every_length(torch.float64, **changes)


def test_padding_of_the_reference_changes_nothing() -> None:
    """I5: pad to 30."""
    reference = reference_of(torch.float64)
    row = draw(16)
    (alone,) = states(ours_of(reference, torch.float64), [row])
    assert (alone - expected(reference, row, pad_to=30)).abs().max() < 1e-12


@pytest.mark.skipif(why_no_compiler(CPU) is not None, reason="needs a compiler")
def test_compiled(tmp_path: Path) -> None:
    """I5: a length not seen at compilation; both terms, whose products have the number of tokens in them."""
    folder = make_checkpoint(tmp_path / "tiny", RECIPE)
    convert(str(folder), tmp_path / "out", verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["compile"])
    assert report.passed, report.summary()


def test_no_segment_table(tmp_path: Path) -> None:
    """G1, H3: type_vocab_size = 0, with a tokenizer that emits segment ids; the whole pipeline."""
    changes = {"type_vocab_size": 0, "position_biased_input": True, "embedding_size": 40, "share_att_key": True}
    folder = make_checkpoint(tmp_path / "tiny", RECIPE, overrides=changes)
    convert(str(folder), tmp_path / "out", verify=False)
    report = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


def test_usable_length_is_that_of_the_positions() -> None:
    """A3: also where no table of positions is added."""
    for biased, rows in ((True, 60), (False, 0)):
        spec = RECIPE.read_config({**RECIPE.tiny, "position_biased_input": biased})[0]
        assert (spec.usable_length, spec.embedding.positions) == (60, rows)


def attention_of(**changes: Any) -> AttentionSpec:
    return RECIPE.read_config({**RECIPE.tiny, **changes})[0].blocks[0].attention


def test_spec_by_hand() -> None:
    spec = RECIPE.read_config(RECIPE.tiny)[0]
    assert (spec.embedding.width, spec.embedding.projection, spec.embedding.projection_bias) == (
        24,
        "before_norm",
        False,
    )
    attention = attention_of(max_relative_positions=-1)
    assert attention.scale == pytest.approx((8 * 3) ** -0.5, rel=1e-7)
    assert attention_of(pos_att_type="p2c").scale == pytest.approx((8 * 2) ** -0.5, rel=1e-7)
    distance = attention.distance
    assert isinstance(distance, DisentangledSpec)
    assert (distance.span, distance.buckets, distance.max_distance) == (8, 8, 60)
    plain = attention_of(position_buckets=-1).distance
    assert isinstance(plain, DisentangledSpec)
    assert (plain.span, plain.buckets, plain.max_distance) == (40, 0, 40)


# Stored forms


def gamma_and_beta(tensors: Tensors) -> Tensors:
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    return {next((k.replace(a, b) for a, b in names.items() if k.endswith(a)), k): t for k, t in tensors.items()}


def as_published(tensors: Tensors) -> Tensors:
    """v3's checkpoints: leftovers of training, a table of positions that is not added, and heads."""
    word = tensors["embeddings.word_embeddings.weight"]
    extra = {
        "deberta.embeddings.word_embeddings._weight": word + 1,
        "deberta.embeddings.position_embeddings.weight": word[:60],
        "deberta.embeddings.position_embeddings._weight": word[:60],
        "deberta.embeddings.position_ids": torch.arange(60)[None],
    }
    heads = (
        "lm_predictions.lm_head.dense.weight mask_predictions.classifier.bias pooler.dense.bias cls.predictions.bias"
    )
    return prefixed(tensors, "deberta.") | extra | dict.fromkeys(heads.split(), word[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: prefixed(tensors, "deberta."),
        lambda tensors: prefixed(tensors, "module.deberta."),
        gamma_and_beta,
        lambda tensors: prefixed(gamma_and_beta(tensors), "deberta."),
        as_published,
    ],
)
def test_stored_forms_give_one_module(change: Any, tmp_path: Path) -> None:
    """H1, H2: prefixes, wrappers, old names of the norms, published checkpoints."""
    plain = make_checkpoint(tmp_path / "plain", RECIPE)
    other = make_checkpoint(tmp_path / "other", RECIPE)
    rewrite(other, change)
    assert_identical(load(other, RECIPE), load(plain, RECIPE))


def test_masked_language_model_is_the_same_module(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", RECIPE)
    base = transformers.AutoModel.from_pretrained(plain)
    for legacy in (True, False):
        base.config.legacy = legacy
        whole = transformers.DebertaV2ForMaskedLM(base.config)
        whole.deberta.load_state_dict(base.state_dict())
        whole.save_pretrained(tmp_path / f"{legacy}")
        assert_identical(load(tmp_path / f"{legacy}", RECIPE), load(plain, RECIPE))


@pytest.mark.parametrize("changes", [{"relative_attention": False}, {"pos_att_type": None}], ids=str)
def test_tensors_without_a_use_are_dropped_with_a_reason(changes: Mapping[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", RECIPE, overrides=changes)
    stored = load_file(folder / "model.safetensors")
    rewrite(folder, lambda tensors: {"encoder.rel_embeddings.weight": torch.ones(16, 40), **tensors})
    audit = {entry["source"]: entry for entry in convert(str(folder), tmp_path / "out", verify=False).manifest.audit}
    assert "encoder.LayerNorm.bias" in stored
    for name in ("encoder.rel_embeddings.weight", "encoder.LayerNorm.weight", "encoder.LayerNorm.bias"):
        assert audit[name]["action"] == "dropped"
        assert "no term that uses the distances" in audit[name]["why"]


@pytest.mark.parametrize(
    "name",
    [
        "embeddings.embed_proj.weight",
        "encoder.rel_embeddings.weight",
        "encoder.LayerNorm.bias",
        "encoder.layer.1.attention.self.value_proj.bias",
        "encoder.layer.2.attention.self.pos_key_proj.weight",
        "encoder.layer.0.attention.self.pos_query_proj.bias",
    ],
)
def test_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """H2: nothing is left random."""
    folder = make_checkpoint(tmp_path / "tiny", RECIPE)
    rewrite(folder, lambda tensors: {k: t for k, t in tensors.items() if k != name})
    with pytest.raises(CheckpointError, match=f"missing tensor: '{name}'"):
        load(folder, RECIPE)


def test_missing_tables(tmp_path: Path) -> None:
    """H2: positions that are added must be stored; a leftover of training does not stand for the words."""
    for table in ("embeddings.position_embeddings", "embeddings.word_embeddings"):
        folder = make_checkpoint(tmp_path / table, RECIPE, overrides={"position_biased_input": True})
        old, new = f"{table}.weight", f"{table}._weight"
        rewrite(folder, lambda tensors, old=old, new=new: {k.replace(old, new): t for k, t in tensors.items()})
        with pytest.raises(CheckpointError, match=f"missing tensor: '{old}'"):
            load(folder, RECIPE)


@pytest.mark.parametrize(
    "name", ["encoder.conv.conv.weight", "encoder.layer.0.attention.self.pos_proj.weight", "embeddings.mystery.weight"]
)
def test_unexpected_tensor_is_named(name: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", RECIPE)
    rewrite(folder, lambda tensors: {**tensors, name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=f"unexpected tensor: '{name}'"):
        load(folder, RECIPE)


def test_projections_that_the_config_does_not_describe(tmp_path: Path) -> None:
    """A term that is stored and not asked for is a contradiction, not a detail."""
    folder = make_checkpoint(tmp_path / "tiny", RECIPE)
    narrow = {**RECIPE.tiny, "share_att_key": True}
    (folder / "config.json").write_text(json.dumps(narrow), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"unexpected tensor: '.*pos_(key|query)_proj\.(bias|weight)'"):
        load(folder, RECIPE)


# What is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conv_kernel_size", 3),
        ("pos_att_type", ["c2p", "p2p"]),
        ("pos_att_type", "p2p"),
        ("pos_att_type", ["C2P"]),
        ("norm_rel_ebd", "batch_norm"),
        ("attention_head_size", 16),
        ("position_buckets", 1),
        ("position_buckets", 78),
        ("position_buckets", 200),
    ],
)
def test_unsupported_value_is_named(name: str, value: object) -> None:
    """I5: the variants that are not served, the convolution among them."""
    with pytest.raises(UnsupportedError) as caught:
        RECIPE.read_config({**RECIPE.tiny, name: value})
    assert f"config.json: {name} = {value!r} is not supported" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("relative_attention", "true"),
        ("position_biased_input", 0),
        ("share_att_key", None),
        ("pos_att_type", 3),
        ("pos_att_type", [1]),
        ("pos_att_type", {"c2p": 1}),
        ("position_buckets", 8.0),
        ("max_relative_positions", None),
        ("type_vocab_size", -1),
        ("embedding_size", 0),
    ],
)
def test_impossible_value_is_named(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"config.json: {name} = "):
        RECIPE.read_config({**RECIPE.tiny, name: value})

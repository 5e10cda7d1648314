"""What is particular to Qwen3's mixtures of experts."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.helpers import random_rows
from tests.recipes.compare import assert_parity, assert_same_weights, checkpoint, encoder, read, rewrite
from tests.recipes.loading import load, make_module, make_reference, tensors_of
from toolkit.batch import pack
from toolkit.compile import Sizes, compile_entry_point
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.nn.experts import ExpertMlp
from toolkit.nn.few_rows import can_fuse
from toolkit.nn.grouped import group_rows
from toolkit.nn.linear import pack_linears
from toolkit.nn.model import Encoder
from toolkit.parity import harness
from toolkit.registry import find_recipe
from toolkit.spec import EncoderSpec, ExpertsSpec

RECIPE = find_recipe("qwen3_moe").recipe
FIRST = "layers.1.mlp.experts."  # the first layer with experts


def sparse(spec: EncoderSpec) -> list[int]:
    return [k for k, block in enumerate(spec.blocks) if block.mlp.experts is not None]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [1, 3]),
        ({"decoder_sparse_step": ...}, [0, 1, 3]),
        ({"decoder_sparse_step": 1, "mlp_only_layers": None}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 3}, []),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [3, 0, 17]}, [1, 2]),
        ({"mlp_only_layers": [3]}, [1]),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    """Every n-th layer, but for those that are named."""
    spec = read(RECIPE, **changes)
    assert sparse(spec) == expected
    assert [block.mlp.width for block in spec.blocks] == [24 if k in expected else 36 for k in range(4)]
    if ... not in changes.values():
        assert_parity(RECIPE, checkpoint(tmp_path / "m", RECIPE, **changes), [1, 13])


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (3, 3), (7, 1), (17, 4)])
def test_numbers_of_experts(experts: int, chosen: int, normalise: bool, tmp_path: Path) -> None:
    changes = {"num_experts": experts, "num_experts_per_tok": chosen, "norm_topk_prob": normalise}
    mixtures = [block.mlp.experts for block in read(RECIPE, **changes).blocks]
    assert mixtures[1] == mixtures[3] == ExpertsSpec(count=experts, chosen=chosen, normalise=normalise)
    assert_parity(RECIPE, checkpoint(tmp_path / "m", RECIPE, **changes), [1, 2, 13, 26])


def test_tokens_go_different_ways(tmp_path: Path) -> None:
    """The fixture is of use: every expert is chosen by some token, and none by all."""
    model = encoder(RECIPE, checkpoint(tmp_path / "m", RECIPE))
    mixtures = [module for module in model.modules() if isinstance(module, ExpertMlp)]
    chosen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(module, ExpertMlp)
        chosen.append(module.route(args[0])[1])

    for mixture in mixtures:
        mixture.register_forward_pre_hook(note)
    ids = torch.arange(26, dtype=torch.int32)
    with torch.inference_mode():
        model.forward_ids(ids, ids, ids * 0, torch.tensor([0, 26], dtype=torch.int32), torch.tensor([26]))
    assert len(chosen) == 2
    for choice in chosen:
        counts = choice.flatten().bincount(minlength=7)
        assert counts.min() > 0
        assert counts.max() < 26


def test_windows_are_in_all_layers_or_none(tmp_path: Path) -> None:
    for changes, reach in (
        ({}, {5}),
        ({"use_sliding_window": False}, {None}),
        ({"sliding_window": None}, {None}),
        ({"max_window_layers": 2}, {5}),
    ):
        assert {attention.reach for attention in read(RECIPE, **changes).attentions} == reach
    assert {attention.reach for attention in read(RECIPE, sliding_window=...).attentions} == {4095}
    with pytest.raises(UnsupportedError, match="layer_types"):
        read(RECIPE, layer_types=["full_attention"] * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 8}, "num_experts_per_tok = 8, but num_experts = 7"),
        ({"num_experts": 0}, "num_experts = 0, expected an integer of at least 1"),
        ({"num_local_experts": 6}, "num_experts = 7 and num_local_experts = 6 contradict"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ({"mlp_only_layers": [1, -1]}, r"mlp_only_layers = \[1, -1\], expected a list of integers of at least 0"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers = \[True\], expected"),
        ({"mlp_only_layers": 1}, "mlp_only_layers = 1, expected"),
        ({"norm_topk_prob": None}, "norm_topk_prob = None, expected true or false"),
    ],
)
def test_fields_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(RECIPE, **changes)


def test_what_transformers_calls_the_number_of_experts() -> None:
    """It writes another name than the checkpoints on the hub have."""
    assert read(RECIPE, num_experts=..., num_local_experts=7) == read(RECIPE)


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the hub's layout as transformers has them in memory."""
    others = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for start in sorted({name.split("experts.")[0] + "experts." for name in tensors.keys() - others.keys()}):
        each = [{part: tensors[f"{start}{e}.{part}_proj.weight"] for part in ("gate", "up", "down")} for e in range(7)]
        others[start + "gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        others[start + "down_proj"] = torch.stack([one["down"] for one in each])
    return others


def test_both_layouts_are_one_module(tmp_path: Path) -> None:
    """H2: each expert by itself, as the hub and save_pretrained have them, or stacked, with and without a prefix."""
    folder = checkpoint(tmp_path / "m", RECIPE)
    tensors = load_file(folder / "model.safetensors")
    assert f"{FIRST}6.up_proj.weight" in tensors
    assert stacked(tensors)[FIRST + "gate_up_proj"].shape == (7, 48, 40)
    one_by_one = encoder(RECIPE, folder)
    ups, downs = (one_by_one.state_dict()[f"blocks.1.mlp.experts_{part}.weight"] for part in ("up", "down"))
    assert torch.equal(ups.view(7, 2, 24, 40)[3, 1], tensors[f"{FIRST}3.up_proj.weight"])
    assert torch.equal(downs.view(7, 40, 24)[3], tensors[f"{FIRST}3.down_proj.weight"])
    rewrite(folder, stacked)
    assert_same_weights(encoder(RECIPE, folder), one_by_one)
    rewrite(folder, lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()})
    assert_same_weights(encoder(RECIPE, folder), one_by_one)


@pytest.mark.parametrize("layout", [lambda tensors: tensors, stacked], ids=["one by one", "stacked"])
def test_each_tensor_is_needed(layout: Any, tmp_path: Path) -> None:
    """Names are those of the checkpoint's own layout."""
    tensors = layout(load_file(checkpoint(tmp_path / "m", RECIPE) / "model.safetensors"))
    for name in tensors:
        with pytest.raises(CheckpointError, match=re.escape(f"missing tensor: '{name}';")):
            load(RECIPE, {other: tensor for other, tensor in tensors.items() if other != name})
    audit = load(RECIPE, tensors).audit
    assert sorted(entry.source for entry in audit) == sorted(tensors)
    actions = {entry.action for entry in audit if ".experts." in entry.source}
    assert actions == {"loaded" if layout is stacked else "fused"}


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m", RECIPE)
    tensors = load_file(folder / "model.safetensors")
    down, up = FIRST + "2.down_proj.weight", FIRST + "2.up_proj.weight"
    both = stacked(tensors)
    cases: list[tuple[dict[str, Tensor], str]] = [
        ({**tensors, FIRST + "7.up_proj.weight": tensors[up]}, f"unexpected tensor: '{FIRST}7.up_proj.weight'"),
        ({**tensors, FIRST + "02.up_proj.weight": tensors[up]}, f"unexpected tensor: '{FIRST}02.up_proj.weight'"),
        ({**tensors, "layers.0.mlp.gate.weight": tensors["layers.1.mlp.gate.weight"]}, "'layers.0.mlp.gate.weight'"),
        ({**tensors, down: tensors[down].t().contiguous()}, f"tensor '{down}' has shape (24, 40)"),
        ({**tensors, up: tensors[up][:-1]}, f"tensor '{up}' has shape (23, 40)"),
        ({**tensors, FIRST + "down_proj": both[FIRST + "down_proj"]}, "are the same parameter: remove one"),
        ({**both, FIRST + "down_proj": both[FIRST + "down_proj"][:6]}, "down_proj' has shape (6, 40, 24)"),
        ({**both, FIRST + "down_proj": both[FIRST + "down_proj"].mT.contiguous()}, "down_proj' has shape (7, 24, 40)"),
        ({**both, FIRST + "down_proj": both[FIRST + "down_proj"].flatten(0, 1)}, "down_proj' has shape (280, 24)"),
        ({**tensors, up: tensors[up] * float("nan")}, f"tensor '{up}' holds NaN"),
    ]
    for given, message in cases:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load(RECIPE, given)
    with pytest.raises(CheckpointError, match=re.escape(f"unexpected tensor: '{FIRST}6.down_proj.weight'")):
        load(RECIPE, tensors, num_experts=6)
    with pytest.raises(CheckpointError, match=re.escape(f"missing tensor: '{FIRST}7.gate_proj.weight'")):
        load(RECIPE, tensors, num_experts=8)


def test_blocks_with_experts_are_no_blocks_for_few_rows() -> None:
    assert [can_fuse(block) for block in read(RECIPE).blocks] == [True, False, True, False]


def test_the_time_of_a_check_counts_a_tokens_experts() -> None:
    one, three = (harness._products(read(RECIPE, num_experts_per_tok=chosen)) for chosen in (1, 3))
    assert three - one == 2 * 2 * 3 * 40 * 24  # two layers, two experts more, three matrices


@pytest.fixture(scope="module")
def module() -> Encoder:
    return make_module(RECIPE, tensors_of(make_reference(RECIPE)))


SHAPES = [[5, 3], [1], [9], [2, 2], [], [0], [0, 0, 4], [24, 24, 24], [1] * 33]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("sizes", [Sizes.ANY, Sizes.MANY])
def test_no_shape_recompiles(sizes: Sizes, packed: bool) -> None:
    """J2: one graph for every number of tokens, however they are routed; 0 and 1 where sizes may be any."""
    model = make_module(RECIPE, tensors_of(make_reference(RECIPE)))
    if packed:
        pack_linears(model)
    compiled = compile_entry_point(model, "forward_ids", sizes)
    for seed, lengths in enumerate(SHAPES):
        if sizes is Sizes.MANY and (len(lengths) < 2 or sum(lengths) < 2):
            continue
        args = pack(random_rows(lengths, 61, seed), 0).encoder_args()
        with torch.inference_mode():
            eager = model.forward_ids(*args)
        ours = compiled(*args)
        assert ours.shape == eager.shape
        if ours.numel():
            assert (ours - eager).abs().max() < 1e-4
    assert compiled.compilations == 1
    assert compiled.graph is not None
    assert sum(node.target is group_rows._opoverload for node in compiled.graph.nodes) == 2


def test_the_tail_of_a_batch_reaches_no_other_row(module: Encoder) -> None:
    """K3: embeddings behind the last sequence are no numbers."""
    batch = pack(random_rows([5, 4], 61), 0)
    ids = torch.cat((batch.ids, torch.zeros(3, dtype=torch.int32)))
    places = torch.cat((batch.positions, torch.zeros(3, dtype=torch.int32)))
    embeds = module.embed_tokens(ids)
    embeds[9:] = float("nan")
    rest = (batch.cu_seqlens, batch.max_len, embeds, torch.ones(12, dtype=torch.bool))
    with torch.inference_mode():
        expected = module.forward_ids(*batch.encoder_args())
        ours = module.forward_embeds(ids, places, ids * 0, *rest)
    assert torch.allclose(ours[:9], expected, atol=1e-5)

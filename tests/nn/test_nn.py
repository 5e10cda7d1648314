import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from toolkit.nn.embeddings import Embeddings
from toolkit.nn.linear import (
    ActivatedLinear,
    FusedLinear,
    PackedLinear,
    apply_activation,
    can_pack,
    gelu_by_series,
    pack_linears,
)
from toolkit.spec import Activation, EmbeddingSpec, NormSpec

CPU = torch.device("cpu")


def embeddings(segments: int = 3) -> Embeddings:
    torch.manual_seed(0)
    norm = NormSpec(eps=1e-3)
    return Embeddings(EmbeddingSpec(vocab_size=11, width=6, positions=9, segments=segments, norm=norm), 6)


def test_unselected_nan_never_spreads() -> None:
    """K3: the selector selects; a blend would turn 0 × NaN into NaN."""
    layer = embeddings()
    ids, positions, segments = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2, 3], [0, 1, 2], [0, 2, 1]))
    embeds = torch.full((3, 6), float("nan"))
    embeds[1] = layer.token.weight[5]
    mixed = layer.from_embeds(embeds, torch.tensor([False, True, False]), ids, positions, segments)
    plain = layer.from_ids(torch.tensor([1, 5, 3], dtype=torch.int32), positions, segments)
    assert torch.equal(mixed, plain)


def test_embeds_path_equals_ids_path_bitwise() -> None:
    """L1: the seam is the token table's output."""
    layer = embeddings()
    ids, positions, segments = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2, 3], [0, 1, 2], [0, 2, 1]))
    embeds = layer.token(ids)
    by_embeds = layer.from_embeds(embeds, torch.ones(3, dtype=torch.bool), torch.zeros_like(ids), positions, segments)
    assert torch.equal(by_embeds, layer.from_ids(ids, positions, segments))


@pytest.mark.parametrize("features", [24, 384, 385, 1536])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "tanh"])
def test_packed_linear_equals_the_plain_one(activation: Activation, features: int) -> None:
    """One piece and several, an uneven split among them; no rows, one, many."""
    if not can_pack(CPU, torch.float32):
        pytest.skip("this torch has no oneDNN")
    torch.manual_seed(0)
    plain = ActivatedLinear(features, 40, True, activation)
    packed = PackedLinear(plain)
    for rows in (0, 1, 2, 17, 300):
        x = torch.randn(rows, features) * 3
        exact = apply_activation(x.double() @ plain.weight.double().T + plain.bias.double(), activation)
        assert packed(x).shape == (rows, 40)
        assert not rows or (packed(x) - exact).abs().max() < 1e-5


def test_packing_keeps_the_error_of_long_sums_down() -> None:
    """One chain over 3072 features would err by more than twice as much as F.linear."""
    if not can_pack(CPU, torch.float32):
        pytest.skip("this torch has no oneDNN")
    torch.manual_seed(0)
    plain, x = nn.Linear(3072, 64), torch.randn(256, 3072)
    exact = x.double() @ plain.weight.double().T + plain.bias.double()
    packed, reference = ((y - exact).pow(2).mean().sqrt() for y in (PackedLinear(plain)(x), plain(x)))
    assert packed < 1.8 * reference


def test_activations_are_what_transformers_means() -> None:
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    names = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
    names |= {"silu": "silu", "swish": "silu", "tanh": "tanh"}
    for theirs, ours in names.items():
        assert torch.allclose(ACT2FN[theirs](x), apply_activation(x, ours), atol=1e-12), theirs  # type: ignore[arg-type]


def test_pack_linears_reaches_every_layer_and_keeps_the_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FusedLinear(8, (4, 2, 2), True), nn.Sequential(nn.Linear(8, 8, bias=False)))
    packed = copy.deepcopy(model)
    pack_linears(packed)
    assert not [m for m in packed.modules() if isinstance(m, nn.Linear)]
    x = torch.randn(5, 8)
    assert torch.allclose(packed(x), model(x), atol=1e-6)


def test_packing_is_for_float32_on_the_cpu_only() -> None:
    assert not can_pack(CPU, torch.bfloat16)
    assert not can_pack(torch.device("cuda"), torch.float32)


def test_gelu_by_series_is_as_exact_as_torch_s_own() -> None:
    x = torch.cat((torch.linspace(-12, 12, 200_001), torch.tensor([0.0, -0.0, 1e30, -1e30])))
    exact = F.gelu(x.double())
    ours, torchs = (gelu_by_series(x).double() - exact).abs(), (F.gelu(x).double() - exact).abs()
    assert ours.max() <= max(torchs.max().item(), 4e-7)
    tail = (x > -4) & (x < -1)  # where 1 + erf cancels
    assert (ours[tail] / exact[tail].abs()).max() < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_gelu_rounds_once_and_avoids_erf_in_16_bits(dtype: torch.dtype) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x = torch.linspace(-6, 6, 10_001).to(dtype)
    compiled = torch.compile(lambda x: apply_activation(x, "gelu"), backend=backend, fullgraph=True)(x)
    by_erf = "gelu" in graphs[0].code
    assert by_erf is (dtype == torch.float32)
    if by_erf:
        assert torch.equal(compiled, F.gelu(x))
    else:
        assert torch.allclose(compiled.double(), F.gelu(x.double()), rtol=torch.finfo(dtype).eps, atol=5e-7)

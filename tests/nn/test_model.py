from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.helpers import CPU, random_rows, tiny_model
from tests.tiny import heat
from toolkit.attention import choose_backend
from toolkit.batch import pack
from toolkit.nn.attention import Places
from toolkit.nn.model import Encoder, build_encoder, part_shapes


def test_part_shapes_know_what_is_fused() -> None:
    shapes = part_shapes(tiny_model())
    assert shapes["blocks.0.attention.qkv.weight"] == ((40, 40), (40, 40), (40, 40))
    assert shapes["blocks.0.attention.qkv.bias"] == ((40,), (40,), (40,))
    assert shapes["blocks.0.mlp.up.weight"] == ((56, 40),)


def test_rows_do_not_see_each_other() -> None:
    """A1, B2: each sequence of a packed batch equals itself alone, whatever its neighbours are."""
    model = tiny_model()
    rows = random_rows([5, 1, 9, 24, 1, 2], model.spec.embedding.vocab_size)
    with torch.inference_mode():
        together = model.forward_ids(*pack(rows, 0).encoder_args()).split([len(row) for row in rows])
        for row, states in zip(rows, together, strict=True):
            assert torch.allclose(model.forward_ids(*pack([row], 0).encoder_args()), states, atol=1e-5)


def test_no_padding_reaches_a_linear_layer() -> None:
    model = tiny_model()
    rows = random_rows([5, 1, 9], model.spec.embedding.vocab_size)
    seen: list[int] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, output: seen.append(args[0].shape[0]))
    with torch.inference_mode():
        model.forward_ids(*pack(rows, 0).encoder_args())
    assert seen
    assert set(seen) == {15}


def test_inference_leaves_parameters_and_buffers_alone() -> None:
    """J4: addresses and values are the same before and after."""
    model = tiny_model()
    before = {name: (t.data_ptr(), t.clone()) for name, t in model.state_dict().items()}
    with torch.inference_mode():
        for lengths in ([3], [9, 24], [24] * 9):
            model.forward_ids(*pack(random_rows(lengths, model.spec.embedding.vocab_size), 0).encoder_args())
    after = model.state_dict()
    assert all(after[name].data_ptr() == at and torch.equal(after[name], t) for name, (at, t) in before.items())


def test_parallel_branches_both_read_the_layers_input() -> None:
    """By hand: x + scale × (attention(first norm of x) + feed-forward(second norm of x))."""
    spec = tiny_model().spec
    block = replace(spec.blocks[0], arrangement="parallel", residual_scale=0.3)
    backend = choose_backend(spec.attentions, CPU, torch.float32)[1]
    model: Encoder = build_encoder(replace(spec, blocks=(block,), schedule=("0",)), backend).to_empty(device="cpu")
    heat(model)
    layer: nn.Module = model.blocks["0"]
    seen: list[tuple[Tensor, Places]] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args))  # type: ignore[arg-type]
    with torch.inference_mode():
        found = model.forward_ids(*pack(random_rows([5, 1, 9], spec.embedding.vocab_size), 0).encoder_args())
        x, places = seen[0]
        wanted = x + 0.3 * layer.attention(layer.attention_norm(x), places) + 0.3 * layer.mlp(layer.mlp_norm(x))  # type: ignore[operator]
    assert (found - wanted).abs().max() < 1e-5
    assert (found - x).abs().max() > 0.1

import torch

from tests.helpers import random_rows, tiny_model
from toolkit.batch import pack
from toolkit.nn.model import part_shapes


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

import dataclasses

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

from tests.helpers import CPU, random_rows, tiny_model
from toolkit.batch import PackedBatch, pack, pack_embeds
from toolkit.compile import Sizes, compile_entry_point, supports_torch_compile
from toolkit.errors import BoundaryError, MissingDependencyError
from toolkit.inputs import Row
from toolkit.nn.linear import pack_linears
from toolkit.nn.model import Encoder

ENTRY_POINTS = ["forward_ids", "forward_embeds"]


def batch_for(name: str, lengths: list[int], model: Encoder, seed: int = 0) -> PackedBatch:
    rows = random_rows(lengths, model.spec.embedding.vocab_size, seed)
    if name == "forward_ids":
        return pack(rows, 0)
    batch = pack_embeds(rows, 0, model.spec.hidden, torch.float32, CPU)
    embeds = torch.randn(batch.tokens, model.spec.hidden, generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(batch, embeds=embeds, is_embed=torch.arange(batch.tokens) % 3 == 0)


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_embedding_lookups_are_in_the_fx_graph(name: str) -> None:
    """J1: the traced graph looks up token, segment and position tables, and is whole."""
    model = tiny_model()
    compiled = compile_entry_point(model, name, Sizes.ANY, backend="eager")
    compiled(*batch_for(name, [5, 3], model).encoder_args())
    assert compiled.graph is not None
    lookups = [node for node in compiled.graph.nodes if node.target is torch.nn.functional.embedding]
    indices = sorted(str(node.args[0].name) for node in lookups)
    assert [name.strip("l_") for name in indices] == ["ids", "positions", "segments"]
    attention = [node for node in compiled.graph.nodes if "sdpa_attention" in str(node.target)]
    assert len(attention) == len(model.spec.schedule)
    assert compiled.compilations == 1


class _Outside(nn.Module):
    """An encoder whose embedding layer is outside the boundary, as engines have it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_model()

    def forward_ids(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, cu_seqlens: Tensor, max_len: Tensor
    ) -> Tensor:
        return self.inner._layers(hidden, positions, cu_seqlens, max_len) + ids[:, None] * 0

    def forward_partly(
        self, ids: Tensor, positions: Tensor, segments: Tensor, cu_seqlens: Tensor, max_len: Tensor
    ) -> Tensor:
        return self.inner._layers(self.inner.embeddings.token(ids), positions, cu_seqlens, max_len)


def test_an_embedding_layer_outside_is_caught() -> None:
    decorated = supports_torch_compile(
        entry_points=("forward_ids", "forward_partly"), dynamic_first_dim=("ids", "hidden", "positions", "cu_seqlens")
    )(_Outside)
    model = decorated()
    batch = batch_for("forward_ids", [5, 3], model.inner)
    hidden = model.inner.embeddings.from_ids(batch.ids, batch.positions, batch.segments)
    outside = compile_entry_point(model, "forward_ids", Sizes.ANY, backend="eager")
    with pytest.raises(BoundaryError, match="no embedding lookup of `ids` inside"):
        outside(batch.ids, hidden, batch.positions, batch.cu_seqlens, batch.max_len)
    partly = compile_entry_point(model, "forward_partly", Sizes.ANY, backend="eager")
    with pytest.raises(BoundaryError, match="1 of 3 embedding tables"):
        partly(*batch.encoder_args())


def test_the_decorator_refuses_unfit_entry_points() -> None:
    class Optional(nn.Module):
        def forward_ids(self, ids: Tensor, embeds: Tensor | None = None) -> Tensor:
            return ids

        def forward_hidden(self, hidden: Tensor) -> Tensor:
            return hidden

    with pytest.raises(BoundaryError, match="'embeds' is optional"):
        supports_torch_compile(entry_points=("forward_ids",), dynamic_first_dim=("ids",))(Optional)
    with pytest.raises(BoundaryError, match="takes no `ids`"):
        supports_torch_compile(entry_points=("forward_hidden",), dynamic_first_dim=())(Optional)
    with pytest.raises(BoundaryError, match="no method 'forward_x'"):
        supports_torch_compile(entry_points=("forward_x",), dynamic_first_dim=())(Optional)


def test_an_undeclared_entry_point_is_refused() -> None:
    with pytest.raises(BoundaryError, match="not declared"):
        compile_entry_point(tiny_model(), "embed_tokens", Sizes.ANY, backend="eager")
    with pytest.raises(BoundaryError, match="not declared"):
        compile_entry_point(nn.Linear(2, 2), "forward", Sizes.ANY, backend="eager")


SHAPES = [[5, 3], [1], [9], [2, 2], [1, 1], [], [0], [0, 0, 4], [24, 24, 24], [1] * 33, [24], [3, 0, 1]]


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_no_shape_recompiles(name: str) -> None:
    """J2: 0 and 1 sequences and tokens, any mix of lengths; inductor, one graph, and equal to eager."""
    model = tiny_model()
    compiled = compile_entry_point(model, name, Sizes.ANY)
    for seed, lengths in enumerate(SHAPES):
        args = batch_for(name, lengths, model, seed).encoder_args()
        with torch.inference_mode():
            eager = getattr(model, name)(*args)
        ours = compiled(*args)
        assert ours.shape == eager.shape
        if ours.numel():
            assert (ours - eager).abs().max() < 1e-4
    assert compiled.compilations == 1


def test_buckets_do_not_recompile() -> None:
    model = tiny_model()
    compiled = compile_entry_point(model, "forward_ids", Sizes.MANY, backend="eager")
    for seed, lengths in enumerate([[24] * 9, [5, 3], [9], [2, 2], [1, 1], [24, 24, 24], [1] * 33]):
        compiled(*batch_for("forward_ids", lengths, model, seed).encoder_args())
    assert compiled.compilations == 1


def test_many_models_in_one_process() -> None:
    """Each model has its own compiled variants: the limit on recompiles is not shared."""
    for seed in range(12):
        model = tiny_model(seed)
        compiled = compile_entry_point(model, "forward_ids", Sizes.ANY, backend="eager")
        compiled(*batch_for("forward_ids", [4, 2], model).encoder_args())
        assert compiled.compilations == 1


@pytest.mark.parametrize("sizes", [Sizes.ANY, Sizes.MANY])
def test_models_of_other_sizes_do_not_disturb_each_other(sizes: Sizes) -> None:
    """What dynamo learns from one model (these sizes change) must not make another's weights dynamic."""
    for hidden in (40, 80, 120):
        model = tiny_model(hidden_size=hidden)
        pack_linears(model)
        compiled = compile_entry_point(model, "forward_ids", sizes)
        for lengths in ([5, 3], [9], [24, 2, 2]):
            compiled(*batch_for("forward_ids", lengths, model).encoder_args())
        assert compiled.compilations == 1
        assert compiled.graph is not None
        weights = [node for node in compiled.graph.find_nodes(op="placeholder") if "weights_0" in node.name]
        assert weights
        assert all(type(n) is int for node in weights for n in node.meta["example_value"].shape)


def test_an_entry_point_of_one_size_has_no_other() -> None:
    """Neither another size's entry point nor a second call makes a size dynamic."""
    model = tiny_model()
    for lengths in ([5], [9], [24]):
        compiled = compile_entry_point(model, "forward_ids", Sizes.ONE)
        for _ in range(2):
            compiled(*batch_for("forward_ids", lengths, model).encoder_args())
        assert compiled.compilations == 1
        assert compiled.graph is not None
        shapes = [node.meta["example_value"].shape for node in compiled.graph.find_nodes(op="placeholder")]
        assert all(type(n) is int for shape in shapes for n in shape)


def test_a_missing_compiler_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(MissingDependencyError, match="apt-get install"):
        compile_entry_point(tiny_model(), "forward_ids", Sizes.ANY)


def test_an_empty_row_is_a_row() -> None:
    empty = Row(ids=np.zeros(0, np.int32), segments=np.zeros(0, np.int32), embeds=())
    assert pack([empty], 0).sequences == 1


class _TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(9, 4), nn.Embedding(9, 4)

    def forward_hidden(self, ids: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """The position tables are inside, the token table is not."""
        return hidden + self.position(positions) + self.token(positions) + ids[:, None] * 0

    def forward_token_only(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.token(ids) + positions[:, None]

    def forward_keyword(self, ids: Tensor, *, positions: Tensor) -> Tensor:
        return self.token(ids)


def test_each_kind_of_lookup_is_missed() -> None:
    declared = ("forward_hidden", "forward_token_only")
    free = ("ids", "hidden", "positions")
    model = supports_torch_compile(entry_points=declared, dynamic_first_dim=free)(_TwoTables)()
    ids = torch.tensor([1, 2, 3], dtype=torch.int32)
    hidden = compile_entry_point(model, "forward_hidden", Sizes.ANY, backend="eager")
    with pytest.raises(BoundaryError, match="no embedding lookup of `ids`"):
        hidden(ids, torch.zeros(3, 4), ids.clone())
    partly = compile_entry_point(model, "forward_token_only", Sizes.ANY, backend="eager")
    with pytest.raises(BoundaryError, match="1 of 2 embedding tables"):
        partly(ids, ids.clone())
    with pytest.raises(BoundaryError, match="'positions' is optional"):
        supports_torch_compile(entry_points=("forward_keyword",), dynamic_first_dim=free)(_TwoTables)


def test_no_guard_on_the_first_batch_from_padded_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """J2: inductor's shape padding decides by the first size, and in some versions of torch guards it."""
    seen: list[bool] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        seen.append(inductor.shape_padding)
        return module

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: backend)
    model = tiny_model()
    compile_entry_point(model, "forward_ids", Sizes.MANY)(*batch_for("forward_ids", [5, 3], model).encoder_args())
    assert seen == [False]

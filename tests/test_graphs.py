"""The same GraphPair as on CUDA, with a checked replay: everything but the capture itself is tested here."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import CPU, random_rows, tiny_model
from toolkit.batch import EmbedsBatch, PackedBatch, pack, pack_embeds
from toolkit.errors import GraphError
from toolkit.graphs import Bucket, BucketLadder, GraphPair
from toolkit.nn.head import Output, build_head
from toolkit.nn.model import Encoder
from toolkit.steps import HeadSpec, NormalizeStep, PoolingStep

HEAD = build_head(
    HeadSpec(steps=(PoolingStep(modes=("mean",)), NormalizeStep(on="vectors")), width=40), CPU, skips=True
)


def with_head(model: Encoder, name: str):
    def run(*args: torch.Tensor) -> Output:
        states = getattr(model, name)(*args[:5], *args[7:])
        return HEAD(states, args[3], args[5])

    return run


def make_pair(model: Encoder, max_tokens: int = 96) -> GraphPair:
    return GraphPair(
        with_head(model, "forward_ids"),
        with_head(model, "forward_embeds"),
        ladder=BucketLadder.up_to(max_tokens, model.spec.usable_length),
        width=model.spec.hidden,
        dtype=torch.float32,
        device=CPU,
    )


def make_batch(model: Encoder, lengths: list[int], *, embeds: bool, seed: int = 0) -> PackedBatch:
    rows = random_rows(lengths, model.spec.embedding.vocab_size, seed)
    if not embeds:
        return pack(rows, 0)
    batch = pack_embeds(rows, 0, model.spec.hidden, torch.float32, CPU)
    values = torch.randn(batch.tokens, model.spec.hidden, generator=torch.Generator().manual_seed(seed))
    selected = torch.arange(batch.tokens) % 2 == seed % 2
    return replace(batch, embeds=values.masked_fill(~selected[:, None], float("nan")), is_embed=selected)


def eager(model: Encoder, batch: PackedBatch) -> Output:
    name = "forward_embeds" if isinstance(batch, EmbedsBatch) else "forward_ids"
    with torch.inference_mode():
        return with_head(model, name)(*batch.args())


def assert_equal(ours: Output, theirs: Output) -> None:
    assert ours.states.shape == theirs.states.shape
    assert ours.vectors.shape == theirs.vectors.shape
    assert torch.isfinite(ours.states).all()
    assert (ours.states - theirs.states).abs().max() < 1e-5
    assert (ours.vectors - theirs.vectors).abs().max() < 1e-6


def test_poisoned_buffers_change_nothing() -> None:
    """K3: big batch then small, segments then none, embeds then ids; every static input is garbage in between."""
    model, draw = tiny_model(), random.Random(0)
    pair = make_pair(model)
    for step in range(60):
        lengths = [draw.randint(1, 24) for _ in range(draw.choice([1, 2, 4]))]
        batch = make_batch(model, lengths, embeds=draw.random() < 0.5, seed=step)
        pair.poison()
        assert_equal(pair.run(batch), eager(model, batch))
    assert pair.stats.graph_hits
    assert pair.stats.embeds_graph_hits
    assert pair.stats.eager_fallbacks == 0


def test_every_static_input_is_written_or_reset() -> None:
    model = tiny_model()
    pair = make_pair(model)
    per_sequence = {"skip": [1, 0], "keys": [2, 1]}
    tensors = {name: torch.tensor(values, dtype=torch.int32) for name, values in per_sequence.items()}
    batch = replace(make_batch(model, [3, 2], embeds=True), **tensors)
    pair.run(batch)
    (graph,) = pair._graphs["embeds"].values()
    pair.poison()
    with torch.inference_mode():
        graph.inputs.write(batch)
    ids, positions, segments, cu_seqlens, _, skip, keys, embeds, is_embed = graph.inputs.tensors()
    assert skip.tolist() == [1, 0] + [0] * 6
    assert keys.tolist() == [2, 1] + [0] * 6
    assert ids[5:].abs().sum() == positions[5:].abs().sum() == segments[5:].abs().sum() == 0
    assert cu_seqlens.tolist() == [0, 3] + [5] * 7
    assert not is_embed[5:].any()
    assert torch.isnan(embeds[5:]).all()  # not selected: may hold anything


def test_results_own_their_memory() -> None:
    """K2."""
    model = tiny_model()
    pair = make_pair(model)
    batches = [make_batch(model, [4, 7], embeds=k % 2 == 1, seed=k) for k in range(6)]
    results = [pair.run(batch) for batch in batches]
    vectors = [pair.part(batch, "vectors") for batch in batches]
    for batch, result, vector in zip(batches, results, vectors, strict=True):
        assert_equal(result, eager(model, batch))
        assert torch.equal(vector, result.vectors)


def test_threads_may_share_a_pair() -> None:
    model = tiny_model()
    pair = make_pair(model)
    batches = [make_batch(model, [k % 20 + 1, 3], embeds=k % 2 == 1, seed=k) for k in range(40)]
    expected = [eager(model, batch) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        for ours, theirs in zip(pool.map(pair.run, batches * 4), expected * 4, strict=True):
            assert_equal(ours, theirs)


def test_a_moved_buffer_is_refused() -> None:
    model = tiny_model()
    pair = make_pair(model)
    batch = make_batch(model, [4], embeds=False)
    pair.run(batch)
    (graph,) = pair._graphs["ids"].values()
    buffers = graph.inputs._tensors
    buffers["ids"] = buffers["ids"].clone()
    with pytest.raises(GraphError, match="moved"):
        pair.run(batch)


def test_the_embeds_graph_exists_only_once_it_is_used() -> None:
    model = tiny_model()
    pair = make_pair(model)
    pair.warm_up()
    pair.run(make_batch(model, [4], embeds=False))
    assert pair.captured["embeds"] == []
    pair.run(make_batch(model, [4], embeds=True))
    assert len(pair.captured["embeds"]) == 1
    assert pair.stats.graph_hits == pair.stats.embeds_graph_hits == 1


def test_one_path_can_be_captured_anew() -> None:
    """K4."""
    model = tiny_model()
    pair = make_pair(model)
    ids, embeds = make_batch(model, [4, 9], embeds=False), make_batch(model, [4, 9], embeds=True)
    before = pair.run(ids), pair.run(embeds)
    pair.drop("embeds")
    after = pair.run(ids), pair.run(embeds)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a.states, b.states)


def test_a_batch_beyond_the_ladder_runs_and_is_counted() -> None:
    model = tiny_model()
    pair = make_pair(model, max_tokens=32)
    batch = make_batch(model, [24, 24], embeds=False)
    assert_equal(pair.run(batch), eager(model, batch))
    assert pair.stats.eager_fallbacks == 1
    assert pair.stats.graph_hits == 0
    with pytest.raises(GraphError, match="fits no bucket"):
        pair.prepare(batch)


def test_a_batch_of_nothing() -> None:
    model = tiny_model()
    pair = make_pair(model)
    empty = pair.run(make_batch(model, [], embeds=False))
    assert empty.states.shape == (0, 40)
    assert empty.vectors.shape == (0, 40)
    zero = pair.run(make_batch(model, [0, 3], embeds=False))
    assert zero.vectors[0].abs().sum() == 0


@given(
    tokens=st.integers(0, 3000),
    sequences=st.integers(0, 3000),
    max_len=st.integers(0, 600),
    top=st.integers(1, 2500),
    longest=st.integers(1, 512),
)
@settings(max_examples=300, deadline=None)
def test_a_bucket_holds_what_it_is_found_for(tokens: int, sequences: int, max_len: int, top: int, longest: int) -> None:
    ladder = BucketLadder.up_to(top, longest)
    bucket = ladder.find(tokens, sequences, max_len)
    if tokens > top or max_len > longest or sequences > max(tokens, 1) or max_len > tokens:
        assert bucket is None or tokens <= top
        return
    assert bucket is not None
    assert bucket.tokens >= tokens
    assert bucket.sequences >= sequences
    assert bucket.max_len >= max_len
    assert bucket.tokens <= top


def test_the_ladder_wastes_at_most_a_third() -> None:
    ladder = BucketLadder.up_to(65536, 512)
    assert ladder.tokens[0] == 32
    assert ladder.tokens[-1] == 65536
    assert all(b / a <= 1.5 for a, b in pairwise(ladder.tokens))
    assert ladder.find(65536, 980, 200) == Bucket(tokens=65536, sequences=1024, max_len=256)


def test_small_buckets_have_one_length() -> None:
    ladder = BucketLadder.up_to(2048, 512)
    assert {ladder.find(500, 4, n).max_len for n in (10, 130, 400)} == {512}  # type: ignore[union-attr]
    assert [ladder.find(1500, 4, n).max_len for n in (10, 130, 400)] == [128, 256, 512]  # type: ignore[union-attr]


def test_a_smaller_batch_leaves_nothing_of_a_larger_one() -> None:
    model = tiny_model()
    pair = make_pair(model)
    large = make_batch(model, [16, 16], embeds=True)
    assert isinstance(large, EmbedsBatch)
    ones = torch.ones(32, dtype=torch.int32)
    large = replace(large, ids=ones, segments=ones, is_embed=ones.bool(), embeds=torch.ones(32, 40))
    pair.run(large)
    (graph,) = pair._graphs["embeds"].values()
    pair.run(make_batch(model, [3], embeds=True))
    ids, positions, segments, cu_seqlens, max_len, _, _, _, is_embed = graph.inputs.tensors()
    assert ids[3:].tolist() == positions[3:].tolist() == segments[3:].tolist() == [0] * 29
    assert not is_embed[3:].any()
    assert cu_seqlens.tolist() == [0] + [3] * 8
    assert max_len.tolist() == [24]


def test_an_output_that_left_the_device_is_refused() -> None:
    model = tiny_model()
    calls: list[int] = []

    def leaves(ids: Tensor, *rest: Tensor) -> Output:
        calls.append(1)
        device = "cpu" if len(calls) == 1 else "meta"
        return Output(*(torch.empty(8, 4, device=device) for _ in range(3)))

    ladder = BucketLadder.up_to(32, 24)
    pair = GraphPair(leaves, leaves, ladder=ladder, width=4, dtype=torch.float32, device=CPU)
    with pytest.raises(GraphError, match="left the device"):
        pair.run(make_batch(model, [4], embeds=False))


def test_a_prepared_replay_sees_its_batch() -> None:
    model = tiny_model()
    pair = make_pair(model)
    batch = make_batch(model, [4, 7], embeds=False)
    expected = pair.run(batch)
    pair.run(make_batch(model, [5, 6], embeds=False, seed=3))
    replay = pair.prepare(batch)
    pair.stats.graph_hits = 0
    assert torch.equal(replay().states[:11], expected.states)
    assert pair.stats.graph_hits == 0


def test_default_buckets_and_warm_up_of_one() -> None:
    ladder = BucketLadder.up_to(2048, 512)
    default = ladder.default()
    assert [bucket.tokens for bucket in default] == sorted(ladder.tokens, reverse=True)
    assert default[0] == Bucket(tokens=2048, sequences=64, max_len=512)
    assert default[-1] == Bucket(tokens=32, sequences=8, max_len=32)
    assert ladder.find(1024, 4, 10) == Bucket(tokens=1024, sequences=16, max_len=512)
    assert ladder.find(1500, 4, 128) == Bucket(tokens=1536, sequences=24, max_len=128)
    assert ladder.find(600, 1, 512) is not None
    assert ladder.find(600, 1, 513) is None
    pair = make_pair(tiny_model())
    pair.warm_up([Bucket(tokens=48, sequences=8, max_len=24)])
    assert pair.captured == {"ids": [Bucket(tokens=48, sequences=8, max_len=24)], "embeds": []}


def test_drop_forgets_one_path_only() -> None:
    model = tiny_model()
    pair = make_pair(model)
    for embeds in (False, True):
        pair.run(make_batch(model, [4], embeds=embeds))
    pair.drop("embeds")
    assert len(pair.captured["ids"]) == 1
    assert pair.captured["embeds"] == []

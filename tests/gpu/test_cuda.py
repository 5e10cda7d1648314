"""On the GPU: parity in every mode, and that a captured graph is never wrong, whatever came before it."""

import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toolkit
from tests.test_scoring import make_classifier
from tests.tiny import embedding_recipes, make_checkpoint
from toolkit import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.attention import BACKENDS
from toolkit.devices import resolve_mode
from toolkit.graphs import _CudaReplay
from toolkit.inputs import Row, check_row
from toolkit.nn.head import Pooling
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.runner import Runner
from toolkit.toolchain import why_no_compiler


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_parity_in_every_mode(dtype: str, bert_checkpoint: Path, tmp_path: Path) -> None:
    report = toolkit.convert(str(bert_checkpoint), tmp_path / "out", dtype=dtype, device="cuda").parity
    assert report.passed, report.summary()
    assert {cell.mode for cell in report.cells} == {"eager", "compile", "graph"}


@pytest.mark.parametrize("recipe", embedding_recipes(), ids=lambda recipe: recipe.label)
def test_every_family_in_graphs(recipe: Recipe, tmp_path: Path) -> None:
    """bfloat16: ids, embeds and mixed inputs through captured graphs, beside the reference."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", recipe)
    toolkit.convert(str(checkpoint), tmp_path / "out", dtype="bfloat16", verify=False)
    report = verify_folder(tmp_path / "out", checkpoint, device="cuda", modes=["graph"])
    assert report.passed, report.summary()


def test_a_reranker_in_graphs(tmp_path: Path) -> None:
    """G3: pairs through the ids graph, the head and its activation in float32."""
    checkpoint = make_classifier(tmp_path / "checkpoint", find_recipe("bert").recipe)
    toolkit.convert(str(checkpoint), tmp_path / "out", dtype="bfloat16", verify=False)
    report = verify_folder(tmp_path / "out", checkpoint, device="cuda", modes=["graph"])
    assert report.passed, report.summary()


def random_rows(runner: Runner, draw: random.Random, count: int, embeds: bool) -> list[Row]:
    rows: list[Row] = []
    for _ in range(count):
        ids = [draw.randrange(runner.limits.vocab_size) for _ in range(draw.randint(1, runner.limits.length))]
        segments = [draw.randrange(runner.limits.segments) for _ in ids]
        if embeds and draw.random() < 0.7:
            cut = draw.randint(0, len(ids))
            table = runner.embed_tokens(ids)
            parts: list[TokenIds | PromptEmbeds] = []
            if cut:
                parts.append(TokenIds(ids[:cut], segments[:cut]))
            if cut < len(ids):
                parts.append(PromptEmbeds(table[cut:] + 0.25, segments[cut:]))
            rows.append(check_row(MixedPrompt(parts), runner.limits, "row"))
        else:
            rows.append(check_row(TokenIds(ids, segments), runner.limits, "row"))
    return rows


def test_poisoned_replays_equal_compiled_runs(cuda_artifact: Path) -> None:
    """K3, K4: poisoned buffers, random buckets, both graphs interleaved, foreign work between, re-capture."""
    graphs = toolkit.load(cuda_artifact, device="cuda", mode="graph")
    direct = toolkit.load(cuda_artifact, device="cuda", mode="compile")
    pair = graphs.graphs
    assert pair is not None
    draw = random.Random(0)
    tolerance = 1e-5 if direct.limits.dtype == torch.float32 else 0.05
    for step in range(200):
        rows = random_rows(graphs, draw, draw.choice([1, 2, 3, 9, 30, 90]), embeds=draw.random() < 0.5)
        batch = graphs.pack(rows)
        pair.poison()
        ours = graphs.run(batch)
        torch.randn(1000, 1000, device="cuda").matmul(torch.randn(1000, 1000, device="cuda"))
        theirs = direct.run(batch)
        assert torch.isfinite(ours.states).all()
        assert (ours.states - theirs.states).abs().max() <= tolerance
        assert (ours.vectors - theirs.vectors).abs().max() <= tolerance
        if step == 100:
            pair.drop("embeds")
    stats = graphs.stats
    assert stats.graph_hits
    assert stats.embeds_graph_hits
    assert stats.eager_fallbacks == 0
    assert stats.recompiles == direct.stats.recompiles == 0


def test_replays_are_bitwise_repeatable(cuda_artifact: Path) -> None:
    graphs = toolkit.load(cuda_artifact, device="cuda", mode="graph")
    rows = random_rows(graphs, random.Random(1), 20, embeds=True)
    batch = graphs.pack(rows)
    first = graphs.run(batch)
    graphs.run(graphs.pack(random_rows(graphs, random.Random(2), 60, embeds=True)))
    second = graphs.run(batch)
    assert torch.equal(first.states, second.states)
    assert torch.equal(first.vectors, second.vectors)


def test_results_own_their_memory(cuda_artifact: Path) -> None:
    """K2: a later replay does not change an earlier result."""
    runner = toolkit.load(cuda_artifact, device="cuda", mode="graph")
    draw = random.Random(3)
    batches = [runner.pack(random_rows(runner, draw, 4, embeds=k % 2 == 1)) for k in range(50)]
    results = [runner.run(batch) for batch in batches]
    copies = [result.states.clone() for result in results]
    for batch in reversed(batches):
        runner.run(batch)
    for result, copy in zip(results, copies, strict=True):
        assert torch.equal(result.states, copy)


def test_an_oversized_batch_is_counted_and_right(cuda_artifact: Path) -> None:
    graphs = toolkit.load(cuda_artifact, device="cuda", mode="graph", batch_tokens=32)
    direct = toolkit.load(cuda_artifact, device="cuda", mode="compile")
    batch = graphs.pack(random_rows(graphs, random.Random(4), 12, embeds=False))
    assert batch.tokens > 32
    ours, theirs = graphs.run(batch), direct.run(batch)
    assert graphs.stats.eager_fallbacks == 1
    assert (ours.vectors - theirs.vectors).abs().max() < 1e-2


def test_memory_is_flat(cuda_artifact: Path) -> None:
    runner = toolkit.load(cuda_artifact, device="cuda", mode="graph")
    draw = random.Random(5)
    batches = [runner.pack(random_rows(runner, draw, draw.randint(1, 60), embeds=k % 3 == 0)) for k in range(20)]
    for batch in batches * 2:
        runner.run(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for batch in batches * 20:
        runner.run(batch)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS if backend.device == "cuda"])
def test_every_backend_that_is_there(name: str, bert_checkpoint: Path, tmp_path: Path) -> None:
    backend = next(b for b in BACKENDS if b.name == name)
    if backend.why_unavailable() is not None:
        pytest.skip(str(backend.why_unavailable()))
    dtype = str(backend.dtypes[-1]).removeprefix("torch.")
    toolkit.convert(str(bert_checkpoint), tmp_path / "out", dtype=dtype, verify=False)
    ours = toolkit.load(tmp_path / "out", device="cuda", mode="graph", attention=name)
    assert ours.attention == name
    exact = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    inputs = [TokenIds(list(range(1, n))) for n in (2, 3, 9, 20, 25)]
    for a, b in zip(ours.token_states(inputs), exact.token_states(inputs), strict=True):
        assert (a - b).abs().max() < 0.25


def test_a_pool_whose_graphs_are_all_gone(cuda_artifact: Path) -> None:
    """K4: the embeds graph comes first, is dropped as the last of its pool, and is captured again."""
    runner = toolkit.load(cuda_artifact, device="cuda", mode="graph")
    pair = runner.graphs
    assert pair is not None
    soft = PromptEmbeds(runner.embed_tokens([3, 4, 5]))
    first = runner.embed(soft)
    pair.drop("embeds")
    assert pair.captured == {"ids": [], "embeds": []}
    assert torch.equal(runner.embed(soft), first)
    pair.drop("embeds")
    ids = runner.embed(TokenIds([3, 4, 5]))
    assert torch.equal(runner.embed(soft), first)
    assert (ids - first).abs().max() < 1e-2


def test_threads_on_streams_of_their_own_share_a_runner(cuda_artifact: Path) -> None:
    """The buffers are not written for one stream while another still reads them."""
    runner = toolkit.load(cuda_artifact, device="cuda", mode="graph")
    draw = random.Random(6)
    batches = [runner.pack(random_rows(runner, draw, 40, embeds=k % 2 == 0)) for k in range(8)]
    expected = [runner.run(batch).states.clone() for batch in batches]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(batch, states: torch.Tensor, number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results = [runner.run(batch).states for _ in range(50)]
            wrong.extend(number for result in results if not torch.equal(result, states))

    threads = [
        threading.Thread(target=work, args=(*pair, k)) for k, pair in enumerate(zip(batches, expected, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_capture_at_once(cuda_artifact: Path) -> None:
    """Two runners capture in two threads while a third thread allocates and synchronises.

    What torch does not allow in the third is random numbers on the device.
    """
    runners = [toolkit.load(cuda_artifact, device="cuda", mode="graph") for _ in range(2)]
    errors: list[BaseException] = []
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            torch.ones(256, 256, device="cuda").sum().item()

    def work(runner: Runner) -> None:
        try:
            for n in range(1, 20):
                runner.embed([TokenIds(list(range(1, n + 1)))] * n)
        except BaseException as error:
            errors.append(error)

    noise = threading.Thread(target=busy)
    threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
    for thread in (noise, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    noise.join()
    assert errors == []
    assert all(runner.stats.eager_fallbacks == 0 for runner in runners)


def test_without_a_c_compiler_the_mode_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    reason = why_no_compiler(torch.device("cuda"))
    assert reason is not None
    assert "apt-get install gcc" in reason
    with pytest.warns(UserWarning, match="no C compiler"):
        assert resolve_mode("auto", torch.device("cuda")) == "eager"
    assert Pooling(("mean",), torch.device("cuda")).fused is None


def test_load_chooses_graphs(cuda_artifact: Path) -> None:
    runner = toolkit.load(cuda_artifact)
    assert (runner.mode, runner.device.type) == ("graph", "cuda")


def test_verify_catches_a_changed_weight(bert_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    toolkit.convert(str(bert_checkpoint), tmp_path / "out", dtype="bfloat16", verify=False)
    file = tmp_path / "out" / "model.safetensors"
    weights = load_file(file)
    weights["blocks.1.mlp.down.bias"][3] += 1.0
    save_file(weights, file, {"format": "pt"})
    assert not verify_folder(tmp_path / "out", bert_checkpoint, device="cuda", modes=["graph"]).passed


def test_replays_do_not_need_the_workspace_of_the_stream() -> None:
    """K4: someone else releases cuBLAS's workspaces, and their memory goes to other tensors."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 16384, device="cuda").half() / 128, torch.randn(16384, 64, device="cuda").half()
    inputs: Any = SimpleNamespace(tensors=lambda: (x, w))
    with torch.inference_mode():
        replay = _CudaReplay(lambda a, b: a @ b, inputs, torch.cuda.graph_pool_handle())
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((2**22,), 7.0, device="cuda") for _ in range(64)]
    found = replay.replay().clone()
    assert torch.allclose(found.double(), x.double() @ w.double(), atol=1e-2)
    assert all(bool((other == 7).all()) for other in others)

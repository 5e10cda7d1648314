"""Two graphs over the same weights: one that takes ids, one that takes embeddings.

A captured graph reads fixed addresses and replays fixed launches. So every input lives in a persistent
buffer of its bucket, every replay writes all of it (the tail beyond the real tokens included), whatever a
launch bakes in is part of the bucket, and what is returned is a copy. On CUDA the capture is a CUDA graph;
on the CPU the same class runs the same callable on the same buffers, with the addresses checked.

Shape suffixes: T tokens, S sequences, D hidden size, V vector size.
"""

import bisect
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from toolkit.batch import Batch, EmbedsBatch, Field, PackedBatch
from toolkit.errors import GraphError

__all__ = ["AnyOutput", "Bucket", "BucketLadder", "GraphPair", "GraphStats", "Ladder", "on_device"]

# The start of a capture synchronises the device, which another thread's capture would not survive.
_one_capture = threading.Lock()


# Bytes. Inputs that share a block begin at places that compiled code need not tell apart: it would from 0 and 1 on.
_ALIGNMENT = 64


class AnyOutput(Protocol):
    """What an entry point returns: a named tuple of tensors."""

    def cut(self, tokens: int, sequences: int) -> Self:
        """Views of what belongs to the first so many tokens and sequences."""
        ...

    def __iter__(self) -> Iterator[Tensor]: ...


Out = TypeVar("Out", bound=AnyOutput)


class Ladder(Protocol):
    """The buckets there can be; see `BucketLadder`."""

    def find(self, tokens: int, sequences: int, max_len: int) -> "Bucket | None":
        """Return the smallest bucket that holds such a batch, or None."""
        ...

    def default(self) -> "list[Bucket]":
        """The buckets to capture ahead of use, largest first."""
        ...


Entry = Callable[..., Any]


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current one where that means something: kernels launch on the current CUDA device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True, order=True, kw_only=True)
class Bucket:
    """What a captured graph is made for: at most this many tokens and sequences, none longer than `max_len`."""

    tokens: int
    sequences: int
    max_len: int


@functools.cache
def _bucket(tokens: int, sequences: int, max_len: int) -> Bucket:
    return Bucket(tokens=tokens, sequences=sequences, max_len=max_len)


@dataclass(frozen=True, kw_only=True)
class BucketLadder:
    """The buckets there can be.

    Attributes:
        tokens: ascending token counts.
        longest: length limit of a sequence.
        tokens_per_sequence: a bucket holds one sequence for so many tokens; if a batch has more, the next,
            smaller ratio is taken. Attention launches for every sequence that a bucket could hold, so the
            capacity is kept close to the need. Ends in 1, so that any batch of non-empty sequences fits.
    """

    tokens: tuple[int, ...]
    longest: int
    tokens_per_sequence: tuple[int, ...] = (64, 32, 16, 4, 1)

    @classmethod
    def up_to(cls, max_tokens: int, longest: int) -> "BucketLadder":
        """Two steps an octave from 32 tokens: at most a third of a bucket is tail."""
        steps = (base << octave for octave in range(max_tokens.bit_length()) for base in (32, 48))
        tokens = sorted({step for step in steps if step < max_tokens} | {max_tokens})
        return cls(tokens=tuple(tokens), longest=longest)

    def find(self, tokens: int, sequences: int, max_len: int) -> Bucket | None:
        """Return the smallest bucket that holds such a batch, or None."""
        k = bisect.bisect_left(self.tokens, tokens)
        if k == len(self.tokens) or max_len > self.longest:
            return None
        size = self.tokens[k]
        for ratio in self.tokens_per_sequence:
            if sequences <= self._sequences(size, ratio):
                return _bucket(size, self._sequences(size, ratio), self._length(size, max_len))
        return None

    def default(self) -> list[Bucket]:
        """One bucket for each token count, largest first: sequences of middling number, any length."""
        ratio = self.tokens_per_sequence[len(self.tokens_per_sequence) // 3]
        return [_bucket(n, self._sequences(n, ratio), self._length(n, self.longest)) for n in reversed(self.tokens)]

    @staticmethod
    def _sequences(tokens: int, ratio: int) -> int:
        return min(max(tokens // ratio, 8), tokens)

    def _length(self, tokens: int, max_len: int) -> int:
        """Attention kernels launch per 128 queries: below that nothing is gained. Powers of two above.

        Small buckets have one length only, so that they have one graph.
        """
        bound = min(tokens, self.longest)
        if tokens <= 1024:
            return bound
        return min(bound, max(128, 1 << (max_len - 1).bit_length()))


@dataclass(kw_only=True)
class GraphStats:
    """Counters of a GraphPair."""

    graph_hits: int = 0
    embeds_graph_hits: int = 0
    eager_fallbacks: int = 0


class _Inputs:
    """The persistent input buffers of one bucket, for batches of one kind.

    The small ones share one block of bytes with a mirror on the host: a single copy writes them all, tail
    included, at every replay.
    """

    def __init__(self, kind: type[Batch], bucket: Bucket, device: torch.device, embeds: tuple[int, torch.dtype]):
        self._kind = kind
        counts = {"token": bucket.tokens, "sequence": bucket.sequences, "offset": bucket.sequences + 1}
        sizes = [-(-counts[field.per] * field.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for field in kind.FIELDS]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8, pin_memory=on_gpu)
        self._block = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if on_gpu else None
        self._mirrors: list[tuple[Field, np.ndarray]] = []
        self._tensors = {"max_len": torch.tensor([bucket.max_len], dtype=torch.int32)}
        for field, mine, mirror in zip(kind.FIELDS, self._block.split(sizes), self._host.split(sizes), strict=True):
            count = counts[field.per]
            self._tensors[field.name] = mine.view(field.dtype)[:count].fill_(field.tail or 0)
            self._mirrors.append((field, mirror.view(field.dtype)[:count].numpy()))
        if kind.PATH == "embeds":
            width, dtype = embeds
            self._tensors["embeds"] = torch.zeros(bucket.tokens, width, dtype=dtype, device=device)

    def write(self, batch: Batch) -> None:
        """Write the batch and reset the tail, as the fields say; embeddings that are not selected stay as they are."""
        assert isinstance(batch, self._kind)
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still be reading the host's mirror
        for field, mirror in self._mirrors:
            values = getattr(batch, field.name).numpy()
            mirror[: len(values)] = values
            mirror[len(values) :] = batch.tokens if field.tail is None else field.tail
        self._block.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if "embeds" in self._tensors:
            self._tensors["embeds"][: batch.tokens].copy_(getattr(batch, "embeds"))  # noqa: B009

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._tensors[name] for name in self._kind.ARGS)

    def poison(self) -> None:
        """Fill every buffer with values that must not survive a write (a test and canary aid)."""
        self._block.fill_(0x7F)
        if "embeds" in self._tensors:
            self._tensors["is_embed"].fill_(True)
            self._tensors["embeds"].fill_(float("nan"))


class _CudaReplay:
    """A CUDA graph of `entry` over the bucket's buffers."""

    def __init__(self, entry: Entry, inputs: _Inputs, pool: Any) -> None:
        self.inputs = inputs
        args = inputs.tensors()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # let compilers, autotuners and libraries allocate before the capture
            for _ in range(2):
                entry(*args)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # cuBLAS has a workspace for each stream, which anyone may release (inductor's own graphs do): with none there,
        # the capture gets one from the pool, which lives as long as the graph does.
        torch._C._cuda_clearCublasWorkspaces()
        # the stream is of this device (torch's default one is not, on a second device); other threads may go on
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._output = entry(*args)
        torch._C._cuda_clearCublasWorkspaces()

    def replay(self) -> Any:
        self._graph.replay()
        return self._output


class _CheckedReplay:
    """The CPU's stand-in for a captured graph: fixed input addresses, one output buffer that is overwritten."""

    def __init__(self, entry: Entry, inputs: _Inputs) -> None:
        self.inputs = inputs
        self._entry = entry
        self._args = inputs.tensors()
        self._addresses = [tensor.data_ptr() for tensor in self._args]
        first = entry(*self._args)
        self._output = type(first)(*(tensor.clone() for tensor in first))

    def replay(self) -> Any:
        if [tensor.data_ptr() for tensor in self.inputs.tensors()] != self._addresses:
            raise GraphError("a static input buffer moved since the capture: a replay would read stale memory")
        with torch.inference_mode():
            return self._run()

    def _run(self) -> Any:
        output = self._entry(*self._args)
        if any(tensor.device != self._args[0].device for tensor in output):
            raise GraphError("an output left the device during the replay")
        for mine, new in zip(self._output, output, strict=True):
            mine.copy_(new)
        return self._output


_Replay = _CudaReplay | _CheckedReplay


class GraphPair(Generic[Out]):
    """The ids graph and the embeds graph of one model, over a ladder of buckets and one memory pool.

    A bucket is captured on its first use (`warm_up` captures ids buckets ahead); the embeds graph exists only
    once a batch with embeddings has come. A batch that fits no bucket runs without a graph and is counted.
    Threads and CUDA streams may share a pair: one batch at a time is written, replayed and copied out.

    Args:
        run_ids: callable over the tensors of a batch of ids, in the order of its `ARGS`.
        run_embeds: callable over the tensors of a batch with embeddings.
        ladder: the buckets.
        embeds_ladder: those of batches with embeddings, if they are others.
        width: width of the seam.
        dtype: dtype of the embeddings.
        device: where the buffers live.
        batches: the kind of a batch of ids, and of one with embeddings.
    """

    def __init__(
        self,
        run_ids: Callable[..., Out],
        run_embeds: Callable[..., Out],
        *,
        ladder: Ladder,
        embeds_ladder: Ladder | None = None,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        batches: tuple[type[Batch], type[Batch]] = (PackedBatch, EmbedsBatch),
    ) -> None:
        self.ladder = ladder
        self._ladders = {"ids": ladder, "embeds": embeds_ladder or ladder}
        self.stats = GraphStats()
        self._runs: dict[str, Entry] = {"ids": run_ids, "embeds": run_embeds}
        self._kinds = {kind.PATH: kind for kind in batches}
        self._width, self._dtype, self._device = width, dtype, device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._primed: set[str] = set()
        self._graphs: dict[str, dict[Bucket, _Replay]] = {"ids": {}, "embeds": {}}

    @property
    def captured(self) -> dict[str, list[Bucket]]:
        """Buckets captured so far, by path."""
        with self._lock:
            return {path: sorted(graphs) for path, graphs in self._graphs.items()}

    def warm_up(self, buckets: list[Bucket] | None = None) -> None:
        """Capture ids buckets ahead of use, by default one for each token count of the ladder."""
        with self._turn():
            for bucket in buckets if buckets is not None else self.ladder.default():
                self._graph("ids", bucket)

    def run(self, batch: Batch) -> Out:
        """Run a batch through the graph of its kind.

        Returns:
            What belongs to the batch's T tokens and S sequences, in memory of its own.
        """
        with self._turn():
            output = self._replay(batch).cut(batch.tokens, batch.sequences)
            return type(output)(*(tensor.clone() for tensor in output))

    def part(self, batch: Batch, name: str) -> Tensor:
        """Like `run`, but only the one tensor of the output that is called `name`."""
        with self._turn():
            return getattr(self._replay(batch).cut(batch.tokens, batch.sequences), name).clone()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One caller at a time; on CUDA its stream waits for what the caller before it has queued."""
        with self._lock, torch.inference_mode(), on_device(self._device):
            if self._device.type == "cuda":
                stream = torch.cuda.current_stream()
                if self._stream is not None and self._stream != stream:
                    stream.wait_stream(self._stream)
                self._stream = stream
            yield

    def prepare(self, batch: Batch) -> Callable[[], Out]:
        """Write a batch into its bucket's buffers, and return the bare replay: for measuring and inspection.

        What the replay returns are the static outputs: the next replay overwrites them, and rows beyond the
        batch's are garbage.

        Raises:
            GraphError: the batch fits no bucket.
        """
        with self._turn():
            graph = self._find(batch)
            if graph is None:
                raise GraphError(f"a batch of {batch.tokens} tokens and {batch.sequences} sequences fits no bucket")
            graph.inputs.write(batch)
        return graph.replay

    def _replay(self, batch: Batch) -> Out:
        """Static outputs of the batch's bucket, valid until the next replay."""
        graph = self._find(batch)
        if graph is None:
            self.stats.eager_fallbacks += 1
            return self._runs[batch.PATH](*batch.to(self._device).args())
        graph.inputs.write(batch)
        output = graph.replay()
        if batch.PATH == "embeds":
            self.stats.embeds_graph_hits += 1
        else:
            self.stats.graph_hits += 1
        return output

    def _find(self, batch: Batch) -> _Replay | None:
        """The graph for a batch, captured now if it is the bucket's first; None if no bucket fits."""
        bucket = self._ladders[batch.PATH].find(batch.tokens, batch.sequences, int(batch.max_len))
        return None if bucket is None else self._graph(batch.PATH, bucket)

    def poison(self) -> None:
        """Overwrite every static input with garbage; a following `run` must not notice."""
        with self._turn():
            for graphs in self._graphs.values():
                for graph in graphs.values():
                    graph.inputs.poison()

    def drop(self, path: str) -> None:
        """Forget the captured graphs of a path ("ids" or "embeds"); they are captured anew on use."""
        with self._turn():
            self._graphs[path].clear()
            if self._device.type == "cuda" and not any(self._graphs.values()):
                self._pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be captured into again

    def _graph(self, path: str, bucket: Bucket) -> _Replay:
        graphs = self._graphs[path]
        if bucket not in graphs:
            graphs[bucket] = self._capture(path, bucket)
        return graphs[bucket]

    def _inputs(self, path: str, bucket: Bucket) -> _Inputs:
        return _Inputs(self._kinds[path], bucket, self._device, (self._width, self._dtype))

    def _capture(self, path: str, bucket: Bucket) -> _Replay:
        entry = self._runs[path]
        if self._device.type != "cuda":
            return _CheckedReplay(entry, self._inputs(path, bucket))
        with _one_capture:
            if path not in self._primed:
                # compilers tune their kernels for the first size they see: let it be the largest
                entry(*self._inputs(path, self._ladders[path].default()[0]).tensors())
                self._primed.add(path)
            return _CudaReplay(entry, self._inputs(path, bucket), self._pool)

"""What runs a packed batch: graphs (see `toolkit.graphs`), or the entry points directly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from toolkit.batch import Batch
from toolkit.graphs import AnyOutput, GraphStats, on_device

__all__ = ["Direct", "Executor", "RunnerStats"]

Out = TypeVar("Out", bound=AnyOutput)
Out_co = TypeVar("Out_co", bound=AnyOutput, covariant=True)


@dataclass(frozen=True, kw_only=True)
class RunnerStats:
    """What the runner did so far.

    Attributes:
        mode, device, attention: what was chosen when it was loaded.
        graph_hits, embeds_graph_hits: batches that went through the ids graph and the embeds graph.
        eager_fallbacks: batches that fitted no bucket.
        recompiles: compilations beyond the first of each entry point.
        captured: buckets captured so far, by path.
        bytes: bytes of the weights, and of the device memory that torch holds.
    """

    mode: str
    device: str
    attention: str
    graph_hits: int
    embeds_graph_hits: int
    eager_fallbacks: int
    recompiles: int
    captured: dict[str, list[dict[str, int]]]
    bytes: dict[str, int]


class Executor(Protocol[Out_co]):
    stats: GraphStats

    def run(self, batch: Batch) -> Out_co: ...

    def part(self, batch: Batch, name: str) -> Tensor: ...


class Direct(Generic[Out]):
    """Runs the entry points without graphs: mode eager and mode compile."""

    def __init__(self, run_ids: Callable[..., Out], run_embeds: Callable[..., Out], device: torch.device):
        self.stats = GraphStats()
        self._runs = {"ids": run_ids, "embeds": run_embeds}
        self._device = device

    def run(self, batch: Batch) -> Out:
        with torch.inference_mode(), on_device(self._device):
            return self._runs[batch.PATH](*batch.to(self._device).args())

    def part(self, batch: Batch, name: str) -> Tensor:
        return getattr(self.run(batch), name)

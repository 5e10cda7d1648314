"""What runs a packed batch: graphs (see `toolkit.graphs`), or the entry points directly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from toolkit.batch import EmbedsBatch, PackedBatch
from toolkit.graphs import GraphStats, on_device
from toolkit.nn.head import Output

__all__ = ["Direct", "Executor", "RunnerStats"]


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


class Executor(Protocol):
    stats: GraphStats

    def run(self, batch: PackedBatch) -> Output: ...

    def vectors(self, batch: PackedBatch) -> Tensor: ...


class Direct:
    """Runs the entry points without graphs: mode eager and mode compile."""

    def __init__(
        self,
        run_ids: Callable[..., Output],
        run_embeds: Callable[..., Output],
        device: torch.device,
    ):
        self.stats = GraphStats()
        self._run_ids, self._run_embeds, self._device = run_ids, run_embeds, device

    def run(self, batch: PackedBatch) -> Output:
        run = self._run_embeds if isinstance(batch, EmbedsBatch) else self._run_ids
        with torch.inference_mode(), on_device(self._device):
            return run(*batch.to(self._device).args())

    def vectors(self, batch: PackedBatch) -> Tensor:
        return self.run(batch).vectors

"""What every loaded artifact has: weights in a module, compiled entry points, an executor, counters."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Generic

import torch
from torch import Tensor, nn

from toolkit.artifact import Artifact
from toolkit.batch import Batch
from toolkit.compile import CompiledEntryPoint, Sizes, compile_entry_point
from toolkit.errors import UnsupportedError
from toolkit.executor import Direct, Executor, Out, RunnerStats
from toolkit.graphs import GraphPair, Ladder
from toolkit.inputs import Limits, TokenIds, check_row
from toolkit.nn.linear import can_pack, pack_linears
from toolkit.nn.model import LayerStack, fill

__all__ = ["Loaded"]


class Loaded(Generic[Out]):
    """A module with its weights, on a device, behind entry points of a mode. Runners build on it.

    Args:
        artifact: what is loaded.
        model: the module, on the meta device.
        head: a head beside it, if it is not part of the module; likewise.
        device, mode: where and how it runs.
        attention: the name of its backend.
    """

    _executor: Executor[Out]

    def __init__(
        self,
        artifact: Artifact,
        model: LayerStack,
        head: nn.Module | None,
        *,
        device: torch.device,
        mode: str,
        attention: str,
    ) -> None:
        manifest = artifact.manifest
        self.artifact, self.device, self.mode, self.attention = artifact, device, mode, attention
        self._stack = model
        parts = nn.ModuleDict({"encoder": model} if head is None else {"encoder": model, "head": head})
        stored = {name.removeprefix("encoder."): name for name, _ in parts.named_parameters()}
        weights = artifact.weights({name: parts.get_parameter(own).shape for name, own in stored.items()})
        fill(parts, {stored[name]: weight for name, weight in weights.items()}, device)
        self._weight_bytes = sum(p.nbytes for p in parts.parameters())
        if can_pack(device, artifact.dtype):
            pack_linears(model)
        self.limits = Limits(
            vocab_size=manifest.spec.embedding.vocab_size,
            segments=manifest.spec.embedding.segments,
            width=manifest.seam_width,
            length=manifest.usable_length,
            dtype=artifact.dtype,
        )
        self._compiled: dict[str, CompiledEntryPoint] = {}

    def embed_tokens(self, ids: TokenIds | Sequence[int] | Tensor) -> Tensor:
        """The seam: what `PromptEmbeds` callers must pass for these ids. [tokens, seam width], on the device."""
        row = check_row(ids if isinstance(ids, TokenIds) else TokenIds(ids), self.limits, "ids")  # type: ignore[arg-type]
        with torch.no_grad():
            return self._stack.embed_tokens(torch.from_numpy(row.ids).to(self.device))

    @property
    def graphs(self) -> GraphPair[Out] | None:
        """The graphs of mode graph; None in the other modes."""
        return self._executor if isinstance(self._executor, GraphPair) else None

    def _counters(self) -> dict[str, Any]:
        """The fields of RunnerStats."""
        captured = self.graphs.captured if self.graphs is not None else {}
        cuda = self.device.type == "cuda"
        return {
            "mode": self.mode,
            "device": str(self.device),
            "attention": self.attention,
            "graph_hits": self._executor.stats.graph_hits,
            "embeds_graph_hits": self._executor.stats.embeds_graph_hits,
            "eager_fallbacks": self._executor.stats.eager_fallbacks,
            "recompiles": sum(max(entry.compilations - 1, 0) for entry in self._compiled.values()),
            "captured": {path: [asdict(bucket) for bucket in buckets] for path, buckets in captured.items()},
            "bytes": {
                "weights": self._weight_bytes,
                "device": torch.cuda.memory_reserved(self.device) if cuda else 0,
            },
        }

    @property
    def stats(self) -> RunnerStats:
        """A snapshot of the counters."""
        return RunnerStats(**self._counters())

    def _entry_point(self, name: str, sizes: Sizes | None = None, label: str = "") -> Callable[..., Any]:
        """The entry point as the mode has it; by default graphs have buckets of two or more tokens.

        `label` tells those apart that are compiled from one method.
        """
        if self.mode == "eager":
            return getattr(self._stack, name)
        sizes = sizes or (Sizes.MANY if self.mode == "graph" else Sizes.ANY)
        self._compiled[name + label] = compile_entry_point(self._stack, name, sizes)
        return self._compiled[name + label]

    def _make_executor(
        self,
        ids: Callable[..., Out],
        embeds: Callable[..., Out],
        ladder: Ladder,
        batches: tuple[type[Batch], type[Batch]],
        embeds_ladder: Ladder | None = None,
    ) -> Executor[Out]:
        if self.mode != "graph":
            return Direct(ids, embeds, self.device)
        return GraphPair(
            ids,
            embeds,
            ladder=ladder,
            embeds_ladder=embeds_ladder,
            width=self.limits.width,
            dtype=self.limits.dtype,
            device=self.device,
            batches=batches,
        )

    def _wrong_task(self, method: str, task: str) -> UnsupportedError:
        return UnsupportedError(
            f"{method} needs an artifact of task {task!r}; {self.artifact.folder} was converted for "
            f"{self.artifact.manifest.task!r}"
        )

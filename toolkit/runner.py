"""Run a converted module: inputs → rows → packed batches → graph → vectors or states, in the caller's order."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from toolkit.artifact import Artifact
from toolkit.attention import choose_backend
from toolkit.batch import EmbedsBatch, PackedBatch, pack, pack_embeds
from toolkit.compile import CompiledEntryPoint, Sizes, compile_entry_point
from toolkit.errors import InputError, UnsupportedError
from toolkit.graphs import BucketLadder, GraphOutput, GraphPair, GraphStats, on_device
from toolkit.inputs import Limits, MixedPrompt, PromptEmbeds, Row, RowInput, TokenIds, check_row
from toolkit.nn.linear import can_pack, pack_linears
from toolkit.nn.model import build_encoder, fill
from toolkit.nn.pooling import Pooler
from toolkit.tokenizer import TextEncoder
from toolkit.toolchain import why_no_compiler

__all__ = ["MODES", "Input", "Runner", "RunnerStats", "best_mode", "load", "resolve_device", "resolve_mode"]

Input = str | RowInput
MODES = ("eager", "compile", "graph")

_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 65536
# Up to so many tokens a forward pass costs about the same, so one mixed batch beats two.
_ONE_BATCH_TOKENS = 1024


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


class _Executor(Protocol):
    stats: GraphStats

    def run(self, batch: PackedBatch) -> GraphOutput: ...

    def vectors(self, batch: PackedBatch) -> Tensor: ...


class _Direct:
    """Runs the entry points without graphs: mode eager and mode compile."""

    def __init__(
        self,
        run_ids: Callable[..., GraphOutput],
        run_embeds: Callable[..., GraphOutput],
        device: torch.device,
    ):
        self.stats = GraphStats()
        self._run_ids, self._run_embeds, self._device = run_ids, run_embeds, device

    def run(self, batch: PackedBatch) -> GraphOutput:
        run = self._run_embeds if isinstance(batch, EmbedsBatch) else self._run_ids
        with torch.inference_mode(), on_device(self._device):
            return run(*batch.to(self._device).args())

    def vectors(self, batch: PackedBatch) -> Tensor:
        return self.run(batch).vectors


class Runner:
    """A loaded artifact. Made by `toolkit.load`.

    An input is a text, a `TokenIds`, a `PromptEmbeds` or a `MixedPrompt`; one call may mix all four.
    """

    def __init__(
        self, artifact: Artifact, *, device: torch.device, mode: str, attention: str, batch_tokens: int | None
    ) -> None:
        manifest = artifact.manifest
        self.artifact, self.device, self.mode = artifact, device, mode
        self.attention, backend = choose_backend(manifest.spec.attentions, device, artifact.dtype, attention)
        self.model = build_encoder(manifest.spec, backend)
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        fill(self.model, artifact.weights(shapes), device)
        self._weight_bytes = sum(p.nbytes for p in self.model.parameters())
        if can_pack(device, artifact.dtype):
            pack_linears(self.model)
        self.limits = Limits(
            vocab_size=manifest.spec.embedding.vocab_size,
            segments=manifest.spec.embedding.segments,
            width=manifest.seam_width,
            length=manifest.usable_length,
            dtype=artifact.dtype,
        )
        self._texts = TextEncoder(artifact.folder / "tokenizer.json", manifest.tokenizer, self.limits)
        default = _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS
        self.batch_tokens = max(batch_tokens or default, manifest.usable_length)
        self._compiled: dict[str, CompiledEntryPoint] = {}
        self._executor = self._build_executor()

    def embed(
        self,
        inputs: Input | Sequence[Input],
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
    ) -> Tensor:
        """Embed inputs as sentence-transformers' `encode` does.

        Args:
            inputs: one input or a sequence of them. Prompts apply to texts only.
            prompt_name: a prompt of the checkpoint, put in front of every text; default: the checkpoint's.
            prompt: a text to put in front instead; the empty string switches prompts off.
            truncate_dim: keep the first so many values of each vector (not normalised again).

        Returns:
            float32 [inputs, dim] on the CPU, in the order of the inputs.

        Raises:
            InputError: an input, a prompt name or `truncate_dim` is not acceptable.
        """
        dim = self.artifact.manifest.spec.hidden
        if truncate_dim is not None and (type(truncate_dim) is not int or not 1 <= truncate_dim <= dim):
            raise InputError(f"truncate_dim = {truncate_dim!r}, expected a whole number, 1 … {dim}")
        rows = self.rows(inputs, self.artifact.manifest.pipeline.prompt(prompt_name, prompt))
        result = torch.empty(len(rows), dim, device=self.device)
        order: list[int] = []
        for members, batch in self._batches(rows):
            result[len(order) : len(order) + len(members)] = self._executor.vectors(batch)
            order += members
        unsorted = torch.zeros(len(rows), dim)  # rows without tokens stay zero
        unsorted[order] = result[: len(order)].cpu()
        return unsorted[:, :truncate_dim].contiguous() if truncate_dim is not None else unsorted

    def token_states(
        self, inputs: Input | Sequence[Input], prompt_name: str | None = None, prompt: str | None = None
    ) -> list[Tensor]:
        """Return the last layer's states of each input's tokens: [tokens, hidden] each, on the CPU."""
        rows = self.rows(inputs, self.artifact.manifest.pipeline.prompt(prompt_name, prompt))
        states: list[Tensor] = [torch.empty(0, self.artifact.manifest.spec.hidden, dtype=self.limits.dtype)] * len(rows)
        for members, batch in self._batches(rows):
            pieces = self._executor.run(batch).states.cpu().split(batch.cu_seqlens.diff().tolist())
            for member, piece in zip(members, pieces, strict=True):
                states[member] = piece.clone()
        return states

    def embed_tokens(self, ids: TokenIds | Sequence[int] | Tensor) -> Tensor:
        """The seam: what `PromptEmbeds` callers must pass for these ids. [tokens, seam width], on the device."""
        row = check_row(ids if isinstance(ids, TokenIds) else TokenIds(ids), self.limits, "ids")  # type: ignore[arg-type]
        with torch.no_grad():
            return self.model.embed_tokens(torch.from_numpy(row.ids).to(self.device))

    def score(self, pairs: Sequence[tuple[str, str]], activation: bool = True) -> Tensor:
        """Score pairs of texts; needs an artifact of task `rerank`."""
        raise self._wrong_task("score", "rerank")

    def classify(self, inputs: Input | Sequence[Input]) -> Any:
        """Classify inputs; needs an artifact of task `classify`."""
        raise self._wrong_task("classify", "classify")

    def generate(self, inputs: Input | Sequence[Input], max_new_tokens: int, **options: Any) -> list[Any]:
        """Generate text; needs an artifact of task `generate`."""
        raise self._wrong_task("generate", "generate")

    @property
    def stats(self) -> RunnerStats:
        """A snapshot of the counters."""
        captured = self.graphs.captured if self.graphs is not None else {}
        cuda = self.device.type == "cuda"
        return RunnerStats(
            mode=self.mode,
            device=str(self.device),
            attention=self.attention,
            graph_hits=self._executor.stats.graph_hits,
            embeds_graph_hits=self._executor.stats.embeds_graph_hits,
            eager_fallbacks=self._executor.stats.eager_fallbacks,
            recompiles=sum(max(entry.compilations - 1, 0) for entry in self._compiled.values()),
            captured={path: [asdict(bucket) for bucket in buckets] for path, buckets in captured.items()},
            bytes={
                "weights": self._weight_bytes,
                "device": torch.cuda.memory_reserved(self.device) if cuda else 0,
            },
        )

    @property
    def graphs(self) -> GraphPair | None:
        """The graphs of mode graph; None in the other modes."""
        return self._executor if isinstance(self._executor, GraphPair) else None

    def warm_up(self) -> None:
        """Compile and capture ahead of the first request, for batches of token ids."""
        if self.graphs is not None:
            self.graphs.warm_up()
        else:
            self._executor.run(self.pack([check_row(TokenIds([0]), self.limits, "warm-up")]))

    def pack(self, rows: Sequence[Row]) -> PackedBatch:
        """Pack rows into one batch: an EmbedsBatch if one of them holds embeddings."""
        embedding = self.artifact.manifest.spec.embedding
        start, pad = embedding.position_start, embedding.position_pad
        if any(row.embeds for row in rows):
            return pack_embeds(rows, start, self.limits.width, self.limits.dtype, self.device, pad)
        return pack(rows, start, pad)

    def run(self, batch: PackedBatch) -> GraphOutput:
        """Run one packed batch: states [T, D] and vectors float32 [S, D], on the device, in memory of their own.

        They are inference tensors: clone them outside of `torch.inference_mode()` to use them with autograd.
        """
        return self._executor.run(batch)

    def _build_executor(self) -> "_Executor":
        spec, pipeline = self.artifact.manifest.spec, self.artifact.manifest.pipeline
        pooler = Pooler(pipeline.pooling, pipeline.normalize, self.device)
        ids, embeds = (_with_pooling(self._entry_point(name), pooler) for name in ("forward_ids", "forward_embeds"))
        if self.mode != "graph":
            return _Direct(ids, embeds, self.device)
        return GraphPair(
            ids,
            embeds,
            ladder=BucketLadder.up_to(self.batch_tokens, spec.usable_length),
            width=self.limits.width,
            dtype=self.limits.dtype,
            device=self.device,
        )

    def _entry_point(self, name: str) -> Callable[..., Tensor]:
        if self.mode == "eager":
            return getattr(self.model, name)
        sizes = Sizes.MANY if self.mode == "graph" else Sizes.ANY
        self._compiled[name] = compile_entry_point(self.model, name, sizes)
        return self._compiled[name]

    def rows(self, inputs: Input | Sequence[Input], prompt: str) -> list[Row]:
        """Tokenize and check, in the caller's order."""
        if not isinstance(inputs, RowInput | Iterable):
            raise InputError(f"inputs are a {type(inputs).__name__}, expected an input or a sequence of them")
        items: list[Any] = [inputs] if isinstance(inputs, str | RowInput) else list(inputs)
        texts: dict[int, str] = {}
        rows: list[Row | None] = [None] * len(items)
        for number, item in enumerate(items):
            if isinstance(item, str):
                texts[number] = prompt + item
            elif isinstance(item, TokenIds | PromptEmbeds | MixedPrompt):
                rows[number] = check_row(item, self.limits, f"input {number}")
            else:
                raise InputError(
                    f"input {number} is a {type(item).__name__}, expected str, TokenIds, PromptEmbeds or MixedPrompt"
                )
        for number, row in self._texts.encode(texts).items():
            rows[number] = row
        return [row for row in rows if row is not None]

    def _batches(self, rows: list[Row]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Pack rows of similar length together; yields the rows' numbers and their batch.

        Rows that hold embeddings get batches of their own, so that the others never pay for the embeds graph,
        except where everything fits into one small batch. Rows without tokens are left out.
        """
        filled = [number for number, row in enumerate(rows) if len(row)]
        kinds = [[n for n in filled if not rows[n].embeds], [n for n in filled if rows[n].embeds]]
        if sum(len(rows[n]) for n in filled) <= _ONE_BATCH_TOKENS:
            kinds = [filled]
        for kind in kinds:
            for members in self._groups(sorted(kind, key=lambda n: len(rows[n]), reverse=True), rows):
                yield members, self.pack([rows[n] for n in members])

    def _groups(self, order: list[int], rows: list[Row]) -> Iterator[list[int]]:
        group: list[int] = []
        tokens = 0
        for number in order:
            if group and tokens + len(rows[number]) > self.batch_tokens:
                yield group
                group, tokens = [], 0
            group.append(number)
            tokens += len(rows[number])
        if group:
            yield group

    def _wrong_task(self, method: str, task: str) -> UnsupportedError:
        return UnsupportedError(
            f"{method} needs an artifact of task {task!r}; {self.artifact.folder} was converted for "
            f"{self.artifact.manifest.task!r}"
        )


def _with_pooling(states: Callable[..., Tensor], pooler: Pooler) -> Callable[..., GraphOutput]:
    def run(ids: Tensor, positions: Tensor, segments: Tensor, cu_seqlens: Tensor, *rest: Tensor) -> GraphOutput:
        states_TD = states(ids, positions, segments, cu_seqlens, *rest)
        return GraphOutput(states=states_TD, vectors=pooler(states_TD, cu_seqlens))

    return run


def resolve_device(device: str) -> torch.device:
    """Return the device that a name means; "auto" is CUDA if there is one.

    Raises:
        InputError: there is no such device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise InputError(f"device {device!r} is no torch device; use auto, cpu, cuda or cuda:N") from None
    if resolved.type not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is not supported; use auto, cpu or cuda")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device!r} is not there; torch sees {torch.cuda.device_count()} CUDA devices")
    if resolved.type == "cuda" and resolved.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def resolve_mode(mode: str, device: torch.device) -> str:
    """Return the mode that a name means; "auto" is the best that the device has.

    That is graph on CUDA and compile on a CPU. Without a compiler it is eager, with a warning.

    Raises:
        InputError: there is no such mode.
    """
    if mode != "auto" and mode not in MODES:
        raise InputError(f"mode {mode!r} is unknown; use auto, {', '.join(MODES)}")
    if mode != "auto":
        return mode
    best, reason = best_mode(device)
    if reason is not None:
        warnings.warn(f"running in eager mode: {reason}", stacklevel=3)
    return best


def best_mode(device: torch.device) -> tuple[str, str | None]:
    """Return the mode that "auto" means on a device; if it is eager, the reason why it is no better."""
    reason = why_no_compiler(device)
    if reason is not None:
        return "eager", reason
    return ("graph" if device.type == "cuda" else "compile"), None


def load(
    out: str | Path,
    device: str = "auto",
    mode: str = "auto",
    *,
    attention: str = "auto",
    batch_tokens: int | None = None,
) -> Runner:
    """Load a converted folder.

    Args:
        out: the folder.
        device: "auto", "cpu", "cuda" or "cuda:N".
        mode: "eager", "compile", "graph", or "auto" for the best that the device has.
        attention: name of a backend (see `toolkit doctor`), or "auto".
        batch_tokens: most tokens in one packed batch; never below the model's usable length.

    Raises:
        ArtifactError: the folder is no artifact or is damaged.
        InputError: no such device or mode, or `batch_tokens` is no positive number.
        MissingDependencyError: the mode needs a compiler that this machine lacks.
        UnsupportedError: no attention backend fits the model on this device.
    """
    if batch_tokens is not None and (type(batch_tokens) is not int or batch_tokens < 1):
        raise InputError(f"batch_tokens = {batch_tokens!r}, expected a positive whole number")
    artifact = Artifact.open(out)
    where = resolve_device(device)
    return Runner(
        artifact, device=where, mode=resolve_mode(mode, where), attention=attention, batch_tokens=batch_tokens
    )

"""Run a converted module: inputs → rows → packed batches → graph → vectors or states, in the caller's order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.artifact import Artifact
from toolkit.attention import choose_backend
from toolkit.batch import PackedBatch, pack, pack_embeds
from toolkit.compile import CompiledEntryPoint, Sizes, compile_entry_point
from toolkit.devices import resolve_device, resolve_mode
from toolkit.errors import InputError, UnsupportedError
from toolkit.executor import Direct, Executor, RunnerStats
from toolkit.graphs import BucketLadder, GraphPair
from toolkit.inputs import Limits, Row, RowInput, TokenIds, check_row
from toolkit.nn.head import Head, Output, build_head
from toolkit.nn.linear import can_pack, pack_linears
from toolkit.nn.model import build_encoder, fill
from toolkit.rows import Input, Pairs, listed, read_rows
from toolkit.scoring import Classification, Scoring, TokenClassification
from toolkit.tokenizer import Pair, TextEncoder

__all__ = ["Input", "Runner", "RunnerStats", "load"]

_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 65536
# Up to so many tokens a forward pass costs about the same, so one mixed batch beats two.
_ONE_BATCH_TOKENS = 1024


class Runner:
    """A loaded artifact. Made by `toolkit.load`.

    An input is a text, a `TokenIds`, a `PromptEmbeds` or a `MixedPrompt`; one call may mix all four. `score` takes
    pairs of texts in the place of texts, `classify` takes both.
    """

    def __init__(
        self, artifact: Artifact, *, device: torch.device, mode: str, attention: str, batch_tokens: int | None
    ) -> None:
        manifest = artifact.manifest
        self.artifact, self.device, self.mode = artifact, device, mode
        self.attention, backend = choose_backend(manifest.spec.attentions, device, artifact.dtype, attention)
        self.model = build_encoder(manifest.spec, backend)
        self.head = build_head(manifest.head, device, skips=not manifest.pipeline.include_prompt)
        parts = nn.ModuleDict({"encoder": self.model, "head": self.head})
        stored = {name.removeprefix("encoder."): name for name, _ in parts.named_parameters()}
        weights = artifact.weights({name: parts.get_parameter(own).shape for name, own in stored.items()})
        fill(parts, {stored[name]: weight for name, weight in weights.items()}, device)
        self.head.tie(self.model.embeddings.token.weight)
        self.head.use_float32_for_vectors()
        self._weight_bytes = sum(p.nbytes for p in parts.parameters())
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
        if manifest.task == "sparse":  # each token's logits over the vocabulary are held at once
            default //= 16 if device.type == "cuda" else 2
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
        """Embed inputs as sentence-transformers' `encode` does; for task `sparse` a column is a word's weight.

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
        if self.artifact.manifest.task not in ("embed", "sparse"):
            raise self._wrong_task("embed", "embed")
        dim = self.artifact.manifest.head.width
        if truncate_dim is not None and (type(truncate_dim) is not int or not 1 <= truncate_dim <= dim):
            raise InputError(f"truncate_dim = {truncate_dim!r}, expected a whole number, 1 … {dim}")
        vectors = self._vectors(self.rows(inputs, self.artifact.manifest.pipeline.prompt(prompt_name, prompt)))
        return vectors[:, :truncate_dim].contiguous() if truncate_dim is not None else vectors

    def _vectors(self, rows: list[Row]) -> Tensor:
        """float32 [rows, V] on the CPU, in the rows' order; rows without tokens are zero."""
        width = self.artifact.manifest.head.width
        result = torch.empty(len(rows), width, device=self.device)
        order: list[int] = []
        for members, batch in self._batches(rows):
            result[len(order) : len(order) + len(members)] = self._executor.vectors(batch)
            order += members
        unsorted = torch.zeros(len(rows), width)
        unsorted[order] = result[: len(order)].cpu()
        return unsorted

    def token_states(
        self, inputs: Input | Sequence[Input], prompt_name: str | None = None, prompt: str | None = None
    ) -> list[Tensor]:
        """Return the last layer's states of each input's tokens: [tokens, hidden] each, on the CPU."""
        rows = self.rows(inputs, self.artifact.manifest.pipeline.prompt(prompt_name, prompt))
        return self._per_token(rows, self.artifact.manifest.spec.hidden, lambda output: output.states)

    def _per_token(self, rows: list[Row], width: int, choose: Callable[[Output], Tensor]) -> list[Tensor]:
        """What `choose` takes from an output, for each row: [tokens, width] on the CPU, in the rows' order."""
        found: list[Tensor] = [torch.empty(0, width, dtype=self.limits.dtype)] * len(rows)
        for members, batch in self._batches(rows):
            pieces = choose(self._executor.run(batch)).cpu().split(batch.cu_seqlens.diff().tolist())
            for member, piece in zip(members, pieces, strict=True):
                found[member] = piece.clone()
        return found

    def embed_tokens(self, ids: TokenIds | Sequence[int] | Tensor) -> Tensor:
        """The seam: what `PromptEmbeds` callers must pass for these ids. [tokens, seam width], on the device."""
        row = check_row(ids if isinstance(ids, TokenIds) else TokenIds(ids), self.limits, "ids")  # type: ignore[arg-type]
        with torch.no_grad():
            return self.model.embed_tokens(torch.from_numpy(row.ids).to(self.device))

    def score(
        self,
        pairs: Sequence[Pair | RowInput],
        activation: bool = True,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> Tensor:
        """Score pairs as sentence-transformers' `CrossEncoder.predict` does; needs an artifact of task `rerank`.

        Args:
            pairs: pairs of texts; or a pair as token ids or embeddings of one sequence, segments included.
            activation: apply the checkpoint's activation (in float32); False gives the raw logits.
            prompt_name, prompt: as in `embed`; a prompt is put in front of the first text of each pair.

        Returns:
            float32 [pairs] on the CPU; [pairs, labels] for a checkpoint with several labels.

        Raises:
            InputError: an input is no pair, or not acceptable.
            UnsupportedError: the artifact was converted for another task.
        """
        scoring = self._scoring("score", "rerank")
        text = self.artifact.manifest.pipeline.prompt(prompt_name, prompt)
        logits = self._vectors(self._full_rows(pairs, text, "only"))
        if activation and scoring.activation == "sigmoid":
            logits = torch.sigmoid(logits)
        return logits[:, 0] if len(scoring.labels) == 1 else logits

    def classify(self, inputs: Input | Pair | Sequence[Input | Pair]) -> Classification:
        """Classify texts, pairs of texts, or other inputs; needs an artifact of task `classify`.

        A tuple of two texts is one pair; a list of two texts are two inputs.

        Raises:
            InputError: an input is not acceptable.
            UnsupportedError: the artifact was converted for another task.
        """
        scoring = self._scoring("classify", "classify")
        return Classification.of(self._vectors(self._full_rows(inputs, "", "allowed")), scoring)

    def classify_tokens(self, inputs: Input | Sequence[Input]) -> list[TokenClassification]:
        """Classify each token of each input; needs an artifact of task `token-classify`.

        Raises:
            InputError: an input is not acceptable.
            UnsupportedError: the artifact was converted for another task.
        """
        scoring = self._scoring("classify_tokens", "token-classify")
        items = listed(inputs, pairs="no")
        logits = self._per_token(self.rows(items, ""), len(scoring.labels), lambda output: output.tokens)
        places = self._texts.places({k: item for k, item in enumerate(items) if isinstance(item, str)})
        return [TokenClassification.of(x.float(), scoring, places.get(k)) for k, x in enumerate(logits)]

    def generate(self, inputs: Input | Sequence[Input], max_new_tokens: int, **options: Any) -> list[Any]:
        """Generate text; needs an artifact of task `generate`, which no recipe makes yet.

        Raises:
            UnsupportedError: always.
        """
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

    def run(self, batch: PackedBatch) -> Output:
        """Run one packed batch: see `toolkit.nn.head.Output`; on the device, in memory of its own.

        They are inference tensors: clone them outside of `torch.inference_mode()` to use them with autograd.
        """
        return self._executor.run(batch)

    def _build_executor(self) -> Executor:
        spec = self.artifact.manifest.spec
        ids, embeds = (_with_head(self._entry_point(name), self.head) for name in ("forward_ids", "forward_embeds"))
        if self.mode != "graph":
            return Direct(ids, embeds, self.device)
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

    def _full_rows(self, inputs: Any, prompt: str, pairs: Pairs) -> list[Row]:
        """Like `rows`, for tasks that cannot do without tokens."""
        rows = self.rows(inputs, prompt, pairs=pairs)
        empty = next((number for number, row in enumerate(rows) if not len(row)), None)
        if empty is not None:
            raise InputError(f"input {empty} has no tokens: there is nothing to score")
        return rows

    def rows(self, inputs: Input | Pair | Sequence[Input | Pair], prompt: str, *, pairs: Pairs = "no") -> list[Row]:
        """Tokenize and check, in the caller's order; see `toolkit.rows.read_rows`."""
        skip = self._texts.prompt_length(prompt) if self.head.skips else 0
        return read_rows(inputs, prompt, self._texts, self.limits, pairs=pairs, skip=skip)

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

    def _scoring(self, method: str, task: str) -> Scoring:
        scoring = self.artifact.manifest.scoring
        if self.artifact.manifest.task != task or scoring is None:
            raise self._wrong_task(method, task)
        return scoring

    def _wrong_task(self, method: str, task: str) -> UnsupportedError:
        return UnsupportedError(
            f"{method} needs an artifact of task {task!r}; {self.artifact.folder} was converted for "
            f"{self.artifact.manifest.task!r}"
        )


def _with_head(states: Callable[..., Tensor], head: Head) -> Callable[..., Output]:
    """Over the tensors of a batch: the encoder's entry point takes all but `skip`, which is the head's."""

    def run(
        ids: Tensor,
        positions: Tensor,
        segments: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        skip: Tensor,
        *rest: Tensor,
    ) -> Output:
        return head(states(ids, positions, segments, cu_seqlens, max_len, *rest), cu_seqlens, skip)

    return run


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

"""Run a converted module: inputs → rows → packed batches → graph → vectors or states, in the caller's order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from toolkit.artifact import Artifact
from toolkit.attention import choose_backend
from toolkit.batch import EmbedsBatch, PackedBatch, pack, pack_embeds
from toolkit.decoding.cache import CacheOptions
from toolkit.decoding.chat import ChatTemplate
from toolkit.decoding.runner import DecoderRunner
from toolkit.devices import resolve_device, resolve_mode
from toolkit.errors import InputError
from toolkit.executor import Executor, RunnerStats
from toolkit.graphs import BucketLadder
from toolkit.inputs import Row, RowInput, TokenIds, check_row
from toolkit.loaded import Loaded
from toolkit.messages import MessageEncoder
from toolkit.multivector import KINDS, Kind, SideEncoder
from toolkit.nn.head import Head, Output, build_head
from toolkit.nn.model import build_encoder
from toolkit.rows import Input, Pairs, Rows, group_rows, listed, read_rows, without_padding
from toolkit.scoring import Classification, Scoring, TokenClassification
from toolkit.steps import PoolingStep
from toolkit.tokenizer import Pair, TextEncoder

__all__ = ["Input", "Runner", "RunnerStats", "load"]

_CPU_BATCH_TOKENS = 2048
_CUDA_BATCH_TOKENS = 65536
# What one batch of a call holds on CUDA: enough for full speed, and little enough to start while texts are read.
_CUDA_GROUP_TOKENS = 16384


class Runner(Loaded[Output]):
    """A loaded encoder. Made by `toolkit.load`.

    An input is a text, a `TokenIds`, a `PromptEmbeds` or a `MixedPrompt`; one call may mix all four. `score` takes
    pairs of texts in the place of texts, `classify` takes both.
    """

    def __init__(
        self, artifact: Artifact, *, device: torch.device, mode: str, attention: str, batch_tokens: int | None
    ) -> None:
        manifest = artifact.manifest
        self._keyed = manifest.multi_vector is not None and manifest.multi_vector.unattended > 0
        name, backend = choose_backend(manifest.spec.attentions, device, artifact.dtype, attention, keyed=self._keyed)
        self.model = build_encoder(manifest.spec, backend)
        self.head = build_head(manifest.head, device, skips=not manifest.pipeline.include_prompt)
        super().__init__(artifact, self.model, self.head, device=device, mode=mode, attention=name)
        self.head.tie(self.model.embeddings.token.weight)
        self.head.use_float32_for_vectors()
        files = (artifact.folder / "tokenizer.json", manifest.tokenizer, self.limits)
        self._texts: dict[str, TextEncoder] = {"": TextEncoder(*files)}
        if manifest.pipeline.messages is not None:
            render = ChatTemplate(artifact.folder).render
            self._texts = {"": MessageEncoder(*files, manifest.pipeline.messages, render)}
        pads = (step.pad for step in manifest.head.steps if isinstance(step, PoolingStep))
        self._pad = next(pads, None)
        if manifest.multi_vector is not None:
            self._texts |= {kind: SideEncoder(*files, manifest.multi_vector.side(kind)) for kind in KINDS}
        default = _CUDA_BATCH_TOKENS if device.type == "cuda" else _CPU_BATCH_TOKENS
        if manifest.task == "sparse":  # each token's logits over the vocabulary are held at once
            default //= 16 if device.type == "cuda" else 2
        self.batch_tokens = max(batch_tokens or default, manifest.usable_length)
        # a longer row makes a group of its own
        self._group_tokens = min(batch_tokens or default, _CUDA_GROUP_TOKENS if device.type == "cuda" else default)
        self._executor = self._build_executor()

    def embed(
        self,
        inputs: Input | Sequence[Input],
        prompt_name: str | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
        normalize: bool | None = None,
    ) -> Tensor:
        """Embed inputs as sentence-transformers' `encode` does; for task `sparse` a column is a word's weight.

        Args:
            inputs: one input or a sequence of them. Prompts apply to texts only.
            prompt_name: a prompt of the checkpoint, put in front of every text; default: the checkpoint's.
            prompt: a text to put in front instead; the empty string switches prompts off.
            truncate_dim: keep the first so many values of each vector; default: the checkpoint's, else all.
            normalize: scale to length 1 in the end; by default only if that was asked for at the conversion. A prefix
                of a vector of length 1 is shorter than 1.

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
        vectors = self._vectors(self._read(inputs, self.artifact.manifest.pipeline.prompt(prompt_name, prompt)))
        kept = truncate_dim if truncate_dim is not None else self.artifact.manifest.pipeline.truncate_dim
        vectors = vectors[:, :kept].contiguous() if kept is not None else vectors
        wanted = self.artifact.manifest.pipeline.normalize if normalize is None else normalize
        return torch.nn.functional.normalize(vectors, dim=-1) if wanted else vectors

    def multi_vectors(
        self,
        inputs: Input | Sequence[Input],
        kind: Kind,
        prompt_name: str | None = None,
        prompt: str | None = None,
    ) -> list[Tensor]:
        """Embed each token, as `MultiVectorEncoder`'s `encode_query` or `encode_document` does.

        Only texts get a prompt, are cut at the limit of their kind and filled up with the expansion of queries. From
        every input the vectors of tokens are left out that the checkpoint's mask names; it goes by ids, so those of
        tokens given as embeddings are all kept. `toolkit.multivector.maxsim` scores the results.

        Args:
            inputs: one input or a sequence of them.
            kind: "query" or "document".
            prompt_name, prompt: as in `embed`; default: the checkpoint's prompt for this kind.

        Returns:
            For each input float32 [kept tokens, dim] on the CPU, in the order of the inputs.

        Raises:
            InputError: an input, the kind or a prompt name is not acceptable.
            UnsupportedError: the artifact was converted for another task.
        """
        if self.artifact.manifest.multi_vector is None:
            raise self._wrong_task("multi_vectors", "multi-vector")
        side = self.artifact.manifest.multi_vector.side(kind)
        text = self.artifact.manifest.pipeline.prompt(kind if prompt_name is None else prompt_name, prompt)
        rows = self.rows(inputs, text, kind=kind)
        vectors = self._per_token(
            dict(enumerate(rows)), self.artifact.manifest.head.token_width, lambda output: output.tokens
        )
        return [x[side.kept(row)].float() for x, row in zip(vectors, rows, strict=True)]

    def _vectors(self, rows: Rows) -> Tensor:
        """float32 [rows, V] on the CPU, in the callers' order; rows without tokens are zero."""
        width = self.artifact.manifest.head.width
        result = torch.empty(len(rows), width, device=self.device)
        order: list[int] = []
        for members, batch in self._batches(map(self._pooled, rows.chunks())):
            result[len(order) : len(order) + len(members)] = self._executor.part(batch, "vectors")
            order += members
        unsorted = torch.zeros(len(rows), width, device=self.device)
        unsorted[torch.tensor(order, dtype=torch.long).to(self.device)] = result[: len(order)]
        return unsorted.cpu()

    def _pooled(self, rows: dict[int, Row]) -> dict[int, Row]:
        """What pooling takes in of rows: tokens at their end that count as padding are left out."""
        if self._pad is None:
            return rows
        return {number: without_padding(row, self._pad) for number, row in rows.items()}

    def token_states(
        self, inputs: Input | Sequence[Input], prompt_name: str | None = None, prompt: str | None = None
    ) -> list[Tensor]:
        """Return the states of each input's tokens, which pooling starts from: [tokens, hidden] each, on the CPU.

        They are the last layer's, behind the final norm; for a checkpoint with a WeightedLayerPooling its weighted mean
        of several layers' states, which is what sentence-transformers calls `token_embeddings` too.
        """
        rows = self.rows(inputs, self.artifact.manifest.pipeline.prompt(prompt_name, prompt))
        width = self.artifact.manifest.spec.state_width
        return self._per_token(dict(enumerate(rows)), width, lambda output: output.states)

    def _per_token(self, rows: dict[int, Row], width: int, choose: Callable[[Output], Tensor]) -> list[Tensor]:
        """What `choose` takes from an output, for each row: [tokens, width] on the CPU, in the rows' order."""
        found: list[Tensor] = [torch.empty(0, width, dtype=self.limits.dtype)] * len(rows)
        for members, batch in self._batches([rows]):
            pieces = choose(self._executor.run(batch)).cpu().split(batch.cu_seqlens.diff().tolist())
            for member, piece in zip(members, pieces, strict=True):
                found[member] = piece.clone()
        return found

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
            prompt_name, prompt: as in `embed`; a prompt is put in front of the first text of each pair, or is a
                message of its own where a chat template makes one text of a pair.

        Returns:
            float32 [pairs] on the CPU; [pairs, labels] for a checkpoint with several labels.

        Raises:
            InputError: an input is no pair, or not acceptable.
            UnsupportedError: the artifact was converted for another task.
        """
        scoring = self._scoring("score", "rerank")
        text = self.artifact.manifest.pipeline.prompt(prompt_name, prompt)
        logits = self._vectors(self._read(pairs, text, pairs="only", empty=False))
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
        return Classification.of(self._vectors(self._read(inputs, "", pairs="allowed", empty=False)), scoring)

    def classify_tokens(self, inputs: Input | Sequence[Input]) -> list[TokenClassification]:
        """Classify each token of each input; needs an artifact of task `token-classify`.

        Raises:
            InputError: an input is not acceptable.
            UnsupportedError: the artifact was converted for another task.
        """
        scoring = self._scoring("classify_tokens", "token-classify")
        items = listed(inputs, pairs="no")
        logits = self._per_token(
            dict(enumerate(self.rows(items, ""))), len(scoring.labels), lambda output: output.tokens
        )
        places = self._texts[""].places({k: item for k, item in enumerate(items) if isinstance(item, str)})
        return [TokenClassification.of(x.float(), scoring, places.get(k)) for k, x in enumerate(logits)]

    def generate(self, inputs: Input | Sequence[Input], max_new_tokens: int, **options: Any) -> NoReturn:
        """Generating text needs an artifact of task `generate`; `toolkit.load` gives it a `DecoderRunner`.

        Raises:
            UnsupportedError: always.
        """
        raise self._wrong_task("generate", "generate")

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

    def _build_executor(self) -> Executor[Output]:
        spec = self.artifact.manifest.spec
        suffix = "_keyed" if self._keyed else ""
        ids, embeds = (
            _with_head(self._entry_point(name + suffix), self.head, self._keyed)
            for name in ("forward_ids", "forward_embeds")
        )
        ladder = BucketLadder.up_to(self.batch_tokens, spec.usable_length)
        return self._make_executor(ids, embeds, ladder, (PackedBatch, EmbedsBatch))

    def rows(
        self,
        inputs: Input | Pair | Sequence[Input | Pair],
        prompt: str,
        *,
        pairs: Pairs = "no",
        kind: Kind | Literal[""] = "",
    ) -> list[Row]:
        """Tokenize and check, in the caller's order; see `toolkit.rows.read_rows`, and `multi_vectors` for `kind`."""
        return self._read(inputs, prompt, pairs=pairs, kind=kind).all()

    def _read(
        self, inputs: Any, prompt: str, *, pairs: Pairs = "no", kind: Kind | Literal[""] = "", empty: bool = True
    ) -> Rows:
        skip = self._texts[kind].prompt_length(prompt) if self.head.skips else 0
        return read_rows(inputs, prompt, self._texts[kind], self.limits, pairs=pairs, skip=skip, empty=empty)

    def _batches(self, chunks: Iterable[dict[int, Row]]) -> Iterator[tuple[list[int], PackedBatch]]:
        """The rows' numbers and their batch; see `toolkit.rows.group_rows`."""
        for group in group_rows(chunks, self._group_tokens):
            yield list(group), self.pack(list(group.values()))

    def _scoring(self, method: str, task: str) -> Scoring:
        scoring = self.artifact.manifest.scoring
        if self.artifact.manifest.task != task or scoring is None:
            raise self._wrong_task(method, task)
        return scoring


def _with_head(states: Callable[..., Tensor], head: Head, keyed: bool) -> Callable[..., Output]:
    """Over the tensors of a batch: `skip` is the head's, the others are the entry point's, `keys` if it is `keyed`."""

    def run(
        ids: Tensor,
        positions: Tensor,
        segments: Tensor,
        cu_seqlens: Tensor,
        max_len: Tensor,
        skip: Tensor,
        keys: Tensor,
        *rest: Tensor,
    ) -> Output:
        own = (keys, *rest) if keyed else rest
        return head(states(ids, positions, segments, cu_seqlens, max_len, *own), cu_seqlens, skip)

    return run


def load(
    out: str | Path,
    device: str = "auto",
    mode: str = "auto",
    *,
    attention: str = "auto",
    batch_tokens: int | None = None,
    cache: CacheOptions | None = None,
) -> Any:
    """Load a converted folder.

    Args:
        out: the folder.
        device: "auto", "cpu", "cuda" or "cuda:N".
        mode: "eager", "compile", "graph", or "auto" for the best that the device has.
        attention: name of a backend (see `toolkit doctor`), or "auto".
        batch_tokens: most tokens in one packed batch; for an encoder never below the model's usable length.
        cache: how a decoder's requests share its key/value cache.

    Returns:
        A `Runner`, or a `DecoderRunner` for an artifact of task `generate`.

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
    options: dict[str, Any] = {"device": where, "mode": resolve_mode(mode, where)}
    options |= {"attention": attention, "batch_tokens": batch_tokens}
    if artifact.manifest.task == "generate":
        return DecoderRunner(artifact, cache=cache or CacheOptions(), **options)
    if cache is not None:
        raise InputError(f"cache is for an artifact of task 'generate'; {out} is for {artifact.manifest.task!r}")
    return Runner(artifact, **options)

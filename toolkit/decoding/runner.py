"""Run a converted decoder: inputs → requests → steps → tokens and text."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from tokenizers import Tokenizer
from torch import Tensor

from toolkit.artifact import Artifact
from toolkit.attention.paged import choose_paged_backend
from toolkit.compile import Sizes
from toolkit.decoding.batch import EmbedsStep, StepBatch
from toolkit.decoding.cache import CacheOptions, bytes_per_page, count_pages
from toolkit.decoding.chat import ChatTemplate, Message
from toolkit.decoding.engine import Engine, Event
from toolkit.decoding.kvcache import PagePool, PageTables
from toolkit.decoding.ladder import StepLadder
from toolkit.decoding.results import Chunk, Generation, Logprobs
from toolkit.decoding.sampling import SamplingParams
from toolkit.decoding.scheduler import Scheduler
from toolkit.decoding.text import TextStream
from toolkit.errors import InputError
from toolkit.executor import RunnerStats
from toolkit.inputs import Row, TokenIds, check_row
from toolkit.loaded import Loaded
from toolkit.nn.decoder import Decoder, StepOutput, build_decoder
from toolkit.nn.gemv import MOST_ROWS, can_serve_few_rows, serve_few_rows
from toolkit.rows import Input, read_rows
from toolkit.tokenizer import TextEncoder

__all__ = ["DecoderRunner", "DecoderStats"]


@dataclass(frozen=True, kw_only=True)
class DecoderStats(RunnerStats):
    """What a decoder's runner did so far, besides what RunnerStats counts.

    Attributes:
        steps: forward passes.
        prompt_tokens, cached_tokens: tokens of requests that were taken in, and how many of them the prefix cache had.
        preemptions: how often a request had to give its pages to an earlier one.
        pages, free_pages: of the cache.
    """

    steps: int
    prompt_tokens: int
    cached_tokens: int
    preemptions: int
    pages: int
    free_pages: int


class DecoderRunner(Loaded[StepOutput]):
    """A loaded decoder. Made by `toolkit.load`.

    An input is a text, a `TokenIds`, a `PromptEmbeds` or a `MixedPrompt`; one call may mix all four. `engine` takes
    requests one by one, for those who serve.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        device: torch.device,
        mode: str,
        attention: str,
        batch_tokens: int | None,
        cache: CacheOptions,
    ) -> None:
        manifest = artifact.manifest
        name, backend = choose_paged_backend(manifest.spec.attentions, device, artifact.dtype, attention)
        self.model = build_decoder(manifest.spec, manifest.head, backend)
        super().__init__(artifact, self.model, None, device=device, mode=mode, attention=name)
        self.model.head.tie(self.model.embeddings.token.weight)
        if can_serve_few_rows(device, artifact.dtype):
            serve_few_rows(self.model)
        file = artifact.folder / "tokenizer.json"
        self._texts = TextEncoder(file, manifest.tokenizer, self.limits, truncate=False)
        lanes = cache.requests or (256 if device.type == "cuda" else 16)
        step_tokens = max(batch_tokens or (8192 if device.type == "cuda" else 512), lanes)
        of_one = -(-manifest.usable_length // cache.page)
        size = bytes_per_page(manifest.spec, cache.page, artifact.dtype)
        pages = cache.pages or count_pages(cache, size, most=of_one * lanes, device=device)
        tables = PageTables(lanes, min(of_one, pages), device)
        self.model.attach_cache(pages, cache.page, tables.tensor)
        # On a CPU nothing is lost when the compiler knows nothing of sizes, and one token alone is one row's work.
        sizes, smallest = (Sizes.MANY, 2) if mode == "graph" and device.type == "cuda" else (Sizes.ANY, 1)
        ids_ladder = ladder = StepLadder(step_tokens=step_tokens, sequences=lanes, smallest=smallest)
        few: dict[int, Entry] = {}
        if mode == "graph" and can_serve_few_rows(device, artifact.dtype) and self.model.serve_few_rows():
            ids_ladder = replace(ladder, smallest=1)
            few_sizes = [size for size in ids_ladder.decode if size <= MOST_ROWS]
            few = {size: self._entry_point("forward_few_rows", Sizes.ONE, f", {size}") for size in few_sizes}
        self._executor = self._make_executor(
            _step(self.model, self._entry_point("forward_ids", sizes), few),
            _step(self.model, self._entry_point("forward_embeds", sizes)),
            ids_ladder,
            (StepBatch, EmbedsStep),
            embeds_ladder=ladder,
        )
        self._cache, self._pages, self._tables, self.step_tokens = cache, pages, tables, step_tokens
        self.engine = self.make_engine()
        self._inboxes: dict[int, deque[Event]] = {}

    def make_engine(
        self,
        *,
        chunked: bool | None = None,
        caching: bool | None = None,
        step_tokens: int | None = None,
        ahead: bool | None = None,
    ) -> Engine:
        """An engine over the same module and the same cache, for the place of `engine` while that has nothing to do.

        Args:
            chunked, caching: whether prompts may be spread over steps, and pages be shared; default: as loaded.
            step_tokens: at most so many tokens in a step; default: as loaded.
            ahead: whether a step is queued before the tokens of the one before are known; default: on CUDA.
        """
        manifest, cache = self.artifact.manifest, self._cache
        scheduler = Scheduler(
            PagePool(self._pages, caching=cache.prefix_caching if caching is None else caching),
            self._tables,
            page=cache.page,
            step_tokens=step_tokens or self.step_tokens,
            chunked=cache.chunked_prefill if chunked is None else chunked,
        )
        return Engine(
            self._executor,
            scheduler,
            limits=self.limits,
            hidden=manifest.spec.state_width,
            position_start=manifest.spec.embedding.position_start,
            ends=manifest.ends,
            head=self.model.head.per_token,
            latest=self.model.latest,
            ahead=self.device.type == "cuda" if ahead is None else ahead,
        )

    def generate(
        self, inputs: Input | Sequence[Input], max_new_tokens: int = 128, temperature: float = 0.0, **settings: Any
    ) -> list[Generation]:
        """Continue inputs; all of them run together, and each result is what the input alone would give.

        Args:
            inputs: one input or a sequence of them. Texts get the special tokens that the tokenizer adds.
            max_new_tokens: at most so many tokens are generated for each.
            temperature: 0 takes the likeliest token; above, tokens are drawn.
            settings: `top_k`, `top_p`, `min_p`, `repetition_penalty`, `seed`, `stop`, `stop_token_ids`, `ignore_eos`,
                `logprobs`, `prompt_logprobs`: see `toolkit.SamplingParams`.

        Returns:
            In the order of the inputs.

        Raises:
            InputError: an input or a setting is not acceptable, or an input can never fit.
        """
        rows, params = self._requests(inputs, max_new_tokens, temperature, settings)
        collected = [_Collector(row, params, self._texts.tokenizer) for row in rows]
        for index, event, _ in self._events(rows, params, [collector.text for collector in collected]):
            collected[index].add(event)
        return [collector.result() for collector in collected]

    def stream(
        self, inputs: Input | Sequence[Input], max_new_tokens: int = 128, temperature: float = 0.0, **settings: Any
    ) -> Iterator[Chunk]:
        """Like `generate`, as the text comes. Closing the iterator cancels what is not finished."""
        return self._chunks(*self._requests(inputs, max_new_tokens, temperature, settings))

    def _requests(
        self, inputs: Input | Sequence[Input], max_new_tokens: int, temperature: float, settings: dict[str, Any]
    ) -> tuple[list[Row], SamplingParams]:
        """Rows and their settings, all of them checked before the first one runs."""
        params = _params(max_new_tokens, temperature, settings)
        rows = self.rows(inputs)
        for row in rows:
            self.engine.check(row, params)
        return rows, params

    def _chunks(self, rows: list[Row], params: SamplingParams) -> Iterator[Chunk]:
        texts = [TextStream(self._texts.tokenizer, params.stop) for _ in rows]
        for index, event, piece in self._events(rows, params, texts):
            reason: Any = event.finished or None
            yield Chunk(index=index, text=piece, token_id=event.token, finish_reason=reason)

    def chat_prompt(self, messages: Sequence[Message], **variables: Any) -> TokenIds:
        """A conversation as the input that the artifact's chat template makes of it.

        Args:
            messages: each with `role` ("system", "user", "assistant") and `content`.
            variables: what else the template looks at.

        Raises:
            UnsupportedError: the artifact has no chat template.
            InputError: the template refuses the messages.
        """
        text = self._template.render(messages, **variables)
        return TokenIds(self._texts.tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _template(self) -> ChatTemplate:
        """Read and compiled for the first conversation."""
        return ChatTemplate(self.artifact.folder)

    def token_states(self, inputs: Input | Sequence[Input]) -> list[Tensor]:
        """The states of each input's tokens, behind the final norm: [tokens, hidden] each, on the CPU.

        Raises:
            InputError: an input is not acceptable, or requests are running.
        """
        return self.engine.states(self.rows(inputs))

    def logits(self, inputs: Input | Sequence[Input]) -> list[Tensor]:
        """The logits behind each input's tokens: [tokens, vocabulary] each, in the model's dtype, on the CPU."""
        with torch.inference_mode():
            return [self.model.head.per_token(x.to(self.device)).cpu() for x in self.token_states(inputs)]

    def rows(self, inputs: Input | Sequence[Input]) -> list[Row]:
        """Tokenize and check, in the caller's order."""
        return read_rows(inputs, "", self._texts, self.limits).all()

    def embed(self, *args: Any, **options: Any) -> NoReturn:
        """What an artifact of another task does; raises UnsupportedError, as do the methods below."""
        raise self._wrong_task("embed", "embed")

    def multi_vectors(self, *args: Any, **options: Any) -> NoReturn:
        """See `embed`."""
        raise self._wrong_task("multi_vectors", "multi-vector")

    def score(self, *args: Any, **options: Any) -> NoReturn:
        """See `embed`."""
        raise self._wrong_task("score", "rerank")

    def classify(self, *args: Any, **options: Any) -> NoReturn:
        """See `embed`."""
        raise self._wrong_task("classify", "classify")

    def classify_tokens(self, *args: Any, **options: Any) -> NoReturn:
        """See `embed`."""
        raise self._wrong_task("classify_tokens", "token-classify")

    def warm_up(self) -> None:
        """Compile and capture ahead of the first request, for batches of token ids."""
        if self.graphs is not None:
            self.graphs.warm_up()
        else:
            self.engine.states([check_row(TokenIds([0]), self.limits, "warm-up")])

    @property
    def stats(self) -> DecoderStats:
        """A snapshot of the counters."""
        scheduler = self.engine.scheduler
        return DecoderStats(
            **self._counters(), **vars(scheduler.stats), pages=scheduler.pool.pages, free_pages=scheduler.pool.free
        )

    def _events(
        self, rows: list[Row], params: SamplingParams, texts: Sequence[TextStream | None]
    ) -> Iterator[tuple[int, Event, str]]:
        """Run rows to their end: (index, what happened, what became certain of the text, if there is one)."""
        index_of = {self.engine.add(row, params): index for index, row in enumerate(rows)}
        numbers, inbox = list(index_of), deque[Event]()
        self._inboxes |= dict.fromkeys(numbers, inbox)
        try:
            while index_of and (inbox or self.engine.busy):  # requests may also be cancelled at the engine
                if not inbox:
                    self._step()
                while inbox:
                    event = inbox.popleft()
                    index = index_of.get(event.number)
                    if index is None:
                        continue  # another caller's steps led behind a stop text
                    text, piece = texts[index], ""
                    if text is not None and event.token is not None:
                        piece = text.push(event.token)
                        if text.stopped:
                            self.engine.cancel(event.number, "stop")
                            event = replace(event, finished="stop")
                    if event.finished:
                        del index_of[event.number]
                        piece += text.finish() if text is not None else ""
                    yield index, event, piece
        finally:
            for number in index_of:
                self.engine.cancel(number)
            for number in numbers:
                del self._inboxes[number]

    def _step(self) -> None:
        """Run a step; what happened in it goes to those who began the requests, of which there may be several."""
        for event in self.engine.step():
            if event.number in self._inboxes:
                self._inboxes[event.number].append(event)


class _Collector:
    """The events of one input, as its Generation. `text` follows it only where a text may stop it."""

    def __init__(self, row: Row, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._prompt_tokens, self._params, self._tokenizer = len(row), params, tokenizer
        self.text = TextStream(tokenizer, params.stop) if params.stop else None
        self._tokens: list[int] = []
        self._logprobs = Logprobs(chosen=[], top=[])
        self._prompt_logprobs = Logprobs(chosen=[], top=[])
        self._reason: Any = "cancelled"

    def add(self, event: Event) -> None:
        if event.token is not None:
            self._tokens.append(event.token)
        if event.logprob is not None:
            self._logprobs.chosen.append(event.logprob[0])
            self._logprobs.top.append(event.logprob[1])
        for own, tops in event.prompt_logprobs:
            self._prompt_logprobs.chosen.append(own)
            self._prompt_logprobs.top.append(tops)
        self._reason = event.finished or self._reason

    def result(self) -> Generation:
        text = self.text.text if self.text is not None else self._tokenizer.decode(self._tokens)
        return Generation(
            token_ids=self._tokens,
            text=text,
            logprobs=self._logprobs if self._params.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs if self._params.prompt_logprobs is not None else None,
            finish_reason=self._reason,
            prompt_tokens=self._prompt_tokens,
        )


def _params(max_new_tokens: int, temperature: float, settings: dict[str, Any]) -> SamplingParams:
    known = SamplingParams.__dataclass_fields__
    unknown = next((name for name in settings if name not in known), None)
    if unknown is not None:
        raise InputError(f"{unknown!r} is no setting of generate; there are {', '.join(known)}")
    for name in ("stop", "stop_token_ids"):
        value = settings.get(name, ())
        settings[name] = tuple(value) if isinstance(value, list | tuple | set) else (value,)
    return SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, **settings)


Entry = Callable[..., tuple[Tensor, Tensor]]


def _step(model: Decoder, entry: Entry, few: Mapping[int, Entry] | None = None) -> Callable[..., StepOutput]:
    """The entry point, and each sequence's likeliest next token, which is noted as its lane's latest.

    `few` has what stands for `entry` in steps with one token a sequence, by the number of tokens.
    """

    def run(*args: Tensor) -> StepOutput:
        special = few.get(args[0].shape[0]) if few and int(args[-1].item()) <= 1 else None
        states_TD, logits_SV = special(*args) if special is not None else entry(*args)
        best_S = logits_SV.argmax(dim=-1)
        lanes_S = args[StepBatch.ARGS.index("lanes")]
        model.latest.index_put_((lanes_S,), best_S.to(torch.int32))
        return StepOutput(states_TD, logits_SV, best_S)

    return run

"""The loop of a decoder: schedule, pack, run, sample.

One step is: `Scheduler.next_step` chooses tokens, `pack_step` makes a batch of them, the executor runs it through the
graph of its kind, `sample` chooses the next tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.decoding.batch import StepBatch, pack_step
from toolkit.decoding.request import Request, Share
from toolkit.decoding.sampling import SamplingParams, penalise, sample, top_logprobs
from toolkit.decoding.scheduler import Scheduler
from toolkit.errors import InputError
from toolkit.executor import Executor
from toolkit.inputs import Limits, Row
from toolkit.nn.decoder import StepOutput

__all__ = ["Engine", "Event"]

Logprob = tuple[float, dict[int, float]]


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a request: it got a token, or ended, or both.

    Attributes:
        number: the request's.
        token: the generated id; None if it ended without one.
        logprob: the token's log-probability and those of the likeliest ones, if they were asked for.
        prompt_logprobs: the same for each prompt token but the first; with the first token, if asked for.
        finished: "stop", "length" or "cancelled"; empty while it goes on.
    """

    number: int
    token: int | None
    logprob: Logprob | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finished: str = ""


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A step that was queued: for each share that gets a token, the request, and what will be known of it.

    Attributes:
        requests: those that get a token.
        rows: their rows among the step's sequences.
        tokens: int64 [S] on the CPU, valid once `ready`.
        ready: the event behind the copy; None where nothing is to be waited for.
        logprobs: by row, for requests that asked for them.
    """

    requests: list[Request]
    rows: list[int]
    tokens: Tensor
    ready: torch.cuda.Event | None
    logprobs: Callable[[], dict[int, Logprob]]


class Engine:
    """Runs requests that come and go. Not for several threads at once.

    Args:
        executor: runs a step.
        scheduler: chooses it.
        limits: what the model takes.
        hidden: D.
        position_start: the position of a sequence's first token.
        ends: the ids that end a generation.
        head: logits [T, V] of token states [T, D].
        latest: int32 [lanes], where the executor notes each lane's likeliest token, on the device.
        ahead: whether a step is queued before the tokens of the one before are known here: the device need not wait
            for the host. A sequence that ends is then computed for one token too many, which is thrown away.
    """

    def __init__(
        self,
        executor: Executor[StepOutput],
        scheduler: Scheduler,
        *,
        limits: Limits,
        hidden: int,
        position_start: int,
        ends: Sequence[int],
        head: Callable[[Tensor], Tensor],
        latest: Tensor,
        ahead: bool,
    ) -> None:
        self.scheduler, self.executor = scheduler, executor
        self._limits, self._hidden, self._position_start = limits, hidden, position_start
        self._head, self._latest, self._ahead = head, latest, ahead
        self._ends = frozenset(ends)
        self._arrivals = 0
        self._flight: _Flight | None = None
        self._prompt_logprobs: dict[int, list[Logprob]] = {}
        self._seen: dict[int, Tensor] = {}

    @property
    def busy(self) -> bool:
        """Whether there are requests that are not finished."""
        return bool(self.scheduler.requests)

    def add(self, row: Row, params: SamplingParams) -> int:
        """Take a request on and return its number.

        Raises:
            InputError: see `check`.
        """
        self.check(row, params)
        self._arrivals += 1
        self.scheduler.add(Request.of(self._arrivals, row, params))
        return self._arrivals

    def check(self, row: Row, params: SamplingParams) -> None:
        """Raise InputError if a request has no tokens, or can never fit into the model's length or into the cache."""
        if not len(row):
            raise InputError("a prompt has no tokens: there is nothing to go on from")
        total = len(row) + params.max_new_tokens
        if total > self._limits.length:
            raise InputError(
                f"{len(row)} prompt tokens and max_new_tokens = {params.max_new_tokens} are {total}, the model takes "
                f"{self._limits.length}"
            )
        self._check_pages(total, "load with more cache memory or pages, or ask for fewer new tokens")
        words = max((*params.stop_token_ids, 0))
        if words >= self._limits.vocab_size:
            raise InputError(f"stop_token_ids: {words} is outside the vocabulary of {self._limits.vocab_size}")
        if params.prompt_logprobs is not None and row.embeds:
            raise InputError("prompt_logprobs: tokens given as embeddings have no id, so no log-probability")

    def _check_pages(self, tokens: int, advice: str) -> None:
        pages, page = self.scheduler.pool.pages, self.scheduler.page
        if -(-tokens // page) > pages:
            raise InputError(
                f"{tokens} tokens need {-(-tokens // page)} pages of {page}, the cache has {pages}: {advice}"
            )

    def cancel(self, number: int, why: str = "cancelled") -> Event | None:
        """End a request; None if it is not there (any more)."""
        request = next((request for request in self.scheduler.requests if request.number == number), None)
        if request is None:
            return None
        self._finish(request, why)
        return Event(number=number, token=None, finished=why)

    def step(self) -> list[Event]:
        """Run one step: an event for each request that got a token. May be empty while requests are busy."""
        shares = self.scheduler.next_step()
        before, self._flight = self._flight, self._launch(shares) if shares else None
        assert shares or before or not self.busy, "the first request in line can always run"
        events = self._land(before) if before is not None else []
        if not self._ahead and self._flight is not None:
            flight, self._flight = self._flight, None
            events += self._land(flight)
        return events

    def _launch(self, shares: list[Share]) -> _Flight:
        """Queue a step, and make room for the tokens that it will bring."""
        tokens_S, logprobs = self._run(shares, self._pack(shares))
        rows = [row for row, share in enumerate(shares) if share.completes]
        requests = [shares[row].request for row in rows]
        for share in shares:
            self.scheduler.done(share)
        for request in requests:
            request.expect()
        ready = None
        if tokens_S.is_cuda:
            host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=True)
            tokens_S = host_S.copy_(tokens_S, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return _Flight(requests=requests, rows=rows, tokens=tokens_S, ready=ready, logprobs=logprobs)

    def _land(self, flight: _Flight) -> list[Event]:
        """Wait for a step's tokens, and say what they mean."""
        if flight.ready is not None:
            flight.ready.synchronize()
        tokens, logprobs = flight.tokens.tolist(), flight.logprobs()
        return [
            self._event(request, tokens[row], logprobs.get(row))
            for request, row in zip(flight.requests, flight.rows, strict=True)
            if not request.finished
        ]

    def states(self, rows: Sequence[Row]) -> list[Tensor]:
        """The token states of whole sequences: [tokens, D] each, on the CPU. Only while nothing else runs.

        Raises:
            InputError: requests are running, or a sequence does not fit into the cache.
        """
        if self.busy:
            raise InputError("token states are to be had only while no request runs")
        for row in rows:
            self._check_pages(len(row), "load with more cache memory or pages")
        try:
            return self._states(rows)
        finally:
            for request in self.scheduler.requests:  # after an error
                self.scheduler.finish(request, "cancelled")

    def _states(self, rows: Sequence[Row]) -> list[Tensor]:
        pieces: dict[int, list[Tensor]] = {number: [] for number in range(len(rows))}
        whole = SamplingParams(max_new_tokens=1, prompt_logprobs=0)  # nothing of it is to come from the prefix cache
        for number, row in enumerate(rows):
            if len(row):
                self.scheduler.add(Request.of(number, row, whole))
        while shares := self.scheduler.next_step():
            batch = self._pack(shares)
            states_TD = self.executor.run(batch).states
            for share, begin in zip(shares, batch.cu_seqlens.tolist(), strict=False):
                pieces[share.request.number].append(states_TD[begin : begin + share.count].cpu())
                completes = share.completes
                self.scheduler.done(share)
                if completes:
                    self.scheduler.finish(share.request, "length")
        empty = torch.empty(0, self._hidden, dtype=self._limits.dtype)
        return [torch.cat(pieces[number] or [empty]) for number in range(len(rows))]

    def _pack(self, shares: list[Share]) -> StepBatch:
        limits, page = self._limits, self.scheduler.page
        batch = pack_step(shares, self._position_start, page, limits.width, limits.dtype, self._latest.device)
        self.scheduler.tables.flush()
        return batch

    def _run(self, shares: list[Share], batch: StepBatch) -> tuple[Tensor, Callable[[], dict[int, Logprob]]]:
        """Each share's next token (int64 [S], on the device) and, later, the log-probabilities that are asked for."""
        params = [share.request.params for share in shares]
        if not any(map(_needs_logits, params)):
            return self.executor.part(batch, "best"), dict
        if any(settings.prompt_logprobs is not None for settings in params):
            output = self.executor.run(batch)
            self._note_prompts(shares, batch, output.states)
            raw_SV = output.logits.float()
        else:
            raw_SV = self.executor.part(batch, "logits").float()
        logits_SV = self._penalised(shares, raw_SV)
        drawn = [float(share.request.random.random()) if _draws(share) else 0.0 for share in shares]
        chosen_S = sample(logits_SV, params, drawn)
        self._latest.index_put_((batch.lanes.to(self._latest.device),), chosen_S.to(torch.int32))
        self._note_seen(shares, chosen_S)
        return chosen_S, self._logprobs(shares, raw_SV, chosen_S)

    def _logprobs(self, shares: list[Share], raw_SV: Tensor, chosen_S: Tensor) -> Callable[[], dict[int, Logprob]]:
        counts = {row: share.request.params.logprobs for row, share in enumerate(shares) if share.completes}
        wanted = {row: count for row, count in counts.items() if count is not None}
        if not wanted:
            return dict
        rows = torch.tensor(list(wanted), device=raw_SV.device)
        found = raw_SV[rows], chosen_S[rows], max(wanted.values())

        def read() -> dict[int, Logprob]:
            values = zip(wanted.items(), top_logprobs(*found), strict=True)
            return {row: (own, dict(list(tops.items())[:count])) for (row, count), (own, tops) in values}

        return read

    def _penalised(self, shares: list[Share], raw_SV: Tensor) -> Tensor:
        """The logits, with those of ids that a request has seen changed as it asks."""
        logits_SV = raw_SV
        for row, share in enumerate(shares):
            request, penalty = share.request, share.request.params.repetition_penalty
            if penalty == 1 or not share.completes:
                continue
            if logits_SV is raw_SV:
                logits_SV = raw_SV.clone()
            if request.number not in self._seen:
                given = torch.ones(len(request.row), dtype=torch.bool)
                for start, values in request.row.embeds:
                    given[start : start + len(values)] = False
                ids = torch.from_numpy(request.tokens[: len(given)])[given].long()
                self._seen[request.number] = torch.zeros(raw_SV.shape[1], dtype=torch.bool, device=raw_SV.device)
                self._seen[request.number][ids.to(raw_SV.device)] = True
            logits_SV[row] = penalise(logits_SV[row], self._seen[request.number], penalty)
        return logits_SV

    def _note_seen(self, shares: list[Share], chosen_S: Tensor) -> None:
        """Remember the tokens that were chosen, without waiting for them."""
        for row, share in enumerate(shares):
            if share.completes and share.request.number in self._seen:
                self._seen[share.request.number].index_fill_(0, chosen_S[row : row + 1], True)

    def _note_prompts(self, shares: list[Share], batch: StepBatch, states_TD: Tensor) -> None:
        """Log-probabilities of prompt tokens: each from the logits of the token before it."""
        for share, begin in zip(shares, batch.cu_seqlens.tolist(), strict=False):
            request, count = share.request, share.request.params.prompt_logprobs
            last = min(share.stop, len(request.row) - 1)  # the logits from here on say nothing of the prompt
            if count is None or share.start >= last or request.known > len(request.row):
                continue  # after it gave way behind its first token, all is said
            if share.start == 0:  # also after it gave way before
                self._prompt_logprobs[request.number] = []
            rows = states_TD[begin : begin + last - share.start]
            targets = torch.from_numpy(request.tokens[share.start + 1 : last + 1]).long().to(rows.device)
            noted = self._prompt_logprobs[request.number]
            with torch.inference_mode():
                for some, ids in zip(rows.split(256), targets.split(256), strict=True):
                    noted += top_logprobs(self._head(some), ids, count)

    def _event(self, request: Request, token: int, logprob: Logprob | None) -> Event:
        """Add a generated token, and say whether it was the last one."""
        request.append(token)
        self.scheduler.publish(request)
        params, why = request.params, ""
        if token in params.stop_token_ids or (token in self._ends and not params.ignore_eos):
            why = "stop"
        elif request.known == len(request.tokens):
            why = "length"
        prompt = self._prompt_logprobs.pop(request.number, [])
        if why:
            self._finish(request, why)
        return Event(number=request.number, token=token, logprob=logprob, prompt_logprobs=prompt, finished=why)

    def _finish(self, request: Request, why: str) -> None:
        self.scheduler.finish(request, why)
        self._seen.pop(request.number, None)
        self._prompt_logprobs.pop(request.number, None)


def _needs_logits(params: SamplingParams) -> bool:
    return (
        params.draws
        or params.repetition_penalty != 1
        or params.logprobs is not None
        or params.prompt_logprobs is not None
    )


def _draws(share: Share) -> bool:
    return share.completes and share.request.params.draws

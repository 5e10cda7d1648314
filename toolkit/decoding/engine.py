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
        device: where the model is.
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
        device: torch.device,
    ) -> None:
        self.scheduler, self.executor = scheduler, executor
        self._limits, self._hidden, self._position_start = limits, hidden, position_start
        self._head, self._device = head, device
        self._ends = frozenset(ends)
        self._arrivals = 0
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
        total, pool, page = len(row) + params.max_new_tokens, self.scheduler.pool, self.scheduler.page
        if total > self._limits.length:
            raise InputError(
                f"{len(row)} prompt tokens and max_new_tokens = {params.max_new_tokens} are {total}, the model takes "
                f"{self._limits.length}"
            )
        if -(-total // page) > pool.pages:
            raise InputError(
                f"{total} tokens need {-(-total // page)} pages of {page}, the cache has {pool.pages}: load with more "
                "cache memory or pages, or ask for fewer new tokens"
            )
        words = max((*params.stop_token_ids, 0))
        if words >= self._limits.vocab_size:
            raise InputError(f"stop_token_ids: {words} is outside the vocabulary of {self._limits.vocab_size}")

    def cancel(self, number: int, why: str = "cancelled") -> Event | None:
        """End a request; None if it is not there (any more)."""
        request = next((request for request in self.scheduler.requests if request.number == number), None)
        if request is None:
            return None
        self._finish(request, why)
        return Event(number=number, token=None, finished=why)

    def step(self) -> list[Event]:
        """Run one step: an event for each request that got a token. Empty if there is nothing to do."""
        shares = self.scheduler.next_step()
        if not shares:
            assert not self.busy, "the first request in line can always run"
            return []
        tokens, logprobs = self._run(shares, self._pack(shares))
        events: list[Event] = []
        for share, token, logprob in zip(shares, tokens, logprobs, strict=True):
            completes = share.completes
            self.scheduler.done(share)
            if completes:
                events.append(self._event(share.request, token, logprob))
        return events

    def states(self, rows: Sequence[Row]) -> list[Tensor]:
        """The token states of whole sequences: [tokens, D] each, on the CPU. Only while nothing else runs.

        Raises:
            InputError: requests are running.
        """
        if self.busy:
            raise InputError("token states are to be had only while no request runs")
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
        batch = pack_step(shares, self._position_start, page, limits.width, limits.dtype, self._device)
        self.scheduler.tables.flush()
        return batch

    def _run(self, shares: list[Share], batch: StepBatch) -> tuple[list[int], list[Logprob | None]]:
        """Each share's next token, and its log-probabilities if they are asked for; some are of no use yet."""
        params = [share.request.params for share in shares]
        nothing: list[Logprob | None] = [None] * len(shares)
        if not any(_needs_logits(settings) for settings in params):
            return self.executor.part(batch, "best").tolist(), nothing
        if any(settings.prompt_logprobs is not None for settings in params):
            output = self.executor.run(batch)
            self._note_prompts(shares, batch, output.states)
            raw_SV = output.logits.float()
        else:
            raw_SV = self.executor.part(batch, "logits").float()
        logits_SV = self._penalised(shares, raw_SV)
        drawn = [float(share.request.random.random()) if _draws(share) else 0.0 for share in shares]
        chosen_S = sample(logits_SV, params, drawn)
        return chosen_S.tolist(), self._logprobs(raw_SV, chosen_S, params)

    def _logprobs(self, raw_SV: Tensor, chosen_S: Tensor, params: list[SamplingParams]) -> list[Logprob | None]:
        found: list[Logprob | None] = [None] * len(params)
        wanted = [k for k, settings in enumerate(params) if settings.logprobs is not None]
        if wanted:
            most = max(params[k].logprobs or 0 for k in wanted)
            rows = torch.tensor(wanted, device=raw_SV.device)
            for k, (own, tops) in zip(wanted, top_logprobs(raw_SV[rows], chosen_S[rows], most), strict=True):
                found[k] = (own, dict(list(tops.items())[: params[k].logprobs]))
        return found

    def _penalised(self, shares: list[Share], raw_SV: Tensor) -> Tensor:
        """The logits, with those of ids that a request has seen changed as it asks."""
        logits_SV = raw_SV
        for k, share in enumerate(shares):
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
            seen_V = self._seen[request.number]
            if len(request.generated):
                seen_V[int(request.generated[-1])] = True
            logits_SV[k] = penalise(logits_SV[k], seen_V, penalty)
        return logits_SV

    def _note_prompts(self, shares: list[Share], batch: StepBatch, states_TD: Tensor) -> None:
        """Log-probabilities of prompt tokens: each from the logits of the token before it."""
        for share, begin in zip(shares, batch.cu_seqlens.tolist(), strict=False):
            request, count = share.request, share.request.params.prompt_logprobs
            last = min(share.stop, len(request.row) - 1)  # the logits from here on say nothing of the prompt
            if count is None or share.start >= last:
                continue
            if share.start == 0:  # also after it had to give way, and begins anew
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
        params, why = request.params, ""
        if token in params.stop_token_ids or (token in self._ends and not params.ignore_eos):
            why = "stop"
        elif len(request.generated) >= params.max_new_tokens:
            why = "length"
        prompt = self._prompt_logprobs.get(request.number, []) if len(request.generated) == 1 else []
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

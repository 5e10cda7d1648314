"""Generated tokens and logits of a decoder, compared with transformers, however its requests are scheduled."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toolkit.artifact import Artifact
from toolkit.decoding.cache import CacheOptions
from toolkit.decoding.runner import DecoderRunner
from toolkit.errors import UnsupportedError
from toolkit.parity.cases import PATHS, Case, make_cases
from toolkit.parity.references import CausalReference
from toolkit.parity.report import Cell
from toolkit.parity.rule import bound, max_abs
from toolkit.parity.texts import SENTENCES

__all__ = ["DecoderChecks"]

_NEW_TOKENS = 12
_CHAT = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy? "},
)


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How requests are scheduled."""

    name: str
    together: bool
    options: dict[str, Any]
    runs: int = 1


def _ways(page: int, lanes: int) -> Sequence[_Way]:
    small = max(lanes, page + page // 2 + 1)  # prompts are cut within a page
    return (
        _Way(name="alone", together=False, options={}),
        _Way(name="batched", together=True, options={}),
        _Way(name="in chunks", together=True, options={"step_tokens": small}),
        _Way(name="whole prompts, no cache", together=True, options={"chunked": False, "caching": False}),
        _Way(name="from the cache", together=True, options={"step_tokens": small}, runs=2),
    )


class DecoderChecks:
    """What transformers makes of prompts, exactly and in the artifact's dtype, and the comparison with ours."""

    def __init__(self, artifact: Artifact, checkpoint: Path, device: torch.device, longest: int) -> None:
        spec = artifact.manifest.spec
        self._exact = CausalReference(checkpoint, torch.float64, torch.device("cpu"))
        same = CausalReference(checkpoint, artifact.dtype, device)
        room = min(longest, spec.usable_length) - _NEW_TOKENS
        page = 16 if room >= 53 else 4  # of short sequences too, several are to be full
        self.options = {"cache": CacheOptions(page=page)}
        lengths = sorted({max(1, min(n, room)) for n in (1, 2, page - 1, page, page + 1, 3 * page + 5)})
        self._new = min(_NEW_TOKENS, spec.usable_length - lengths[-1])
        if self._new < 1:
            raise UnsupportedError(f"sequences of {spec.usable_length} tokens leave no room to compare generated ones")
        self._cases: dict[str, list[Case]] = {
            path: make_cases(spec, artifact.dtype, self._exact.table, path, lengths) for path in PATHS
        }
        every = [case for path in PATHS for case in self._cases[path]]
        self._expected = [self._exact.logits(case.same) for case in every]
        self._error = max_abs([same.logits(case.same) for case in every], self._expected)[0]
        self._bound = bound(artifact.dtype, self._error, self._expected)
        self._greedy = [same.greedy(case.same, self._new) for case in every]
        self.texts = [(text, "") for text in SENTENCES if text]

    def tokenizer_differences(self, runner: DecoderRunner) -> list[str]:
        """Texts, and a chat, for which our ids differ."""
        ours = {text: runner.rows([text])[0].ids.tolist() for text, _ in self.texts}
        pairs = [(repr(text[:40]), ours[text], self._exact.ids(text)) for text in ours]
        chat = self._exact.chat(_CHAT)
        if chat is not None:
            pairs.append(("the chat template", list(runner.chat_prompt(_CHAT).ids), chat))
        return [
            f"{name}: {len(own)} ids {own[:6]}, expected {len(theirs)} ids {theirs[:6]}"
            for name, own, theirs in pairs
            if own != theirs
        ]

    def compare(self, runner: DecoderRunner, mode: str) -> list[Cell]:
        """Logits of every prompt, and the tokens that follow it, on each path and for each way of scheduling."""
        cells: list[Cell] = []
        scheduler = runner.engine.scheduler
        usual = runner.engine
        every = [case for path in PATHS for case in self._cases[path]]
        logits = runner.logits([case.given for case in every])
        for path, members in self._by_path():
            error, worst = max_abs([logits[k] for k in members], [self._expected[k] for k in members])
            cells.append(
                Cell(
                    mode=mode,
                    path=path,
                    company="batched",
                    quantity="logits",
                    cases=len(members),
                    error=error,
                    reference_error=self._error,
                    bound=self._bound,
                    worst=every[members[worst]].name,
                )
            )
        for way in _ways(scheduler.page, scheduler.tables.tensor.shape[0]):
            runner.engine = runner.make_engine(**way.options)
            groups = [[case.given for case in every]] if way.together else [[case.given] for case in every]
            tokens: list[list[int]] = []
            for _ in range(way.runs):
                found = [x for group in groups for x in runner.generate(group, self._new, ignore_eos=True)]
                tokens = [generation.token_ids for generation in found]
            for path, members in self._by_path():
                wrong = [k for k in members if self._diverges(tokens[k], *self._greedy[k])]
                cells.append(
                    Cell(
                        mode=mode,
                        path=path,
                        company=way.name,
                        quantity="greedy tokens",
                        cases=len(members),
                        error=float(len(wrong)),
                        reference_error=0.0,
                        bound=0.0,
                        worst=every[wrong[0]].name if wrong else "-",
                    )
                )
        runner.engine = usual
        return cells

    def _by_path(self) -> list[tuple[str, list[int]]]:
        count = len(self._cases["ids"])
        return [(path, list(range(k * count, (k + 1) * count))) for k, path in enumerate(PATHS)]

    def _diverges(self, ours: list[int], theirs: list[int], margins: list[float]) -> bool:
        """Whether tokens part where the reference was sure of its own, beyond what its rounding explains."""
        first = next((k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        return first is not None and margins[first] > 2 * self._bound

"""transformers' greedy tokens of prompts that are ids, embeddings or both, and where it is sure of them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from toolkit.decoding.results import Generation
from toolkit.decoding.runner import DecoderRunner
from toolkit.inputs import RowInput
from toolkit.parity.cases import PATHS, Case, make_cases
from toolkit.parity.decoding import DecoderChecks
from toolkit.parity.references import CausalReference
from toolkit.parity.rule import bound, max_abs
from toolkit.spec import EncoderSpec

CPU = torch.device("cpu")


class Greedy(DecoderChecks):
    """float32 `generate` of a prompt of each length and kind, each alone; tokens are compared as the parity gate does.

    Args:
        checkpoint: the folder.
        spec: the model.
        lengths: of the prompts.
        new: at most so many tokens are generated, up to the model's length.
    """

    def __init__(self, checkpoint: Path, spec: EncoderSpec, lengths: Sequence[int], new: int) -> None:
        exact, same = (CausalReference(checkpoint, dtype, CPU) for dtype in (torch.float64, torch.float32))
        self.table, self.lengths = same.table, lengths
        self.cases = {path: make_cases(spec, torch.float32, exact.table, path, lengths) for path in PATHS}
        self.new = {length: min(new, spec.usable_length - length) for length in lengths}
        every = [case for path in PATHS for case in self.cases[path]]
        self._logits = [exact.logits(case.same) for case in every]
        error, _ = max_abs([same.logits(case.same) for case in every], self._logits)
        self._bound = bound(torch.float32, error, self._logits)
        self.tokens = {path: [self._greedy_of(same, case) for case in self.cases[path]] for path in PATHS}

    def _greedy_of(self, reference: CausalReference, case: Case) -> tuple[list[int], list[float]]:
        given: list[int] | Tensor = case.same
        new = self.new[len(given)]
        return reference.greedy(given, new) if new else ([], [])

    @property
    def sure(self) -> float:
        """The share of the prompts of whose every token the reference is sure."""
        margins = [min(found[1], default=torch.inf) > 2 * self._bound for path in PATHS for found in self.tokens[path]]
        return sum(margins) / len(margins)

    @property
    def variety(self) -> float:
        """How many different tokens follow a prompt, on average."""
        counts = [len(set(found[0])) for path in PATHS for found in self.tokens[path]]
        return sum(counts) / len(counts)

    def inputs(self, *paths: str) -> list[RowInput]:
        """The prompts of these kinds."""
        return [case.given for path in paths for case in self.cases[path]]

    def check(self, runner: DecoderRunner) -> None:
        """Logits of all prompts are within the gate's bound, and tokens are right, as far as a prompt can go on."""
        error, worst = max_abs(runner.logits(self.inputs(*PATHS)), self._logits)
        assert error <= self._bound, f"prompt {worst}: {error}"
        for path in PATHS:
            for length, given, expected in zip(self.lengths, self.inputs(path), self.tokens[path], strict=True):
                if self.new[length]:
                    found = runner.generate(given, self.new[length], ignore_eos=True)[0].token_ids
                    assert not self._diverges(found, *expected), f"{path}, {length} tokens"

    def wrong(self, found: Sequence[Generation], *paths: str) -> list[str]:
        """The prompts whose tokens are others where the reference was sure of its own."""
        names = [f"{path}, {case.name}" for path in paths for case in self.cases[path]]
        expected = [tokens for path in paths for tokens in self.tokens[path]]
        pairs = zip(names, found, expected, strict=True)
        return [name for name, ours, theirs in pairs if self._diverges(ours.token_ids, *theirs)]

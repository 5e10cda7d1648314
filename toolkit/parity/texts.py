"""Texts (or pairs of texts) through the whole pipeline, compared with the library that serves such checkpoints."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifact import Artifact, Manifest
from toolkit.multivector import KINDS
from toolkit.parity.references import (
    ClassifierReference,
    CrossEncoderReference,
    MultiVectorReference,
    SentenceTransformersReference,
    Sided,
    SparseEncoderReference,
    TextReference,
)
from toolkit.parity.report import Cell
from toolkit.parity.rule import bound, max_abs
from toolkit.runner import Runner

__all__ = ["SENTENCES", "TextChecks", "in_company"]

SENTENCES = (
    "",
    "a",
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "  spaces   between,\tand\nlines  ",
    "UPPER lower MiXeD",
    "naïve café — Grüße, 東京 и Москва 🙂",
    "literal [SEP] and [PAD] and <s> inside",
    "numbers 1234567890, 3.14159, 0x7f",
    "A sentence embedding maps a text to a point, so that texts of similar meaning lie close together.",
)
_QUANTITIES = {
    "multi-vector": "token vectors",
    "rerank": "scores",
    "classify": "logits",
    "token-classify": "token logits",
}


def in_company(run: Callable[[list[Any]], list[Tensor]], inputs: list[Any], company: str) -> list[Tensor]:
    """Run inputs one by one, together, or together in another order; results come in the given order."""
    if company == "alone":
        return [run([item])[0] for item in inputs]
    order = list(range(len(inputs)))
    if company == "shuffled":
        random.Random(1).shuffle(order)
    results = run([inputs[k] for k in order])
    return [results[order.index(k)] for k in range(len(inputs))]


class TextChecks:
    """What the reference makes of the texts, exactly and in the artifact's dtype, and the comparison with ours."""

    options: Mapping[str, Any] = {}  # of loading

    def __init__(self, artifact: Artifact, checkpoint: Path, device: torch.device, longest: int) -> None:
        manifest = artifact.manifest
        self._task = manifest.task
        kind = (self._task, manifest.pipeline.normalize)
        self._exact = _reference(*kind, checkpoint, torch.float64, torch.device("cpu"), "eager")
        # A score is one number where a vector is hundreds, and one text may be far more sensitive to rounding than all
        # others: so the reference's error is that of both its ways to compute attention.
        ways = ("eager",) if self._task in ("embed", "sparse", "multi-vector") else ("eager", "sdpa")
        same = [_reference(*kind, checkpoint, artifact.dtype, device, way) for way in ways]
        # queries and documents have limits of their own, which the reference is to find by itself
        limit = manifest.usable_length if manifest.multi_vector is not None else manifest.tokenizer.limit
        for reference in (self._exact, *same):
            reference.limit_length(limit)
        self.texts = _texts(manifest, longest)
        # A tokenizer without special tokens makes nothing of some texts, and the reference fails on them.
        self.texts = [(item, p) for item, p in self.texts if not _empty(item) or p or self._has_special_tokens()]
        self._expected = [self._exact.result(item, p) for item, p in self.texts]
        self._error = max(
            max_abs([reference.result(item, p) for item, p in self.texts], self._expected)[0] for reference in same
        )
        self._bound = bound(artifact.dtype, self._error, self._expected)

    def _has_special_tokens(self) -> bool:
        one = {"multi-vector": Sided("document", "a", own=False), "rerank": ("a", "")}.get(self._task, "a")
        return len(self._exact.tokens(one, "")) > 1

    def tokenizer_differences(self, runner: Runner) -> list[str]:
        """Texts for which our ids or segment ids differ, with the first difference."""
        found: list[str] = []
        for item, prompt in self.texts:
            text, kind = (item.text, item.kind) if isinstance(item, Sided) else (item, "")
            row = runner.rows([text], prompt, pairs="allowed", kind=kind)[0]
            ours = list(zip(row.ids.tolist(), row.segments.tolist(), strict=True))
            theirs = self._exact.tokens(item, prompt)
            if ours != theirs:
                found.append(f"{_name(item)!r}: {len(ours)} ids {ours[:6]}, expected {len(theirs)} ids {theirs[:6]}")
        return found

    def compare(self, runner: Runner, mode: str) -> list[Cell]:
        """Results of all texts, alone and batched."""
        cells: list[Cell] = []
        prompts = sorted({prompt for _, prompt in self.texts})
        for company in ("alone", "batched", "shuffled"):
            ours: list[Tensor] = [torch.empty(0)] * len(self.texts)
            for prompt in prompts:
                members = [k for k, (_, p) in enumerate(self.texts) if p == prompt]
                run = lambda items, prompt=prompt: _results(runner, items, prompt)  # noqa: E731
                for k, result in zip(
                    members, in_company(run, [self.texts[k][0] for k in members], company), strict=True
                ):
                    # other tokens were kept than the reference's: a miss, whatever the values
                    fits = result.shape == self._expected[k].shape
                    ours[k] = result if fits else torch.full_like(self._expected[k], torch.nan)
            error, worst = max_abs(ours, self._expected)
            cells.append(
                Cell(
                    mode=mode,
                    path="text",
                    company=company,
                    quantity=_QUANTITIES.get(self._task, "vectors"),
                    cases=len(self.texts),
                    error=error,
                    reference_error=self._error,
                    bound=self._bound,
                    worst=repr(_name(self.texts[worst][0])),
                )
            )
        return cells


def _reference(
    task: str, normalize: bool, checkpoint: Path, dtype: torch.dtype, device: torch.device, attention: str
) -> TextReference:
    match task:
        case "embed":
            return SentenceTransformersReference(checkpoint, dtype, device, attention, normalize=normalize)
        case "multi-vector":
            return MultiVectorReference(checkpoint, dtype, device, attention)
        case "sparse":
            return SparseEncoderReference(checkpoint, dtype, device, attention)
        case "rerank":
            return CrossEncoderReference(checkpoint, dtype, device, attention)
        case "classify":
            return ClassifierReference(checkpoint, dtype, device, attention, per_token=False)
        case "token-classify":
            return ClassifierReference(checkpoint, dtype, device, attention, per_token=True)
    raise AssertionError(f"no reference for task {task!r}")


def _items(task: str, limit: int, longest: int) -> Sequence[Any]:
    """Texts, or for a reranker pairs of them: odd ones, and such around the limit, if that is not beyond `longest`."""
    around = (limit - 3, limit - 2, limit - 1, limit, 3 * limit) if limit <= longest else (longest // 2,)
    long = ("one two three " * max(around)).split()
    cut = [" ".join(long[:n]) for n in around if n > 0]
    texts = [*SENTENCES, *cut]
    if task in ("embed", "sparse", "multi-vector"):
        return texts
    # more texts than for vectors, so that the largest error means as much
    draw, words = random.Random(0), " ".join(SENTENCES).split()
    texts += [" ".join(draw.sample(words, draw.randrange(1, 12))) for _ in range(40)]
    if task == "token-classify":
        return texts
    shifted = texts[1:] + texts[:1]
    short = [("a query", text) for text in cut] + [(text, "a document") for text in cut]
    pairs = [*zip(texts, shifted, strict=True), *short]
    return pairs if task == "rerank" else [*texts, *pairs]


def _texts(manifest: Manifest, longest: int) -> list[tuple[Any, str]]:
    """Each item with the prompt that applies by default, and one with every prompt that there is."""
    prompts = manifest.pipeline.prompts
    every = [prompt for prompt in prompts.values() if prompt]
    texts: list[tuple[Any, str]] = []
    if manifest.multi_vector is not None:
        for kind in KINDS:
            chosen = _items(manifest.task, manifest.multi_vector.side(kind).longest, longest)
            texts += [(Sided(kind, text, own=True), prompts[kind]) for text in chosen]
            texts += [(Sided(kind, chosen[3], own=False), prompt) for prompt in every]
        return texts
    items = _items(manifest.task, manifest.tokenizer.limit, longest)
    texts = [(item, manifest.pipeline.prompt(None, None)) for item in items]
    return texts + [(texts[3][0], prompt) for prompt in every if manifest.task in ("embed", "sparse", "rerank")]


def _name(item: Any) -> str:
    """How an item is shown."""
    return f"{item.kind} {item.text[:40]}" if isinstance(item, Sided) else str(item)[:40]


def _empty(item: Any) -> bool:
    """Whether there is nothing in a text or in a pair of texts."""
    return not any(item.text if isinstance(item, Sided) else item)


def _results(runner: Runner, items: list[Any], prompt: str) -> list[Tensor]:
    """Ours, in the form of the reference's `result`."""
    match runner.artifact.manifest.task:
        case "embed" | "sparse":
            return list(runner.embed(items, prompt=prompt))
        case "multi-vector":
            found: dict[int, Tensor] = {}
            for kind in KINDS:
                members = [k for k, item in enumerate(items) if item.kind == kind]
                vectors = runner.multi_vectors([items[k].text for k in members], kind, prompt=prompt)
                found.update(zip(members, vectors, strict=True))
            return [found[k] for k in range(len(items))]
        case "rerank":
            raw, final = (runner.score(items, activation=a, prompt=prompt).view(len(items), -1) for a in (False, True))
            return list(torch.cat((raw, final), dim=1))
        case "classify":
            return list(runner.classify(items).logits)
        case _:
            return [result.logits for result in runner.classify_tokens(items)]

"""Labels of a classifier, and what sentence-transformers does to a reranker's logits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.tokenizer import Place

__all__ = [
    "Classification",
    "ScoreActivation",
    "Scoring",
    "TokenClassification",
    "count_labels",
    "read_scoring",
]

ScoreActivation = Literal["identity", "sigmoid"]

_ACTIVATIONS: Mapping[str, ScoreActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
_MOST_LABELS = 2**20
_ST_CONFIG = "config_sentence_transformers.json"


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What a classifier's or reranker's logits mean.

    Attributes:
        labels: their names, in order.
        activation: what `score` applies to the logits, in float32.
        probabilities: how `classify` turns logits into probabilities: "softmax" over the labels, or "sigmoid" of
            each where a sequence may have several labels or there is only one.
    """

    labels: tuple[str, ...]
    activation: ScoreActivation
    probabilities: Literal["softmax", "sigmoid"]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Scoring":
        """Inverse of `dataclasses.asdict`; missing or unknown keys raise TypeError or KeyError."""
        return cls(**{**data, "labels": tuple(data["labels"])})

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """[…, labels] → […, labels], in float32."""
        return logits.float().softmax(-1) if self.probabilities == "softmax" else logits.float().sigmoid()


@dataclass(frozen=True, kw_only=True)
class Classification:
    """What a classifier says of each input.

    Attributes:
        logits: float32 [inputs, labels].
        probabilities: float32 [inputs, labels].
        labels: the names of the columns.
        several: whether an input may have several labels.
    """

    logits: Tensor
    probabilities: Tensor
    labels: tuple[str, ...]
    several: bool

    @classmethod
    def of(cls, logits: Tensor, scoring: Scoring) -> "Classification":
        """Make it from logits."""
        several = scoring.probabilities == "sigmoid"
        return cls(
            logits=logits, probabilities=scoring.to_probabilities(logits), labels=scoring.labels, several=several
        )

    @property
    def predicted(self) -> list[tuple[str, ...]]:
        """The likeliest label of each input; where it may have several, those of probability above one half."""
        if not self.several:
            return [(self.labels[k],) for k in self.probabilities.argmax(-1).tolist()]
        rows = (self.probabilities > 0.5).tolist()
        return [tuple(label for label, above in zip(self.labels, row, strict=True) if above) for row in rows]


@dataclass(frozen=True, kw_only=True)
class TokenClassification:
    """What a classifier says of each token of one input.

    Attributes:
        logits: float32 [tokens, labels].
        probabilities: float32 [tokens, labels].
        labels: the names of the columns.
        places: where each token comes from in the text; None for an input that is no text.
    """

    logits: Tensor
    probabilities: Tensor
    labels: tuple[str, ...]
    places: list[Place] | None

    @classmethod
    def of(cls, logits: Tensor, scoring: Scoring, places: list[Place] | None) -> "TokenClassification":
        """Make it from logits."""
        probabilities = logits.softmax(-1)
        return cls(logits=logits, probabilities=probabilities, labels=scoring.labels, places=places)

    @property
    def predicted(self) -> list[str]:
        """The likeliest label of each token."""
        return [self.labels[k] for k in self.probabilities.argmax(-1).tolist()]


def count_labels(config: Mapping[str, Any]) -> int:
    """The number of labels that `config.json` describes; 2 where it says nothing, as in transformers.

    Raises:
        CheckpointError: `id2label` and `num_labels` contradict each other, or are malformed.
    """
    return len(_labels(config))


def _labels(config: Mapping[str, Any]) -> list[str]:
    named, stated = config.get("id2label"), config.get("num_labels")
    if stated is not None and (type(stated) is not int or not 1 <= stated <= _MOST_LABELS):
        raise CheckpointError(
            f"config.json: num_labels = {stated!r}, expected a positive integer, at most {_MOST_LABELS}"
        )
    if named is None:
        return [f"LABEL_{k}" for k in range(stated or 2)]
    if not isinstance(named, dict) or not named or not all(isinstance(label, str) for label in named.values()):
        raise CheckpointError("config.json: id2label must map numbers to names")
    if sorted(named) != sorted(str(k) for k in range(len(named))):
        raise CheckpointError(f"config.json: id2label must number its labels 0 … {len(named) - 1}")
    if stated is not None and stated != len(named):
        raise CheckpointError(f"config.json: num_labels = {stated}, but id2label has {len(named)} labels: correct one")
    return [named[str(k)] for k in range(len(named))]


def read_scoring(checkpoint: Checkpoint, task: str, *, by_words: bool = False) -> Scoring:
    """Read labels and activation.

    The activation is, in this order: that of config_sentence_transformers.json, that of config.json (in its new and
    old place), sigmoid for one label, none for several. This is sentence-transformers' order.

    Args:
        checkpoint: where the files are.
        task: what it is converted for.
        by_words: whether a language model scores by its logits of some words: one label, whatever config.json says.

    Raises:
        CheckpointError: a field is malformed.
        UnsupportedError: the activation is another one; or a regression is to be a classifier.
    """
    config = checkpoint.config
    labels = ["LABEL_0"] if by_words else _labels(config)
    where, stated = _stated_activation(checkpoint)
    if stated is not None and (not isinstance(stated, str) or stated not in _ACTIVATIONS):
        raise UnsupportedError(
            f"{where} = {stated!r} is not supported (and never imported); supported: {', '.join(_ACTIVATIONS)}"
        )
    default: ScoreActivation = "sigmoid" if len(labels) == 1 else "identity"
    problem = config.get("problem_type")
    if problem not in (None, "regression", "single_label_classification", "multi_label_classification"):
        raise CheckpointError(f"config.json: problem_type = {problem!r} is none that transformers knows")
    if problem == "regression" and task == "classify":
        raise UnsupportedError("config.json: problem_type = 'regression' has no probabilities: say --task rerank")
    several = problem == "multi_label_classification" or len(labels) == 1
    return Scoring(
        labels=tuple(labels),
        activation=_ACTIVATIONS[stated] if stated is not None else default,
        probabilities="sigmoid" if several else "softmax",
    )


def _stated_activation(checkpoint: Checkpoint) -> tuple[str, Any]:
    """(where it stands, the name of the activation), None where nothing is stated.

    sentence-transformers reads its own file only beside a modules.json, and the old field only without the new one.
    """
    config = checkpoint.config
    if checkpoint.has("modules.json") and checkpoint.has(_ST_CONFIG):
        stated = checkpoint.json(_ST_CONFIG).get("activation_fn")
        if stated is not None:
            return f"{_ST_CONFIG}: activation_fn", stated
    nested = config.get("sentence_transformers")
    if isinstance(nested, dict) and "activation_fn" in nested:
        return "config.json: sentence_transformers.activation_fn", nested["activation_fn"]
    old = "sbert_ce_default_activation_function"
    return f"config.json: {old}", config.get(old)

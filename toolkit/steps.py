"""What becomes of the token states, as plain data: the steps of a head, which the artifact stores."""

from dataclasses import dataclass
from typing import Literal

from toolkit.spec import Activation, NormSpec, Stored

__all__ = [
    "DenseStep",
    "DifferenceStep",
    "DivideStep",
    "HeadSpec",
    "LogStep",
    "NormStep",
    "NormalizeStep",
    "Place",
    "PoolingStep",
    "SoftcapStep",
    "Step",
    "VocabularyStep",
    "WordsStep",
]

Place = Literal["vectors", "tokens"]


@dataclass(frozen=True, kw_only=True)
class PoolingStep:
    """One vector a sequence from its token states; several modes are concatenated in this order.

    Tokens at a sequence's end whose id is `pad` are left out, None for none; see `toolkit.rows.without_padding`.
    """

    kind: Literal["pooling"] = "pooling"
    modes: tuple[str, ...]
    pad: int | None = None


@dataclass(frozen=True, kw_only=True)
class DenseStep:
    """A linear layer on the vectors or on each token, with an activation; `residual` adds the input to the result.

    Its weights are called `head.steps.NAME`; without a name, by the step's number.
    """

    kind: Literal["dense"] = "dense"
    name: str = ""
    on: Place
    inputs: int
    outputs: int
    bias: bool
    activation: Activation = "identity"
    residual: bool = False


@dataclass(frozen=True, kw_only=True)
class NormStep:
    """Normalisation with learned weights, called as a DenseStep's are."""

    kind: Literal["norm"] = "norm"
    name: str = ""
    on: Place
    width: int
    norm: NormSpec


@dataclass(frozen=True, kw_only=True)
class VocabularyStep:
    """Each token's logits over the vocabulary: products with the model's own token table, and perhaps a bias."""

    kind: Literal["vocabulary"] = "vocabulary"
    name: str = ""
    on: Place
    outputs: int
    bias: bool


@dataclass(frozen=True, kw_only=True)
class WordsStep:
    """Logits of some `words` only, given by their ids: products with these rows of the language model's output layer.

    The rows are those of the model's own token table if `tied`, else they are stored, called as a DenseStep's are.
    """

    kind: Literal["words"] = "words"
    name: str = ""
    on: Place
    inputs: int
    words: tuple[int, ...]
    tied: bool

    @property
    def outputs(self) -> int:
        """How many logits there are."""
        return len(self.words)


@dataclass(frozen=True, kw_only=True)
class DifferenceStep:
    """The first of two values minus the second."""

    kind: Literal["difference"] = "difference"
    on: Place

    @property
    def outputs(self) -> int:
        """One value is left."""
        return 1


@dataclass(frozen=True, kw_only=True)
class LogStep:
    """SPLADE's activation (Formal et al., 2021): log(1 + relu), `times` in a row."""

    kind: Literal["log"] = "log"
    on: Place
    times: int


@dataclass(frozen=True, kw_only=True)
class DivideStep:
    """Division by a number: logits that the model's training scaled down."""

    kind: Literal["divide"] = "divide"
    on: Place
    by: float


@dataclass(frozen=True, kw_only=True)
class SoftcapStep:
    """Bounded values: cap × tanh(x / cap)."""

    kind: Literal["softcap"] = "softcap"
    on: Place
    cap: float


@dataclass(frozen=True, kw_only=True)
class NormalizeStep:
    """Scale to length 1."""

    kind: Literal["normalize"] = "normalize"
    on: Place


Step = (
    PoolingStep
    | DenseStep
    | NormStep
    | VocabularyStep
    | WordsStep
    | DifferenceStep
    | LogStep
    | DivideStep
    | SoftcapStep
    | NormalizeStep
)


@dataclass(frozen=True, kw_only=True)
class HeadSpec(Stored):
    """What becomes of the token states, step by step.

    `width` is that of the vectors, 0 if there are none; `token_width` that of what each token ends as, 0 if tokens
    keep their states.
    """

    steps: tuple[Step, ...]
    width: int
    token_width: int = 0

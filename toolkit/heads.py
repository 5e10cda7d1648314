"""What stands behind the base model in a transformers class for a task: steps and the tensors that fill them.

Recipes list these as data; the functions here make the common ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

from toolkit.config import ConfigReader
from toolkit.spec import Activation, DenseStep, NormSpec, NormStep, Place, PoolingStep, Step, VocabularyStep
from toolkit.weights import Rule, copy, rename

__all__ = ["TaskHead", "late_head", "mlm_head", "normed_head", "sequence_head", "token_head"]

# (configuration, hidden size, number of labels) → steps
MakeSteps = Callable[[ConfigReader, int, int], tuple[Step, ...]]

SEQUENCE_TASKS = ("rerank", "classify")


@dataclass(frozen=True, kw_only=True)
class TaskHead:
    """The head of some transformers classes.

    Attributes:
        classes: the classes that have it.
        tasks: what it serves.
        steps: from the token states to the result; their parameters are called `head.steps.NAME.…`.
        rules: what fills these parameters.
    """

    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    steps: MakeSteps
    rules: tuple[Rule, ...]


def _named(config: ConfigReader, activation: str) -> Activation:
    """An activation's own name, or that of the configuration field that names it, with gelu as its default."""
    known: dict[str, Activation] = {"tanh": "tanh", "gelu": "gelu", "relu": "relu"}
    return known.get(activation) or config.activation(activation, "gelu")


def first_token_steps(activation: str) -> MakeSteps:
    """First token's state, dense layer, activation (or the field that names it), dense layer to the labels."""

    def steps(config: ConfigReader, hidden: int, labels: int) -> tuple[Step, ...]:
        name = _named(config, activation)
        return (
            PoolingStep(modes=("cls",)),
            DenseStep(name="dense", on="vectors", inputs=hidden, outputs=hidden, bias=True, activation=name),
            DenseStep(name="out", on="vectors", inputs=hidden, outputs=labels, bias=True),
        )

    return steps


def sequence_head(
    name: str, activation: str, dense: str, out: str = "classifier", *, dense_inside: bool = False
) -> TaskHead:
    """The usual head of a sequence classifier.

    Args:
        name: the transformers class.
        activation: between the two dense layers; see `first_token_steps`.
        dense, out: the stored layers' names.
        dense_inside: whether `dense` is part of the base model and carries its prefix (a pooler).
    """
    return TaskHead(
        classes=(name,),
        tasks=SEQUENCE_TASKS,
        steps=first_token_steps(activation),
        rules=(
            rename("head.steps.dense.linear.{p}", f"{dense}.{{p}}", outside=not dense_inside),
            rename("head.steps.out.linear.{p}", f"{out}.{{p}}", outside=True),
        ),
    )


def normed_head(name: str, *, on: Place) -> TaskHead:
    """Dense layer, activation and norm as `config.json` says, then the labels: after pooling, or on each token.

    Args:
        name: the transformers class.
        on: "vectors" for a sequence classifier, "tokens" for a token classifier.
    """

    def steps(config: ConfigReader, hidden: int, labels: int) -> tuple[Step, ...]:
        norm = NormSpec(eps=config.positive("norm_eps", 1e-5), bias=config.boolean("norm_bias", False))
        activation = config.activation("classifier_activation", "gelu")
        bias = config.boolean("classifier_bias", False)
        pooling = PoolingStep(modes=(config.choice("classifier_pooling", "cls", ("cls", "mean")),))
        return (
            *([pooling] if on == "vectors" else []),
            DenseStep(name="dense", on=on, inputs=hidden, outputs=hidden, bias=bias, activation=activation),
            NormStep(name="norm", on=on, width=hidden, norm=norm),
            DenseStep(name="out", on=on, inputs=hidden, outputs=labels, bias=True),
        )

    return TaskHead(
        classes=(name,),
        tasks=SEQUENCE_TASKS if on == "vectors" else ("token-classify",),
        steps=steps,
        rules=(
            rename("head.steps.dense.linear.{p}", "head.dense.{p}", outside=True),
            rename("head.steps.norm.{p}", "head.norm.{p}", outside=True),
            rename("head.steps.out.linear.{p}", "classifier.{p}", outside=True),
        ),
    )


def late_head(name: str) -> TaskHead:
    """Dense layer, gelu, labels; pooled before ("bos", "mean") or, by default, after them ("late"), as a mean."""

    def steps(config: ConfigReader, hidden: int, labels: int) -> tuple[Step, ...]:
        pooling = config.choice("classifier_pooling", "late", ("bos", "mean", "late"))
        on: Place = "tokens" if pooling == "late" else "vectors"
        dense = DenseStep(name="dense", on=on, inputs=hidden, outputs=hidden, bias=True, activation="gelu")
        out = DenseStep(name="out", on=on, inputs=hidden, outputs=labels, bias=True)
        pool = PoolingStep(modes=("cls" if pooling == "bos" else "mean",))
        return (dense, out, pool) if on == "tokens" else (pool, dense, out)

    rules = tuple(
        rename(f"head.steps.{name}.linear.{{p}}", f"{stored}.{{p}}", outside=True)
        for name, stored in (("dense", "dense"), ("out", "classifier"))
    )
    return TaskHead(classes=(name,), tasks=SEQUENCE_TASKS, steps=steps, rules=rules)


def mlm_head(
    name: str, activation: str, *, dense: str, norm: str, bias: str, decoder: str, eps: float | None = None
) -> TaskHead:
    """A masked language model's head, for sparse embeddings; its output is tied to the token table.

    Args:
        name: the transformers class.
        activation: "gelu", or the configuration field that names it.
        dense, norm, bias, decoder: the stored tensors' names; `bias` whole, the others without weight or bias.
        eps: the norm's; by default what `config.json` says.
    """

    def steps(config: ConfigReader, hidden: int, labels: int) -> tuple[Step, ...]:
        chosen = _named(config, activation)
        used = eps if eps is not None else config.positive("layer_norm_eps", 1e-12)
        words = config.integer("vocab_size", 1)
        return (
            DenseStep(name="dense", on="tokens", inputs=hidden, outputs=hidden, bias=True, activation=chosen),
            NormStep(name="norm", on="tokens", width=hidden, norm=NormSpec(eps=used)),
            VocabularyStep(name="out", on="tokens", outputs=words),
        )

    return TaskHead(
        classes=(name,),
        tasks=("sparse",),
        steps=steps,
        rules=(
            rename("head.steps.dense.linear.{p}", f"{dense}.{{p}}", outside=True),
            rename("head.steps.norm.{p}", f"{norm}.{{p}}", outside=True),
            rename("head.steps.out.bias", bias, outside=True),
            *([copy("head.steps.out.bias", f"{decoder}.bias", outside=True)] if bias != f"{decoder}.bias" else []),
            copy("embeddings.token.weight", f"{decoder}.weight", outside=True),
        ),
    )


def token_steps(config: ConfigReader, hidden: int, labels: int) -> tuple[Step, ...]:
    """A dense layer to the labels, on each token."""
    return (DenseStep(name="out", on="tokens", inputs=hidden, outputs=labels, bias=True),)


def token_head(name: str, out: str = "classifier") -> TaskHead:
    """The usual head of a token classifier."""
    return TaskHead(
        classes=(name,),
        tasks=("token-classify",),
        steps=token_steps,
        rules=(rename("head.steps.out.linear.{p}", f"{out}.{{p}}", outside=True),),
    )

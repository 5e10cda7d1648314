"""What stands behind the base model in a transformers class for a task: steps and the tensors that fill them.

Recipes list these as data; the functions here make the common ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from toolkit.config import ConfigReader
from toolkit.errors import UnsupportedError
from toolkit.spec import Activation, EncoderSpec, NormSpec
from toolkit.steps import (
    DenseStep,
    DifferenceStep,
    DivideStep,
    NormStep,
    Place,
    PoolingStep,
    SoftcapStep,
    Step,
    VocabularyStep,
    WordsStep,
)
from toolkit.weights import Rows, Rule, copy, drop, rename

__all__ = [
    "TaskHead",
    "causal_head",
    "either_head",
    "last_token_head",
    "late_head",
    "lm_head",
    "mlm_head",
    "normed_head",
    "normed_mlm_head",
    "sequence_head",
    "token_head",
    "vocabulary_head",
    "words_head",
]

# (configuration, the base model, number of labels) → steps
MakeSteps = Callable[[ConfigReader, EncoderSpec, int], tuple[Step, ...]]
MakeRules = Callable[[ConfigReader], tuple[Rule, ...]]

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
    rules: MakeRules


def _always(*rules: Rule) -> MakeRules:
    """These rules, whatever the configuration."""
    return lambda config: rules


def _named(config: ConfigReader, activation: str) -> Activation:
    """An activation's own name, or that of the configuration field that names it, with gelu as its default."""
    known: dict[str, Activation] = {"tanh": "tanh", "gelu": "gelu", "relu": "relu"}
    return known.get(activation) or config.activation(activation, "gelu")


def first_token_steps(activation: str) -> MakeSteps:
    """First token's state, dense layer, activation (or the field that names it), dense layer to the labels."""

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        name, hidden = _named(config, activation), spec.hidden
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
        rules=_always(
            rename("head.steps.dense.linear.{p}", f"{dense}.{{p}}", outside=not dense_inside),
            rename("head.steps.out.linear.{p}", f"{out}.{{p}}", outside=True),
        ),
    )


NORMED_RULES = (
    rename("head.steps.dense.linear.{p}", "head.dense.{p}", outside=True),
    rename("head.steps.norm.{p}", "head.norm.{p}", outside=True),
)


def _normed_steps(config: ConfigReader, hidden: int, on: Place) -> tuple[Step, ...]:
    """Dense layer, activation and norm as `config.json` says."""
    norm = NormSpec(eps=config.positive("norm_eps", 1e-5), bias=config.boolean("norm_bias", False))
    activation = config.activation("classifier_activation", "gelu")
    bias = config.boolean("classifier_bias", False)
    return (
        DenseStep(name="dense", on=on, inputs=hidden, outputs=hidden, bias=bias, activation=activation),
        NormStep(name="norm", on=on, width=hidden, norm=norm),
    )


def normed_head(name: str, *, on: Place) -> TaskHead:
    """Dense layer, activation and norm as `config.json` says, then the labels: after pooling, or on each token.

    Args:
        name: the transformers class.
        on: "vectors" for a sequence classifier, "tokens" for a token classifier.
    """

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        pooling = PoolingStep(modes=(config.choice("classifier_pooling", "cls", ("cls", "mean")),))
        return (
            *([pooling] if on == "vectors" else []),
            *_normed_steps(config, spec.hidden, on),
            DenseStep(name="out", on=on, inputs=spec.hidden, outputs=labels, bias=True),
        )

    return TaskHead(
        classes=(name,),
        tasks=SEQUENCE_TASKS if on == "vectors" else ("token-classify",),
        steps=steps,
        rules=_always(*NORMED_RULES, rename("head.steps.out.linear.{p}", "classifier.{p}", outside=True)),
    )


def late_head(name: str) -> TaskHead:
    """Dense layer, gelu, labels; pooled before ("bos", "mean") or, by default, after them ("late"), as a mean."""

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        pooling = config.choice("classifier_pooling", "late", ("bos", "mean", "late"))
        on: Place = "tokens" if pooling == "late" else "vectors"
        hidden = spec.hidden
        dense = DenseStep(name="dense", on=on, inputs=hidden, outputs=hidden, bias=True, activation="gelu")
        out = DenseStep(name="out", on=on, inputs=hidden, outputs=labels, bias=True)
        pool = PoolingStep(modes=("cls" if pooling == "bos" else "mean",))
        return (dense, out, pool) if on == "tokens" else (pool, dense, out)

    rules = tuple(
        rename(f"head.steps.{name}.linear.{{p}}", f"{stored}.{{p}}", outside=True)
        for name, stored in (("dense", "dense"), ("out", "classifier"))
    )
    return TaskHead(classes=(name,), tasks=SEQUENCE_TASKS, steps=steps, rules=_always(*rules))


def vocabulary_head(
    name: str,
    *,
    before: Callable[[ConfigReader, EncoderSpec], tuple[Step, ...]],
    rules: tuple[Rule, ...],
    decoder: str,
    bias: str = "",
    biased: tuple[str, bool] | None = None,
    tied: bool = True,
    unties: bool = True,
) -> TaskHead:
    """A masked language model's head, for sparse embeddings: some steps, then logits over the vocabulary.

    Where `tie_word_embeddings` is true these are products with the token table, otherwise with a weight of their own.

    Args:
        name: the transformers class.
        before: the steps before the logits.
        rules: what fills those.
        decoder: the name of the stored output layer.
        bias: the name of a tensor that is tied to the output layer's bias, if there is one.
        biased: the configuration field that says whether the output has a bias, and its default; None if it always has.
        tied: the default of `tie_word_embeddings`.
        unties: whether the class reads `tie_word_embeddings`; otherwise its output is always the token table.
    """

    def is_tied(config: ConfigReader) -> bool:
        return config.boolean("tie_word_embeddings", tied) or not unties

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        words, width = spec.embedding.vocab_size, spec.embedding.width
        with_bias = config.boolean(*biased) if biased is not None else True
        if is_tied(config):
            return *before(config, spec), VocabularyStep(name="out", on="tokens", outputs=words, bias=with_bias)
        out = DenseStep(name="out", on="tokens", inputs=width, outputs=words, bias=with_bias)
        return *before(config, spec), out

    def make_rules(config: ConfigReader) -> tuple[Rule, ...]:
        if not is_tied(config):
            unused = [drop(bias, why="the output is not tied, and has a bias of its own", outside=True)] if bias else []
            return *rules, rename("head.steps.out.linear.{p}", f"{decoder}.{{p}}", outside=True), *unused
        copies = [copy("head.steps.out.bias", f"{decoder}.bias", outside=True)] if bias else []
        own = rename("head.steps.out.bias", bias or f"{decoder}.bias", outside=True)
        return *rules, own, *copies, copy("embeddings.token.weight", f"{decoder}.weight", outside=True)

    return TaskHead(classes=(name,), tasks=("sparse",), steps=steps, rules=make_rules)


def mlm_head(
    name: str,
    *,
    dense: str = "cls.predictions.transform.dense",
    norm: str | tuple[str, ...] = "cls.predictions.transform.LayerNorm",
    decoder: str = "cls.predictions.decoder",
    bias: str = "cls.predictions.bias",
    activation: Activation | None = None,
    unties: bool = True,
) -> TaskHead:
    """The usual head of a masked language model: dense layer to the token table's width, activation, norm, logits.

    Args:
        name: the transformers class.
        dense, norm, decoder: the stored layers' names, of the norm perhaps several; it is like the embeddings' norm.
        bias, unties: see `vocabulary_head`.
        activation: by default that of the feed-forward layers.
    """

    def before(config: ConfigReader, spec: EncoderSpec) -> tuple[Step, ...]:
        width, like = spec.embedding.width, spec.embedding.norm
        assert like is not None, "a family without a norm in its embeddings has another head"
        chosen = activation or spec.blocks[0].mlp.activation
        return (
            DenseStep(name="dense", on="tokens", inputs=spec.hidden, outputs=width, bias=True, activation=chosen),
            NormStep(name="norm", on="tokens", width=width, norm=like),
        )

    names = (norm,) if isinstance(norm, str) else norm
    rules = (
        rename("head.steps.dense.linear.{p}", f"{dense}.{{p}}", outside=True),
        *(rename("head.steps.norm.{p}", f"{stored}.{{p}}", outside=True) for stored in names),
    )
    return vocabulary_head(name, before=before, rules=rules, decoder=decoder, bias=bias, unties=unties)


def causal_head(
    name: str,
    *,
    tied: bool = False,
    stored: tuple[str, ...] = ("lm_head",),
    after: Callable[[ConfigReader], tuple[Step, ...]] = lambda config: (),
) -> TaskHead:
    """A causal language model's head: logits from the token table, or from a weight of their own.

    Args:
        name: the transformers class.
        tied: the default of `tie_word_embeddings`.
        stored: what checkpoints call the output layer.
        after: the steps behind the logits.
    """

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        words = spec.embedding.vocab_size
        if config.boolean("tie_word_embeddings", tied):
            return (VocabularyStep(name="out", on="tokens", outputs=words, bias=False), *after(config))
        return (DenseStep(name="out", on="tokens", inputs=spec.state_width, outputs=words, bias=False), *after(config))

    def rules(config: ConfigReader) -> tuple[Rule, ...]:
        if config.boolean("tie_word_embeddings", tied):
            return tuple(copy("embeddings.token.weight", f"{name}.weight", outside=True) for name in stored)
        return tuple(rename("head.steps.out.linear.weight", f"{name}.weight", outside=True) for name in stored)

    return TaskHead(classes=(name,), tasks=("generate", "rerank"), steps=steps, rules=rules)


def words_head(head: TaskHead, words: tuple[int, ...], spec: EncoderSpec) -> TaskHead:
    """A causal language model's head as a reranker's: what is behind a sequence speaks for it or against it.

    Args:
        head: of the language model.
        words: the ids of one or two tokens; the score is the last token's logit of the first, less that of the second.
        spec: the base model.
    """

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        logits, *after = head.steps(config, spec, labels)
        tied, width = isinstance(logits, VocabularyStep), spec.state_width
        made: list[Step] = [
            PoolingStep(modes=("lasttoken",)),
            WordsStep(name="out", on="vectors", inputs=width, words=words, tied=tied),
        ]
        for step in after:
            assert isinstance(step, DivideStep | SoftcapStep), f"what {step} does depends on the other words"
            made.append(replace(step, on="vectors"))
        return (*made, *([DifferenceStep(on="vectors")] if len(words) == 2 else []))

    def rules(config: ConfigReader) -> tuple[Rule, ...]:
        rows = Rows(chosen=words, count=spec.embedding.vocab_size)
        kept = f"only rows {', '.join(map(str, words))}"
        return tuple(rule if rule.copy else replace(rule, rows=rows, why=kept) for rule in head.rules(config))

    return replace(head, steps=steps, rules=rules)


def last_token_head(name: str, *, pad: int | None = None) -> TaskHead:
    """A decoder as a sequence classifier: a dense layer without bias on the state of the last token.

    As the last one counts the last whose id is not `pad_token_id`, also of a single text. What is behind it makes no
    difference to a causal model's state.

    Args:
        name: the transformers class.
        pad: the default of `pad_token_id`.
    """

    def steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
        stated = config.optional_integer("pad_token_id", minimum=-1)
        ignored = stated if "pad_token_id" in config.raw else pad
        if ignored is not None and not all(attention.causal for attention in spec.attentions):
            raise UnsupportedError(
                f"config.json: is_causal = False is not supported with a classifier of the last token that is not "
                f"pad_token_id = {ignored}"
            )
        return (
            PoolingStep(modes=("lasttoken",), pad=ignored),
            DenseStep(name="out", on="vectors", inputs=spec.state_width, outputs=labels, bias=False),
        )

    return TaskHead(
        classes=(name,),
        tasks=SEQUENCE_TASKS,
        steps=steps,
        rules=_always(rename("head.steps.out.linear.weight", "score.weight", outside=True)),
    )


def lm_head(name: str, *, norm: str | tuple[str, ...] = "lm_head.layer_norm", bias: str = "lm_head.bias") -> TaskHead:
    """`mlm_head` under RoBERTa's names, with gelu."""
    return mlm_head(name, dense="lm_head.dense", norm=norm, decoder="lm_head.decoder", bias=bias, activation="gelu")


def normed_mlm_head(name: str) -> TaskHead:
    """A masked language model's head whose layers are as `config.json` says, like `normed_head`'s."""

    def before(config: ConfigReader, spec: EncoderSpec) -> tuple[Step, ...]:
        return _normed_steps(config, spec.hidden, "tokens")

    return vocabulary_head(name, before=before, rules=NORMED_RULES, decoder="decoder", biased=("decoder_bias", True))


def either_head(field: str, default: bool, true: TaskHead, false: TaskHead) -> TaskHead:
    """One of two heads of one class, by a field of `config.json`."""

    def chosen(config: ConfigReader) -> TaskHead:
        return true if config.boolean(field, default) else false

    return TaskHead(
        classes=true.classes,
        tasks=true.tasks,
        steps=lambda config, spec, labels: chosen(config).steps(config, spec, labels),
        rules=lambda config: chosen(config).rules(config),
    )


def token_steps(config: ConfigReader, spec: EncoderSpec, labels: int) -> tuple[Step, ...]:
    """A dense layer to the labels, on each token."""
    return (DenseStep(name="out", on="tokens", inputs=spec.hidden, outputs=labels, bias=True),)


def token_head(name: str, out: str = "classifier") -> TaskHead:
    """The usual head of a token classifier."""
    return TaskHead(
        classes=(name,),
        tasks=("token-classify",),
        steps=token_steps,
        rules=_always(rename("head.steps.out.linear.{p}", f"{out}.{{p}}", outside=True)),
    )

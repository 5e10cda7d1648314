"""What sentence-transformers does around the model: prompts, length limit, and the head that its modules make."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.messages import Messages
from toolkit.modules import READERS, Modules, read_modules, transformer_options
from toolkit.multivector import MaskOptions, MultiVectorOptions, read_options
from toolkit.pylate import ALIASES, PyLate, is_pylate, read_pylate
from toolkit.scoring import count_labels
from toolkit.spec import LayerMixSpec
from toolkit.stanford import is_stanford, names_stanford, read_stanford, stanford_rules
from toolkit.steps import (
    DenseStep,
    DifferenceStep,
    HeadSpec,
    LogStep,
    NormalizeStep,
    PoolingStep,
    Step,
    VocabularyStep,
    WordsStep,
)
from toolkit.weights import Rule

__all__ = ["Pipeline", "ReadPipeline", "checkpoint_kind", "is_reranker", "read_pipeline"]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is done to texts before the model.

    Attributes:
        max_seq_length: the limit that the checkpoint asks for, or None; not yet clamped to the model's.
        lower_case: whether texts are lowered before tokenization (on top of the tokenizer's own rules).
        prompts: texts that are put in front, by name.
        default_prompt: the name of the prompt that applies when the caller names none, or None.
        include_prompt: whether pooling takes the prompt's tokens in.
        similarity: the checkpoint's similarity function, or None.
        normalize: whether vectors are scaled to length 1 after truncation, on top of what the checkpoint does; asked
            for at the conversion.
        truncate_dim: how many values of a vector are kept by default, None for all.
        messages: how texts become messages for the tokenizer's chat template, None if they do not: then prompts are
            messages as well.
    """

    max_seq_length: int | None
    lower_case: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None
    include_prompt: bool
    similarity: str | None
    normalize: bool = False
    truncate_dim: int | None = None
    messages: Messages | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Pipeline":
        """Inverse of `to_dict`; missing or unknown keys raise TypeError or KeyError."""
        messages = Messages(**data["messages"]) if data["messages"] is not None else None
        return cls(**{**data, "messages": messages})

    def prompt(self, name: str | None, text: str | None) -> str:
        """Return the text to put in front: `text` if given (empty switches prompts off), else by `name`.

        Raises:
            InputError: there is no prompt of that name.
        """
        if text is not None:
            if not isinstance(text, str):
                raise InputError(f"prompt is a {type(text).__name__}, expected a text")
            return text
        name = name if name is not None else self.default_prompt
        if name is None:
            return ""
        if not isinstance(name, str) or name not in self.prompts:
            raise InputError(f"no prompt named {name!r}; this model has: {', '.join(self.prompts) or 'none'}")
        return self.prompts[name]


@dataclass(frozen=True, kw_only=True)
class ReadPipeline:
    """A checkpoint's pipeline, the head that its modules make, and warnings.

    `options` are the Transformer module's; `mix` is the mean of layers' states that the modules ask for; `folders`
    tells where parameters lie, by how their names begin; `rules`, what becomes of tensors that stand beside the base
    model's.
    For task `multi-vector`, `multi_vector` says how queries and documents differ, and `prefixes` what is in front of
    their prompts and is to be one token each.
    """

    pipeline: Pipeline
    options: Mapping[str, Any]
    head: HeadSpec
    mix: LayerMixSpec | None
    folders: Mapping[str, str]
    rules: tuple[Rule, ...]
    warnings: list[str]
    multi_vector: MultiVectorOptions | None
    prefixes: Mapping[str, str]


_KINDS = {
    "CrossEncoder": "rerank",
    "SentenceTransformer": "embed",
    "SparseEncoder": "sparse",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",  # PyLate
}
_ST_CONFIG = "config_sentence_transformers.json"


def checkpoint_kind(checkpoint: Checkpoint) -> str | None:
    """The task that sentence-transformers' files name; None if they name none.

    Raises:
        UnsupportedError: they name a kind of model that is not served.
    """
    config = _st_config(checkpoint)
    kind = config.get("model_type")
    if kind is None:
        return "multi-vector" if is_pylate(config) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedError(f"{_ST_CONFIG}: model_type = {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    return _KINDS[kind]


def _st_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config_sentence_transformers.json; without modules.json sentence-transformers ignores it, and so do we."""
    return checkpoint.json(_ST_CONFIG) if checkpoint.has("modules.json") and checkpoint.has(_ST_CONFIG) else {}


def _is_causal_lm(checkpoint: Checkpoint) -> bool:
    """Whether sentence-transformers takes the checkpoint for a causal language model."""
    first = checkpoint.architectures[0] if checkpoint.architectures else ""
    return first.endswith("ForCausalLM") and bool(checkpoint.config.get("is_causal", True))


def is_reranker(checkpoint: Checkpoint) -> bool:
    """Whether a sequence classifier is for scoring pairs: it has one label, or names a CrossEncoder's activation."""
    config = checkpoint.config
    nested = config.get("sentence_transformers")
    named = isinstance(nested, dict) and nested.get("activation_fn") is not None
    return named or "sbert_ce_default_activation_function" in config or count_labels(config) == 1


def read_pipeline(
    checkpoint: Checkpoint, hidden: int, task: str = "embed", steps: tuple[Step, ...] = ()
) -> ReadPipeline:
    """Read the pipeline of a checkpoint.

    Args:
        checkpoint: where the files are.
        hidden: width of the token states.
        task: what the checkpoint is converted for.
        steps: the head's steps, for a task that has one; sentence-transformers' modules make it for `embed`.

    Raises:
        CheckpointError: a file is malformed, or contradicts another.
        UnsupportedError: a module or an option is not supported.
    """
    warnings: list[str] = []
    modules = Modules(checkpoint=checkpoint, width=hidden, per_token=task == "multi-vector")
    options: dict[str, Any] = {}
    config = _st_config(checkpoint) if task != "generate" else {}
    pylate = read_pylate(_ST_CONFIG, config if task == "multi-vector" else {})
    if task == "multi-vector":
        if is_stanford(checkpoint):
            pylate = _read_stanford(modules)
            options = dict(pylate.options)
        else:
            options = {**pylate.options, **_read_per_token(modules, config, pylate)}
    elif task == "generate":
        pass  # sentence-transformers' files speak of another use
    elif checkpoint.has("modules.json"):
        options = _read_pooled(modules, task, by_words=any(isinstance(step, WordsStep) for step in steps))
    elif task == "sparse":
        modules.add(PoolingStep(modes=("max",)))
        modules.add(LogStep(on="vectors", times=1))
    elif not steps:
        mode = "lasttoken" if _is_causal_lm(checkpoint) else "mean"
        warnings.append(
            f"no modules.json: {mode} pooling without normalisation is assumed, as sentence-transformers does"
        )
        modules.add(PoolingStep(modes=(mode,)))
    if task == "sparse" and config.get("max_active_dims") is not None:
        raise UnsupportedError(f"{_ST_CONFIG}: max_active_dims = {config['max_active_dims']!r} is not supported")
    prompts = _prompts(config, task, pylate)
    default = config.get("default_prompt_name")
    similarity = config.get("similarity_fn_name")
    if not isinstance(similarity, str | None):
        raise CheckpointError(f"{_ST_CONFIG}: similarity_fn_name = {similarity!r}, expected a text")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(
            f"{_ST_CONFIG}: default_prompt_name {default!r} is not among the prompts {sorted(prompts)}"
        )
    pipeline = Pipeline(
        max_seq_length=options.get("max_seq_length"),
        lower_case=options.get("do_lower_case") or False,
        prompts=prompts,
        default_prompt=default,
        include_prompt=modules.include_prompt,
        similarity=similarity,
        truncate_dim=_truncate_dim(config, modules.width) if task == "embed" else None,
    )
    return ReadPipeline(
        pipeline=pipeline,
        options=options,
        head=_whole_head(task, steps, modules),
        mix=modules.mix,
        folders=modules.folders,
        rules=stanford_rules(checkpoint, projected=task == "multi-vector" and is_stanford(checkpoint)),
        warnings=warnings + modules.warnings,
        multi_vector=read_options(options, modules.mask, similarity) if task == "multi-vector" else None,
        prefixes=pylate.prefixes,
    )


def _truncate_dim(config: Mapping[str, Any], width: int) -> int | None:
    value = config.get("truncate_dim")
    if value is not None and (type(value) is not int or not 1 <= value <= width):
        raise CheckpointError(f"{_ST_CONFIG}: truncate_dim = {value!r}, expected a whole number, 1 … {width}")
    return value


def _prompts(config: Mapping[str, Any], task: str, pylate: PyLate) -> dict[str, str]:
    """The prompts by name; a MultiVectorEncoder may store one as null, which is none."""
    prompts = config.get("prompts") or {}
    if task == "multi-vector" and isinstance(prompts, dict):
        prompts = {name: "" if prompt is None else prompt for name, prompt in prompts.items()}
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise CheckpointError(f"{_ST_CONFIG}: prompts must map names to texts")
    named = {"query": "", "document": ""} if task in ("embed", "sparse", "multi-vector") else {}
    return {**named, **pylate.prompts(prompts)}


def _read_pooled(modules: Modules, task: str, *, by_words: bool) -> dict[str, Any]:
    """Read the modules of all other tasks; `by_words` says that the head compares a language model's words.

    Returns:
        The options of the Transformer module.
    """
    entries = read_modules(modules.checkpoint)
    options = transformer_options(modules.checkpoint, entries[0][1], task, by_words=by_words)
    allowed = {
        "embed": [k for k in READERS if k not in ("SpladePooling", "MultiVectorMask", "LogitScore")],
        "sparse": ["SpladePooling", "Normalize", "Dropout"],
        "rerank": ["LogitScore"] if by_words else [],
    }.get(task, [])
    for kind, folder in entries[1:]:
        if kind not in allowed:
            raise UnsupportedError(f"modules.json: a {kind} module is not supported for task {task!r}")
        READERS[kind](modules, folder)
    if task in ("embed", "sparse") and not modules.pooled:
        raise UnsupportedError("modules.json: there is no Pooling module")
    return options


def _read_per_token(modules: Modules, config: Mapping[str, Any], pylate: PyLate) -> dict[str, Any]:
    """Read the modules of a MultiVectorEncoder, or make of others' modules what it makes of them.

    Returns:
        The options of the Transformer module.
    """
    checkpoint = modules.checkpoint
    kind = config.get("model_type") or ("MultiVectorEncoder" if names_stanford(checkpoint) else "SentenceTransformer")
    untrained = "MultiVectorEncoder would put a projection with random weights behind the model: train and save it"
    if not checkpoint.has("modules.json"):
        raise UnsupportedError(f"no modules.json: {untrained}")
    if kind not in ("MultiVectorEncoder", "ColBERT", "SentenceTransformer"):
        reason = "it contradicts HF_ColBERT in config.json" if names_stanford(checkpoint) else untrained
        raise UnsupportedError(f"{_ST_CONFIG}: model_type = {kind!r}: {reason}")
    entries = read_modules(checkpoint, ALIASES)
    modules.redirected = kind == "SentenceTransformer"
    for name, folder in entries[1:]:
        if modules.redirected and (name == "Pooling" or (name == "Normalize" and modules.of_vectors(folder))):
            continue  # they make and scale the one vector that there is not
        if name not in ("Dense", "Normalize", "MultiVectorMask"):
            raise UnsupportedError(f"modules.json: a {name} module is not supported for task 'multi-vector'")
        READERS[name](modules, folder)
    if kind == "SentenceTransformer" and not any(isinstance(step, DenseStep) for step in modules.steps):
        raise UnsupportedError(f"modules.json: there is no Dense module: {untrained}")
    if kind != "MultiVectorEncoder":
        if modules.mask is not None:
            raise UnsupportedError(f"modules.json: a MultiVectorMask is not supported for model_type {kind!r}")
        default = pylate.words if kind == "ColBERT" or pylate.prefixes else ()
        modules.mask = MaskOptions(skip_words=default if pylate.skip_words is None else pylate.skip_words)
        modules.add(NormalizeStep(on="tokens"))
    return transformer_options(checkpoint, entries[0][1], "multi-vector")


def _read_stanford(modules: Modules) -> PyLate:
    """Project and normalise each token.

    Returns:
        What is said of texts.
    """
    read = read_stanford(modules.checkpoint, modules.width)
    modules.add(read.projection)
    modules.add(NormalizeStep(on="tokens"))
    modules.width = read.projection.outputs
    modules.mask = MaskOptions(skip_words=read.texts.words)
    modules.warnings += read.warnings
    return read.texts


def _whole_head(task: str, steps: tuple[Step, ...], modules: Modules) -> HeadSpec:
    """The steps of the head and of the modules."""
    if task == "sparse":
        words = next(step.outputs for step in reversed(steps) if isinstance(step, DenseStep | VocabularyStep))
        return HeadSpec(steps=(*steps, *modules.steps), width=words)
    if task == "multi-vector":
        return HeadSpec(steps=tuple(modules.steps), width=0, token_width=modules.width)
    return _head_of(steps) if steps else HeadSpec(steps=tuple(modules.steps), width=modules.width)


def _head_of(steps: tuple[Step, ...]) -> HeadSpec:
    """The head that a class's steps make: its last layer gives one logit for each label or word, or one score."""
    changing = (s for s in steps if isinstance(s, DenseStep | VocabularyStep | WordsStep | DifferenceStep))
    widths = {step.on: step.outputs for step in changing}
    pooled = any(isinstance(step, PoolingStep) for step in steps)
    width = widths.get("vectors", widths.get("tokens", 0)) if pooled else 0
    return HeadSpec(steps=steps, width=width, token_width=0 if pooled else widths["tokens"])

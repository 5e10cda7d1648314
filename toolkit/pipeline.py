"""What sentence-transformers does around the model: prompts, length limit, and the head that its modules make."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.modules import READERS, Modules, read_modules, transformer_options
from toolkit.scoring import count_labels
from toolkit.spec import DenseStep, HeadSpec, LogStep, PoolingStep, Step, VocabularyStep

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
    """

    max_seq_length: int | None
    lower_case: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None
    include_prompt: bool
    similarity: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)

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
    """A checkpoint's pipeline, the head that its modules make, where each step's tensors are, and warnings."""

    pipeline: Pipeline
    head: HeadSpec
    folders: Mapping[int, str]
    warnings: list[str]


_KINDS = {"CrossEncoder": "rerank", "SentenceTransformer": "embed", "SparseEncoder": "sparse"}


def checkpoint_kind(checkpoint: Checkpoint) -> str | None:
    """The task that sentence-transformers' files name; None if they name none.

    Raises:
        UnsupportedError: they name a kind of model that is not served.
    """
    name = "config_sentence_transformers.json"
    # without modules.json sentence-transformers ignores this file, and so do we
    beside = checkpoint.has("modules.json") and checkpoint.has(name)
    kind = checkpoint.json(name).get("model_type") if beside else None
    if kind is None:
        return None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedError(f"{name}: model_type = {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    return _KINDS[kind]


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
    modules = Modules(checkpoint=checkpoint, width=hidden)
    options: dict[str, Any] | None = None
    if checkpoint.has("modules.json"):
        entries = read_modules(checkpoint)
        options = transformer_options(checkpoint, entries[0][1], task)
        allowed = {"embed": [k for k in READERS if k != "SpladePooling"], "sparse": ["SpladePooling"]}.get(task, [])
        for kind, folder in entries[1:]:
            if kind not in allowed:
                raise UnsupportedError(f"modules.json: a {kind} module is not supported for task {task!r}")
            READERS[kind](modules, folder)
        if task in ("embed", "sparse") and not modules.pooled:
            raise UnsupportedError("modules.json: there is no Pooling module")
    elif task == "sparse":
        modules.add(PoolingStep(modes=("max",)))
        modules.add(LogStep(on="vectors", times=1))
    elif not steps:
        warnings.append("no modules.json: mean pooling without normalisation is assumed, as sentence-transformers does")
        modules.add(PoolingStep(modes=("mean",)))
    name = "config_sentence_transformers.json"
    # without modules.json sentence-transformers ignores this file, and so do we
    config = checkpoint.json(name) if options is not None and checkpoint.has(name) else {}
    options = options or {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(f"{name}: prompts must map names to texts")
    default = config.get("default_prompt_name")
    similarity = config.get("similarity_fn_name")
    if not isinstance(similarity, str | None):
        raise CheckpointError(f"{name}: similarity_fn_name = {similarity!r}, expected a text")
    prompts = {**({"query": "", "document": ""} if task in ("embed", "sparse") else {}), **prompts}
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise CheckpointError(f"{name}: default_prompt_name {default!r} is not among the prompts {sorted(prompts)}")
    pipeline = Pipeline(
        max_seq_length=options.get("max_seq_length"),
        lower_case=options.get("do_lower_case") or False,
        prompts=prompts,
        default_prompt=default,
        include_prompt=modules.include_prompt,
        similarity=similarity,
    )
    if task == "sparse":
        words = next(step.outputs for step in steps if isinstance(step, VocabularyStep))
        head = HeadSpec(steps=(*steps, *modules.steps), width=words)
    else:
        head = _head_of(steps) if steps else HeadSpec(steps=tuple(modules.steps), width=modules.width)
    return ReadPipeline(pipeline=pipeline, head=head, folders=modules.folders, warnings=warnings)


def _head_of(steps: tuple[Step, ...]) -> HeadSpec:
    """The head that a class's steps make: its last dense layer gives one logit for each label."""
    widths = {step.on: step.outputs for step in steps if isinstance(step, DenseStep)}
    pooled = any(isinstance(step, PoolingStep) for step in steps)
    width = widths.get("vectors", widths.get("tokens", 0)) if pooled else 0
    return HeadSpec(steps=steps, width=width, token_width=0 if pooled else widths["tokens"])

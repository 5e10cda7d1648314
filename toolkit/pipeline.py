"""What sentence-transformers does around the model: prompts, length limit, pooling, normalisation.

Read from `modules.json` and the files it points to. Class names in them are compared with a list and never
imported; a module or option that is not supported is an error that names it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError

__all__ = ["Pipeline", "read_pipeline"]

TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
_LIBRARY = re.compile(r"sentence_transformers\.(?:\w+\.)*(\w+)")
_LEGACY_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_SUPPORTED_POOLING = ("mean", "cls")


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The pipeline of an embedding model.

    Attributes:
        pooling: "mean" or "cls".
        normalize: whether the vectors are scaled to length 1.
        max_seq_length: the limit that the checkpoint asks for, or None; not yet clamped to the model's.
        lower_case: whether texts are lowered before tokenization (on top of the tokenizer's own rules).
        prompts: texts that are put in front, by name.
        default_prompt: the name of the prompt that applies when the caller names none, or None.
        similarity: the checkpoint's similarity function, or None.
    """

    pooling: str
    normalize: bool
    max_seq_length: int | None
    lower_case: bool
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None
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


def read_pipeline(checkpoint: Checkpoint, hidden: int) -> tuple[Pipeline, list[str]]:
    """Read the pipeline of a checkpoint; `hidden` is the width of its token states.

    Returns:
        The pipeline, and warnings about what had to be assumed.

    Raises:
        CheckpointError: a file is malformed, or contradicts another.
        UnsupportedError: a module or an option is not supported.
    """
    warnings: list[str] = []
    pooling, normalize = "mean", False
    options: dict[str, Any] | None = None
    if checkpoint.has("modules.json"):
        modules = _read_modules(checkpoint)
        options = _transformer_options(checkpoint, modules[0][1])
        pooling = _read_pooling(checkpoint, modules[1][1], hidden)
        normalize = len(modules) == 3
        if normalize:
            _check_normalize(checkpoint, modules[2][1])
    else:
        warnings.append("no modules.json: mean pooling without normalisation is assumed, as sentence-transformers does")
    name = "config_sentence_transformers.json"
    # without modules.json sentence-transformers ignores this file, and so do we
    config = checkpoint.json(name) if options is not None and checkpoint.has(name) else {}
    options = options or {}
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(f"{name}: prompts must map names to texts")
    default = config.get("default_prompt_name")
    prompts = {"query": "", "document": "", **prompts}
    if default is not None and default not in prompts:
        raise CheckpointError(f"{name}: default_prompt_name {default!r} is not among the prompts {sorted(prompts)}")
    pipeline = Pipeline(
        pooling=pooling,
        normalize=normalize,
        max_seq_length=options.get("max_seq_length"),
        lower_case=bool(options.get("do_lower_case", False)),
        prompts=prompts,
        default_prompt=default,
        similarity=config.get("similarity_fn_name"),
    )
    return pipeline, warnings


def _read_modules(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(class, folder) of each module: Transformer, Pooling, and perhaps Normalize."""
    try:
        entries = json.loads(checkpoint.read_bytes("modules.json"))
        modules = [(str(entry["type"]), str(entry["path"])) for entry in sorted(entries, key=lambda e: e["idx"])]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError("modules.json: expected a list of objects with idx, path and type") from None
    kinds: list[str] = []
    for type_name, path in modules:
        known = _LIBRARY.fullmatch(type_name)
        if known is None or known[1] not in ("Transformer", "Pooling", "Normalize"):
            raise UnsupportedError(
                f"modules.json: module {path or '.'!r} of type {type_name!r} is not supported (and never imported); "
                "supported: Transformer, Pooling, Normalize of sentence_transformers"
            )
        kinds.append(known[1])
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedError(f"modules.json: the sequence {' → '.join(kinds)} is not supported")
    if modules[0][1] != "":
        raise UnsupportedError(
            f"modules.json: the Transformer lies in {modules[0][1]!r}; convert that folder's parent copy"
        )
    return [(kind, path) for kind, (_, path) in zip(kinds, modules, strict=True)]


def _transformer_options(checkpoint: Checkpoint, folder: str) -> dict[str, Any]:
    """Options of the Transformer module; those that would change the numbers and are not served are refused."""
    prefix = f"{folder}/" if folder else ""
    name = next((prefix + n for n in TRANSFORMER_CONFIGS if checkpoint.has(prefix + n)), None)
    options = checkpoint.json(name) if name is not None else {}
    limit = options.get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CheckpointError(f"{name}: max_seq_length = {limit!r}, expected a positive integer")
    neutral = {
        "transformer_task": ("feature-extraction",),
        "module_output_name": ("token_embeddings",),
        "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
        "unpad_inputs": (None, False, True),
    }
    for key, value in options.items():
        if key in ("max_seq_length", "do_lower_case", "cache_dir") or value in (None, {}):
            continue
        if value not in neutral.get(key, ()):
            raise UnsupportedError(f"{name}: {key} = {value!r} is not supported")
    return options


def _check_normalize(checkpoint: Checkpoint, folder: str) -> None:
    """The Normalize module may name the features that it reads and writes; only the pooled vector is served."""
    name = f"{folder}/config.json"
    for key, value in (checkpoint.json(name) if checkpoint.has(name) else {}).items():
        if key not in ("module_input_name", "module_output_name") or value not in (None, "sentence_embedding"):
            raise UnsupportedError(f"{name}: {key} = {value!r} is not supported")


def _read_pooling(checkpoint: Checkpoint, folder: str, hidden: int) -> str:
    """The pooling mode of `folder`/config.json, in its old or new form."""
    name = f"{folder}/config.json"
    config = checkpoint.json(name)
    width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    if width != hidden:
        raise CheckpointError(f"{name}: the pooling is {width} wide, the model's states are {hidden} wide")
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        modes = [modes] if isinstance(modes, str) else modes
    else:
        modes = [mode for key, mode in _LEGACY_POOLING.items() if config.get(key)] or ["mean"]
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _SUPPORTED_POOLING:
        raise UnsupportedError(f"{name}: pooling {modes!r} is not supported; supported: one of {_SUPPORTED_POOLING}")
    if config.get("include_prompt", True) is not True:
        raise UnsupportedError(f"{name}: include_prompt = {config['include_prompt']!r} is not supported, only True is")
    known = {
        "embedding_dimension",
        "word_embedding_dimension",
        "pooling_mode",
        "include_prompt",
        *_LEGACY_POOLING,
    }
    unknown = sorted(set(config) - known)
    if unknown:
        raise UnsupportedError(f"{name}: unknown field {unknown[0]!r}")
    return modes[0]

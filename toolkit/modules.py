"""The modules of a sentence-transformers checkpoint, read from `modules.json` and the files that it points to.

Class names in them are compared with a list and never imported; a module or option that is not supported is an
error that names it.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.checkpoint import Checkpoint
from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.spec import DenseStep, LogStep, NormalizeStep, NormSpec, NormStep, PoolingStep, Step

__all__ = ["READERS", "Modules", "read_modules", "stored_name", "transformer_options"]

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
_ACTIVATIONS: Mapping[str, Any] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}


@dataclass(kw_only=True)
class Modules:
    """The steps read so far, and the width of what they leave behind."""

    checkpoint: Checkpoint
    width: int
    pooled: bool = False
    include_prompt: bool = True
    steps: list[Step] = field(default_factory=list)
    folders: dict[int, str] = field(default_factory=dict)

    def add(self, step: Step, folder: str | None = None) -> None:
        """Append a step; `folder` holds its tensors, if it has any."""
        if folder is not None:
            self.folders[len(self.steps)] = folder
        self.steps.append(step)

    def config(self, folder: str, *known: str) -> tuple[str, dict[str, Any]]:
        """The module's config.json; fields that are not `known` are refused."""
        name = f"{folder}/config.json" if folder else "config.json"
        config = self.checkpoint.json(name) if self.checkpoint.has(name) else {}
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise UnsupportedError(f"{name}: unknown field {unknown[0]!r}")
        return name, config

    def need_vectors(self, name: str, config: Mapping[str, Any]) -> None:
        """Refuse a module that reads or writes anything but the pooled vector."""
        for key in ("module_input_name", "module_output_name"):
            if config.get(key) not in (None, "sentence_embedding"):
                raise UnsupportedError(f"{name}: {key} = {config[key]!r} is not supported")
        if not self.pooled:
            raise UnsupportedError(f"{name}: a module before the pooling is not supported")


# task → (what sentence-transformers calls it, the name of the output, the output of transformers that is taken)
_OUTPUTS: Mapping[str, tuple[str, str, str]] = {
    "embed": ("feature-extraction", "token_embeddings", "last_hidden_state"),
    "rerank": ("sequence-classification", "scores", "logits"),
    "sparse": ("fill-mask", "token_embeddings", "logits"),
}


def read_modules(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    """(class, folder) of each module, the Transformer first."""
    try:
        entries = json.loads(checkpoint.read_bytes("modules.json"))
        modules = [(entry["idx"], entry["type"], entry["path"]) for entry in entries]
        if not all([type(value) for value in module] == [int, str, str] for module in modules):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError("modules.json: expected a list of objects with idx, path and type") from None
    if [idx for idx, _, _ in modules] != sorted({idx for idx, _, _ in modules}):
        raise CheckpointError("modules.json: idx does not count up: sentence-transformers goes by the list's order")
    supported = ("Transformer", "MLMTransformer", *READERS)
    kinds: list[tuple[str, str]] = []
    for _, type_name, path in modules:
        known = _LIBRARY.fullmatch(type_name)
        if known is None or known[1] not in supported:
            raise UnsupportedError(
                f"modules.json: module {path or '.'!r} of type {type_name!r} is not supported (and never imported); "
                f"supported: {', '.join(supported)} of sentence_transformers"
            )
        kinds.append(("Transformer" if known[1] == "MLMTransformer" else known[1], path))
    if [kind for kind, _ in kinds[:1]] != ["Transformer"] or "Transformer" in [kind for kind, _ in kinds[1:]]:
        sequence = " → ".join(kind for kind, _ in kinds) or "of no modules"
        raise UnsupportedError(f"modules.json: the sequence {sequence} is not supported: one Transformer, first")
    if kinds[0][1] != "":
        raise UnsupportedError(
            f"modules.json: the Transformer lies in {kinds[0][1]!r}; convert that folder's parent copy"
        )
    return kinds


def transformer_options(checkpoint: Checkpoint, folder: str, task: str) -> dict[str, Any]:
    """Options of the Transformer module; those that would change the numbers and are not served are refused."""
    prefix = f"{folder}/" if folder else ""
    name = next((prefix + n for n in TRANSFORMER_CONFIGS if checkpoint.has(prefix + n)), None)
    options = checkpoint.json(name) if name is not None else {}
    limit = options.get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CheckpointError(f"{name}: max_seq_length = {limit!r}, expected a positive integer")
    if not isinstance(options.get("do_lower_case"), bool | None):
        raise CheckpointError(f"{name}: do_lower_case = {options['do_lower_case']!r}, expected true or false")
    called, output_name, output = _OUTPUTS.get(task, _OUTPUTS["rerank"])
    neutral = {
        "transformer_task": (called,),
        "module_output_name": (output_name,),
        "modality_config": ({"text": {"method": "forward", "method_output_name": output}},),
        "unpad_inputs": (None, False, True),
    }
    for key, value in options.items():
        if key in ("max_seq_length", "do_lower_case", "cache_dir") or value in (None, {}):
            continue
        if value not in neutral.get(key, ()):
            raise UnsupportedError(f"{name}: {key} = {value!r} is not supported")
    return options


def _read_pooling(modules: Modules, folder: str) -> None:
    """The pooling modes, in their old or new form."""
    keys = ("embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt", *_LEGACY_POOLING)
    name, config = modules.config(folder, *keys)
    if modules.pooled:
        raise UnsupportedError(f"{name}: a second Pooling is not supported")
    width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    if width != modules.width:
        raise CheckpointError(f"{name}: the pooling is {width} wide, the model's states are {modules.width} wide")
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        modes = [modes] if isinstance(modes, str) else modes
    else:
        modes = [mode for key, mode in _LEGACY_POOLING.items() if config.get(key)] or ["mean"]
    supported = tuple(_LEGACY_POOLING.values())
    if not isinstance(modes, list) or not modes or not all(mode in supported for mode in modes):
        raise UnsupportedError(f"{name}: pooling {modes!r} is not supported; supported: {', '.join(supported)}")
    for key in _LEGACY_POOLING:
        if not isinstance(config.get(key), bool | None):
            raise CheckpointError(f"{name}: {key} = {config[key]!r}, expected true or false")
    include = config.get("include_prompt", True)
    if type(include) is not bool:
        raise CheckpointError(f"{name}: include_prompt = {include!r}, expected true or false")
    modules.pooled, modules.include_prompt = True, include
    modules.add(PoolingStep(modes=tuple(modes)))
    modules.width *= len(modes)


def _read_dense(modules: Modules, folder: str) -> None:
    names = ("module_input_name", "module_output_name")
    keys = ("in_features", "out_features", "bias", "activation_function", "use_residual", *names)
    name, config = modules.config(folder, *keys)
    modules.need_vectors(name, config)
    for key in ("in_features", "out_features"):
        if type(config.get(key)) is not int or not 1 <= config[key] < 2**31:
            raise CheckpointError(f"{name}: {key} = {config.get(key)!r}, expected a positive integer")
    if config["in_features"] != modules.width:
        raise CheckpointError(f"{name}: in_features = {config['in_features']}, but {modules.width} values come in")
    for key in ("bias", "use_residual"):
        if type(config.get(key, True)) is not bool:
            raise CheckpointError(f"{name}: {key} = {config[key]!r}, expected true or false")
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedError(
            f"{name}: activation_function = {activation!r} is not supported (and never imported); "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    step = DenseStep(
        on="vectors",
        inputs=modules.width,
        outputs=config["out_features"],
        bias=config.get("bias", True),
        activation=_ACTIVATIONS[activation],
        residual=config.get("use_residual", False),
    )
    modules.add(step, folder)
    modules.width = step.outputs


def _read_layer_norm(modules: Modules, folder: str) -> None:
    name, config = modules.config(folder, "dimension")
    modules.need_vectors(name, config)
    if config.get("dimension") != modules.width:
        raise CheckpointError(f"{name}: dimension = {config.get('dimension')!r}, but {modules.width} values come in")
    modules.add(NormStep(on="vectors", width=modules.width, norm=NormSpec(eps=1e-5)), folder)


def _read_normalize(modules: Modules, folder: str) -> None:
    name, config = modules.config(folder, "module_input_name", "module_output_name")
    modules.need_vectors(name, config)
    modules.add(NormalizeStep(on="vectors"))


def stored_name(name: str) -> str:
    """What a module of sentence-transformers calls the parameter `name` of our step."""
    return name if name.startswith(("linear.", "residual.")) else f"norm.{name}"


def _read_splade(modules: Modules, folder: str) -> None:
    """The largest activated logit of each word; the activation does not change which one that is."""
    keys = ("pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension", "chunk_size")
    name, config = modules.config(folder, *keys)
    if modules.pooled:
        raise UnsupportedError(f"{name}: a second pooling is not supported")
    if config.get("pooling_strategy", "max") != "max":
        raise UnsupportedError(
            f"{name}: pooling_strategy = {config['pooling_strategy']!r} is not supported, only 'max'"
        )
    activation = config.get("activation_function", "relu")
    if activation not in ("relu", "log1p_relu"):
        raise UnsupportedError(f"{name}: activation_function = {activation!r} is not supported: relu or log1p_relu")
    modules.pooled = True
    modules.add(PoolingStep(modes=("max",)))
    modules.add(LogStep(on="vectors", times=1 if activation == "relu" else 2))


def _read_dropout(modules: Modules, folder: str) -> None:
    """Dropout does nothing at inference."""
    modules.config(folder, "dropout")


READERS: Mapping[str, Callable[[Modules, str], None]] = {
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "LayerNorm": _read_layer_norm,
    "Normalize": _read_normalize,
    "Dropout": _read_dropout,
    "SpladePooling": _read_splade,
}

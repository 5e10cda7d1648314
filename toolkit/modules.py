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
from toolkit.multivector import MaskOptions, read_mask
from toolkit.spec import LayerMixSpec, NormSpec
from toolkit.steps import DenseStep, LogStep, NormalizeStep, NormStep, Place, PoolingStep, Step

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
# the Transformer's options for queries and documents
SIDES = ("query_length", "document_length", "query_expansion")
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
    """The steps read so far, and the width of what they leave behind.

    `per_token` says that there are no pooled vectors: each token has one of its own; `redirected`, that modules of
    vectors work on tokens instead. `mask` is what a MultiVectorMask says.
    `folders` tells where parameters lie, by how their names begin.
    """

    checkpoint: Checkpoint
    width: int
    pooled: bool = False
    per_token: bool = False
    redirected: bool = False
    mask: MaskOptions | None = None
    include_prompt: bool = True
    steps: list[Step] = field(default_factory=list)
    mix: LayerMixSpec | None = None
    folders: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, step: Step, folder: str | None = None) -> None:
        """Append a step; `folder` holds its tensors, if it has any."""
        if folder is not None:
            self.folders[f"head.steps.{len(self.steps)}."] = folder
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

    def place(self, name: str, config: Mapping[str, Any]) -> Place:
        """What a module works on: tokens where there are no vectors, else vectors; anything else is refused."""
        if not self.per_token:
            self.need_vectors(name, config)
            return "vectors"
        served = (None, "token_embeddings", *(["sentence_embedding"] if self.redirected else []))
        for key in ("module_input_name", "module_output_name"):
            if config.get(key) not in served:
                raise UnsupportedError(f"{name}: {key} = {config[key]!r} is not supported without a pooling")
        return "tokens"

    def of_vectors(self, folder: str) -> bool:
        """Whether a Normalize module works on vectors."""
        _, config = self.config(folder, "module_input_name", "module_output_name")
        return config.get("module_input_name") in (None, "sentence_embedding")


# task → (what sentence-transformers calls it, the name of the output, the output of transformers that is taken)
_OUTPUTS: Mapping[str, tuple[str, str, str]] = {
    "embed": ("feature-extraction", "token_embeddings", "last_hidden_state"),
    "rerank": ("sequence-classification", "scores", "logits"),
    "rerank by words": ("text-generation", "causal_logits", "logits"),
    "sparse": ("fill-mask", "token_embeddings", "logits"),
    "multi-vector": ("feature-extraction", "token_embeddings", "last_hidden_state"),
}


_NONE: Mapping[str, str] = {}


def read_modules(checkpoint: Checkpoint, aliases: Mapping[str, str] = _NONE) -> list[tuple[str, str]]:
    """(class, folder) of each module, the Transformer first; `aliases` are other names for the library's classes."""
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
        known = _LIBRARY.fullmatch(aliases.get(type_name, type_name))
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


def transformer_options(checkpoint: Checkpoint, folder: str, task: str, *, by_words: bool = False) -> dict[str, Any]:
    """Options of the Transformer module; those that would change the numbers and are not served are refused.

    `by_words` says that a LogitScore follows. What a reranker's options say of messages is for `toolkit.messages`.
    """
    prefix = f"{folder}/" if folder else ""
    name = next((prefix + n for n in TRANSFORMER_CONFIGS if checkpoint.has(prefix + n)), None)
    options = checkpoint.json(name) if name is not None else {}
    limit = options.get("max_seq_length")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise CheckpointError(f"{name}: max_seq_length = {limit!r}, expected a positive integer")
    if not isinstance(options.get("do_lower_case"), bool | None):
        raise CheckpointError(f"{name}: do_lower_case = {options['do_lower_case']!r}, expected true or false")
    called, output_name, output = _OUTPUTS["rerank by words" if by_words else task if task in _OUTPUTS else "rerank"]
    text = {"method": "forward", "method_output_name": output}
    forms = ({}, {"format": "auto"}, {"format": "flat"}, {"format": "structured"}) if task == "rerank" else ()
    neutral = {
        "transformer_task": (called,),
        "module_output_name": (output_name,),
        "modality_config": ({"text": text}, *({"text": text, "message": text | form} for form in forms)),
        "unpad_inputs": (None, False, True),
    }
    more = {"multi-vector": SIDES, "rerank": ("processing_kwargs",)}.get(task, ())
    served = ("max_seq_length", "do_lower_case", "cache_dir", *more)
    for key, value in options.items():
        if key in served or value in (None, {}):
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
    place = modules.place(name, config)
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
        on=place,
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
    place = modules.place(name, config)
    if place == "tokens" and config.get("module_input_name") is None:
        raise CheckpointError(f"{name}: module_input_name is missing: say token_embeddings, or remove the module")
    modules.add(NormalizeStep(on=place))


def stored_name(name: str) -> str:
    """What a module of sentence-transformers calls the parameter `name` of our step."""
    return name if name.startswith(("linear.", "residual.", "layer_weights")) else f"norm.{name}"


def _read_splade(modules: Modules, folder: str) -> None:
    """Each word's largest activated logit (which one that is the activation does not change), or their sum."""
    keys = ("pooling_strategy", "activation_function", "embedding_dimension", "word_embedding_dimension", "chunk_size")
    name, config = modules.config(folder, *keys)
    if modules.pooled:
        raise UnsupportedError(f"{name}: a second pooling is not supported")
    strategy = config.get("pooling_strategy", "max")
    if strategy not in ("max", "sum"):
        raise UnsupportedError(f"{name}: pooling_strategy = {strategy!r} is not supported: max or sum")
    activation = config.get("activation_function", "relu")
    if activation not in ("relu", "log1p_relu"):
        raise UnsupportedError(f"{name}: activation_function = {activation!r} is not supported: relu or log1p_relu")
    if type(config.get("chunk_size", 1)) not in (int, type(None)):
        raise CheckpointError(f"{name}: chunk_size = {config['chunk_size']!r}, expected a whole number")
    modules.pooled = True
    times = 1 if activation == "relu" else 2
    if strategy == "max":
        modules.add(PoolingStep(modes=("max",)))
        modules.add(LogStep(on="vectors", times=times))
    else:
        modules.add(LogStep(on="tokens", times=times))
        modules.add(PoolingStep(modes=("sum",)))


def _read_mask(modules: Modules, folder: str) -> None:
    """Which vectors are left out of the result; the steps do not change."""
    name, config = modules.config(folder, "skiplist_words", "skiplist_tasks", "keep_only_token_ids")
    if modules.mask is not None:
        raise UnsupportedError(f"{name}: a second MultiVectorMask is not supported")
    modules.mask = read_mask(name, config)


def _read_weighted_layers(modules: Modules, folder: str) -> None:
    """The mean of several layers' states; without `output_hidden_states` the library passes the last one's on."""
    name, config = modules.config(
        folder, "embedding_dimension", "word_embedding_dimension", "num_hidden_layers", "layer_start"
    )
    if modules.pooled or modules.mix is not None:
        raise UnsupportedError(f"{name}: a WeightedLayerPooling behind another pooling is not supported")
    width = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    if width != modules.width:
        raise CheckpointError(f"{name}: the pooling is {width} wide, the model's states are {modules.width} wide")
    layers, start = config.get("num_hidden_layers", 12), config.get("layer_start", 4)
    if type(layers) is not int or layers < 1:
        raise CheckpointError(f"{name}: num_hidden_layers = {layers!r}, expected a positive integer")
    if type(start) is not int or not 0 <= start <= layers:
        raise CheckpointError(f"{name}: layer_start = {start!r}, expected an integer from 0 to {layers}")
    shown = modules.checkpoint.config.get("output_hidden_states")
    if not isinstance(shown, bool | None):
        raise UnsupportedError(f"config.json: output_hidden_states = {shown!r} is not supported: true or false")
    if not shown:
        modules.warnings.append(
            f"{folder}: sentence-transformers' WeightedLayerPooling has no effect, as config.json does not set "
            "output_hidden_states"
        )
        return
    modules.mix = LayerMixSpec(start=start, count=layers + 1 - start)
    modules.folders["mix."] = folder


def _read_logit_score(modules: Modules, folder: str) -> None:
    """What it does is the head's; see `toolkit.logit_score`."""


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
    "WeightedLayerPooling": _read_weighted_layers,
    "MultiVectorMask": _read_mask,
    "LogitScore": _read_logit_score,
}

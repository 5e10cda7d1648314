"""A recipe says how one architecture's `config.json` and tensors become a module. It is data.

To add an architecture, write one file in `recipes/` that defines `RECIPE` (or `RECIPES`).
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.spec import Activation, EncoderSpec
from toolkit.weights import Rule

__all__ = ["ConfigReader", "Recipe"]

# Fields that any checkpoint may carry and that cannot change an inference result.
IRRELEVANT_EVERYWHERE = frozenset(
    """
    _name_or_path _attn_implementation _attn_implementation_autoset architectures attn_implementation
    auto_map bos_token_id dtype eos_token_id finetuning_task gradient_checkpointing id2label initializer_range
    label2id language model_type name_or_path num_labels output_attentions output_hidden_states output_past
    problem_type return_dict sep_token_id sentence_transformers task_specific_params tie_word_embeddings
    tokenizer_class torch_dtype torchscript transformers_version use_cache
    """.split()
)
# Fields that must hold this value wherever they appear.
NEUTRAL_EVERYWHERE: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "quantization_config": None,
    "cross_attention_hidden_size": None,
    "chunk_size_feed_forward": 0,
}

_ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


class ConfigReader:
    """Typed access to a raw `config.json` that remembers which fields were read.

    Defaults are those of the architecture's transformers config class; they apply to absent fields only.
    A field of the wrong type or outside its range raises CheckpointError naming the field and the value.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._read: set[str] = set()

    def _get(self, name: str, default: object) -> object:
        self._read.add(name)
        return self.raw.get(name, default)

    def integer(self, name: str, default: int, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """An integer field of at least `minimum`."""
        value = self._get(name, default)
        if type(value) is not int or value < minimum:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected an integer of at least {minimum}")
        if value > maximum:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected an integer of at most {maximum}")
        return value

    def positive(self, name: str, default: float) -> float:
        """A positive, finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected a positive number")
        return float(value)

    def activation(self, name: str, default: str) -> Activation:
        """An activation by its transformers name."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise UnsupportedError(
                f"config.json: {name} = {value!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}"
            )
        return _ACTIVATIONS[value]

    def neutral(self, **expected: object) -> None:
        """Fields that may be absent or hold exactly this value; anything else is unsupported."""
        for name, value in expected.items():
            found = self._get(name, value)
            if found != value or type(found) is not type(value):
                raise UnsupportedError(f"config.json: {name} = {found!r} is not supported, only {value!r} is")

    def unrecognised(self, irrelevant: frozenset[str]) -> list[str]:
        """Fields that nothing read and nobody declared irrelevant, sorted; the caller reports them."""
        return sorted(set(self.raw) - self._read - irrelevant - IRRELEVANT_EVERYWHERE)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One architecture.

    Attributes:
        model_type: as in `config.json`.
        classes: the transformers classes that it answers to (`architectures` in `config.json`).
        tasks: what a checkpoint of it can be converted for.
        spec: effective configuration from the raw one.
        rules: what becomes of every stored tensor.
        prefixes: what the base model's tensor names may start with, e.g. `"bert."`; always tried with `""`.
        legacy_names: old → new last components of tensor names (`LayerNorm.gamma` → `LayerNorm.weight`).
        irrelevant: configuration fields that cannot change an inference result of this architecture.
        tiny: a small configuration for the parity tests, with unusual values.
        note: known limits, shown by `toolkit recipes`.
    """

    model_type: str
    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    spec: Callable[[ConfigReader], EncoderSpec]
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...]
    legacy_names: Mapping[str, str]
    irrelevant: frozenset[str]
    tiny: Mapping[str, Any]
    note: str

    def read_config(self, raw: Mapping[str, Any]) -> tuple[EncoderSpec, list[str]]:
        """Return the effective configuration and the names of unrecognised fields.

        Raises:
            CheckpointError: a field's value is impossible.
            UnsupportedError: a field's value is valid and not supported.
        """
        reader = ConfigReader(raw)
        reader.neutral(**NEUTRAL_EVERYWHERE)
        spec = self.spec(reader)
        return spec, reader.unrecognised(self.irrelevant)

"""Typed access to a checkpoint's raw `config.json`, which remembers what was read.

Fields may have several names: that of the transformers class and those of older or foreign checkpoints. Where two
of them are present they must agree.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any

from toolkit.errors import CheckpointError, UnsupportedError
from toolkit.spec import Activation, Llama3Scaling, RopeSpec, YarnScaling

__all__ = ["IRRELEVANT_EVERYWHERE", "LAYER_TYPES", "NEUTRAL_EVERYWHERE", "ConfigReader"]

# Fields that any checkpoint may carry and that cannot change an inference result.
IRRELEVANT_EVERYWHERE = frozenset(
    """
    _name_or_path _attn_implementation _attn_implementation_autoset architectures attn_implementation
    auto_map bos_token_id dtype eos_token_id finetuning_task gradient_checkpointing id2label initializer_range
    label2id language model_type name_or_path num_labels output_attentions output_hidden_states output_past
    problem_type return_dict sep_token_id sentence_transformers task_specific_params tie_word_embeddings
    tokenizer_class torch_dtype torchscript transformers_version use_bfloat16 use_cache
    do_sample early_stopping eos_token_ids length_penalty max_length min_length no_repeat_ngram_size num_beams
    num_return_sequences repetition_penalty temperature top_k top_p
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
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# What each kind of rope may carry besides its base; "dynamic" is plain up to the trained length, our limit.
_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
}
_MORE_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "ntk": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        "factor original_max_position_embeddings attention_factor mscale mscale_all_dim beta_fast beta_slow "
        "truncate".split()
    ),
}
_TWO_TABLES = "it has two tables, and a text's length chooses between them"
_WHY_NO_ROPE: Mapping[object, str] = {"longrope": _TWO_TABLES, "su": _TWO_TABLES}
LAYER_TYPES = ("full_attention", "sliding_attention")

Names = str | tuple[str, ...]


class ConfigReader:
    """A raw configuration. Defaults are those of the transformers class; they apply to absent fields only.

    A field of the wrong type or outside its range raises CheckpointError naming the field and the value. Where a
    method takes names, the first is the one in messages.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self._read: set[str] = set()

    def _get(self, names: Names, default: Any) -> tuple[str, Any]:
        """(the name that was found or the first, the value)."""
        names = (names,) if isinstance(names, str) else names
        self._read.update(names)
        present = [name for name in names if name in self.raw]
        for name in present[1:]:
            if self.raw[name] != self.raw[present[0]]:
                raise CheckpointError(
                    f"config.json: {present[0]} = {self.raw[present[0]]!r} and {name} = {self.raw[name]!r} "
                    "contradict each other: correct one of them"
                )
        return (present[0], self.raw[present[0]]) if present else (names[0], default)

    def integer(self, names: Names, default: int, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """An integer of at least `minimum`."""
        name, value = self._get(names, default)
        if type(value) is not int or value < minimum:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected an integer of at least {minimum}")
        if value > maximum:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected an integer of at most {maximum}")
        return value

    def optional_integer(self, names: Names, minimum: int = 1) -> int | None:
        """An integer of at least `minimum`, or None if it is absent or null."""
        return None if self._get(names, None)[1] is None else self.integer(names, minimum, minimum)

    def positive(self, names: Names, default: float) -> float:
        """A positive, finite number."""
        name, value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected a positive number")
        return float(value)

    def optional_positive(self, names: Names, default: float | None = None) -> float | None:
        """A positive, finite number, or None if it is null; `default` if it is absent."""
        return None if self._get(names, default)[1] is None else self.positive(names, default or 1.0)

    def boolean(self, names: Names, default: bool) -> bool:
        """True or false."""
        name, value = self._get(names, default)
        if type(value) is not bool:
            raise CheckpointError(f"config.json: {name} = {value!r}, expected true or false")
        return value

    def choice(self, names: Names, default: str, options: tuple[str, ...]) -> str:
        """One of several texts; another one is unsupported."""
        name, value = self._get(names, default)
        if value not in options:
            raise UnsupportedError(f"config.json: {name} = {value!r} is not supported; supported: {', '.join(options)}")
        return value

    def strings(self, names: Names, length: int, options: tuple[str, ...]) -> tuple[str, ...] | None:
        """A list of `length` texts, each one of `options`; None if it is absent or null."""
        name, value = self._get(names, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or not all(item in options for item in value):
            raise CheckpointError(f"config.json: {name} = {value!r}, expected {length} of {', '.join(options)}")
        return tuple(value)

    def flags(self, names: Names, length: int) -> tuple[bool, ...] | None:
        """The first `length` of a list of zeros and ones, which may be longer; None if it is absent or null."""
        name, value = self._get(names, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length or not all(item in (0, 1) for item in value):
            raise CheckpointError(f"config.json: {name} = {value!r}, expected at least {length} zeros and ones")
        return tuple(bool(item) for item in value[:length])

    def integers(self, names: Names) -> tuple[int, ...]:
        """A list of integers of at least 0; none if it is absent or null."""
        name, value = self._get(names, None)
        if value is not None and not (isinstance(value, list) and all(type(k) is int and k >= 0 for k in value)):
            raise CheckpointError(f"config.json: {name} = {value!r}, expected a list of integers of at least 0")
        return tuple(value or ())

    def terms(self, names: Names, options: tuple[str, ...]) -> tuple[str, ...]:
        """Some of several texts, as a list or as one text with `|` between them; none if it is absent or null."""
        name, value = self._get(names, None)
        items = [part.strip() for part in value.lower().split("|")] if isinstance(value, str) else value
        if items is not None and not (isinstance(items, list) and all(isinstance(item, str) for item in items)):
            raise CheckpointError(f"config.json: {name} = {value!r}, expected texts")
        if not set(items or ()) <= {*options, ""}:
            raise UnsupportedError(f"config.json: {name} = {value!r} is not supported; supported: {', '.join(options)}")
        return tuple(option for option in options if option in (items or ()))

    def activation(self, names: Names, default: str) -> Activation:
        """An activation by its transformers name."""
        name, value = self._get(names, default)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise UnsupportedError(
                f"config.json: {name} = {value!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}"
            )
        return _ACTIVATIONS[value]

    def kv_heads(self, heads: int, default: int | None = None, name: str = "num_key_value_heads") -> int:
        """The number of key and value heads, which must divide `heads`; None stands for as many."""
        stated = self.optional_integer(name) if default is None else self.integer(name, default)
        if heads % (stated or heads):
            raise CheckpointError(f"config.json: num_attention_heads {heads} is no multiple of {name} {stated}")
        return stated or heads

    def head_dim(
        self,
        hidden: int,
        heads: int,
        names: Names = (),
        called: tuple[str, str] = ("hidden_size", "num_attention_heads"),
    ) -> int:
        """The size of a head: what `names` say, else hidden size / heads, which must then divide.

        `called` are the names of these two fields, for the message.
        """
        stated = self.optional_integer(names) if names else None
        if stated is not None:
            return stated
        if hidden % heads:
            raise CheckpointError(f"config.json: {called[0]} {hidden} is no multiple of {called[1]} {heads}")
        return hidden // heads

    def rope(
        self,
        dims: int,
        default_base: float,
        base: Names = "rope_theta",
        layer_type: str | None = None,
        *,
        more: tuple[str, ...] = (),
        only: tuple[str, ...] = (),
        partial: bool = False,
        share: tuple[str, float] = ("partial_rotary_factor", 1.0),
    ) -> RopeSpec:
        """Rotary positions, in their new form (`rope_parameters`, by layer type if the model has several) or old.

        Args:
            dims: how many values of a head are rotated; with `partial`, its size.
            default_base: the base where none is given.
            base: names of the old field for the base.
            layer_type: which of the nested parameters to read.
            more: types that not every architecture has: "llama3", "yarn", and "ntk", which is static NTK scaling
                (base × factor, angles / factor ** (2 / dims)).
            only: the types that the architecture has, if it lacks usual ones.
            partial: whether `partial_rotary_factor` says which share of `dims` is rotated.
            share: what it is called outside of `rope_parameters`, and its default.
        """
        known = {**_ROPE_KEYS, **{kind: _MORE_ROPE_KEYS[kind] for kind in more}}
        known = {kind: keys for kind, keys in known.items() if kind in only or not only}
        old_name, old_base = self._get(base, None)
        values = self._rope_values(layer_type)
        if partial:
            dims = int(dims * self._rotated_share(values.pop("partial_rotary_factor", None), *share))
        if dims < 2 or dims % 2:
            raise CheckpointError(f"config.json: rotary positions need an even head size, not {dims}")
        kind = values.pop("rope_type", "default")
        stated = values.pop("rope_theta", None)
        if stated is not None and old_base is not None and stated != old_base:
            raise CheckpointError(f"config.json: rope_theta = {stated!r} and {old_name} = {old_base!r} contradict")
        if not isinstance(kind, str) or kind not in known:
            why = _WHY_NO_ROPE.get(kind) if isinstance(kind, str) else None
            reason = f" ({why})" if why is not None else ""
            raise UnsupportedError(
                f"config.json: rope type {kind!r} is not supported{reason}; supported: {', '.join(sorted(known))}"
            )
        if values.get("partial_rotary_factor") in (None, 1.0):
            values.pop("partial_rotary_factor", None)
        unknown = sorted(set(values) - known[kind])
        if unknown:
            raise UnsupportedError(f"config.json: the rope parameter {unknown[0]!r} is not supported for type {kind!r}")
        chosen = stated if stated is not None else old_base if old_base is not None else default_base
        factor = values.get("factor") if kind in ("linear", "ntk") else 1.0
        numbers: dict[str, Any] = {"rope_theta": chosen, "factor": factor}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
                raise CheckpointError(f"config.json: {name} = {value!r}, expected a positive number")
        chosen, factor = float(numbers["rope_theta"]), float(numbers["factor"])
        if kind == "ntk":
            if factor < 1:
                raise CheckpointError(f"config.json: the rope parameter factor = {factor}, expected at least 1")
            chosen, factor = chosen * factor, factor ** (2 / dims)
        return RopeSpec(base=chosen, dims=dims, factor=factor, scaling=_rope_scaling(kind, values))

    def _rotated_share(self, inner: object, name: str, default: float) -> float:
        """`partial_rotary_factor`, which may stand among the rope parameters (`inner`) or as `name` beside them."""
        outer = self._get(name, None)[1]
        if inner is not None and outer is not None and inner != outer:
            raise CheckpointError(
                f"config.json: {name} = {outer!r} and {inner!r} in rope_parameters contradict each other"
            )
        share = next(value for value in (inner, outer, default) if value is not None)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise CheckpointError(f"config.json: {name} = {share!r}, expected a number from 0 to 1")
        return float(share)

    def _rope_values(self, layer_type: str | None) -> dict[str, Any]:
        """What is stated of a layer type, in the new form or the old one, which scales full attention only."""
        parameters, scaling = self._mapping("rope_parameters"), self._mapping("rope_scaling")
        if parameters is not None and layer_type is not None:
            for name, value in parameters.items():
                if name not in LAYER_TYPES or not isinstance(value, dict | None):
                    raise CheckpointError(
                        f"config.json: rope_parameters holds {name!r} = {value!r}, expected an object for each of "
                        + ", ".join(LAYER_TYPES)
                    )
            parameters = parameters.get(layer_type)
        if layer_type == "sliding_attention":
            scaling = None
        forms = [{"rope_type": form.get("type", "default"), **form} for form in (parameters, scaling) if form]
        for form in forms:
            form.pop("type", None)
        if len(forms) == 2 and forms[0] != forms[1]:
            raise CheckpointError(
                f"config.json: rope_parameters = {parameters!r} and rope_scaling = {scaling!r} contradict each other"
            )
        return forms[0] if forms else {}

    def _mapping(self, name: str) -> dict[str, Any] | None:
        value = self._get(name, None)[1]
        if value is not None and not isinstance(value, dict):
            raise CheckpointError(f"config.json: {name} = {value!r}, expected an object")
        return value

    def neutral(self, **expected: object) -> None:
        """Fields that may be absent or hold exactly this value (one of a tuple's); anything else is unsupported."""
        for name, value in expected.items():
            options = value if isinstance(value, tuple) else (value,)
            found = self._get(name, options[0])[1]
            if not any(found == option and type(found) is type(option) for option in options):
                known = " or ".join(map(repr, options))
                raise UnsupportedError(f"config.json: {name} = {found!r} is not supported, only {known} is")

    def unrecognised(self, irrelevant: frozenset[str]) -> list[str]:
        """Fields that nothing read and nobody declared irrelevant, sorted; the caller reports them."""
        return sorted(set(self.raw) - self._read - irrelevant - IRRELEVANT_EVERYWHERE)


def _rope_scaling(kind: str, values: Mapping[str, Any]) -> Llama3Scaling | YarnScaling | None:
    """What the rope types llama3 and yarn say beyond their base."""

    def number(name: str, default: float | None = None) -> float:
        value = values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise CheckpointError(f"config.json: the rope parameter {name} = {value!r}, expected a positive number")
        return float(value)

    if kind not in ("llama3", "yarn"):
        return None
    factor, original = number("factor"), number("original_max_position_embeddings")
    if factor < 1 or original != int(original):
        raise CheckpointError(
            f"config.json: the rope parameters factor = {factor} and original_max_position_embeddings = {original}, "
            "expected at least 1 and a whole number"
        )
    if kind == "llama3":
        low, high = number("low_freq_factor"), number("high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: low_freq_factor = {low} must be below high_freq_factor = {high}")
        return Llama3Scaling(factor=factor, low=low, high=high, original=int(original))
    truncate = values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise CheckpointError(f"config.json: the rope parameter truncate = {truncate!r}, expected true or false")
    fast, slow = number("beta_fast", 32), number("beta_slow", 1)
    if fast <= slow:
        raise CheckpointError(f"config.json: beta_fast = {fast} must be above beta_slow = {slow}")
    magnitude = _yarn_magnitude(factor, 1.0)
    if values.get("mscale") and values.get("mscale_all_dim"):
        magnitude = _yarn_magnitude(factor, number("mscale")) / _yarn_magnitude(factor, number("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original=int(original),
        fast=fast,
        slow=slow,
        truncate=truncate,
        magnitude=number("attention_factor", magnitude),
    )


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0

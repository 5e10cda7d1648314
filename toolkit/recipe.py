"""A recipe says how one architecture's `config.json` and tensors become a module. It is data.

To add an architecture, write one file in `recipes/` that defines `RECIPE` (or `RECIPES`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config import NEUTRAL_EVERYWHERE, ConfigReader
from toolkit.spec import EncoderSpec
from toolkit.weights import Rule

__all__ = ["ConfigReader", "Recipe"]


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
        aliases: old → new parts of tensor names, whole components only (`LayerNorm.gamma` → `LayerNorm.weight`).
        irrelevant: configuration fields that cannot change an inference result of this architecture.
        tiny: a small configuration for the parity tests, with unusual values.
        note: known limits, shown by `toolkit recipes`.
        reference: the transformers class that is the reference for token states, or None where there is only
            remote code, which is never run: such checkpoints convert with `--no-verify`.
        neutral: fields that every recipe refuses unless they hold a value, where this architecture's differs.
    """

    model_type: str
    classes: tuple[str, ...]
    tasks: tuple[str, ...]
    spec: Callable[[ConfigReader], EncoderSpec]
    rules: tuple[Rule, ...]
    prefixes: tuple[str, ...]
    aliases: Mapping[str, str]
    irrelevant: frozenset[str]
    tiny: Mapping[str, Any]
    note: str
    reference: str | None = "AutoModel"
    neutral: Mapping[str, Any] = field(default_factory=dict)

    def read_config(self, raw: Mapping[str, Any]) -> tuple[EncoderSpec, list[str]]:
        """Return the effective configuration and the names of unrecognised fields.

        Raises:
            CheckpointError: a field's value is impossible.
            UnsupportedError: a field's value is valid and not supported.
        """
        reader = ConfigReader(raw)
        reader.neutral(**{**NEUTRAL_EVERYWHERE, **self.neutral})
        spec = self.spec(reader)
        return spec, reader.unrecognised(self.irrelevant)

"""A recipe says how one architecture's `config.json` and tensors become a module. It is data.

To add an architecture, write one file in `recipes/` that defines `RECIPE` (or `RECIPES`).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from toolkit.config import NEUTRAL_EVERYWHERE, ConfigReader
from toolkit.errors import UnsupportedError
from toolkit.heads import TaskHead
from toolkit.spec import EncoderSpec
from toolkit.weights import Rule

__all__ = ["ConfigReader", "Recipe"]

_LONGEST = 2**20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One architecture.

    Attributes:
        model_type: as in `config.json`.
        classes: the transformers classes that it answers to (`architectures` in `config.json`).
        tasks: what a checkpoint of it can be converted for; see `base_tasks`.
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
        when: fields of `config.json` that must hold these values for this recipe to answer. Of several recipes for
            one model_type, the one with the most conditions that hold is chosen.
        heads: what stands behind the base model in other classes, and the tasks that it serves.
        positions_by_mask: whether the reference counts positions over attended tokens only.
        having: ends of tensor names; for each, a tensor must be stored for this recipe to answer.
        segments_refused: whether the reference would look segments up in its token table, which no block does: a
            tokenizer that emits them is refused.
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
    when: Mapping[str, Any] = field(default_factory=dict)
    having: tuple[str, ...] = ()
    positions_by_mask: bool = False
    heads: tuple[TaskHead, ...] = ()
    segments_refused: bool = False

    @property
    def base_tasks(self) -> tuple[str, ...]:
        """The tasks of the base model: where token states serve `embed`, they serve `multi-vector` as well."""
        return (*self.tasks, *(("multi-vector",) if "embed" in self.tasks else ()))

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """The tasks of the base model and of every head."""
        return tuple(dict.fromkeys((*self.base_tasks, *(task for head in self.heads for task in head.tasks))))

    @property
    def all_classes(self) -> tuple[str, ...]:
        """The transformers classes of the base model and of every head."""
        return (*self.classes, *(name for head in self.heads for name in head.classes))

    @property
    def attention_kinds(self) -> tuple[str, ...]:
        """How attention knows positions and what it sees, as the tiny configuration has it."""
        spec, _ = self.read_config(self.tiny)
        kinds = ["absolute positions"] if spec.embedding.positions else []
        for attention in spec.attentions:
            kinds += ["rotary positions"] if attention.rope is not None else []
            kinds += [f"{attention.distance.kind} by distance"] if attention.distance is not None else []
            kinds += ["full" if attention.reach is None else "windows"]
            kinds += ["grouped heads"] if attention.kv_heads != attention.heads else []
        return tuple(dict.fromkeys(kinds))

    def head_rules(self, head: TaskHead | None, raw: Mapping[str, Any]) -> tuple[Rule, ...]:
        """The rules for a checkpoint with `head` and this configuration: what the head needs is not dropped."""
        if head is None:
            return self.rules
        rules = head.rules(ConfigReader(raw))
        wanted = [source.replace("{p}", "weight") for rule in rules for source in rule.sources]
        kept = (rule for rule in self.rules if rule.target is not None or not any(map(rule.match, wanted)))
        return (*kept, *rules)

    @property
    def label(self) -> str:
        """The model_type and the conditions: what tells this recipe from all others."""
        conditions = [*(f"{name} = {self.when[name]!r}" for name in sorted(self.when)), *self.having]
        return f"{self.model_type} ({', '.join(conditions)})" if conditions else self.model_type

    def answers(self, raw: Mapping[str, Any], stored: Callable[[], Iterable[str]]) -> bool:
        """Whether the conditions hold; `stored` gives the names of the tensors, and is called only if it matters."""
        if any(name not in raw or raw[name] != value for name, value in self.when.items()):
            return False
        names = tuple(stored()) if self.having else ()
        return all(any(name.endswith(end) for name in names) for end in self.having)

    def read_config(self, raw: Mapping[str, Any]) -> tuple[EncoderSpec, list[str]]:
        """Return the effective configuration and the names of unrecognised fields.

        Raises:
            CheckpointError: a field's value is impossible.
            UnsupportedError: a field's value is valid and not supported.
        """
        reader = ConfigReader(raw)
        reader.neutral(**{**NEUTRAL_EVERYWHERE, **self.neutral})
        spec = self.spec(reader)
        if spec.usable_length > _LONGEST:
            raise UnsupportedError(
                f"config.json: sequences of {spec.usable_length} tokens: tables of positions beyond {_LONGEST} are "
                "not supported"
            )
        return spec, reader.unrecognised(self.irrelevant)

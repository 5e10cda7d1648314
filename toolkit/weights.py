"""Weights move by rules, and the rules are data: rename, fuse, drop. Every stored tensor is accounted for.

`{i}` and `{j}` in a pattern stand for numbers and `{p}` for `weight` or `bias`; `{*}` (for tensors that are left out
or refused) for any rest of a name. `{e}` in the sources of a fuse runs over 0, 1, 2 …: there are as many tensors as the
parameter has parts, number by number. One shared loop applies the rules: each source tensor matches exactly one, each
parameter of the module is filled exactly once, and the audit of both goes into the artifact.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch

from toolkit.checkpoint import TensorSet
from toolkit.errors import CheckpointError, UnsupportedError

__all__ = [
    "AuditEntry",
    "LoadedWeights",
    "Rows",
    "Rule",
    "copy",
    "drop",
    "either",
    "fuse",
    "load_weights",
    "refuse",
    "rename",
]

PartShapes = tuple[tuple[int, ...], ...]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile

# How a tensor may be stored: as the module has it, with rows and columns exchanged, with the parts of a fused one
# (queries, keys, values) head by head instead of one after the other, or with a dimension of its own for the groups of
# rows (experts). What is said of each in the audit.
Layout = Literal["plain", "transposed", "by_head", "stacked"]
_LAYOUTS: Mapping[Layout, str] = {
    "plain": "",
    "transposed": "stored transposed",
    "by_head": "stored head by head",
    "stacked": "stored with a dimension for the groups of rows",
}

_HOLES = {
    "{i}": r"(?P<i>\d+)",
    "{j}": r"(?P<j>\d+)",
    "{e}": r"(?P<e>0|[1-9]\d*)",
    "{p}": r"(?P<p>weight|bias)",
    "{*}": r".+",
}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which rows of a stored tensor are taken, in this order, and how many it has."""

    chosen: tuple[int, ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One line of a recipe. `target` is None for a drop; `part` sources are concatenated along dim 0.

    `outside` marks tensors beside the base model (heads): their names never carry the base model's prefix.
    `copy` marks a further name of a parameter that may be stored under both, with equal values. `unused` says why a
    tensor is left out where the module has no such parameter; without a reason that is an error. `refused` stops a
    conversion for the reason `why`. `layout` is how the sources are stored; `rows` of a plain one are taken, None for
    all.
    """

    target: str | None
    sources: tuple[str, ...]
    why: str
    outside: bool = False
    copy: bool = False
    unused: str = ""
    refused: bool = False
    layout: Layout = "plain"
    rows: Rows | None = None

    def match(self, name: str) -> tuple[int, dict[str, str]] | None:
        """Return which part of the parameter `name` is, and what the holes stand for."""
        for place, source in enumerate(self.sources):
            found = _pattern(source).fullmatch(name)
            if found is not None:
                return int(found.groupdict().get("e", 0)) * len(self.sources) + place, found.groupdict()
        return None

    @property
    def runs(self) -> bool:
        """Whether there are as many tensors as the parameter has parts."""
        return any("{e}" in source for source in self.sources)

    def names(self, parts: int, holes: Mapping[str, str]) -> list[str]:
        """The stored names of all tensors of a parameter of so many parts."""
        numbers = range(-(-parts // len(self.sources)) if self.runs else 1)
        return [_fill(source, {**holes, "e": str(number)}) for number in numbers for source in self.sources]


@functools.cache
def _pattern(source: str) -> re.Pattern[str]:
    pieces = re.split(r"(\{[ijep*]\})", source)
    return re.compile("".join(_HOLES.get(piece) or re.escape(piece) for piece in pieces))


def rename(target: str, source: str, *, unused: str = "", outside: bool = False, layout: Layout = "plain") -> Rule:
    """One stored tensor becomes one parameter; `unused`, `outside` and `layout` as in Rule."""
    why = _LAYOUTS[layout]
    return Rule(target=target, sources=(source,), why=why, unused=unused, outside=outside, layout=layout)


def fuse(target: str, *sources: str) -> Rule:
    """Several stored tensors become one parameter, concatenated along dim 0 in this order, for each `{e}` in turn."""
    return Rule(target=target, sources=sources, why="")


def copy(target: str, source: str, *, outside: bool = False) -> Rule:
    """Like `rename`, for a further name of a tied parameter; where both are stored they must be equal."""
    return Rule(target=target, sources=(source,), why="", copy=True, outside=outside)


def drop(source: str, *, why: str, outside: bool = False) -> Rule:
    """A stored tensor is left out on purpose; `why` goes into the audit."""
    return Rule(target=None, sources=(source,), why=why, outside=outside)


def either(target: str, *sources: str) -> tuple[Rule, ...]:
    """One `rename` for each name that checkpoints may store a parameter under."""
    return tuple(rename(target, source) for source in sources)


def refuse(source: str, *, why: str) -> Rule:
    """A stored tensor of a variant that is not supported: the error gives the reason `why`."""
    return Rule(target=None, sources=(source,), why=why, refused=True)


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """What became of one stored tensor."""

    source: str
    shape: tuple[int, ...]
    dtype: str
    action: Literal["loaded", "fused", "dropped"]
    target: str | None
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """The module's state dict, complete, and the audit of every source tensor."""

    state: dict[str, torch.Tensor]
    audit: tuple[AuditEntry, ...]


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A stored name, the rule that takes it, its place among the rule's sources, and the concrete target."""

    stored: str
    rule: Rule
    part: int
    target: str | None
    why: str


def load_weights(
    tensors: TensorSet,
    *,
    rules: tuple[Rule, ...],
    prefixes: tuple[str, ...],
    aliases: Mapping[str, str],
    expected: Mapping[str, PartShapes],
    dtype: torch.dtype,
    groups: Mapping[str, int] = MappingProxyType({}),
) -> LoadedWeights:
    """Apply the rules to every stored tensor.

    Args:
        tensors: the checkpoint's tensors.
        rules: the recipe's rules; names in them are those of the bare base model.
        prefixes: prefixes that the base model's names may carry, tried together with none.
        aliases: old → new parts of names, whole components only, applied in order.
        expected: every parameter of the module and the shapes of its parts, in order (one part if it is not
            fused); all of them must be filled.
        dtype: the dtype that floating point tensors are cast to.
        groups: the parameters that may be stored head by head or stacked, and how many groups of rows they have.

    Raises:
        CheckpointError: a tensor is missing, extra, misshapen, ambiguous, or does not fit `dtype`.
    """
    placed = _settle_copies(tensors, _place_all(tensors, rules, prefixes, aliases, expected))
    by_target: dict[str, dict[int, _Placed]] = {}
    for item in placed:
        if item.target is not None:
            parts = by_target.setdefault(item.target, {})
            other = next((p for p in parts.values() if p.rule is not item.rule or p.part == item.part), None)
            parts[item.part] = item
            if other is not None:
                raise CheckpointError(
                    f"tensors {other.stored!r} and {item.stored!r} are the same parameter: remove one"
                )
    state = {
        target: _assemble(tensors, parts, expected[target], dtype, groups.get(target))
        for target, parts in by_target.items()
    }
    return LoadedWeights(state=state, audit=tuple(_audit(tensors, item) for item in placed))


def _place_all(
    tensors: TensorSet,
    rules: tuple[Rule, ...],
    prefixes: tuple[str, ...],
    aliases: Mapping[str, str],
    expected: Mapping[str, PartShapes],
) -> list[_Placed]:
    """Find the one reading of the stored names under which every parameter has its tensors."""
    names = sorted(tensors.info)
    wrapper = next((w for w in WRAPPERS if names and all(n.startswith(w) for n in names)), "")
    readings = [_read_names(names, wrapper, prefix, rules, aliases) for prefix in ("", *prefixes)]
    missing = [_missing(reading, rules, expected) for reading in readings]
    complete = [reading for reading, gaps in zip(readings, missing, strict=True) if not gaps]
    if len(complete) > 1:
        raise CheckpointError(f"the base model is stored twice, under the prefixes {('', *prefixes)}: remove one copy")
    if not complete:
        gaps = min(missing, key=len)
        shown = ", ".join(repr(name) for name in gaps[:3]) + (f" and {len(gaps) - 3} more" if len(gaps) > 3 else "")
        raise CheckpointError(f"missing tensor: {shown}; the checkpoint is incomplete or of another architecture")
    placed = [_leave_out(item, expected) for item in complete[0]]
    unknown = sorted(set(names) - {item.stored for item in placed})
    if unknown:
        shown = ", ".join(repr(name) for name in unknown[:3])
        raise CheckpointError(
            f"unexpected tensor: {shown} ({len(unknown)} in all); no rule of this architecture takes it"
        )
    for item in placed:
        if item.target is not None and item.target not in expected:
            raise CheckpointError(f"unexpected tensor: {item.stored!r}; config.json describes no {item.target!r}")
        if item.target is not None and item.rule.runs and item.part >= len(expected[item.target]):
            parts = len(expected[item.target])
            raise CheckpointError(
                f"unexpected tensor: {item.stored!r}; config.json describes {item.target!r} in {parts} parts"
            )
    return placed


def _leave_out(item: _Placed, expected: Mapping[str, PartShapes]) -> _Placed:
    """Drop what the module has no place for, if the rule has a reason."""
    if item.target is None or item.target in expected or not item.rule.unused:
        return item
    return replace(item, target=None, why=item.rule.unused)


def _settle_copies(tensors: TensorSet, placed: list[_Placed]) -> list[_Placed]:
    """Drop the copies of what is stored under its first name too, after comparing them."""
    first = {item.target: item for item in placed if not item.rule.copy}
    settled: list[_Placed] = []
    for item in placed:
        if item.rule.copy and item.target in first:
            names = first[item.target].stored, item.stored
            if not torch.equal(*map(tensors.read, names)):
                raise CheckpointError(f"tensors {names[0]!r} and {names[1]!r} are the same parameter, but they differ")
            item = replace(item, target=None, why=f"a copy of {names[0]!r}, with equal values")
        settled.append(item)
    return settled


def _read_names(
    names: Iterable[str], wrapper: str, prefix: str, rules: tuple[Rule, ...], aliases: Mapping[str, str]
) -> list[_Placed]:
    """Place every name that fits, if the base model's names start with `prefix`."""
    placed: list[_Placed] = []
    for stored in names:
        name = stored.removeprefix(wrapper)
        inner, why = name.removeprefix(prefix), ""
        for old, new in aliases.items():
            if f".{old}." in f".{inner}.":
                inner = f".{inner}.".replace(f".{old}.", f".{new}.")[1:-1]
                why = f"{why}, {old}" if why else f"alias {old}"
        hits: list[_Placed] = []
        for rule in rules:
            if not rule.outside and not name.startswith(prefix):
                continue
            found = rule.match(name if rule.outside else inner)
            if found is not None:
                if rule.refused:
                    raise UnsupportedError(f"tensor {stored!r}: {rule.why}")
                target = _fill(rule.target, found[1]) if rule.target else None
                hits.append(_Placed(stored=stored, rule=rule, part=found[0], target=target, why=rule.why or why))
        if len(hits) > 1:
            raise CheckpointError(f"tensor {stored!r} matches {len(hits)} rules of the recipe, must be exactly one")
        placed += hits
    return placed


def _fill(target: str, holes: Mapping[str, str]) -> str:
    for hole, value in holes.items():
        target = target.replace("{" + hole + "}", value)
    return target


def _missing(placed: list[_Placed], rules: tuple[Rule, ...], expected: Mapping[str, PartShapes]) -> list[str]:
    """Source names that the expected parameters need and `placed` does not have.

    Where several rules fill a parameter, the stored names decide which one it is: one that is used elsewhere too, if
    possible, so that the names are in the checkpoint's own spelling.
    """
    have = {(item.target, item.rule, item.part) for item in placed}
    used = {item.rule for item in placed}
    gaps: list[str] = []
    for target in expected:
        missing: list[tuple[bool, list[str]]] = []
        for rule in rules:
            found = _pattern(rule.target).fullmatch(target) if rule.target else None
            if found is not None:
                sources = rule.names(len(expected[target]), found.groupdict())
                gap = [s for part, s in enumerate(sources) if (target, rule, part) not in have]
                missing.append((rule not in used, gap))
        assert missing, f"no rule of the recipe fills the parameter {target!r}"
        gaps += min(missing, key=lambda choice: (choice[0], len(choice[1])))[1]
    return gaps


def _assemble(
    tensors: TensorSet, parts: Mapping[int, _Placed], shapes: PartShapes, dtype: torch.dtype, groups: int | None
) -> torch.Tensor:
    """Read, check, concatenate and cast the tensors of one parameter, and bring them from their layout to ours."""
    stored = [tensors.info[parts[k].stored] for k in sorted(parts)]
    rule, rows = next(iter(parts.values())).rule, [shape[0] for shape in shapes]
    layout, taken = rule.layout, rule.rows
    if len(stored) == 1:  # fused already in the checkpoint
        leading: tuple[int, ...] = (sum(rows),)
        if layout == "stacked":
            assert groups is not None, f"{next(iter(parts.values())).target} has no groups to be stacked by"
            leading = (groups, sum(rows) // groups)
        shapes = ((*leading, *shapes[0][1:]),)
    if len(stored) != len(shapes):
        names = ", ".join(repr(info.name) for info in stored)
        raise CheckpointError(f"tensors {names} are {len(stored)} parts of what config.json describes in {len(shapes)}")
    for info, ours in zip(stored, shapes, strict=True):
        shape = ours[::-1] if layout == "transposed" else ours
        shape = (taken.count, *shape[1:]) if taken is not None else shape
        if info.shape != shape:
            raise CheckpointError(f"tensor {info.name!r} has shape {info.shape}, config.json asks for {shape}")
        if info.dtype not in FLOATS:
            raise CheckpointError(f"tensor {info.name!r} has dtype {info.dtype}, expected plain floating point")
    pieces = [_cast(info.name, tensors.read(info.name), dtype) for info in stored]
    if taken is not None:
        pieces = [piece[list(taken.chosen)] for piece in pieces]
    if layout == "transposed":
        pieces = [piece.t() for piece in pieces]
    if layout == "stacked":
        pieces = [piece.flatten(0, 1) for piece in pieces]
    if layout == "by_head":
        assert groups is not None, f"{next(iter(parts.values())).target} has no heads to be stored by"
        pieces = _part_by_part(pieces[0], rows, groups)
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).contiguous()


def _part_by_part(tensor: torch.Tensor, rows: list[int], groups: int) -> list[torch.Tensor]:
    """Split rows that stand group by group, each with its share of every part, into parts of `rows` rows."""
    shares = [count // groups for count in rows]
    return [piece.flatten(0, 1) for piece in tensor.unflatten(0, (groups, sum(shares))).split(shares, dim=1)]


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"tensor {name!r} holds NaN or infinite values")
    cast = tensor.to(dtype)
    if not torch.isfinite(cast).all():
        raise CheckpointError(f"tensor {name!r} exceeds the range of {dtype}; convert with --dtype float32")
    return cast


def _audit(tensors: TensorSet, item: _Placed) -> AuditEntry:
    info = tensors.info[item.stored]
    several = len(item.rule.sources) > 1 or item.rule.runs
    action = "dropped" if item.target is None else "fused" if several else "loaded"
    return AuditEntry(
        source=item.stored,
        shape=info.shape,
        dtype=str(info.dtype).removeprefix("torch."),
        action=action,
        target=item.target,
        why=item.why,
    )

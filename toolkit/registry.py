"""Which recipe answers to a checkpoint: built in, from an entry point, or from a file the user names."""

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from toolkit.errors import UnsupportedError
from toolkit.recipe import Recipe

__all__ = ["RegisteredRecipe", "all_recipes", "find_recipe"]

ENTRY_POINT_GROUP = "toolkit.recipes"


@dataclass(frozen=True, kw_only=True)
class RegisteredRecipe:
    """A recipe, where it was found, and the sha256 of the file that defines it."""

    recipe: Recipe
    origin: str
    digest: str


def all_recipes() -> list[RegisteredRecipe]:
    """Built-in recipes and those of installed packages (entry point group `toolkit.recipes`), by model_type.

    Raises:
        UnsupportedError: two of them answer to the same model_type under the same conditions.
    """
    found: dict[str, RegisteredRecipe] = {}
    for module, origin in _modules():
        for entry in _recipes_of(module, origin):
            label = entry.recipe.label
            other = found.setdefault(label, entry)
            if other is not entry:
                raise UnsupportedError(f"model_type {label!r} is claimed by {other.origin} and {origin}: uninstall one")
    return [found[name] for name in sorted(found)]


def find_recipe(
    model_type: str,
    file: str | None = None,
    config: Mapping[str, Any] | None = None,
    stored: Callable[[], Iterable[str]] = tuple,
) -> RegisteredRecipe:
    """Return the recipe for `model_type` with the most conditions that hold.

    Args:
        model_type: as in `config.json`.
        file: a Python file of the user's, which is executed and whose recipes are the only ones.
        config: the raw `config.json`.
        stored: gives the names of the stored tensors; called only if a recipe depends on them.

    Raises:
        UnsupportedError: no recipe answers to it, or it is open which one does.
    """
    candidates = _from_file(file) if file is not None else all_recipes()
    fitting = [e for e in candidates if e.recipe.model_type == model_type and e.recipe.answers(config or {}, stored)]
    if fitting:
        most = max(map(_conditions, fitting))
        best = [entry for entry in fitting if _conditions(entry) == most]
        if len(best) > 1:
            labels = " and ".join(entry.recipe.label for entry in best)
            raise UnsupportedError(
                f"config.json: several recipes answer to this checkpoint: {labels}; see --recipe FILE"
            )
        return best[0]
    known = ", ".join(dict.fromkeys(entry.recipe.label for entry in candidates))
    where = file or "toolkit"
    raise UnsupportedError(
        f"config.json: model_type = {model_type!r} is not supported; {where} has recipes for: {known}. "
        "docs/adding-an-architecture.md shows how to write one and pass it with --recipe FILE"
    )


def _conditions(entry: RegisteredRecipe) -> int:
    return len(entry.recipe.when) + len(entry.recipe.having)


def _modules() -> Iterator[tuple[ModuleType, str]]:
    package = importlib.import_module("toolkit.recipes")
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        yield importlib.import_module(f"toolkit.recipes.{info.name}"), "built in"
    for point in entry_points(group=ENTRY_POINT_GROUP):
        origin = f"package {point.dist.name if point.dist else point.value}"
        try:
            module = point.load()
        except Exception as error:
            raise UnsupportedError(f"{origin}: its recipes cannot be loaded ({error}): uninstall it") from error
        yield module, origin


def _from_file(file: str) -> list[RegisteredRecipe]:
    path = Path(file)
    if not path.is_file():
        raise UnsupportedError(f"--recipe {file}: no such file")
    spec = importlib.util.spec_from_file_location(f"toolkit_user_recipe_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UnsupportedError(f"--recipe {file}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses with postponed annotations look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UnsupportedError(f"--recipe {file}: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    entries = _recipes_of(module, str(path))
    for k, entry in enumerate(entries):
        if any(entry.recipe.label == other.recipe.label for other in entries[:k]):
            raise UnsupportedError(f"model_type {entry.recipe.label!r} is claimed twice by {file}")
    return entries


def _recipes_of(module: ModuleType, origin: str) -> list[RegisteredRecipe]:
    recipes: Any = getattr(module, "RECIPES", None) or (getattr(module, "RECIPE", None),)
    if not module.__file__ or not isinstance(recipes, tuple) or not all(isinstance(r, Recipe) for r in recipes):
        raise UnsupportedError(f"{origin}: {module.__name__} defines no RECIPE of type toolkit.recipe.Recipe")
    digest = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    return [RegisteredRecipe(recipe=recipe, origin=origin, digest=digest) for recipe in recipes]

import hashlib
import types
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest

import toolkit.registry
from tests.tiny import edit_json, make_checkpoint
from toolkit.conversion import convert
from toolkit.errors import UnsupportedError
from toolkit.recipe import Recipe
from toolkit.registry import all_recipes, find_recipe

BERT = find_recipe("bert").recipe
FOLDER = Path(str(import_module("toolkit.recipes").__file__)).parent
TWIN = """
from dataclasses import replace
from toolkit.recipes.bert import RECIPE as BERT
"""


def write(folder: Path, text: str, name: str = "own.py") -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_every_recipe_file_is_registered() -> None:
    entries = all_recipes()
    digests = {entry.digest for entry in entries if entry.origin == "built in"}
    files = [path for path in FOLDER.glob("*.py") if not path.name.startswith("_")]
    assert digests == {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_built_in_recipe_is_found() -> None:
    entry = find_recipe("bert")
    assert (entry.recipe.model_type, entry.origin) == ("bert", "built in")
    assert entry.digest == hashlib.sha256((FOLDER / "bert.py").read_bytes()).hexdigest()


@pytest.mark.parametrize("model_type", ["no-such-model", "BERT", "bert ", ""])
def test_unknown_model_type_lists_the_known_ones(model_type: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        find_recipe(model_type)
    message = str(caught.value)
    assert f"config.json: model_type = {model_type!r} is not supported" in message
    assert ", ".join(entry.recipe.label for entry in all_recipes()) in message
    assert "--recipe FILE" in message


def test_unknown_model_type_stops_a_conversion(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bert", BERT)
    edit_json(folder / "config.json", model_type="bert-twin")
    with pytest.raises(UnsupportedError, match="model_type = 'bert-twin' is not supported; toolkit has recipes for: "):
        convert(str(folder), tmp_path / "out", verify=False)


def test_recipe_file_of_the_users(tmp_path: Path) -> None:
    file = write(tmp_path, TWIN + 'RECIPE = replace(BERT, model_type="bert-twin")\n')
    folder = make_checkpoint(tmp_path / "bert", BERT)
    edit_json(folder / "config.json", model_type="bert-twin")
    manifest = convert(str(folder), tmp_path / "out", verify=False, recipe=file).manifest
    assert manifest.model_type == "bert-twin"
    assert manifest.recipe == {
        "model_type": "bert-twin",
        "origin": file,
        "sha256": hashlib.sha256(Path(file).read_bytes()).hexdigest(),
    }
    assert all(entry.recipe.model_type != "bert-twin" for entry in all_recipes())


def test_recipe_file_goes_before_the_built_in_one(tmp_path: Path) -> None:
    file = write(tmp_path, TWIN + 'RECIPE = replace(BERT, note="mine")\n')
    assert find_recipe("bert", file).recipe.note == "mine"
    assert find_recipe("bert").recipe.note == BERT.note


def test_recipe_file_with_several(tmp_path: Path) -> None:
    file = write(tmp_path, TWIN + 'RECIPES = tuple(replace(BERT, model_type=name) for name in ("one", "two"))\n')
    assert [find_recipe(name, file).recipe.model_type for name in ("one", "two")] == ["one", "two"]
    with pytest.raises(UnsupportedError, match=r"'bert' is not supported; \S*own\.py has recipes for: one, two"):
        find_recipe("bert", file)


# Several recipes for one model_type


PLAIN, ALIBI = "bert", "bert (position_embedding_type = 'alibi')"
BOTH = TWIN + "RECIPES = (BERT, replace(BERT, note='field', when={'x': 1}), "
BOTH += "replace(BERT, note='field and tensor', when={'x': 1}, having=('q.weight',)))\n"


def chosen(file: str, stored: tuple[str, ...] = (), **config: object) -> str:
    return find_recipe("bert", file, {"model_type": "bert", **config}, lambda: stored).recipe.note


def test_the_most_conditions_that_hold_win(tmp_path: Path) -> None:
    """I4: variants under one model_type, told by a field of config.json and by what is stored."""
    file = write(tmp_path, BOTH)
    assert chosen(file) == chosen(file, ("a.q.weight",)) == chosen(file, ("a.q.weight",), x=2) == BERT.note
    assert chosen(file, x=1) == chosen(file, ("a.q.bias", "q.weight.0"), x=1) == "field"
    assert chosen(file, ("other", "a.q.weight"), x=1) == "field and tensor"


def test_stored_names_are_read_only_if_they_matter(tmp_path: Path) -> None:
    """A config that is refused must not cost reading the weights."""

    def stored() -> tuple[str, ...]:
        raise AssertionError("asked for the stored names")

    file = write(tmp_path, BOTH)
    assert find_recipe("bert", file, {"x": 2}, stored).recipe.note == BERT.note
    with pytest.raises(AssertionError, match="stored names"):
        find_recipe("bert", file, {"x": 1}, stored)


def test_a_tie_of_conditions_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, TWIN + "RECIPES = tuple(replace(BERT, when={name: 1}) for name in 'xy')\n")
    with pytest.raises(UnsupportedError, match=r"several recipes answer.* bert \(x = 1\) and bert \(y = 1\)"):
        chosen(file, x=1, y=1)
    with pytest.raises(UnsupportedError, match=r"'bert' is not supported; \S*own\.py has recipes for: bert \(x = 1\)"):
        chosen(file)


def test_same_conditions_twice_are_refused(tmp_path: Path) -> None:
    twice = "RECIPES = tuple(replace(BERT, when={'x': 1}, note=note) for note in 'ab')\n"
    with pytest.raises(UnsupportedError, match=r"bert \(x = 1\).* is claimed twice by \S*own\.py"):
        chosen(write(tmp_path, TWIN + twice))


def test_built_in_variants_of_one_model_type() -> None:
    alibi = {"model_type": "bert", "position_embedding_type": "alibi"}
    assert find_recipe("bert").recipe.label == PLAIN
    assert find_recipe("bert", None, {"position_embedding_type": "absolute"}).recipe.label == PLAIN
    assert find_recipe("bert", None, alibi).recipe.label == ALIBI
    labels = [entry.recipe.label for entry in all_recipes()]
    assert len(set(labels)) == len(labels)


def test_recipe_file_may_define_classes(tmp_path: Path) -> None:
    """A dataclass with postponed annotations looks its module up in sys.modules."""
    own = "@dataclass\nclass Own:\n    x: int\n\n"
    file = write(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n" + TWIN + own + "RECIPE = BERT\n",
    )
    assert find_recipe("bert", file).recipe == BERT


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"own\.py: .* defines no RECIPE"),
        ("RECIPE = None\n", r"own\.py: .* defines no RECIPE"),
        ("RECIPE = {'model_type': 'bert'}\n", r"own\.py: .* defines no RECIPE"),
        ("RECIPES = ()\n", r"own\.py: .* defines no RECIPE"),
        ("RECIPES = 3\n", r"own\.py: .* defines no RECIPE"),
        (TWIN + "RECIPES = (BERT, 'bert')\n", r"own\.py: .* defines no RECIPE"),
        (TWIN + "RECIPES = (BERT, replace(BERT, note='again'))\n", r"model_type 'bert' is claimed .*own\.py"),
        ("RECIPE = (\n", r"own\.py"),
        ("import no_such_package_here\n", r"own\.py.*no_such_package_here"),
        ("1 / 0\n", r"own\.py.*division by zero"),
    ],
)
def test_recipe_file_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message) as caught:
        find_recipe("bert", write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_recipe_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"--recipe \S*nowhere\.py: no such file"):
        find_recipe("bert", str(tmp_path / "nowhere.py"))
    with pytest.raises(UnsupportedError, match=r"--recipe \S+: no such file"):
        find_recipe("bert", str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"--recipe \S*own\.txt: not a Python file"):
        find_recipe("bert", write(tmp_path, TWIN + "RECIPE = BERT\n", "own.txt"))


@dataclass(frozen=True)
class FakeDistribution:
    name: str


@dataclass(frozen=True)
class FakeEntryPoint:
    dist: FakeDistribution
    recipe: Recipe
    value: str = "other.recipes"

    def load(self) -> types.ModuleType:
        module = types.ModuleType("other.recipes")
        module.__file__ = __file__
        module.__dict__["RECIPE"] = self.recipe
        return module


@dataclass(frozen=True)
class BrokenEntryPoint(FakeEntryPoint):
    def load(self) -> types.ModuleType:
        raise ImportError("no module named gone")


def install(monkeypatch: pytest.MonkeyPatch, *points: FakeEntryPoint) -> None:
    def entry_points(*, group: str) -> list[FakeEntryPoint]:
        return list(points) if group == "toolkit.recipes" else []

    monkeypatch.setattr(toolkit.registry, "entry_points", entry_points)


def test_recipe_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeEntryPoint(FakeDistribution("theirs"), replace(BERT, model_type="a-bert")))
    assert find_recipe("a-bert").origin == "package theirs"
    assert find_recipe("bert").origin == "built in"
    names = [entry.recipe.model_type for entry in all_recipes()]
    assert names == sorted(names)


@pytest.mark.parametrize("model_type", ["bert", "their-bert"])
def test_model_type_that_two_claim(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which recipe converts a checkpoint must not depend on the order of installed packages."""
    recipe = replace(BERT, model_type=model_type)
    install(monkeypatch, *(FakeEntryPoint(FakeDistribution(name), recipe) for name in ("theirs", "others")))
    first = "built in" if model_type == "bert" else "package theirs"
    second = "package theirs" if model_type == "bert" else "package others"
    with pytest.raises(UnsupportedError, match=f"model_type '{model_type}' is claimed by {first} and {second}"):
        all_recipes()


def test_installed_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, BrokenEntryPoint(FakeDistribution("theirs"), BERT))
    with pytest.raises(UnsupportedError, match=r"package theirs.*no module named gone"):
        all_recipes()

"""The command line: what is printed where, and the exit statuses."""

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

import toolkit
from tests.tiny import edit_json, make_checkpoint, write_json
from toolkit.cli import app, main
from toolkit.registry import find_recipe

ROOT = Path(__file__).parents[1]
WEIGHTS = "model.safetensors"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
TEXTS = ["the fox", "query doc", "", "a lazy dog"]
EAGER = ("--device", "cpu", "--mode", "eager")


@dataclass(frozen=True)
class Result:
    status: int | str | None
    out: str
    err: str


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: several threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process, as the `toolkit` script does."""

    def call(*words: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["toolkit", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        return Result(caught.value.code, printed.out, printed.err)

    return call


@pytest.fixture
def checkpoint(bert_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bert_checkpoint, tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def expected(bert_artifact: Path) -> torch.Tensor:
    return toolkit.load(bert_artifact, device="cpu", mode="eager").embed(TEXTS)


def assert_close(found: object, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, rtol=0, atol=1e-6)


def assert_one_error_line(result: Result, *words: str) -> None:
    *stages, last = result.err.splitlines()
    assert (result.status, result.out) == (2, ""), result.err
    assert last.startswith("error ")
    assert all(word in last for word in words), last
    assert all(line.startswith("· ") for line in stages), result.err


@pytest.mark.parametrize("words", [["--help"], ["convert", "-h"], ["--version"]])
def test_help_is_quick_and_imports_no_framework(words: list[str]) -> None:
    script = (
        "import sys, toolkit.cli\n"
        "sys.argv = ['toolkit', *sys.argv[1:]]\n"
        "try: toolkit.cli.main()\n"
        "finally: print(sorted({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)), file=sys.stderr)"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert time.monotonic() - begin < 3


def test_version(run: Callable[..., Result]) -> None:
    assert run("--version") == Result(0, f"{toolkit.__version__}\n", "")


def test_help_lists_every_command_and_the_exit_statuses(run: Callable[..., Result]) -> None:
    result = run("--help")
    assert result.status == 0
    assert set(COMMANDS) >= {"convert", "verify", "embed", "bench", "recipes", "doctor"}
    assert all(name in result.out for name in COMMANDS)
    assert "0 done, 1 parity failed, 2 unsupported" in result.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_json(run: Callable[..., Result], name: str) -> None:
    result = run(name, "--help")
    assert (result.status, result.err) == (0, "")
    assert "--json" in result.out
    assert COMMANDS[name].help
    assert all(parameter.help for parameter in COMMANDS[name].params)


def test_recipes(run: Callable[..., Result]) -> None:
    entries = json.loads(run("recipes", "--json").out)
    bert = next(entry for entry in entries if entry["model_type"] == "bert")
    tasks = ["embed", "multi-vector", "rerank", "classify", "token-classify", "sparse"]
    assert (bert["tasks"], bert["origin"]) == (tasks, "built in")
    assert bert["attention"] == ["absolute positions", "full"]
    assert len(entries) >= 19
    assert bert["sha256"] == find_recipe("bert").digest
    assert "BertModel" in bert["classes"]
    for word in ("modernbert", "windows", "DebertaV2ForSequenceClassification", "remote code only"):
        assert word in run("recipes").out


def test_doctor(run: Callable[..., Result]) -> None:
    from toolkit.doctor import diagnose

    assert json.loads(run("doctor", "--json").out) == json.loads(json.dumps(diagnose().to_dict()))
    table = run("doctor")
    assert table.status == 0
    assert f"toolkit.load on cpu: mode {diagnose().modes['cpu']}" in table.out


def test_convert(run: Callable[..., Result], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("convert", checkpoint, "--no-verify", "--json")
    report = json.loads(result.out)
    assert (result.status, report["out"], report["parity"]) == (0, "checkpoint-toolkit", None)
    assert report["manifest"] == json.loads((tmp_path / "checkpoint-toolkit" / "toolkit.json").read_text())
    assert all(line.startswith("· ") for line in result.err.splitlines())
    plain = run("convert", checkpoint, "out", "--no-verify", "--dtype", "bfloat16", "--task", "embed")
    assert plain.status == 0
    assert "out  bert · embed · bfloat16 · " in plain.out
    again = run("convert", checkpoint, "out", "--no-verify")
    assert_one_error_line(again, "out exists", "--force")
    assert run("convert", checkpoint, "out", "--no-verify", "--force").status == 0


def test_convert_verifies_and_prints_warnings(
    run: Callable[..., Result], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: the warnings of a conversion are shown; parity runs unless it is switched off."""
    write_json(checkpoint / "sentence_bert_config.json", {"max_seq_length": 1000})
    monkeypatch.setattr("toolkit.parity.harness.MODES", ("eager",))
    result = run("convert", checkpoint, tmp_path / "out", "--device", "cpu")
    assert result.status == 0
    assert "warning the checkpoint asks for texts of 1000 tokens" in " ".join(result.err.split())
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["passed"] is True
    assert (tmp_path / "out" / "parity.html").is_file()


def test_verify_says_1_when_a_weight_was_changed(
    run: Callable[..., Result], bert_checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    toolkit.convert(str(bert_checkpoint), out, verify=False)
    good = run("verify", out, *EAGER, "--json")
    assert (good.status, json.loads(good.out)["passed"]) == (0, True)
    weights = load_file(out / WEIGHTS)
    name = "blocks.1.mlp.down.weight"
    save_file({**weights, name: weights[name] * 1.01}, out / WEIGHTS)
    bad = run("verify", out, *EAGER, "--json")
    assert (bad.status, json.loads(bad.out)["passed"]) == (1, False)
    table = run("verify", out, *EAGER, "--source", bert_checkpoint)
    assert table.status == 1
    assert "Traceback" not in table.err


def test_verify_without_its_source(run: Callable[..., Result], checkpoint: Path, tmp_path: Path) -> None:
    toolkit.convert(str(checkpoint), tmp_path / "out", verify=False)
    edit_json(checkpoint / "config.json", hidden_dropout_prob=0.2)
    assert_one_error_line(run("verify", tmp_path / "out", *EAGER), "is not what the artifact was converted from")
    shutil.rmtree(checkpoint)
    assert_one_error_line(run("verify", tmp_path / "out", *EAGER), "--source")


@pytest.mark.parametrize("place", ["file", "-", None])
def test_embed(
    run: Callable[..., Result], bert_artifact: Path, tmp_path: Path, expected: torch.Tensor, place: str | None
) -> None:
    lines = "".join(f"{text}\n" for text in TEXTS)
    (tmp_path / "texts").write_text(lines, encoding="utf-8")
    words = [] if place is None else [tmp_path / "texts"] if place == "file" else ["-"]
    result = run("embed", bert_artifact, *words, *EAGER, stdin="" if place == "file" else lines)
    assert result.status == 0
    assert_close([json.loads(line) for line in result.out.splitlines()], expected)
    document = json.loads(run("embed", bert_artifact, *words, *EAGER, "--json", stdin=lines).out)
    assert document["texts"] == TEXTS
    assert_close(document["vectors"], expected)


def test_embed_options(run: Callable[..., Result], tmp_path: Path) -> None:
    """E3, E6."""
    prompts = {"prompts": {"q": "query doc "}, "default_prompt_name": "q"}
    folder = make_checkpoint(tmp_path / "c", find_recipe("bert").recipe, prompts=prompts)
    toolkit.convert(str(folder), tmp_path / "out", verify=False)
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="eager")

    def vectors(*words: object) -> object:
        return json.loads(run("embed", tmp_path / "out", *EAGER, "--json", *words, stdin="the fox\n").out)["vectors"]

    assert_close(vectors(), runner.embed(["query doc the fox"], prompt=""))
    assert_close(vectors("--prompt-name", "q"), runner.embed(["query doc the fox"], prompt=""))
    assert_close(vectors("--prompt", ""), runner.embed(["the fox"], prompt=""))
    assert_close(vectors("--prompt", "jumps "), runner.embed(["jumps the fox"], prompt=""))
    assert_close(vectors("--truncate-dim", 8), runner.embed(["the fox"])[:, :8])
    cut = runner.embed(["the fox"], truncate_dim=8, normalize=True)
    assert_close(vectors("--truncate-dim", 8, "--normalize"), cut)
    assert run("convert", folder, tmp_path / "scaled", "--normalize", "--no-verify").status == 0
    options = ["--truncate-dim", 8, "--json"]
    scaled = run("embed", tmp_path / "scaled", *EAGER, *options, "--prompt", "", stdin="the fox\n").out
    assert_close(json.loads(scaled)["vectors"], runner.embed(["the fox"], "q", "", 8, True))
    plain = run("embed", tmp_path / "scaled", *EAGER, *options, "--no-normalize", stdin="the fox\n").out
    assert_close(json.loads(plain)["vectors"], runner.embed(["the fox"], truncate_dim=8))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either a converted folder or --suite"),
        (["OUT", "--suite", "encoders"], "either a converted folder or --suite"),
        (["OUT", "--model", "BERT-base"], "--model and --dtype are for --suite"),
        (["OUT", "--dtype", "float32"], "--model and --dtype are for --suite"),
        (["--suite", "encoders", "--packed-tokens", "64"], "--source and --packed-tokens are for a converted folder"),
        (["--suite", "decoders"], "no suite named 'decoders'"),
        (["--suite", "encoders", "--save", "nowhere/at/all.json"], "there is no folder nowhere/at"),
        (["--suite", "encoders", "--model", "GPT"], "no model 'GPT'"),
    ],
)
def test_bench_measures_a_folder_or_a_suite(
    run: Callable[..., Result], bert_artifact: Path, words: list[str], message: str
) -> None:
    result = run("bench", *(str(bert_artifact) if word == "OUT" else word for word in words))
    assert result.status == 2
    assert message in result.err


def test_similarity(run: Callable[..., Result], bert_artifact: Path, expected: torch.Tensor) -> None:
    lines = "\n".join(TEXTS)
    document = json.loads(run("embed", bert_artifact, *EAGER, "--similarity", "--json", stdin=lines).out)
    unit = normalize(expected)
    assert_close(document["similarity"], unit @ unit.T)
    table = run("embed", bert_artifact, *EAGER, "--similarity", stdin=lines)
    assert table.status == 0
    assert all(f"{value:.3f}" in table.out for value in (unit @ unit.T).flatten().tolist())
    assert "3 a lazy dog" in table.out


@pytest.mark.parametrize("stdin", ["", "\n", "a", "a\n", "a\n\n", "a\r\nb\r\n", "a\u2028b\x0c c\x85d\n"])
def test_one_text_a_line(run: Callable[..., Result], bert_artifact: Path, tmp_path: Path, stdin: str) -> None:
    """F4: only line ends separate texts, whatever Unicode calls a line."""
    (tmp_path / "texts").write_text(stdin, encoding="utf-8", newline="")
    wanted = stdin.replace("\r\n", "\n").removesuffix("\n").split("\n") if stdin else []
    result = run("embed", bert_artifact, tmp_path / "texts", *EAGER, "--json")
    assert json.loads(result.out)["texts"] == wanted
    assert len(json.loads(result.out)["vectors"]) == len(wanted)


def test_long_names_do_not_break_lines(run: Callable[..., Result], checkpoint: Path, tmp_path: Path) -> None:
    """One stage, warning or result is one line, also in a pipe."""
    edit_json(checkpoint / "config.json", **{"field " * 30: 1})
    out = tmp_path / ("out " * 30)
    result = run("convert", checkpoint, out, "--no-verify")
    assert result.out.startswith(f"{out}  bert")
    assert len(result.out.splitlines()) == 1
    assert all(line.startswith(("· ", "warning ")) for line in result.err.splitlines()), result.err
    result = run("embed", out, *EAGER, "--prompt-name", "Q " * 60, stdin="a\n")
    assert_one_error_line(result, "Q Q Q")


def test_brackets_are_no_markup(
    run: Callable[..., Result], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: names and texts from the user or the checkpoint are printed as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    edit_json(checkpoint / "config.json", **{"[/bold]field": 1})
    out = Path("x[") / "red]out"
    out.parent.mkdir()
    result = run("convert", checkpoint, out, "--no-verify")
    assert result.status == 0
    assert str(out) in result.out
    assert "'[/bold]field'" in result.err
    table = run("embed", out, *EAGER, "--similarity", stdin="a [/b] fox\n[red]dog\n")
    assert table.status == 0
    assert f"loading {out}" in table.err
    assert "a [/b] fox" in table.out
    assert "[red]dog" in table.out


def test_brackets_in_an_error_are_no_markup(run: Callable[..., Result], bert_artifact: Path) -> None:
    for text in ("[/b]nowhere", "[red]nowhere"):
        result = run("embed", bert_artifact, "--prompt-name", text, *EAGER, stdin="a")
        assert_one_error_line(result, f"prompt named '{text}'")


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def _pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"weight": Payload(folder / "marker")}, protocol=2))


def _escaping_shard(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / WEIGHTS)
    write_json(folder / f"{WEIGHTS}.index.json", {"weight_map": {"a": f"../{WEIGHTS}"}})


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"

CHECKPOINT_ERRORS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "architecture": (lambda f: edit_json(f / "config.json", model_type="nosuch"), ("model_type", "nosuch", "bert")),
    "no model_type": (lambda f: edit_json(f / "config.json", model_type=...), ("model_type",)),
    "field": (
        lambda f: edit_json(f / "config.json", position_embedding_type="relative_key"),
        ("position_emb", "relative_key"),
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json is missing",)),
    "config cut": (lambda f: os.truncate(f / "config.json", 30), ("config.json", "JSON")),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ("no weights", WEIGHTS)),
    "lfs pointer": (lambda f: (f / WEIGHTS).write_text(LFS), (WEIGHTS, "Git-LFS pointer", "git lfs pull")),
    "weights cut": (lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 16), (WEIGHTS,)),
    "weights empty": (lambda f: os.truncate(f / WEIGHTS, 0), (WEIGHTS, "too short")),
    "shard outside": (_escaping_shard, (f"../{WEIGHTS}", "leaves the checkpoint folder")),
    "pickle payload": (_pickled, ("pytorch_model.bin", "weights-only")),
    "module type": (
        lambda f: write_json(f / "modules.json", [{"idx": 0, "path": "", "type": "os.system"}]),
        ("modules.json", "'os.system'"),
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINT_ERRORS)
def test_bad_checkpoints_are_one_line_and_status_2(
    run: Callable[..., Result], checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    """O2, O3: named, with nothing written and nothing executed."""
    damage, words = CHECKPOINT_ERRORS[kind]
    damage(checkpoint)
    before = sorted(tmp_path.rglob("*"))
    result = run("convert", checkpoint, tmp_path / "out", "--no-verify", "--json")
    assert_one_error_line(result, *words)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dtype", "int4"], ["dtype 'int4'", "float32"]),
        (["--dtype", "float64"], ["dtype 'float64'"]),
        (["--task", "nonsense"], ["task 'nonsense'", "embed"]),
        (["--task", "rerank"], ["task 'rerank'", "no head"]),
        (["--task", "multi-vector"], ["no Dense module", "random weights"]),
        (["--task", "generate"], ["task 'generate'", "not supported"]),
        (["--device", "abacus"], ["device 'abacus'"]),
        (["--device", "meta"], ["device 'meta'"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--revision", "main"], ["--revision", "local folder"]),
        (["--recipe", "nowhere.py"], ["--recipe nowhere.py", "no such file"]),
    ],
)
def test_bad_options_of_convert(
    run: Callable[..., Result], bert_checkpoint: Path, tmp_path: Path, words: list[str], named: list[str]
) -> None:
    assert_one_error_line(run("convert", bert_checkpoint, tmp_path / "out", *words), *named)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "package:no_such_package_at_all", "a b", ""])
def test_models_that_are_not_there(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_error_line(run("convert", model, "out"), model.removeprefix("package:"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere.txt"], ["cannot read nowhere.txt"]),
        (["."], ["cannot read ."]),
        (["latin1.txt"], ["cannot read latin1.txt"]),
        (["--mode", "fast"], ["mode 'fast'", "eager, compile, graph"]),
        (["--device", "abacus"], ["device 'abacus'"]),
        (["--device", "cuda:99"], ["cuda:99"]),
        (["--prompt-name", "Q"], ["prompt named 'Q'"]),
        (["--truncate-dim", "0"], ["truncate_dim = 0", "1 … 40"]),
        (["--truncate-dim", "41"], ["truncate_dim = 41"]),
    ],
)
def test_bad_options_of_embed(
    run: Callable[..., Result],
    bert_artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    named: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    defaults = [] if "--mode" in words or "--device" in words else EAGER
    assert_one_error_line(run("embed", bert_artifact, *words, *defaults, stdin="a\n"), *named)


@pytest.mark.parametrize("words", [["embed"], ["verify"]])
def test_folders_that_are_no_artifacts(run: Callable[..., Result], tmp_path: Path, words: list[str]) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert_one_error_line(run(*words, folder, *EAGER), "toolkit.json is missing")


def test_bad_mode_of_verify(run: Callable[..., Result], bert_artifact: Path) -> None:
    assert_one_error_line(run("verify", bert_artifact, "--mode", "fast"), "mode 'fast'")


@pytest.mark.parametrize("words", [["embed"], ["convert"], ["nonsense"], ["embed", ".", "--truncate-dim", "x"]])
def test_usage_errors(run: Callable[..., Result], words: list[str]) -> None:
    result = run(*words)
    assert (result.status, result.out) == (2, "")
    assert "Traceback" not in result.err


def test_a_process_exits_with_the_status(checkpoint: Path, tmp_path: Path) -> None:
    """The same through `python -m toolkit`: no traceback, nothing on standard output."""
    edit_json(checkpoint / "config.json", model_type="nosuch")
    command = [sys.executable, "-m", "toolkit", "convert", str(checkpoint), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert_one_error_line(Result(done.returncode, done.stdout, done.stderr), "nosuch")
    assert not (tmp_path / "out").exists()

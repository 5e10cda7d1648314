"""The sentence-transformers pipeline around the model: modules, pooling, prompts, truncation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)
from torch import nn

import toolkit
from tests.converted import load, reference
from tests.test_sparse import make_mlm
from tests.tiny import edit_json, make_checkpoint, make_tokenizer, write_json
from toolkit.checkpoint import open_checkpoint
from toolkit.errors import CheckpointError, InputError, UnsupportedError
from toolkit.pipeline import ReadPipeline, read_pipeline
from toolkit.registry import find_recipe
from toolkit.runner import Runner
from toolkit.steps import NormalizeStep, PoolingStep

HIDDEN = 40
MODES: list[Any] = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
TEXTS = ["the fox", "query doc text one two three", "a"]
PROMPTS = {"prompts": {"q": "query doc ", "d": "text one "}, "default_prompt_name": "q"}


def read(folder: Path) -> ReadPipeline:
    return read_pipeline(open_checkpoint(str(folder)), HIDDEN)


def encode(model: SentenceTransformer, texts: list[str], **options: Any) -> torch.Tensor:
    return torch.as_tensor(model.encode(texts, convert_to_tensor=True, **options))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["legacy", "new"])
def test_both_forms_of_modules_and_pooling_equal_sentence_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path, form: str, mode: Any, normalize: bool
) -> None:
    """D4, E3: legacy booleans and class names, and what sentence-transformers 6 writes itself."""
    folder = checkpoint(pooling=mode, normalize=normalize)
    if form == "new":
        modules = [Transformer(str(folder)), Pooling(HIDDEN, mode), *([Normalize()] if normalize else [])]
        folder = tmp_path / "saved"
        SentenceTransformer(modules=modules, device="cpu").save(str(folder))
        types = [module["type"] for module in json.loads((folder / "modules.json").read_text())]
        assert types[0].startswith("sentence_transformers.base.modules.")
        assert json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode"] == mode
    steps = [PoolingStep(modes=(mode,)), *([NormalizeStep(on="vectors")] if normalize else [])]
    found = read(folder)
    assert (list(found.head.steps), found.warnings) == (steps, [])
    assert_close(load(folder).embed(TEXTS), encode(reference(folder), TEXTS))


def test_without_modules_mean_pooling_is_assumed_aloud(checkpoint: Callable[..., Path]) -> None:
    """D4: no modules.json is mean pooling without normalisation, with a warning."""
    folder = checkpoint(pooling=None)
    runner = load(folder)
    assert any("no modules.json: mean pooling" in warning for warning in runner.artifact.manifest.warnings)
    assert_close(runner.embed(TEXTS), encode(reference(folder), TEXTS))


def test_without_modules_prompts_are_those_of_sentence_transformers(checkpoint: Callable[..., Path]) -> None:
    """E6, D4: sentence-transformers reads config_sentence_transformers.json only beside a modules.json."""
    folder = checkpoint(pooling=None, prompts=PROMPTS)
    assert_close(load(folder).embed(TEXTS), encode(reference(folder), TEXTS))


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode": []},
        {"pooling_mode": None},
        {"pooling_mode": "median"},
        {"pooling_mode": ["mean", "median"]},
        {"pooling_mode": "pooling_mode_mean_tokens"},
        {"pooling_mode": "mean", "pooling_mode_dream": True},
        {"pooling_mode": "mean", "temperature": 2},
    ],
)
def test_pooling_that_is_not_served_is_refused(checkpoint: Callable[..., Path], config: dict[str, Any]) -> None:
    """D4: an unknown mode or field is an error, never mean pooling."""
    folder = checkpoint()
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **config})
    with pytest.raises(UnsupportedError, match=r"1_Pooling/config\.json"):
        read(folder)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode": "cls", "pooling_mode_mean_tokens": True}, "cls"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True, "include_prompt": True}, "cls"),
    ],
)
def test_odd_but_valid_pooling_is_read_as_sentence_transformers_does(
    checkpoint: Callable[..., Path], config: dict[str, Any], mode: str
) -> None:
    """D4: no mode set is mean; the new field beats the old booleans."""
    folder = checkpoint()
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **config})
    module = reference(folder)[1]
    assert isinstance(module, Pooling)
    assert read(folder).head.steps[0] == PoolingStep(modes=(mode,))
    assert module.pooling_mode == mode


@pytest.mark.parametrize("width", [HIDDEN - 1, HIDDEN + 1, None, str(HIDDEN)])
def test_pooling_width_must_be_the_models(checkpoint: Callable[..., Path], width: object) -> None:
    folder = checkpoint()
    edit_json(folder / "1_Pooling" / "config.json", word_embedding_dimension=width)
    with pytest.raises(CheckpointError, match=f"{width} wide.*{HIDDEN} wide"):
        read(folder)


def test_normalize_options_that_change_the_numbers_are_refused(checkpoint: Callable[..., Path]) -> None:
    """E3: sentence-transformers 6 lets the Normalize module read and write other features."""
    folder = checkpoint()
    write_json(folder / "2_Normalize" / "config.json", {"module_input_name": "token_embeddings"})
    with pytest.raises(UnsupportedError, match="module_input_name"):
        read(folder)


@pytest.mark.parametrize(
    "type_name",
    [
        "sentence_transformers.models.CNN",
        "sentence_transformers.models.StaticEmbedding",
        "evil.Thing",
        "evil.Pooling",
        "os.system",
        "sentence_transformers.models.Pooling\n",
        "sentence_transformers_evil.Pooling",
        "evil.sentence_transformers.models.Pooling",
        "Pooling",
        "",
    ],
)
def test_other_module_types_are_refused_by_name_and_never_imported(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type_name: str
) -> None:
    """O2: class names are compared with a list; evil.py in the folder never runs."""
    folder, marker = checkpoint(), tmp_path / "marker"
    for place in (folder, folder / "1_Pooling"):
        (place / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(folder))
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = type_name
    write_json(folder / "modules.json", modules)
    with pytest.raises(UnsupportedError) as caught:
        toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert repr(type_name) in str(caught.value)
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("local", [True, False])
def test_auto_map_is_never_followed(checkpoint: Callable[..., Path], tmp_path: Path, file: str, local: bool) -> None:
    """O2: code that config.json or tokenizer_config.json names is not executed, from a local folder neither."""
    folder, marker = checkpoint(), tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Thing: pass\n")
    thing = "evil.Thing" if local else "someone/else--evil.Thing"
    auto_map = {
        "config.json": {"AutoConfig": thing, "AutoModel": thing},
        "tokenizer_config.json": {"AutoTokenizer": [thing, thing]},
    }
    edit_json(folder / file, auto_map=auto_map[file])
    stages: list[str] = []
    if file == "config.json":
        toolkit.convert(str(folder), tmp_path / "out", verify=False, on_stage=stages.append)
        assert any("auto_map" in stage and "not executed" in stage for stage in stages)
    else:
        with pytest.raises(UnsupportedError, match=r"tokenizer_config\.json: auto_map"):
            toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[:1],
        lambda m: [m[0], m[2], m[1]],
        lambda m: [m[1], m[0], m[2]],
        lambda m: [m[0], m[1], m[1]],
        lambda m: [{**m[0], "path": "0_Transformer"}, *m[1:]],
    ],
)
def test_other_sequences_of_modules_are_refused(
    checkpoint: Callable[..., Path], change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    folder = checkpoint()
    modules = change(json.loads((folder / "modules.json").read_text()))
    write_json(folder / "modules.json", [{**module, "idx": k} for k, module in enumerate(modules)])
    with pytest.raises(UnsupportedError, match=r"modules\.json|a module before the pooling|a second Pooling"):
        read(folder)


def test_the_order_of_the_list_and_idx_must_agree(checkpoint: Callable[..., Path]) -> None:
    """sentence-transformers goes by the list; a file that says otherwise is not guessed at."""
    folder = checkpoint()
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [modules[0], {**modules[1], "idx": 2}, {**modules[2], "idx": 1}])
    with pytest.raises(CheckpointError, match="idx does not count up"):
        read(folder)


def saved(folder: Path, out: Path, *modules: Any) -> Path:
    """What sentence-transformers writes for the checkpoint's model with other modules behind it."""
    torch.manual_seed(1)
    SentenceTransformer(modules=[Transformer(str(folder)), *modules], device="cpu").save(str(out))
    return out


PIPELINES: dict[str, Callable[[], list[Any]]] = {
    "dense": lambda: [Pooling(HIDDEN, "mean"), Dense(HIDDEN, 48)],
    "dense, normalised": lambda: [Pooling(HIDDEN, "mean"), Dense(HIDDEN, 48, bias=False), Normalize()],
    "two dense": lambda: [
        Pooling(HIDDEN, "cls"),
        Dense(HIDDEN, 64, bias=False, activation_function=nn.Identity()),
        Dense(64, HIDDEN, bias=False, activation_function=nn.Identity()),
        Normalize(),
    ],
    "residual": lambda: [Pooling(HIDDEN, "mean"), Dense(HIDDEN, HIDDEN, use_residual=True)],
    "projected residual": lambda: [Pooling(HIDDEN, "mean"), Dense(HIDDEN, 12, use_residual=True)],
    "activations": lambda: [
        Pooling(HIDDEN, "mean"),
        *(Dense(HIDDEN, HIDDEN, activation_function=f()) for f in (nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid)),
    ],
    "layer norm": lambda: [Pooling(HIDDEN, "max"), LayerNorm(HIDDEN), Dropout(0.3), Normalize()],
    "all poolings": lambda: [Pooling(HIDDEN, tuple(MODES)), Dense(6 * HIDDEN, 20)],
    "normalised first": lambda: [Pooling(HIDDEN, "mean"), Normalize(), Dense(HIDDEN, 16)],
}


@pytest.mark.parametrize("name", PIPELINES)
def test_saved_pipelines_equal_sentence_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """D4, E1, E3: written by the library itself, converted from disk; its own biases and norms are made random."""
    folder = saved(checkpoint(pooling=None), tmp_path / "saved", *PIPELINES[name]())
    for file in folder.glob("*/model.safetensors"):
        weights = load_file(file)
        save_file({n: torch.randn(w.shape) * 0.3 for n, w in weights.items()}, file, {"format": "pt"})
    model = reference(folder)
    runner = load(folder)
    ours = runner.embed(TEXTS)
    assert_close(ours, encode(model, TEXTS))
    assert ours.shape[1] == model.get_embedding_dimension() == runner.artifact.manifest.head.width
    assert_close(runner.embed(TEXTS, truncate_dim=7), encode(model, TEXTS, truncate_dim=7))


def test_a_saved_pipeline_passes_the_gate(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """E1: weights of modules are part of the source: audited, digested, verified."""
    folder = saved(checkpoint(pooling=None), tmp_path / "saved", *PIPELINES["dense, normalised"]())
    report = toolkit.convert(str(folder), tmp_path / "out", device="cpu")
    assert report.parity.passed
    assert "2_Dense/linear.weight" in {entry["source"] for entry in report.manifest.audit}
    assert set(report.manifest.source["sha256"]) == {"config.json", "model.safetensors", "2_Dense/model.safetensors"}
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    save_file({n: w + 1 for n, w in weights.items()}, folder / "2_Dense" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="other digests"):
        toolkit.verify(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_features": 41}, "in_features = 41, but 40 values come in"),
        ({"out_features": 0}, "out_features = 0"),
        ({"out_features": 47}, "has shape"),
        ({"bias": "yes"}, "bias = 'yes'"),
        ({"bias": False}, "unexpected tensor: 'linear.bias'"),
        ({"activation_function": "builtins.eval"}, "activation_function = 'builtins.eval' is not supported"),
        ({"activation_function": "torch.nn.functional.tanh"}, "is not supported"),
        ({"module_input_name": "token_embeddings"}, "module_input_name = 'token_embeddings'"),
        ({"surprise": 1}, "unknown field 'surprise'"),
        ({"use_residual": True}, "missing tensor: 'residual.weight'"),
    ],
)
def test_dense_modules_that_are_not_served(
    checkpoint: Callable[..., Path], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """E1, H2, O2: contradictions and foreign names are errors; nothing is skipped or imported."""
    folder = saved(checkpoint(pooling=None), tmp_path / "saved", *PIPELINES["dense"]())
    edit_json(folder / "2_Dense" / "config.json", **change)
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert message in str(caught.value)


@pytest.mark.parametrize("mode", [*MODES, ("cls", "weightedmean")])
@pytest.mark.parametrize("special_tokens", [True, False])
def test_a_prompt_that_is_left_out_of_the_pooling(
    checkpoint: Callable[..., Path], tmp_path: Path, mode: Any, special_tokens: bool
) -> None:
    """E6: include_prompt = false, with and without special tokens around the prompt, default and given prompts."""
    plain = checkpoint(pooling=None, tokenizer=make_tokenizer(special_tokens=special_tokens))
    folder = saved(plain, tmp_path / "saved", Pooling(HIDDEN, mode, include_prompt=False))
    write_json(folder / "config_sentence_transformers.json", PROMPTS)
    runner, model = load(folder), reference(folder)
    options: dict[str, Any]
    for options in ({}, {"prompt": "jumps over "}, {"prompt": ""}, {"prompt_name": "d"}):
        assert_close(runner.embed(TEXTS, **options), encode(model, TEXTS, **options))
    moved = runner.embed(TEXTS) - load(saved(plain, tmp_path / "included", Pooling(HIDDEN, mode))).embed(
        TEXTS, prompt="query doc "
    )
    assert moved.abs().max() > 0.01 or mode == "lasttoken"


@pytest.mark.parametrize(
    "text",
    ["", "{}", "null", "[1]", "[[]]", '[{"idx": 0, "path": ""}]', "\x00", "[" * 100_000 + "]" * 100_000],
    ids=["empty", "object", "null", "numbers", "lists", "no type", "binary", "deep"],
)
def test_malformed_modules_file(checkpoint: Callable[..., Path], text: str) -> None:
    """O3: hostile JSON is one named error."""
    folder = checkpoint()
    (folder / "modules.json").write_text(text)
    with pytest.raises((CheckpointError, UnsupportedError), match=r"modules\.json"):
        read(folder)


@pytest.mark.parametrize("path", ["../outside", "/etc", "1_Pooling/../../outside"])
def test_module_folder_outside_of_the_checkpoint(checkpoint: Callable[..., Path], path: str) -> None:
    folder = checkpoint()
    write_json(folder.parent / "outside" / "config.json", {"word_embedding_dimension": HIDDEN})
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    write_json(folder / "modules.json", modules)
    with pytest.raises(CheckpointError, match="leaves the checkpoint folder"):
        read(folder)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"transformer_task": "fill-mask"}, "transformer_task"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name"),
        ({"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}, "modality_conf"),
        ({"processing_kwargs": {"text": {"max_length": 3}}}, "processing_kwargs"),
        ({"model_args": {"attn_implementation": "eager"}}, "model_args"),
        ({"surprise": 1}, "surprise"),
        ({"query_length": 0}, "query_length"),
    ],
)
def test_transformer_options_that_are_not_served(
    checkpoint: Callable[..., Path], options: dict[str, Any], field: str
) -> None:
    folder = checkpoint(sentence_config=options)
    with pytest.raises(UnsupportedError, match=f"sentence_bert_config.json: {field}"):
        read(folder)


@pytest.mark.parametrize("value", [0, -1, True, 6.0, "6", [6]])
def test_max_seq_length_must_be_a_positive_integer(checkpoint: Callable[..., Path], value: object) -> None:
    """E4."""
    with pytest.raises(CheckpointError, match="max_seq_length"):
        read(checkpoint(sentence_config={"max_seq_length": value}))


@pytest.fixture(scope="module", params=["q", None])
def prompted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Runner, SentenceTransformer]:
    prompts = {**PROMPTS, "default_prompt_name": request.param}
    folder = make_checkpoint(tmp_path_factory.mktemp("prompted") / "c", find_recipe("bert").recipe, prompts=prompts)
    return load(folder), reference(folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt_name": "q"},
        {"prompt_name": "d"},
        {"prompt_name": "query"},
        {"prompt": ""},
        {"prompt": "jumps over "},
        {"prompt": "", "prompt_name": "d"},
        {"prompt": "jumps over ", "prompt_name": "unknown"},
    ],
)
def test_prompts_equal_sentence_transformers(
    prompted: tuple[Runner, SentenceTransformer], options: dict[str, Any]
) -> None:
    """E6: default, named, given and switched-off prompts; they travel with the artifact."""
    runner, model = prompted
    assert_close(runner.embed(TEXTS, **options), encode(model, TEXTS, **options))


def test_the_default_prompt_is_put_in_front_once(checkpoint: Callable[..., Path]) -> None:
    """E6: default equals the hand-written prefix; an empty prompt moves the vector; ids take no prompt."""
    runner = load(checkpoint(prompts=PROMPTS))
    default = runner.embed(["the fox"])
    plain = runner.embed(["the fox"], prompt="")
    assert torch.equal(default, runner.embed(["query doc the fox"], prompt=""))
    assert (default - plain).abs().max() > 0.1
    row = runner.rows("the fox", "")[0]
    assert_close(runner.embed(toolkit.TokenIds(row.ids.tolist())), plain)


def test_unknown_prompt_names(checkpoint: Callable[..., Path]) -> None:
    """E6: an unknown name is an error, for the caller and for the checkpoint's own default."""
    folder = checkpoint(prompts=PROMPTS)
    with pytest.raises(InputError, match=r"'Q'.*q, d"):
        load(folder).embed(TEXTS, prompt_name="Q")
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name="Q")
    with pytest.raises(CheckpointError, match="default_prompt_name 'Q'"):
        read(folder)
    with pytest.raises(ValueError, match="Default prompt name 'Q'"):
        reference(folder)


@pytest.mark.parametrize("prompts", [["q"], "q", {"q": 1}, {"q": ["a"]}])
def test_malformed_prompts(checkpoint: Callable[..., Path], prompts: object) -> None:
    with pytest.raises(CheckpointError, match="prompts must map names to texts"):
        read(checkpoint(prompts={"prompts": prompts}))


@pytest.mark.parametrize("dim", [None, 1, 8, HIDDEN])
@pytest.mark.parametrize("normalize", [True, False])
def test_truncated_vectors_equal_sentence_transformers(
    checkpoint: Callable[..., Path], normalize: bool, dim: int | None
) -> None:
    """E3: the Normalize module comes first, the prefix is not normalised again."""
    folder = checkpoint(normalize=normalize)
    ours = load(folder).embed(TEXTS, truncate_dim=dim)
    assert_close(ours, encode(reference(folder), TEXTS, truncate_dim=dim))
    assert ours.shape == (len(TEXTS), dim or HIDDEN)
    if dim == 8:
        assert not torch.allclose(ours.norm(dim=1), torch.ones(len(TEXTS)), atol=0.01)


@pytest.mark.parametrize("mode", ["cls", "lasttoken"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_of_padding_does_not_matter(checkpoint: Callable[..., Path], mode: str, side: str) -> None:
    """D1: short and long texts in one call, each as the library makes it alone."""
    folder = checkpoint(pooling=mode)
    edit_json(folder / "tokenizer_config.json", padding_side=side)
    texts = ["the quick", "the quick brown fox jumps over the lazy dog"]
    model = reference(folder)
    assert_close(load(folder).embed(texts), torch.cat([encode(model, [text]) for text in texts]))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("words", [7, 8, 9, 48])
def test_truncation_spares_the_token_that_is_pooled(checkpoint: Callable[..., Path], side: str, words: int) -> None:
    """F2: a limit of 10, and the last token pooled: it is the one that the tokenizer puts behind the text."""
    folder = checkpoint(pooling="lasttoken", sentence_config={"max_seq_length": 10})
    edit_json(folder / "tokenizer_config.json", truncation_side=side)
    text = " ".join((["one", "two", "three"] * 16)[:words])
    runner = load(folder)
    (row,) = runner.rows([text], "")
    assert len(row) == min(words + 2, 10)
    assert row.ids.tolist()[-1] == 3
    assert_close(runner.embed([text]), encode(reference(folder), [text]))


@pytest.mark.parametrize("dim", [None, 8])
@pytest.mark.parametrize("module", [True, False])
def test_normalising_in_the_end_is_an_option_that_the_artifact_records(
    checkpoint: Callable[..., Path], module: bool, dim: int | None, tmp_path: Path
) -> None:
    """E3: as the library's `normalize_embeddings`, after truncation; a call may say otherwise."""
    folder = checkpoint(normalize=module)
    report = toolkit.convert(str(folder), tmp_path / "out", normalize=True)
    assert report.parity.passed
    assert json.loads((tmp_path / "out" / "toolkit.json").read_text())["pipeline"]["normalize"] is True
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    plain = encode(reference(folder), TEXTS, truncate_dim=dim)
    scaled = encode(reference(folder), TEXTS, truncate_dim=dim, normalize_embeddings=True)
    assert (plain - scaled).abs().max() > 0.01 or (module and dim is None)
    assert_close(runner.embed(TEXTS, truncate_dim=dim), scaled)
    assert_close(runner.embed(TEXTS, truncate_dim=dim, normalize=False), plain)
    assert_close(load(folder).embed(TEXTS, truncate_dim=dim, normalize=True), scaled)


def test_normalising_is_for_embeddings(tmp_path: Path) -> None:
    folder = make_mlm(tmp_path / "mlm")
    with pytest.raises(InputError, match="normalize is for task 'embed'; this one is 'sparse'"):
        toolkit.convert(str(folder), tmp_path / "out", "sparse", normalize=True)


def test_a_stored_truncation_is_the_default(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """E3: as the library, which saves it; a call may say otherwise."""
    folder = checkpoint(prompts={"truncate_dim": 8})
    assert toolkit.convert(str(folder), tmp_path / "out").parity.passed
    runner = toolkit.load(tmp_path / "out", device="cpu", mode="eager")
    assert_close(runner.embed(TEXTS), encode(reference(folder), TEXTS))
    assert runner.embed(TEXTS).shape == (len(TEXTS), 8)
    assert runner.embed(TEXTS, truncate_dim=HIDDEN).shape == (len(TEXTS), HIDDEN)
    for bad in (0, HIDDEN + 1, "8", True):
        edit_json(folder / "config_sentence_transformers.json", truncate_dim=bad)
        with pytest.raises(CheckpointError, match="truncate_dim = "):
            read(folder)


@pytest.mark.parametrize("dim", [0, -1, HIDDEN + 1, 2**40])
def test_truncate_dim_outside_of_the_vector(bert_artifact: Path, dim: int) -> None:
    """E3."""
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    with pytest.raises(InputError, match=f"truncate_dim = {dim}.*{HIDDEN}"):
        runner.embed(TEXTS, truncate_dim=dim)
    assert runner.embed([], truncate_dim=8).shape == (0, 8)


def test_zero_vectors_stay_finite_under_normalisation(checkpoint: Callable[..., Path]) -> None:
    """E3, F4: a text without tokens is a zero vector, not NaN."""
    folder = checkpoint(tokenizer=make_tokenizer(special_tokens=False), normalize=True)
    assert torch.equal(load(folder).embed(["", "the"])[0], torch.zeros(HIDDEN))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config_sentence_transformers.json", {"model_type": [1]}, "model_type = [1]"),
        ("config_sentence_transformers.json", {"default_prompt_name": [1]}, "default_prompt_name [1]"),
        ("config_sentence_transformers.json", {"similarity_fn_name": [1]}, "similarity_fn_name = [1]"),
        ("sentence_bert_config.json", {"do_lower_case": "false"}, "do_lower_case = 'false'"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": "false"}, "pooling_mode_cls_token = 'false'"),
    ],
)
def test_values_of_the_wrong_type(
    checkpoint: Callable[..., Path], tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    """O3: JSON of another type than expected is one named error, never taken for true."""
    folder = checkpoint(prompts={})
    edit_json(folder / file, **change)
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert message in str(caught.value)


@pytest.mark.parametrize("value", ["1", 1.9, True, float("inf"), None])
@pytest.mark.parametrize("key", ["idx", "path"])
def test_modules_of_the_wrong_type(checkpoint: Callable[..., Path], key: str, value: object) -> None:
    folder = checkpoint()
    modules = json.loads((folder / "modules.json").read_text())
    modules[1][key] = value if key == "idx" else (5 if value == "1" else value)
    write_json(folder / "modules.json", modules)
    with pytest.raises(CheckpointError, match="expected a list of objects"):
        read(folder)


@pytest.mark.parametrize("path", ["a\u0000b", "\ud800", "x" * 5000])
def test_module_folders_that_no_file_system_has(checkpoint: Callable[..., Path], path: str) -> None:
    folder = checkpoint()
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    write_json(folder / "modules.json", modules)
    with pytest.raises(CheckpointError, match=r"cannot be (resolved|read)"):
        read(folder)


def test_labels_play_no_part_in_embeddings(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint()
    edit_json(folder / "config.json", num_labels=3, id2label={"0": "a", "1": "b"})
    assert toolkit.convert(str(folder), tmp_path / "out", verify=False).manifest.scoring is None


def test_a_prompt_that_is_no_unicode(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved(checkpoint(pooling=None), tmp_path / "saved", Pooling(HIDDEN, "mean", include_prompt=False))
    with pytest.raises(InputError, match="not valid Unicode"):
        load(folder).embed(["a"], prompt="\ud800")

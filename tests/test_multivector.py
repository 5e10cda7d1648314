"""Late interaction: token vectors of queries and documents as `MultiVectorEncoder` makes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentence_transformers
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from sentence_transformers.util.similarity import maxsim as their_maxsim
from transformers import AutoTokenizer

import toolkit
from tests.test_cli import EAGER, Result, assert_one_error_line, run
from tests.tiny import edit_json, embedding_recipes, make_checkpoint, make_tokenizer, why_no_reference, write_json
from toolkit import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.artifact import MANIFEST, Artifact
from toolkit.errors import ArtifactError, CheckpointError, InputError, MissingDependencyError, UnsupportedError
from toolkit.multivector import KINDS, Expansion, Kind, MultiVector, Side, maxsim
from toolkit.parity import verify_folder
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe
from toolkit.runner import Runner

__all__ = ["run"]  # a fixture

BERT = find_recipe("bert").recipe
MODERNBERT = find_recipe("modernbert").recipe
RECIPES = [recipe for recipe in embedding_recipes() if why_no_reference(recipe) is None]
TEXTS = ["the quick brown fox jumps over the lazy dog a b c d e f", "", "a", "the fox . query", "one two three"]
FIXED = {"strategy": "fixed", "attend": True, "length": 7}
MIN = {"strategy": "min", "attend": True, "length": 7}
UNSEEN = {"attend": False}


def base(folder: Path, recipe: Recipe = BERT, **options: Any) -> Path:
    """A heated checkpoint of the base model."""
    segments = int(recipe.tiny.get("type_vocab_size", 0)) > 1
    return make_checkpoint(folder, recipe, pooling=None, tokenizer=make_tokenizer(segments=segments), **options)


def dense(hidden: int = 40, **options: Any) -> Dense:
    torch.manual_seed(1)
    made = Dense(hidden, 16, module_input_name="token_embeddings", **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    return made


def saved(
    source: Path,
    out: Path,
    *modules: Any,
    transformer: dict[str, Any] | None = None,
    kind: Any = MultiVectorEncoder,
    **options: Any,
) -> Path:
    """What the library writes."""
    first = Transformer(str(source), **(transformer or {}))
    modules = modules or (dense(bias=False), MultiVectorMask(), Normalize("token_embeddings"))
    kind(modules=[first, *modules], device="cpu", **options).save(str(out))
    return out


def load(folder: Path, **options: Any) -> Runner:
    out = folder.parent / f"{folder.name}-out"
    toolkit.convert(str(folder), out, verify=False, force=out.exists(), **options)
    return toolkit.load(out, device="cpu", mode="eager")


def theirs(folder: Path, kind: Kind, texts: list[str] = TEXTS, **options: Any) -> list[torch.Tensor]:
    model = MultiVectorEncoder(str(folder), device="cpu")
    encode = model.encode_query if kind == "query" else model.encode_document
    return [encode(text, **options) for text in texts]


def assert_equal(ours: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert [x.shape for x in ours] == [x.shape for x in expected]
    assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in ours)
    assert torch.allclose(torch.cat(ours), torch.cat(expected), rtol=0, atol=1e-5)


def assert_both(folder: Path, runner: Runner | None = None) -> dict[str, list[torch.Tensor]]:
    """Compare both kinds; return ours."""
    runner = runner or load(folder)
    found = {kind: runner.multi_vectors(TEXTS, kind) for kind in KINDS}
    for kind in KINDS:
        assert_equal(found[kind], theirs(folder, kind))
    return found


@pytest.mark.parametrize("attend", [True, False])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.label)
def test_every_family_passes_the_gate(recipe: Recipe, attend: bool, tmp_path: Path) -> None:
    """Token states are all that is needed; expansions that are attended to are tokens like others."""
    source = base(tmp_path / "base", recipe)
    spec = recipe.read_config(json.loads((source / "config.json").read_text()))[0]
    modules = (dense(spec.state_width), MultiVectorMask(["a"]), Normalize("token_embeddings"))
    transformer = {"document_length": 9, "query_expansion": FIXED | {"attend": attend}}
    folder = saved(source, tmp_path / "saved", *modules, transformer=transformer)
    biased = any(a.distance is not None or (a.reach or 9) < 6 for a in spec.attentions)
    if not attend and (biased or recipe.positions_by_mask):
        with pytest.raises(UnsupportedError, match=r"attend = False is not supported where (attention has|positions)"):
            toolkit.convert(str(folder), tmp_path / "out", verify=False)
        return
    report = toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert report.manifest.task == "multi-vector"
    assert "multi-vector" in recipe.all_tasks
    found = verify_folder(tmp_path / "out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()
    assert {cell.path for cell in found.cells} == {"ids", "embeds", "mixed", "text"}
    assert any(cell.quantity == "token vectors" for cell in found.cells)


@pytest.mark.parametrize("recipe", [BERT, MODERNBERT], ids=lambda recipe: recipe.model_type)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("layers", ["plain", "bias and tanh", "residual", "two", "none"])
def test_vectors_equal_the_library(tmp_path: Path, recipe: Recipe, normalize: bool, layers: str) -> None:
    source = base(tmp_path / "base", recipe)
    hidden = recipe.read_config(json.loads((source / "config.json").read_text()))[0].hidden
    stacks: dict[str, list[Any]] = {
        "plain": [dense(hidden, bias=False, activation_function=torch.nn.Identity())],
        "bias and tanh": [dense(hidden)],
        "residual": [dense(hidden, use_residual=True)],
        "two": [dense(hidden), dense(16)],
        "none": [],
    }
    tail = [MultiVectorMask(), *([Normalize("token_embeddings")] if normalize else [])]
    folder = saved(source, tmp_path / "saved", *stacks[layers], *tail)
    found = assert_both(folder)
    assert found["query"][0].shape[1] == (hidden if layers == "none" else 16)
    lengths = torch.cat(found["query"]).norm(dim=1)
    assert bool(((lengths - 1).abs() < 1e-5).all()) is normalize


def test_without_a_mask_every_token_is_kept(tmp_path: Path) -> None:
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", dense(), transformer={"query_expansion": FIXED})
    assert [len(x) for x in assert_both(folder)["query"]] == [7] * len(TEXTS)


@pytest.mark.parametrize("expansion", [FIXED | UNSEEN, MIN | UNSEEN])
def test_without_a_mask_unseen_expansions_have_no_effect(tmp_path: Path, expansion: dict[str, Any]) -> None:
    """But for the limit of "fixed"."""
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", dense(), transformer={"query_expansion": expansion})
    found = assert_both(folder)
    assert [len(x) for x in found["query"]] == [7 if expansion["strategy"] == "fixed" else 17, 2, 3, 6, 5]
    report = verify_folder(tmp_path / "saved-out", folder, device="cpu", modes=["eager"])
    assert report.passed, report.summary()


@pytest.mark.parametrize("on", ["query", "document", ["query", "document"], None, ["other"]])
def test_skip_lists(tmp_path: Path, on: Any) -> None:
    """Of documents by default; words that are no single token are dropped, and said so."""
    mask = MultiVectorMask(["the", "a", "[SEP]", "[UNK]", "nope", "quick brown"], skiplist_tasks=on)
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", dense(), mask)
    runner = load(folder)
    assert_both(folder, runner)
    sides = runner.artifact.manifest.multi_vector
    assert sides is not None
    skipped = {kind for kind in KINDS if sides.side(kind).skip_ids}
    assert skipped == {kind for kind in KINDS if kind in (on or ["document"])}
    warnings = [w for w in runner.artifact.manifest.warnings if "skiplist_words" in w]
    assert len(warnings) == 1
    assert "['nope', 'quick brown'] are no single tokens" in warnings[0]


def test_skip_lists_are_for_documents_where_nothing_is_said(tmp_path: Path) -> None:
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", dense(), MultiVectorMask(["the"]))
    edit_json(folder / "2_MultiVectorMask" / "config.json", skiplist_tasks=..., keep_only_token_ids=...)
    found = assert_both(folder)
    assert (len(found["query"][0]), len(found["document"][0])) == (17, 15)


def test_an_expansion_may_be_skipped(tmp_path: Path) -> None:
    mask = MultiVectorMask(["[MASK]"], skiplist_tasks=["query"])
    transformer = {"query_expansion": FIXED}
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", dense(), mask, transformer=transformer)
    assert [len(x) for x in assert_both(folder)["query"]] == [7, 2, 3, 6, 5]


@pytest.mark.parametrize("keep", [[5, 6, 13], [], [999]])
def test_keep_only(tmp_path: Path, keep: list[int]) -> None:
    """Of documents only, and on top of the skip list; an empty list keeps all."""
    mask = MultiVectorMask(["the"], keep_only_token_ids=keep)
    found = assert_both(saved(base(tmp_path / "base"), tmp_path / "saved", dense(), mask))
    assert [len(x) for x in found["query"]] == [17, 2, 3, 6, 5]
    expected = {3: [2, 0, 1, 0, 0], 0: [15, 2, 3, 5, 5], 1: [0] * 5}[len(keep)]
    assert [len(x) for x in found["document"]] == expected
    assert all(x.shape[1] == 16 for x in found["document"])


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ({"query_length": 5, "document_length": 9}, (5, 9)),
        ({"query_length": 8}, (8, 12)),
        ({"document_length": 15}, (12, 15)),
        ({}, (12, 12)),
        ({"query_length": 500, "document_length": 400}, (24, 24)),
    ],
)
def test_limits(tmp_path: Path, lengths: dict[str, int], expected: tuple[int, int]) -> None:
    """Each side's own, even beyond that of texts in general; never beyond what the model can take."""
    source = base(tmp_path / "base")
    folder = saved(source, tmp_path / "saved", transformer={"max_seq_length": 12, **lengths})
    runner = load(folder)
    long = ["the quick fox " * 20]
    for kind, limit in zip(KINDS, expected, strict=True):
        (vectors,) = runner.multi_vectors(long, kind)
        assert len(vectors) == limit
        if max(lengths.values(), default=0) < 24:
            assert_equal([vectors], theirs(folder, kind, long))
    clamped = [w for w in runner.artifact.manifest.warnings if "the model takes 24" in w]
    assert [w.split(":")[0] for w in clamped] == (["queries", "documents"] if expected == (24, 24) else [])
    assert len(runner.token_states(long)[0]) == 12
    found = verify_folder(runner.artifact.folder, folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


def test_prompts(tmp_path: Path) -> None:
    """Each kind has its own; the default prompt is never used, as encode_query and encode_document never do."""
    prompts = {"query": "query one ", "document": "doc ", "other": "lazy "}
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", prompts=prompts, default_prompt_name="other")
    runner = load(folder)
    options: dict[str, Any]
    for kind in KINDS:
        for options in ({}, {"prompt_name": "other"}, {"prompt": "two three "}, {"prompt": ""}):
            assert_equal(runner.multi_vectors(TEXTS, kind, **options), theirs(folder, kind, **options))
    assert [len(runner.multi_vectors("a", kind)[0]) for kind in KINDS] == [5, 4]
    with pytest.raises(InputError, match="no prompt named 'nope'"):
        runner.multi_vectors("a", "query", prompt_name="nope")


def test_no_prompts(tmp_path: Path) -> None:
    """A kind without a prompt, or with null, has none: the default prompt is still not used."""
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", prompts={"other": "lazy "}, default_prompt_name="other")
    prompts: Any
    for prompts in ({"query": None, "document": None, "other": "lazy "}, {"other": "lazy ", "passage": "dog "}):
        edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
        assert [len(x) for x in assert_both(folder)["document"]] == [17, 2, 3, 6, 5]


@pytest.mark.parametrize("recipe", [BERT, MODERNBERT], ids=lambda recipe: recipe.model_type)
@pytest.mark.parametrize(
    ("transformer", "lengths"),
    [
        ({"query_expansion": FIXED}, [7, 7, 7, 7, 7]),
        ({"query_expansion": FIXED | {"token": "dog"}}, [7, 7, 7, 7, 7]),
        ({"query_expansion": FIXED, "query_length": 12}, [7, 7, 7, 7, 7]),
        ({"query_expansion": MIN}, [17, 7, 7, 7, 7]),
        ({"query_expansion": MIN, "query_length": 9}, [9, 7, 7, 7, 7]),
        ({"query_expansion": MIN, "max_seq_length": 5}, [7, 7, 7, 7, 7]),
        ({"query_expansion": FIXED | UNSEEN}, [7, 7, 7, 7, 7]),
        ({"query_expansion": MIN | UNSEEN}, [17, 7, 7, 7, 7]),
        ({"query_expansion": {"strategy": "min", "length": 7}, "query_length": 9}, [9, 7, 7, 7, 7]),
    ],
)
def test_expansions(tmp_path: Path, recipe: Recipe, transformer: dict[str, Any], lengths: list[int]) -> None:
    """Of queries only; "fixed" cuts longer ones, "min" does not. By default they are not attended to."""
    wide = {"overrides": {"local_attention": 14}} if recipe is MODERNBERT else {}
    source = base(tmp_path / "base", recipe, **wide)
    hidden = recipe.read_config(json.loads((source / "config.json").read_text()))[0].hidden
    modules = (dense(hidden), MultiVectorMask())
    found = assert_both(saved(source, tmp_path / "saved", *modules, transformer=transformer))
    assert [len(x) for x in found["query"]] == lengths
    assert len(found["document"][2]) == 3


@pytest.mark.parametrize("mask", [True, False])
def test_which_token_expands(tmp_path: Path, mask: bool) -> None:
    """The mask token, else the end token; and of texts only: token ids are taken as they are."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "[SEP]"
    if not mask:
        tokenizer.mask_token = None
    source = make_checkpoint(tmp_path / "base", BERT, pooling=None, tokenizer=tokenizer)
    folder = saved(source, tmp_path / "saved", transformer={"query_expansion": FIXED})
    runner = load(folder)
    assert_both(folder, runner)
    assert runner.rows(["a"], "", kind="query")[0].ids.tolist() == [2, 13, 3, *[4 if mask else 3] * 4]
    assert [len(x) for x in runner.multi_vectors(["a", TokenIds([2, 13, 3])], "query")] == [7, 3]


def test_expansions_that_are_not_seen_change_nothing_else(tmp_path: Path) -> None:
    """A query's own tokens are as they are without; its expansion is not as it is when it is seen."""
    source = base(tmp_path / "base")
    stated = {"unseen": FIXED | UNSEEN, "seen": FIXED, "none": None}
    found = {
        name: load(saved(source, tmp_path / name, transformer={"query_expansion": expansion})).multi_vectors(
            "a", "query"
        )
        for name, expansion in stated.items()
    }
    (unseen,), (seen,), (none,) = found["unseen"], found["seen"], found["none"]
    assert (len(unseen), len(none)) == (7, 3)
    assert (unseen[:3] - none).abs().max() < 1e-5
    assert (unseen[:3] - seen[:3]).abs().max() > 0.01
    assert (unseen[3:] - seen[3:]).abs().max() > 0.01


def test_an_expansion_needs_a_token_to_attend_to(tmp_path: Path) -> None:
    """Without special tokens an empty text has none."""
    tokenizer = make_tokenizer(special_tokens=False)
    source = make_checkpoint(tmp_path / "base", BERT, pooling=None, tokenizer=tokenizer)
    folder = saved(source, tmp_path / "saved", MultiVectorMask(), transformer={"query_expansion": FIXED | UNSEEN})
    runner = load(folder)
    assert [len(x) for x in runner.multi_vectors(["a"], "query")] == [7]
    with pytest.raises(InputError, match="input 1 has no tokens for its expansion to attend to"):
        runner.multi_vectors(["a", ""], "query")


@pytest.mark.parametrize("attend", [True, False])
def test_every_mode(tmp_path: Path, attend: bool) -> None:
    transformer = {"query_length": 9, "document_length": 12, "query_expansion": MIN | {"attend": attend}}
    modules = (dense(), MultiVectorMask(["the", "a"]), Normalize("token_embeddings"))
    prompts = {"query": "query ", "document": "doc "}
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", *modules, transformer=transformer, prompts=prompts)
    report = toolkit.convert(str(folder), tmp_path / "out")
    assert report.parity.passed
    assert {cell.mode for cell in report.parity.cells} == {"eager", "compile", "graph"}
    expected = {kind: theirs(folder, kind) for kind in KINDS}
    for mode in ("eager", "compile", "graph"):
        runner = toolkit.load(tmp_path / "out", device="cpu", mode=mode)
        for kind in KINDS:
            assert_equal(runner.multi_vectors(TEXTS, kind), expected[kind])
        assert runner.stats.eager_fallbacks == 0


@pytest.mark.parametrize("layers", [True, False])
def test_ids_and_embeddings(tmp_path: Path, layers: bool) -> None:
    """Skip lists go by ids: embeddings are kept, whatever token they may stand for."""
    mask = MultiVectorMask(["[PAD]", "fox"], keep_only_token_ids=[2, 3, 8, 12])
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", *([dense()] if layers else []), mask)
    runner = toolkit.load(load(folder).artifact.folder, device="cpu", mode="graph")
    ids = [2, 12, 8, 9, 3]
    soft = runner.embed_tokens(ids)
    inputs = [
        TokenIds(ids),
        PromptEmbeds(soft),
        MixedPrompt([TokenIds(ids[:2]), PromptEmbeds(soft[2:4]), TokenIds(ids[4:])]),
    ]
    query = runner.multi_vectors(inputs, "query")
    assert [len(x) for x in query] == [5, 5, 5]
    assert max(float((x - query[0]).abs().max()) for x in query) < 1e-5
    by_ids, by_embeds, mixed = runner.multi_vectors(inputs, "document")
    assert torch.equal(by_ids, query[0][[0, 1, 4]])  # 8 is a fox, 9 is not to be kept
    assert torch.equal(by_embeds, query[1])
    assert torch.equal(mixed, query[2])
    assert runner.multi_vectors([], "query") == []
    assert len(runner.multi_vectors("one", "query")) == 1


def test_results_own_their_memory(tmp_path: Path) -> None:
    runner = toolkit.load(load(saved(base(tmp_path / "base"), tmp_path / "saved")).artifact.folder, device="cpu")
    first = runner.multi_vectors(TEXTS, "query")
    kept = [x.clone() for x in first]
    runner.multi_vectors(list(reversed(TEXTS)), "document")
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def test_half_precision(tmp_path: Path) -> None:
    """float32 comes out; the steps on tokens keep the model's dtype, as the library's do."""
    folder = saved(base(tmp_path / "base"), tmp_path / "saved")
    runner = load(folder, dtype="bfloat16")
    model = MultiVectorEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.bfloat16})
    (ours,) = runner.multi_vectors("the quick fox", "query")
    assert ours.dtype == torch.float32
    assert (ours - model.encode_query("the quick fox").float()).abs().max() < 0.02
    found = verify_folder(runner.artifact.folder, folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


REFUSED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {}


def refused(error: type[Exception], message: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def note(change: Callable[[Path], None]) -> Callable[[Path], None]:
        REFUSED[change.__name__] = (change, error, message)
        return change

    return note


def options(error: type[Exception], message: str, name: str, **fields: Any) -> None:
    """Change the options of the Transformer module."""
    REFUSED[name] = (lambda folder: edit_json(folder / "sentence_bert_config.json", **fields), error, message)


def module(folder: Path, number: int, kind: str) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[number]["type"] = kind
    write_json(folder / "modules.json", modules)


LIBRARY = "sentence_transformers."
options(
    CheckpointError, "strategy = 'max', expected fixed or min", "strategy", query_expansion=FIXED | {"strategy": "max"}
)
options(CheckpointError, "length = None, expected a positive", "no length", query_expansion=FIXED | {"length": None})
options(CheckpointError, "length = True, expected a positive", "length", query_expansion=FIXED | {"length": True})
options(CheckpointError, "attend = 1, expected true or false", "attend", query_expansion=FIXED | {"attend": 1})
options(CheckpointError, "token = 3, expected a text", "token", query_expansion=FIXED | {"token": 3})
options(CheckpointError, "token = 'nope' is not in", "unknown token", query_expansion=FIXED | {"token": "nope"})
options(CheckpointError, "expected an object with", "unknown key", query_expansion=FIXED | {"surprise": 3})
options(CheckpointError, "expected an object with", "no object", query_expansion=["fixed"])
options(CheckpointError, "the model takes at most 24", "too long", query_expansion=FIXED | {"length": 25})
options(CheckpointError, "no room for the tokenizer's 2", "too short", query_expansion=FIXED | {"length": 1})
options(CheckpointError, "no room for the tokenizer's 2", "short documents", document_length=1)
options(CheckpointError, "query_length = 5 is smaller than", "contradiction", query_length=5, query_expansion=FIXED)
options(CheckpointError, "query_length = 0, expected a positive", "zero", query_length=0)
options(CheckpointError, "document_length = '9', expected a positive", "text", document_length="9")
options(UnsupportedError, "processing_kwargs = ", "processing", processing_kwargs={"text": {"max_length": 3}})


@refused(UnsupportedError, "a Pooling module is not supported for task 'multi-vector'")
def pooled(folder: Path) -> None:
    module(folder, 1, f"{LIBRARY}sentence_transformer.modules.pooling.Pooling")


@refused(UnsupportedError, "a LayerNorm module is not supported for task 'multi-vector'")
def norm(folder: Path) -> None:
    module(folder, 1, f"{LIBRARY}sentence_transformer.modules.layer_norm.LayerNorm")


@refused(UnsupportedError, "HierarchicalTokenPooling' is not supported (and never imported)")
def token_pooling(folder: Path) -> None:
    module(folder, 1, f"{LIBRARY}multi_vector_encoder.modules.token_pooling.HierarchicalTokenPooling")


@refused(UnsupportedError, "'somewhere.Code' is not supported (and never imported)")
def foreign(folder: Path) -> None:
    module(folder, 1, "somewhere.Code")


@refused(UnsupportedError, "a second MultiVectorMask")
def second_mask(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    write_json(folder / "modules.json", [*modules, {**modules[2], "idx": 4, "name": "4"}])


@refused(UnsupportedError, "module_input_name = 'sentence_embedding' is not supported without a pooling")
def dense_on_vectors(folder: Path) -> None:
    edit_json(folder / "1_Dense" / "config.json", module_input_name="sentence_embedding")


@refused(UnsupportedError, "module_output_name = 'elsewhere' is not supported without a pooling")
def dense_elsewhere(folder: Path) -> None:
    edit_json(folder / "1_Dense" / "config.json", module_output_name="elsewhere")


@refused(CheckpointError, "module_input_name is missing")
def normalize_of_nothing(folder: Path) -> None:
    write_json(folder / "3_Normalize" / "config.json", {})


@refused(CheckpointError, "in_features = 40, but 16 values come in")
def widths(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[2] |= {"type": modules[1]["type"], "path": "1_Dense"}
    write_json(folder / "modules.json", modules)


@refused(CheckpointError, "skiplist_words = 'the', expected a list of str")
def words(folder: Path) -> None:
    edit_json(folder / "2_MultiVectorMask" / "config.json", skiplist_words="the")


@refused(CheckpointError, "skiplist_tasks = [1], expected a list of str")
def tasks(folder: Path) -> None:
    edit_json(folder / "2_MultiVectorMask" / "config.json", skiplist_tasks=[1])


@refused(CheckpointError, "keep_only_token_ids = [True], expected a list of int")
def keep_ids(folder: Path) -> None:
    edit_json(folder / "2_MultiVectorMask" / "config.json", keep_only_token_ids=[True])


@refused(UnsupportedError, "unknown field 'surprise'")
def mask_field(folder: Path) -> None:
    edit_json(folder / "2_MultiVectorMask" / "config.json", surprise=1)


@refused(CheckpointError, "prompts must map names to texts")
def prompts_of_numbers(folder: Path) -> None:
    edit_json(folder / "config_sentence_transformers.json", prompts={"query": 3})


@refused(UnsupportedError, "model_type = 'CrossEncoder': MultiVectorEncoder would put a projection with random weights")
def reranker(folder: Path) -> None:
    edit_json(folder / "config_sentence_transformers.json", model_type="CrossEncoder")


@refused(UnsupportedError, "no modules.json: MultiVectorEncoder would put a projection with random weights")
def no_modules(folder: Path) -> None:
    (folder / "modules.json").unlink()


@refused(UnsupportedError, "padding_side = 'left' is not supported with a query_expansion")
def left(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", padding_side="left")
    edit_json(folder / "sentence_bert_config.json", query_expansion=FIXED)


@refused(CheckpointError, "skiplist_words: 'nope' is not in the tokenizer's vocabulary")
def no_unknown_token(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", unk_token=None)
    edit_json(folder / "2_MultiVectorMask" / "config.json", skiplist_words=["nope"])


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("native")
    modules = (dense(), MultiVectorMask(["the"]), Normalize("token_embeddings"))
    return saved(base(folder / "base"), folder / "saved", *modules)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, native: Path, tmp_path: Path) -> None:
    change, error, message = REFUSED[name]
    folder = shutil.copytree(native, tmp_path / "c")
    change(folder)
    with pytest.raises(error) as caught:
        load(folder, task="multi-vector")
    assert message in str(caught.value)


def test_the_mask_is_for_token_vectors(native: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="module_input_name = 'token_embeddings' is not supported"):
        load(native, task="embed")
    folder = saved(
        base(tmp_path / "base"), tmp_path / "saved", Pooling(40), MultiVectorMask(["the"]), kind=SentenceTransformer
    )
    with pytest.raises(UnsupportedError, match="a MultiVectorMask module is not supported for task 'embed'"):
        load(folder)


def test_other_methods_refuse(native: Path, tmp_path: Path) -> None:
    runner = load(native)
    for method, given in (("embed", "a"), ("score", [("a", "b")]), ("classify", "a"), ("classify_tokens", "a")):
        with pytest.raises(UnsupportedError, match="was converted for 'multi-vector'"):
            getattr(runner, method)(given)
    with pytest.raises(InputError, match="kind 'passage' is unknown; use query or document"):
        runner.multi_vectors("a", "passage")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="input 0 is a tuple"):
        runner.multi_vectors([("a", "b")], "query")  # type: ignore[arg-type]
    other = load(make_checkpoint(tmp_path / "c", BERT))
    with pytest.raises(UnsupportedError, match=r"multi_vectors needs an artifact of task 'multi-vector'"):
        other.multi_vectors("a", "query")


def pylate(source: Path, out: Path, *, kind: str | None = "ColBERT", dense_config: Any = None, **fields: Any) -> Path:
    """A checkpoint as PyLate lays it out: no mask, no normalisation, its own Dense, its own fields."""
    shutil.copytree(source, out)
    layer = dense(bias=False, activation_function=torch.nn.Identity())
    config = {"in_features": 40, "out_features": 16, "bias": False}
    write_json(
        out / "1_Dense" / "config.json",
        {**config, "activation_function": "torch.nn.modules.linear.Identity", **(dense_config or {})},
    )
    save_file(layer.state_dict(), out / "1_Dense" / "model.safetensors")
    types = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    modules = [
        {"idx": k, "name": str(k), "path": p, "type": t}
        for k, (p, t) in enumerate(zip(("", "1_Dense"), types, strict=True))
    ]
    write_json(out / "modules.json", modules)
    write_json(out / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    stated = {} if kind is None else {"model_type": kind}
    write_json(out / "config_sentence_transformers.json", {**stated, "similarity_fn_name": "MaxSim", **fields})
    return out


@pytest.mark.parametrize("kind", ["ColBERT", None])
@pytest.mark.parametrize(
    "fields",
    [
        {"query_length": 7, "document_length": 9, "attend_to_expansion_tokens": True},
        {"query_length": 7, "document_length": 9},
        {"query_length": None, "document_length": None, "do_query_expansion": False},
        {"query_length": 6, "do_query_expansion": False, "skiplist_words": ["the", "a"]},
        {"do_query_expansion": False, "skiplist_words": []},
        {"query_expansion": FIXED, "document_length": 5},
        {"query_expansion": None, "query_prefix": "[Q] ", "document_prefix": ""},
        {"do_query_expansion": False, "query_prefix": "[unused0] ", "document_prefix": "dog"},
        {"do_query_expansion": False, "query_prefix": "one ", "prompts": {"query": "two: ", "other": "three"}},
        {"do_query_expansion": False, "query_prefix": "one ", "prompts": {"query": "one two: ", "document": None}},
        {"do_query_expansion": False, "query_prefix": None, "skiplist_words": None},
    ],
    ids=str,
)
def test_pylate(tmp_path: Path, fields: dict[str, Any], kind: str | None) -> None:
    """Its fields, its default skip list of punctuation, its prefixes as single tokens."""
    folder = pylate(with_words(base(tmp_path / "base"), "[unused0]", "."), tmp_path / "saved", kind=kind, **fields)
    assert_both(folder)


def with_words(source: Path, *words: str) -> Path:
    """Put words into the tokenizer's own vocabulary, in the place of some that are there."""
    data = json.loads((source / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    for old, word in zip(("jumps", "over", "lazy"), words, strict=False):
        vocab[word] = vocab.pop(old)
    write_json(source / "tokenizer.json", data)
    return source


@pytest.mark.parametrize("prefix", ["[unused0]", "[unused0] ", "[unused0] one ", "[unused1] ", " "])
def test_prefixes_become_one_token(tmp_path: Path, prefix: str) -> None:
    """Where the vocabulary knows them; the tokenizer alone would make three of it."""
    fields = {"do_query_expansion": False, "query_prefix": prefix}
    folder = pylate(with_words(base(tmp_path / "base"), "[unused0]"), tmp_path / "saved", **fields)
    runner = load(folder)
    assert_both(folder, runner)
    known = runner.rows(["fox"], prefix, kind="query")[0].ids.tolist()
    assert (known[1] == 9) is prefix.startswith("[unused0]")


def test_a_prefix_is_not_lowered(tmp_path: Path) -> None:
    """What only looks like it after the tokenizer's lower-casing is text."""
    source = make_checkpoint(tmp_path / "base", BERT, pooling=None, tokenizer=make_tokenizer(lower_case=True))
    fields = {"do_query_expansion": False, "query_prefix": "[unused0] "}
    folder = pylate(with_words(source, "[unused0]"), tmp_path / "saved", **fields)
    texts = ["[unused0] fox", "[UNUSED0] fox", "FOX"]
    ours = load(folder).multi_vectors(texts, "query")
    assert_equal(ours, theirs(folder, "query", texts))
    assert [len(x) for x in ours] == [5, 7, 4]


def test_a_prefix_that_ends_in_a_space(tmp_path: Path) -> None:
    """PyLate adds it as it is."""
    tokenizer = make_tokenizer(lower_case=True)
    tokenizer.add_tokens(["[Q] "])
    source = make_checkpoint(tmp_path / "base", BERT, pooling=None, tokenizer=tokenizer)
    folder = pylate(source, tmp_path / "saved", do_query_expansion=False, query_prefix="[Q] ", document_prefix="[D] ")
    runner = load(folder)
    assert_both(folder, runner)
    assert runner.rows(["fox"], "[Q] ", kind="query")[0].ids.tolist() == [2, len(tokenizer) - 1, 8, 3]


@pytest.mark.parametrize("kind", ["ColBERT", "SentenceTransformer"])
def test_pylate_skips_punctuation(tmp_path: Path, kind: str) -> None:
    """By default, which without prefixes only its own model_type brings along."""
    source = with_words(base(tmp_path / "base"), ".")
    folder = pylate(source, tmp_path / "saved", kind=kind, do_query_expansion=False)
    found_ours = assert_both(folder, load(folder, task="multi-vector"))
    assert [len(x) for x in found_ours["document"]] == [17, 2, 3, 5 if kind == "ColBERT" else 6, 5]
    found = verify_folder(tmp_path / "saved-out", folder, device="cpu", modes=["eager"])
    assert found.passed, found.summary()


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"do_query_expansion": True}, CheckpointError, "length = 32, the model takes at most 24"),
        ({"attend_to_mask_tokens": True}, CheckpointError, "length = 32, the model takes at most 24"),
        ({"query_prefix": 3}, CheckpointError, "query_prefix = 3, expected a text"),
        ({"skiplist_words": "abc"}, CheckpointError, "skiplist_words = 'abc', expected a list of texts"),
    ],
)
def test_pylate_refusals(tmp_path: Path, fields: dict[str, Any], error: type[Exception], message: str) -> None:
    """It expands queries by default, to 32 tokens that are not attended to."""
    folder = pylate(base(tmp_path / "base"), tmp_path / "saved", **fields)
    with pytest.raises(error) as caught:
        load(folder)
    assert message in str(caught.value)


def test_pylate_with_a_mask_is_refused(native: Path, tmp_path: Path) -> None:
    """The library would put a second one behind it."""
    folder = shutil.copytree(native, tmp_path / "c")
    edit_json(folder / "config_sentence_transformers.json", model_type="ColBERT")
    with pytest.raises(UnsupportedError, match="a MultiVectorMask is not supported for model_type 'ColBERT'"):
        load(folder)


def test_the_transformers_own_options_rule(tmp_path: Path) -> None:
    """Those of its file, before PyLate's fields."""
    folder = pylate(base(tmp_path / "base"), tmp_path / "saved", document_length=9, do_query_expansion=False)
    edit_json(folder / "sentence_bert_config.json", document_length=5)
    assert len(assert_both(folder)["document"][0]) == 5


def test_pylates_dense_is_for_multi_vector_only(tmp_path: Path) -> None:
    folder = pylate(base(tmp_path / "base"), tmp_path / "saved", do_query_expansion=False)
    with pytest.raises(UnsupportedError, match=r"pylate\.models\.Dense\.Dense' is not supported"):
        load(folder, task="embed")


@pytest.mark.parametrize("where", ["", "sentence_embedding", "token_embeddings"])
def test_a_sentence_transformer_with_a_projection(tmp_path: Path, where: str) -> None:
    """Its projection works on tokens; its pooling and its vectors' normalisation are left out."""
    torch.manual_seed(2)
    modules = [Pooling(40), *([Normalize(where)] if where else []), Dense(40, 16)]
    folder = saved(
        base(tmp_path / "base"), tmp_path / "saved", *modules, kind=SentenceTransformer, prompts={"query": "one "}
    )
    found = assert_both(folder, load(folder, task="multi-vector"))
    assert (torch.cat(found["query"]).norm(dim=1) - 1).abs().max() < 1e-5
    assert [len(x) for x in found["query"]] == [18, 3, 4, 7, 6]
    if where != "token_embeddings":
        assert load(folder).artifact.manifest.task == "embed"


def test_a_sentence_transformer_without_one(tmp_path: Path) -> None:
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", Pooling(40), kind=SentenceTransformer)
    with pytest.raises(UnsupportedError, match=r"no Dense module: MultiVectorEncoder would put .* random weights"):
        load(folder, task="multi-vector")
    folder = saved(base(tmp_path / "b"), tmp_path / "s", Pooling(40), LayerNorm(40), kind=SentenceTransformer)
    with pytest.raises(UnsupportedError, match="a LayerNorm module is not supported"):
        load(folder, task="multi-vector")


@pytest.mark.parametrize("similarity", ["maxsim", "meanmaxsim"])
def test_similarity(tmp_path: Path, similarity: Any) -> None:
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", similarity_fn_name=similarity)
    runner, model = load(folder), MultiVectorEncoder(str(folder), device="cpu")
    sides = runner.artifact.manifest.multi_vector
    assert sides is not None
    assert sides.similarity == similarity
    documents = runner.multi_vectors(TEXTS, "document")
    for query in runner.multi_vectors(TEXTS, "query"):
        scores = maxsim(query, documents, sides.similarity)
        assert (scores - model.similarity([query], documents)[0]).abs().max() < 1e-5


def test_maxsim() -> None:
    """Documents without vectors rank last; half precision is added up in float32."""
    draw = torch.Generator().manual_seed(0)
    query, *documents = (torch.randn(n, 8, generator=draw) for n in (5, 3, 0, 40, 1))
    expected = their_maxsim([query], documents)[0]
    assert torch.allclose(maxsim(query, documents), expected)
    assert maxsim(query, documents)[1] == -1e9
    assert torch.allclose(maxsim(query, documents, "meanmaxsim"), expected / 5)
    half = [x.to(torch.bfloat16) for x in documents]
    scores = maxsim(query.to(torch.bfloat16), half)
    assert scores.dtype == torch.float32
    assert torch.allclose(scores, maxsim(query.to(torch.bfloat16).float(), [x.float() for x in half]))
    assert maxsim(query, []).shape == (0,)
    assert maxsim(query[:0], documents)[0] == 0
    assert maxsim(query[:0], documents, "meanmaxsim")[0] == 0
    with pytest.raises(InputError, match=r"document 1: vectors of shape \(3, 7\), expected \[tokens, 8\]"):
        maxsim(query, [query, torch.zeros(3, 7)])
    with pytest.raises(InputError, match="query: vectors of shape"):
        maxsim(query[0], documents)
    with pytest.raises(InputError, match="similarity 'cosine' is unknown; use maxsim, meanmaxsim"):
        maxsim(query, documents, "cosine")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="document 1 is a list, expected a tensor"):
        maxsim(query, [documents[0], [[0.0]]])  # type: ignore[list-item]
    assert torch.equal(maxsim(query, (x for x in documents)), maxsim(query, documents))  # type: ignore[arg-type]


def test_the_manifest(tmp_path: Path) -> None:
    """Read back as it was written; a limit or a token beyond the model's is refused."""
    mask = MultiVectorMask(["a"], skiplist_tasks=["query"], keep_only_token_ids=[5])
    transformer = {"query_expansion": MIN, "document_length": 9}
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", dense(), mask, transformer=transformer)
    out = load(folder).artifact.folder
    query = Side(limit=24, skip_ids=(13,), keep_ids=None, expansion=Expansion(length=7, id=4, attend=True))
    document = Side(limit=9, skip_ids=(), keep_ids=(5,), expansion=None)
    expected = MultiVector(query=query, document=document, similarity="maxsim")
    assert Artifact.open(out).manifest.multi_vector == expected
    text = (out / MANIFEST).read_text()
    for field, value, message in (
        ("limit", 25, "limits contradict"),
        ("limit", 0, "limits contradict"),
        ("expansion", {"length": 25, "id": 4, "attend": True}, "limits contradict"),
        ("expansion", {"length": 7, "id": 61, "attend": True}, "token 61 is outside the vocabulary"),
        ("expansion", {"length": 7, "id": 4}, "damaged"),
        ("skip_ids", 3, "damaged"),
    ):
        data = json.loads(text)
        data["multi_vector"]["query"][field] = value
        write_json(out / MANIFEST, data)
        with pytest.raises(ArtifactError, match=message):
            Artifact.open(out)


def test_an_expansion_without_a_token(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.mask_token = None
    source = make_checkpoint(tmp_path / "base", BERT, pooling=None, tokenizer=tokenizer)
    folder = saved(source, tmp_path / "saved")
    edit_json(folder / "sentence_bert_config.json", query_expansion=FIXED)
    with pytest.raises(CheckpointError, match=r"token = None is not in the tokenizer's vocabulary"):
        load(folder)


def test_an_expansion_beyond_the_vocabulary(tmp_path: Path) -> None:
    source = base(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"[new{k}]" for k in range(61)])
    tokenizer.save_pretrained(source)
    transformer = {"query_expansion": FIXED | {"token": "[new60]"}}
    folder = saved(source, tmp_path / "saved", transformer=transformer)
    with pytest.raises(CheckpointError, match=r"the token's id is .*, the model's vocabulary has 61"):
        load(folder)


def change_side(out: Path, kind: str, **fields: Any) -> None:
    data = json.loads((out / MANIFEST).read_text())
    data["multi_vector"][kind] |= fields
    write_json(out / MANIFEST, data)


@pytest.mark.parametrize(
    ("kind", "fields", "tokens_differ"),
    [
        ("document", {"skip_ids": []}, False),
        ("query", {"skip_ids": [5]}, False),
        ("document", {"keep_ids": [5, 6]}, False),
        ("query", {"limit": 9}, True),
        ("document", {"limit": 8}, True),
        ("query", {"expansion": {"length": 6, "id": 4, "attend": True}}, True),
        ("query", {"expansion": {"length": 7, "id": 5, "attend": True}}, True),
        ("query", {"expansion": {"length": 7, "id": 4, "attend": False}}, False),
    ],
)
def test_the_gate_sees_a_wrong_side(tmp_path: Path, kind: str, fields: dict[str, Any], tokens_differ: bool) -> None:
    """It fails, with a report, when other tokens are fed or kept than the library's."""
    transformer = {"query_length": 10, "document_length": 9, "query_expansion": MIN}
    folder = saved(
        base(tmp_path / "base"), tmp_path / "saved", dense(), MultiVectorMask(["the"]), transformer=transformer
    )
    out = load(folder).artifact.folder
    assert verify_folder(out, folder, device="cpu", modes=["eager"]).passed
    change_side(out, kind, **fields)
    report = verify_folder(out, folder, device="cpu", modes=["eager"])
    assert not report.passed
    assert bool(report.tokenizer) is tokens_differ
    assert [cell for cell in report.cells if cell.quantity == "token vectors" and not cell.passed] or tokens_differ


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_sees_a_wrong_prompt(tmp_path: Path, kind: str) -> None:
    """The library finds its prompts by itself."""
    folder = saved(base(tmp_path / "base"), tmp_path / "saved", prompts={"query": "query ", "document": "doc "})
    out = load(folder).artifact.folder
    data = json.loads((out / MANIFEST).read_text())
    data["pipeline"]["prompts"][kind] = "fox "
    write_json(out / MANIFEST, data)
    report = verify_folder(out, folder, device="cpu", modes=["eager"])
    assert report.tokenizer
    assert [cell for cell in report.cells if cell.quantity == "token vectors" and not cell.passed]


def test_the_gate_sees_wrong_weights(tmp_path: Path) -> None:
    folder = saved(base(tmp_path / "base"), tmp_path / "saved")
    out = load(folder).artifact.folder
    weights = load_file(out / "model.safetensors")
    name = next(name for name in weights if name.startswith("head."))
    save_file(weights | {name: weights[name] * 1.001 + 0.001}, out / "model.safetensors", {"format": "pt"})
    assert not verify_folder(out, folder, device="cpu", modes=["eager"]).passed


def test_a_library_that_lacks_the_class(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sentence_transformers, "MultiVectorEncoder")
    with pytest.raises(
        MissingDependencyError, match=r"sentence-transformers 6\.0 or newer, for its MultiVectorEncoder"
    ):
        toolkit.convert(str(native), tmp_path / "out")


def test_commands(run: Callable[..., Result], native: Path, tmp_path: Path) -> None:
    runner = load(native)
    out = runner.artifact.folder
    texts = ["the quick fox", "a b"]
    stdin = "\n".join(texts) + "\n"
    for words, kind in (([], "document"), (["--kind", "document"], "document"), (["--kind", "query"], "query")):
        result = run("embed", out, *EAGER, *words, stdin=stdin)
        assert result.status == 0
        lines = [json.loads(line) for line in result.out.splitlines()]
        expected = [x.tolist() for x in runner.multi_vectors(texts, kind)]  # type: ignore[arg-type]
        assert [len(line) for line in lines] == [len(x) for x in expected]
        assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(lines, expected, strict=True))
        document = json.loads(run("embed", out, *EAGER, *words, "--json", stdin=stdin).out)
        assert document == {"texts": texts, "vectors": lines}
    assert_one_error_line(run("embed", out, *EAGER, "--kind", "passage", stdin=stdin), "kind 'passage' is unknown")
    for words in (["--truncate-dim", "4"], ["--similarity"]):
        assert_one_error_line(run("embed", out, *EAGER, *words, stdin=stdin), "one vector a text", "each token")
    other = load(make_checkpoint(tmp_path / "c", BERT)).artifact.folder
    assert_one_error_line(run("embed", other, *EAGER, "--kind", "query", stdin=stdin), "--kind query", "multi-vector")
    prompted = run("embed", out, *EAGER, "--prompt", "one two ", stdin=stdin)
    assert [len(json.loads(line)) for line in prompted.out.splitlines()] == [6, 6]

"""Texts to ids: limits, lower-casing, stored padding, degenerate texts; compared with sentence-transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, normalizers, processors
from transformers import AddedToken, PreTrainedTokenizerFast

import toolkit
from tests.converted import load, reference
from tests.tiny import edit_json, make_tokenizer
from toolkit.errors import CheckpointError, InputError, ToolkitError, UnsupportedError
from toolkit.runner import Runner
from toolkit.tokenizer import text_limit

HIDDEN, POSITIONS = 40, 24
CLS, SEP, PAD, UNK = 2, 3, 0, 1
VOCAB = make_tokenizer().get_vocab()


def ids(runner: Runner, texts: Sequence[str]) -> list[list[int]]:
    return [row.ids.tolist() for row in runner.rows(list(texts), "")]


def reference_ids(model: SentenceTransformer, texts: Sequence[str]) -> list[list[int]]:
    return [model.preprocess([text])["input_ids"][0].tolist() for text in texts]


def words(count: int) -> str:
    return " ".join(["one two three fox".split()[k % 4] for k in range(count)])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("tokenizer_limit", [12, 10**30, float("inf"), None])
@pytest.mark.parametrize("max_seq_length", [6, None, 1000])
def test_the_same_length_limit_rules_as_in_sentence_transformers(
    checkpoint: Callable[..., Path], max_seq_length: int | None, tokenizer_limit: float | None, side: str
) -> None:
    """E4, A3: max_seq_length, else the smaller of tokenizer and position table; above the table clamp and warn."""
    options = {} if max_seq_length is None else {"max_seq_length": max_seq_length}
    folder = checkpoint(sentence_config=options)
    stored = ... if tokenizer_limit is None else tokenizer_limit
    edit_json(folder / "tokenizer_config.json", truncation_side=side, model_max_length=stored)
    runner, model = load(folder), reference(folder)
    wanted = max_seq_length or int(min(tokenizer_limit or POSITIONS, POSITIONS))
    limit = min(wanted, POSITIONS)
    warnings = [w for w in runner.artifact.manifest.warnings if f"{wanted} tokens" in w and str(POSITIONS) in w]
    assert len(warnings) == (wanted > POSITIONS)
    assert runner.artifact.manifest.tokenizer.limit == limit
    texts = [words(n) for n in (limit - 3, limit - 2, limit - 1, 10 * limit)]
    if wanted > POSITIONS:  # the reference would read past its table: give it the clamped limit
        assert len(reference_ids(model, texts)[-1]) > POSITIONS
        model.max_seq_length = limit
    ours = ids(runner, texts)
    assert ours == reference_ids(model, texts)
    assert [len(row) for row in ours] == [limit - 1, limit, limit, limit]
    assert all((row[0], row[-1]) == (CLS, SEP) for row in ours)
    vectors = torch.as_tensor(model.encode(texts, convert_to_tensor=True))
    torch.testing.assert_close(runner.embed(texts), vectors, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("configured", "tokenizer_limit", "usable", "limit", "clamped"),
    [
        (None, 10**30, 24, 24, False),
        (None, 12, 24, 12, False),
        (18, 12, 24, 18, False),
        (24, 12, 24, 24, False),
        (25, 12, 24, 24, True),
        (None, 10**30, 22, 22, True),
        (None, 23, 22, 22, True),
        (22, 10**30, 22, 22, False),
    ],
)
def test_text_limit(configured: int | None, tokenizer_limit: int, usable: int, limit: int, clamped: bool) -> None:
    """E4, A3: a table of 24 rows of which `usable` can be used."""
    found, warnings = text_limit(configured, tokenizer_limit, POSITIONS, usable)
    assert (found, len(warnings)) == (limit, clamped)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_limit_that_special_tokens_fill_never_gives_rows_above_the_table(
    checkpoint: Callable[..., Path], limit: int
) -> None:
    """E4, F2: below the number of special tokens `tokenizers` silently cuts nothing."""
    folder = checkpoint(sentence_config={"max_seq_length": limit})
    try:
        runner = load(folder)
        vectors = runner.embed([words(100), "a"])
    except ToolkitError:
        return
    assert torch.isfinite(vectors).all()
    assert max(len(row) for row in ids(runner, [words(100)])) <= POSITIONS


@pytest.mark.parametrize("limit", [-1, "many"])
def test_impossible_tokenizer_limit(checkpoint: Callable[..., Path], limit: object) -> None:
    """E4: refused by name when converting, not a crash when loading."""
    folder = checkpoint()
    edit_json(folder / "tokenizer_config.json", model_max_length=limit)
    with pytest.raises(CheckpointError):
        load(folder)


NORMALIZERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "own": normalizers.Lowercase,
    "bert": lambda: normalizers.BertNormalizer(lowercase=True),
    "replace": lambda: normalizers.Replace("dog", "fox"),
    "cased bert": lambda: normalizers.BertNormalizer(lowercase=False),
    "sequence": lambda: normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()]),
    "cased sequence": lambda: normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
    "replace, bert": lambda: normalizers.Sequence(
        [normalizers.Replace("T", "x"), normalizers.BertNormalizer(lowercase=True)]
    ),
}


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("lower", [True, False, None])
def test_do_lower_case_means_lower_the_text(
    checkpoint: Callable[..., Path], lower: bool | None, normalizer: str
) -> None:
    """E5: on top of the tokenizer's own rules; a literal special token in the text stays one token."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = NORMALIZERS[normalizer]()  # type: ignore[assignment]
    options = {} if lower is None else {"do_lower_case": lower}
    folder = checkpoint(tokenizer=tokenizer, sentence_config=options)
    texts = ["THE fox", "[SEP] fox", "the [MASK] FOX [sep]", "THÉ", " The QUICK ", "the DOG"]
    ours = ids(load(folder), texts)
    assert ours == reference_ids(reference(folder), texts)
    own = normalizer in ("own", "bert", "sequence")
    if normalizer != "replace, bert":
        assert ours[0] == [CLS, VOCAB["the"] if lower or own else UNK, VOCAB["fox"], SEP]
    assert ours[1] == [CLS, SEP, VOCAB["fox"], SEP]


@pytest.mark.parametrize("padding", [{"length": 16}, {"pad_to_multiple_of": 8}, {"direction": "left", "length": 9}])
@pytest.mark.parametrize("truncation", [None, 3, 5])
def test_stored_padding_and_truncation_are_cleared(
    checkpoint: Callable[..., Path], padding: dict[str, Any], truncation: int | None
) -> None:
    """F3: neither extra pad ids nor a stray limit; a pad token that the user typed is still a token."""
    folder = checkpoint()
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.enable_padding(pad_id=PAD, pad_token="[PAD]", **padding)
    if truncation is not None:
        raw.enable_truncation(truncation)
    raw.save(str(folder / "tokenizer.json"))
    runner, model = load(folder), reference(folder)
    texts = ["the fox", words(20), "[PAD] fox [PAD]", "a"]
    ours = ids(runner, texts)
    assert ours == reference_ids(model, texts)
    assert [len(row) for row in ours] == [4, 22, 5, 3]
    assert ours[2] == [CLS, PAD, VOCAB["fox"], PAD, SEP]
    written = json.loads((runner.artifact.folder / "tokenizer.json").read_text())
    assert (written["padding"], written["truncation"]) == (None, None)
    # one by one: the reference's own left padding moves BERT's positions (trap 1)
    expected = torch.cat([torch.as_tensor(model.encode([text], convert_to_tensor=True)) for text in texts])
    torch.testing.assert_close(runner.embed(texts), expected, rtol=0, atol=1e-5)


def test_the_configured_pad_id_is_an_ordinary_token(bert_checkpoint: Path, bert_artifact: Path) -> None:
    """F3: pad_token_id 7 among the caller's ids is attended to like any other."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(bert_checkpoint).eval()
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    given = [7, 5, 7, 0, 7]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([given]), attention_mask=torch.ones(1, 5)).last_hidden_state[0]
    torch.testing.assert_close(runner.token_states(toolkit.TokenIds(given))[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("texts", [[""], ["", "a b"], ["   "], ["\n\t"], ["", ""], ["a b", "", "fox", ""], "the fox"])
def test_degenerate_texts_equal_sentence_transformers(
    bert_checkpoint: Path, bert_artifact: Path, texts: list[str] | str
) -> None:
    """F4."""
    vectors = toolkit.load(bert_artifact, device="cpu", mode="eager").embed(texts)
    expected = torch.as_tensor(reference(bert_checkpoint).encode(texts, convert_to_tensor=True)).reshape(-1, HIDDEN)
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


def test_no_texts(bert_artifact: Path) -> None:
    """F4."""
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    assert runner.embed([]).shape == (0, HIDDEN)
    assert runner.embed([]).dtype == torch.float32
    assert runner.token_states([]) == []


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_text_without_tokens_is_a_zero_vector_and_leaves_the_others_alone(
    checkpoint: Callable[..., Path], pooling: str
) -> None:
    """F4: a tokenizer without special tokens; sentence-transformers' mixed batch gives zeros for mean pooling."""
    folder = checkpoint(tokenizer=make_tokenizer(special_tokens=False), pooling=pooling)
    runner, model = load(folder), reference(folder)
    texts = ["", "the fox", "   ", "a"]
    vectors = runner.embed(texts)
    assert torch.equal(vectors[[0, 2]], torch.zeros(2, HIDDEN))
    assert torch.equal(runner.embed([""]), torch.zeros(1, HIDDEN))
    assert torch.equal(runner.embed(["", "", ""]), torch.zeros(3, HIDDEN))
    alone = torch.cat([runner.embed(texts[k]) for k in (1, 3)])
    torch.testing.assert_close(vectors[[1, 3]], alone, rtol=0, atol=1e-6)
    expected = torch.as_tensor(model.encode(["the fox", "a"], convert_to_tensor=True))
    torch.testing.assert_close(vectors[[1, 3]], expected, rtol=0, atol=1e-5)
    if pooling == "mean":
        assert torch.equal(torch.as_tensor(model.encode(texts, convert_to_tensor=True))[0], vectors[0])
    assert [len(states) for states in runner.token_states(texts)] == [0, 2, 0, 1]


@pytest.mark.parametrize("emits", [True, False])
def test_segment_ids_only_if_the_tokenizer_emits_them(checkpoint: Callable[..., Path], emits: bool) -> None:
    """G1, trap 5: what the loaded tokenizer yields; zeros if it yields none, whatever its template says."""
    tokenizer = make_tokenizer(segments=emits)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS]:1 $A:2 [SEP]:0", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    folder = checkpoint(tokenizer=tokenizer)
    runner, model = load(folder), reference(folder)
    assert ("token_type_ids" in model.preprocess(["the fox"])) == emits
    assert runner.rows("the fox", "")[0].segments.tolist() == ([1, 2, 2, 0] if emits else [0, 0, 0, 0])
    expected = torch.as_tensor(model.encode(["the fox"], convert_to_tensor=True))
    torch.testing.assert_close(runner.embed("the fox"), expected, rtol=0, atol=1e-5)


def test_segment_ids_of_the_tokenizer_outside_of_the_table(checkpoint: Callable[..., Path]) -> None:
    """G1: a clear error instead of a read past the table."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A:5 [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    with pytest.raises(ToolkitError, match="segment"):
        load(checkpoint(tokenizer=tokenizer)).embed("the fox")


def test_tokenizer_vocabulary_larger_than_the_table(checkpoint: Callable[..., Path]) -> None:
    """F4: an id that the table lacks is refused on the host, naming the input; others pass."""
    runner = load(checkpoint(overrides={"vocab_size": VOCAB["two"]}))
    assert runner.embed("one").shape == (1, HIDDEN)
    with pytest.raises(InputError, match=f"1.*id {VOCAB['three']}.*{VOCAB['two']}"):
        runner.embed(["one", "three"])
    with pytest.raises(InputError):
        runner.embed("two")
    assert runner.embed("one").shape == (1, HIDDEN)


def test_an_error_in_a_text_names_the_input(checkpoint: Callable[..., Path]) -> None:
    """F4: counted among all inputs, not among the texts."""
    runner = load(checkpoint(overrides={"vocab_size": VOCAB["two"]}))
    with pytest.raises(InputError, match=r"^(input|text) 2\b"):
        runner.embed([toolkit.TokenIds([5]), "one", "two"])


def test_tokenizer_vocabulary_smaller_than_the_table(bert_artifact: Path) -> None:
    """F4: ids above the tokenizer's vocabulary are fine as ids."""
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    assert runner.limits.vocab_size > len(VOCAB)
    assert runner.embed(toolkit.TokenIds([runner.limits.vocab_size - 1])).isfinite().all()


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b"])
def test_texts_that_are_not_unicode(bert_artifact: Path, text: str) -> None:
    """F4: a lone surrogate is an InputError that names the input."""
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    with pytest.raises(InputError, match=r"(input|text) 1"):
        runner.embed(["a", text])
    assert runner.embed("a\0b").isfinite().all()


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: [(folder / name).unlink() for name in ("tokenizer.json", "tokenizer_config.json")],
        _write("tokenizer.json", ""),
        _write("tokenizer.json", "{"),
        _write("tokenizer.json", "{}"),
        _write("tokenizer.json", "[]"),
        _write("tokenizer.json", '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "u"}}'),
        _write("tokenizer.json", LFS),
        _write("tokenizer_config.json", "{"),
        _write("tokenizer_config.json", "[]"),
        _write("tokenizer_config.json", LFS),
        _write("special_tokens_map.json", "{"),
        _write("added_tokens.json", "{"),
        lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff\xfe\x00"),
    ],
    ids="missing empty cut object list model lfs config-cut config-list config-lfs special added binary".split(),
)
def test_missing_or_broken_tokenizer_files(
    checkpoint: Callable[..., Path], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = checkpoint()
    damage(folder)
    with pytest.raises((CheckpointError, UnsupportedError)) as caught:
        toolkit.convert(str(folder), tmp_path / "out", verify=False)
    assert "token" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"])
def test_tokenizer_files_that_link_out_of_the_checkpoint(
    checkpoint: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    """O2: a link that leaves the folder is refused before anything reads it, whichever file it is."""
    folder, outside = checkpoint(), tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leaves"):
        toolkit.convert(str(folder), tmp_path / "out", verify=False)


@pytest.mark.parametrize("class_name", ["evil.Thing", "os.system", "NoSuchTokenizer"])
def test_tokenizer_class_names_are_never_imported(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, class_name: str
) -> None:
    """O2."""
    folder, marker = checkpoint(), tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(folder))
    edit_json(folder / "tokenizer_config.json", tokenizer_class=class_name)
    try:
        runner = load(folder)
    except (CheckpointError, UnsupportedError):
        pass
    else:
        assert ids(runner, ["the fox"]) == [[CLS, VOCAB["the"], VOCAB["fox"], SEP]]
    assert not marker.exists()


def test_added_tokens_survive(checkpoint: Callable[..., Path]) -> None:
    """F1: tokens that were added to the tokenizer are single ids in the artifact too."""
    tokenizer: PreTrainedTokenizerFast = make_tokenizer()
    tokenizer.add_tokens([AddedToken("New York", normalized=False), AddedToken("<x>", special=True)])
    folder = checkpoint(tokenizer=tokenizer)
    texts = ["the New York fox", "<x>fox", "new york"]
    ours = ids(load(folder), texts)
    assert ours == reference_ids(reference(folder), texts)
    assert ours[0] == [CLS, VOCAB["the"], len(VOCAB), VOCAB["fox"], SEP]

"""What callers of a decoder pass: every defect is an error that names the input, and harms nobody else."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import toolkit
from tests.test_inputs import BAD_EMBEDS, BAD_IDS, VIEWS, VOCAB, WIDTH, embeds
from tests.tiny import edit_json, make_decoder, make_tokenizer
from toolkit import CacheOptions, DecoderRunner, MixedPrompt, PromptEmbeds, TokenIds
from toolkit.errors import InputError
from toolkit.parity.references import CausalReference
from toolkit.registry import find_recipe
from toolkit.rows import Input

LLAMA = find_recipe("llama").recipe
IDS = make_tokenizer().get_vocab()
GOOD: list[Input] = [TokenIds([5, 6, 7]), "the fox", PromptEmbeds(embeds(9))]


def load(source: Path, out: Path) -> DecoderRunner:
    toolkit.convert(str(source), out, verify=False)
    runner: Any = toolkit.load(out, device="cpu", mode="eager", cache=CacheOptions(page=4))
    return runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> DecoderRunner:
    """Made for 24 tokens, as the model is for which the defects are written down."""
    folder = tmp_path_factory.mktemp("llama")
    make_decoder(folder / "m", LLAMA, tied=False, overrides={"max_position_embeddings": 24})
    return load(folder / "m", folder / "out")


@pytest.fixture
def refused(runner: DecoderRunner) -> Iterator[Callable[[Any, str], None]]:
    """Check that an input is refused at its place among good ones, quickly, and that the next request works."""
    expected = runner.generate(GOOD, 4, ignore_eos=True)

    def check(bad: Any, words: str) -> None:
        begin = time.perf_counter()
        for run in (runner.generate, runner.stream):
            with pytest.raises(InputError, match=rf"(?s)input 3\b.*{words}"):
                run([*GOOD, bad, *GOOD], 4)
        with pytest.raises(InputError, match=rf"(?s)input 0\b.*{words}"):
            runner.token_states([bad])
        assert not runner.engine.busy
        assert time.perf_counter() - begin < 2

    yield check
    assert runner.generate(GOOD, 4, ignore_eos=True) == expected
    assert runner.stats.free_pages == runner.stats.pages


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", BAD_EMBEDS)
def test_embeds_that_are_refused(refused: Callable[[Any, str], None], kind: str) -> None:
    """L3: on the host, before a request is taken on; alone and within a prompt."""
    make, words = BAD_EMBEDS[kind]
    refused(PromptEmbeds(make()), words)
    refused(MixedPrompt([TokenIds([1]), PromptEmbeds(make())]), words)


@pytest.mark.parametrize("kind", BAD_IDS)
def test_ids_that_are_refused(refused: Callable[[Any, str], None], kind: str) -> None:
    """F4: an id that the table does not have never reaches the device."""
    make, words = BAD_IDS[kind]
    refused(TokenIds(make()), words)


@pytest.mark.parametrize("segments", [[1, 0, 0], [0, 0], [0, -1, 0]])
@pytest.mark.parametrize("path", ["ids", "embeds"])
def test_segments_that_are_refused(refused: Callable[[Any, str], None], path: str, segments: list[int]) -> None:
    """G1: a decoder has no table for them, so all are zero; they are never dropped in silence."""
    refused(TokenIds([5, 6, 7], segments) if path == "ids" else PromptEmbeds(embeds(), segments), "segment")


def test_segments_of_zeros_are_none(runner: DecoderRunner) -> None:
    """G1."""
    zeros, none = TokenIds([5, 6, 7], [0, 0, 0]), TokenIds([5, 6, 7])
    assert torch.equal(runner.logits(zeros)[0], runner.logits(none)[0])


@pytest.mark.parametrize("kind", VIEWS)
def test_views_are_what_they_show(runner: DecoderRunner, kind: str) -> None:
    """L3: layout in memory does not matter, nor for the prefix cache."""
    view = VIEWS[kind]()
    copy = torch.tensor(view.tolist())
    assert copy.shape == (3, WIDTH)
    prompts = [MixedPrompt([TokenIds([5, 6]), PromptEmbeds(values), TokenIds([7])]) for values in (view, copy)]
    runner.engine = runner.make_engine()
    first, second = (runner.generate(prompt, 6, ignore_eos=True) for prompt in prompts)
    assert first == second
    assert runner.stats.cached_tokens == 4, "the second one's first page is the first one's"
    assert torch.equal(runner.logits(prompts[0])[0], runner.logits(prompts[1])[0])


def test_the_last_id_of_the_table(runner: DecoderRunner) -> None:
    """F4: also one that the tokenizer does not have; what it becomes as text is no error."""
    assert len(IDS) < VOCAB
    (one,) = runner.generate(TokenIds([0, VOCAB - 1]), 12, ignore_eos=True)
    assert len(one.token_ids) == 12
    assert any(token >= len(IDS) for token in one.token_ids)


def test_a_tokenizer_with_more_words_than_the_table(tmp_path: Path) -> None:
    """F4: the text that has such a word is named, and the others are served."""
    make_decoder(tmp_path / "m", LLAMA, overrides={"vocab_size": IDS["two"], "pad_token_id": 0})
    runner = load(tmp_path / "m", tmp_path / "out")
    expected = runner.generate("one", 3)
    for text in ("two", "one three"):
        with pytest.raises(InputError, match=rf"(text|input) 1\b.*{IDS['two']}"):
            runner.generate(["one", text, "one"], 3)
    assert runner.generate("one", 3) == expected
    with pytest.raises(InputError, match=rf"(text|input) 2\b.*{IDS['three']}"):
        runner.generate([TokenIds([5]), "one", "three"], 3)


def test_texts_are_never_cut(tmp_path: Path) -> None:
    """F2, F3: neither by the tokenizer's own limit nor by one that its file holds; what is too long is refused."""
    tokenizer = make_tokenizer(segments=False, limit=6)
    source = make_decoder(tmp_path / "m", LLAMA)
    tokenizer.save_pretrained(source)
    raw = Tokenizer.from_file(str(source / "tokenizer.json"))
    raw.enable_truncation(5)
    raw.save(str(source / "tokenizer.json"))
    runner = load(source, tmp_path / "out")
    reference = CausalReference(source, torch.float32, torch.device("cpu"))
    for words in (3, 4, 5, 23):
        text = " ".join(["fox"] * words)
        assert runner.rows(text)[0].ids.tolist() == reference.ids(text) == [2, *[IDS["fox"]] * words, 3]
        assert runner.generate(text, 1)[0].prompt_tokens == words + 2
    for words, new in ((24, 1), (23, 2)):
        with pytest.raises(InputError, match=f"{words + 2} prompt tokens and max_new_tokens = {new} are 27"):
            runner.generate(" ".join(["fox"] * words), new)
    with pytest.raises(InputError, match="27 tokens"):
        runner.generate(" ".join(["fox"] * 25), 1)


@pytest.mark.parametrize("padding", [{"length": 16}, {"pad_to_multiple_of": 8}, {"direction": "left", "length": 9}])
def test_stored_padding_is_cleared(tmp_path: Path, padding: dict[str, Any]) -> None:
    """F3: a prompt has its own tokens only; a pad token that is written out is one of them."""
    source = make_decoder(tmp_path / "m", LLAMA)
    raw = Tokenizer.from_file(str(source / "tokenizer.json"))
    raw.enable_padding(pad_id=0, pad_token="[PAD]", **padding)
    raw.save(str(source / "tokenizer.json"))
    edit_json(source / "tokenizer_config.json", padding_side="left")
    runner = load(source, tmp_path / "out")
    texts = ["the fox", "[PAD] fox [PAD]", "a"]
    assert [row.ids.tolist() for row in runner.rows(texts)] == [
        [2, IDS["the"], IDS["fox"], 3],
        [2, 0, IDS["fox"], 0, 3],
        [2, IDS["a"], 3],
    ]
    together = runner.generate(texts, 5, ignore_eos=True)
    assert together == [runner.generate(text, 5, ignore_eos=True)[0] for text in texts]


def test_the_configured_pad_id_is_an_ordinary_token(runner: DecoderRunner, tmp_path: Path) -> None:
    """F3: the reference, told to attend to it, has the same logits."""
    source = make_decoder(tmp_path / "m", LLAMA, tied=False, overrides={"max_position_embeddings": 24})
    assert LLAMA.tiny["pad_token_id"] == 7
    reference = CausalReference(source, torch.float32, torch.device("cpu"))
    for ids in ([7], [7, 5, 7], [5, 7, 7]):
        torch.testing.assert_close(runner.logits(TokenIds(ids))[0], reference.logits(ids), rtol=0, atol=1e-4)

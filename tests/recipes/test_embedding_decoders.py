"""Decoders as embedding models: every pooling, either side of padding, and ends that truncation must spare."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import toolkit
from tests.tiny import POOLING_KEYS, edit_json, make_checkpoint, make_tokenizer
from toolkit import PromptEmbeds, TokenIds
from toolkit.recipe import Recipe
from toolkit.registry import find_recipe

LLAMA, QWEN3, GPT2 = (find_recipe(name).recipe for name in ("llama", "qwen3", "gpt2"))
WORDS = "the quick brown fox jumps over lazy dog".split()
LENGTHS = (23, 22, 9, 2, 1)  # words: the first fills the limit of 24, the special token included


def text(words: int, first: int = 0) -> str:
    return " ".join(WORDS[(first + k) % len(WORDS)] for k in range(words))


def encode(model: SentenceTransformer, texts: list[str], size: int = 32) -> Tensor:
    return torch.as_tensor(model.encode(texts, batch_size=size, convert_to_tensor=True, show_progress_bar=False))


def load(folder: Path, out: Path) -> Any:
    toolkit.convert(str(folder), out, "embed", verify=False)
    return toolkit.load(out, device="cpu", mode="eager")


def with_end(end: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(segments=False)
    names = [(word, tokenizer.convert_tokens_to_ids(word)) for word in end.split() if word != "$A"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=end, special_tokens=list(dict.fromkeys(names))
    )
    return tokenizer


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", [*POOLING_KEYS, "all"])
@pytest.mark.parametrize("recipe", [QWEN3, LLAMA, GPT2], ids=lambda recipe: recipe.model_type)
def test_poolings(recipe: Recipe, mode: str, side: str, tmp_path: Path) -> None:
    """D1, D2, D4: the longest text, one less, and one word; packed as alone, and as the library pads them."""
    tokenizer = with_end("$A [SEP]")
    tokenizer.padding_side = side
    limit = {"max_seq_length": 24}
    one = "mean" if mode == "all" else mode
    folder = make_checkpoint(
        tmp_path / "m", recipe, pooling=one, normalize=False, tokenizer=tokenizer, sentence_config=limit
    )
    if mode == "all":
        every = dict.fromkeys((f"pooling_mode_{key}" for key in POOLING_KEYS.values()), True)
        edit_json(folder / "1_Pooling" / "config.json", **every)
    texts = [text(length, first) for first, length in enumerate(LENGTHS)]
    model, runner = SentenceTransformer(str(folder), device="cpu"), load(folder, tmp_path / "out")
    alone = torch.cat([encode(model, [one]) for one in texts])
    ours = runner.embed(texts)
    assert ours.shape == (len(texts), (len(POOLING_KEYS) if mode == "all" else 1) * 40)
    assert len({tuple(row) for row in ours.round(decimals=3).tolist()}) == len(texts)
    torch.testing.assert_close(ours, alone, rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.cat([runner.embed(one) for one in texts]), ours, rtol=0, atol=1e-5)
    if recipe is not GPT2:  # whose positions the library counts from the padding on
        torch.testing.assert_close(encode(model, texts), ours, rtol=0, atol=2e-5)


@pytest.mark.parametrize("path", ["ids", "embeds"])
def test_the_last_token_of_what_callers_pass(path: str, tmp_path: Path) -> None:
    """D2: of ids and embeddings too, nothing is added and the last one is pooled."""
    folder = make_checkpoint(tmp_path / "m", QWEN3, pooling="lasttoken", normalize=False)
    runner = load(folder, tmp_path / "out")
    ids = [[5, 6, 7], [9], list(range(26)), [7, 7]]
    given = [TokenIds(one) if path == "ids" else PromptEmbeds(runner.embed_tokens(one)) for one in ids]
    states = runner.token_states([TokenIds(one) for one in ids])
    torch.testing.assert_close(runner.embed(given), torch.stack([x[-1] for x in states]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("end", ["$A [SEP]", "$A [SEP] [MASK] [CLS]", "[CLS] $A [SEP] [SEP]"])
def test_truncation_spares_the_end(end: str, tmp_path: Path) -> None:
    """F2: a limit of 10; whatever the tokenizer puts behind a text is there at every length, and is pooled."""
    folder = make_checkpoint(
        tmp_path / "m", QWEN3, pooling="lasttoken", tokenizer=with_end(end), sentence_config={"max_seq_length": 10}
    )
    model, runner = SentenceTransformer(str(folder), device="cpu"), load(folder, tmp_path / "out")
    last = [make_tokenizer().convert_tokens_to_ids(word) for word in end.split("$A ")[1].split()]
    for words in (6, 7, 8, 9, 10, 11, 50):
        (row,) = runner.rows([text(words)], "")
        assert row.ids.tolist()[-len(last) :] == last
        assert len(row) == min(words + len(end.split()) - 1, 10)
        assert row.ids.tolist() == model.preprocess([text(words)])["input_ids"][0].tolist()
    texts = [text(words) for words in (50, 3, 10)]
    theirs = torch.cat([encode(model, [one]) for one in texts])
    torch.testing.assert_close(runner.embed(texts), theirs, rtol=0, atol=1e-5)


def test_a_text_without_tokens_is_a_zero_vector(tmp_path: Path) -> None:
    """F4: and leaves the others alone."""
    tokenizer = make_tokenizer(special_tokens=False, segments=False)
    folder = make_checkpoint(tmp_path / "m", QWEN3, pooling="lasttoken", tokenizer=tokenizer)
    runner = load(folder, tmp_path / "out")
    found = runner.embed(["", "the fox", "  ", "a"])
    assert torch.equal(found[[0, 2]], torch.zeros(2, 40))
    torch.testing.assert_close(found[[1, 3]], runner.embed(["the fox", "a"]), rtol=0, atol=1e-6)
    assert runner.embed([]).shape == (0, 40)

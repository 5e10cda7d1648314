"""How inputs become rows, and rows become groups: every one once, texts when their turn comes."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import toolkit
from toolkit import TokenIds, rows
from toolkit.errors import InputError
from toolkit.inputs import Row
from toolkit.rows import Rows, group_rows, without_padding
from toolkit.tokenizer import Pair


def row(length: int, *, embeds: bool = False) -> Row:
    ids = np.zeros(length, np.int32)
    return Row(ids=ids, segments=ids, embeds=((0, torch.zeros(length, 2)),) if embeds and length else ())


def encode(texts: Mapping[int, str | Pair]) -> dict[int, Row]:
    return {number: row(len(text)) for number, text in texts.items()}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_CHUNK_CHARACTERS", 20)
    monkeypatch.setattr(rows, "_CHUNK_TEXTS", 2)


@pytest.mark.usefixtures("small_chunks")
def test_the_longest_texts_come_first_beside_what_needs_no_tokenizer() -> None:
    lengths = [1, 30, 3, 12, 9, 0, 2]
    texts: dict[int, str | Pair] = {number: "x" * length for number, length in enumerate(lengths)}
    texts[3] = ("x" * 7, "x" * 5)
    made = Rows({7: row(4)}, texts, encode, empty=True)
    chunks = list(made.chunks())
    assert [list(chunk) for chunk in chunks] == [[7, 1, 3], [4, 2, 6, 0, 5]]
    assert len(made) == 8
    # a pair has two texts, so this tokenizer makes two tokens of it
    assert [len(r) for r in made.all()] == [1, 30, 3, 2, 9, 0, 2, 4]


@pytest.mark.usefixtures("small_chunks")
def test_a_chunk_has_work_for_several_threads() -> None:
    """However long its texts are."""
    made = Rows({}, dict.fromkeys(range(5), "x" * 100), encode, empty=True)
    assert [len(chunk) for chunk in made.chunks()] == [2, 2, 1]


@pytest.mark.parametrize("texts", [{}, {0: "x"}])
def test_few_inputs_are_one_chunk(texts: dict[int, str | Pair]) -> None:
    assert [dict(chunk).keys() for chunk in Rows({}, texts, encode, empty=True).chunks()] == [texts.keys()]


def test_a_text_without_tokens_is_named_where_it_is_not_allowed() -> None:
    with pytest.raises(InputError, match="input 1 has no tokens"):
        list(Rows({}, {0: "xx", 1: ""}, encode, empty=False).chunks())


LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=40)


@given(chunks=st.lists(LENGTHS, max_size=4), most=st.integers(40, 120))
def test_every_row_is_in_one_group(chunks: list[list[tuple[int, bool]]], most: int) -> None:
    """Groups are never too large; kinds share one only where all fits into one."""
    numbers = iter(range(1000))
    given = [{next(numbers): row(n, embeds=embeds) for n, embeds in chunk} for chunk in chunks]
    all_rows = {number: r for chunk in given for number, r in chunk.items()}
    groups = list(group_rows(given, most))
    found = [number for group in groups for number in group]
    assert sorted(found) == sorted(number for number, r in all_rows.items() if len(r))
    for group in groups:
        assert group
        assert all(group[number] is all_rows[number] for number in group)
        assert sum(map(len, group.values())) <= most
        assert len({bool(r.embeds) for r in group.values()}) == 1 or len(groups) == 1


def test_rows_of_similar_length_are_together() -> None:
    lengths = [5, 40, 7, 38, 6, 39, 41, 8]
    groups = list(group_rows([{k: row(n) for k, n in enumerate(lengths)}], 120))
    assert [[len(r) for r in group.values()] for group in groups] == [[41, 40, 39], [38, 8, 7, 6, 5]]


def test_a_full_group_does_not_wait_for_later_texts() -> None:
    """So the device starts before the last text is tokenized."""
    read: list[int] = []

    def chunks() -> Iterator[dict[int, Row]]:
        for number in range(3):
            read.append(number)
            yield {10 * number + k: row(40) for k in range(4)}

    groups = group_rows(chunks(), 100)
    assert [len(next(groups)), len(read)] == [2, 1]
    assert [sum(map(len, group.values())) for group in groups] == [80] * 5
    assert read == [0, 1, 2]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_many_texts_are_as_each_alone(bert_artifact: Path, mode: str) -> None:
    runner = toolkit.load(bert_artifact, device="cpu", mode=mode, batch_tokens=64)
    words = "the quick brown fox jumps over lazy dog".split()
    texts = [" ".join(words[: 1 + 5 * k % 8]) for k in range(23)]
    inputs = [*texts[:9], TokenIds([2, 9, 3]), "", *texts[9:]]
    expected = torch.cat([runner.embed([item]) for item in inputs])
    assert (runner.embed(inputs) - expected).abs().max() < 1e-5
    assert runner.embed([]).shape == (0, 40)


def test_a_bad_prompt_is_blamed_and_not_an_input(bert_artifact: Path) -> None:
    runner = toolkit.load(bert_artifact, device="cpu", mode="eager")
    with pytest.raises(InputError, match="prompt: not valid Unicode"):
        runner.embed(["a", "b"], prompt="\ud800")


def test_a_row_that_is_longer_than_a_group_makes_its_own() -> None:
    groups = list(group_rows([{k: row(n) for k, n in enumerate([50, 10, 9])}], 20))
    assert [[len(r) for r in group.values()] for group in groups] == [[50], [10, 9]]


@pytest.mark.parametrize(
    ("ids", "left"),
    [
        ([], 0),
        ([3], 1),
        ([7], 1),
        ([7, 7, 7], 1),
        ([7, 3], 2),
        ([3, 7], 1),
        ([7, 3, 7, 5, 7, 7], 4),
    ],
)
def test_rows_without_padding(ids: list[int], left: int) -> None:
    """D2: what is at the end; of nothing but padding the first token is left."""
    numbers = np.array(ids, np.int32)
    made = without_padding(Row(ids=numbers, segments=numbers + 1, embeds=()), 7)
    assert made.ids.tolist() == ids[:left]
    assert made.segments.tolist() == [id + 1 for id in ids[:left]]


def test_rows_with_embeddings_stay_whole() -> None:
    given = row(3, embeds=True)
    assert without_padding(given, 0) is given

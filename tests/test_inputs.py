"""Validation of what callers pass: every defect is an InputError that names the input, and harms nobody else."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit
from toolkit import MixedPrompt, PromptEmbeds, TokenIds
from toolkit.errors import InputError
from toolkit.inputs import Limits, check_row
from toolkit.runner import Runner

VOCAB, SEGMENTS, WIDTH, LENGTH = 61, 3, 40, 24
LIMITS = Limits(vocab_size=VOCAB, segments=SEGMENTS, width=WIDTH, length=LENGTH, dtype=torch.float32)
GOOD = [TokenIds([5, 6, 7]), "the fox"]


@pytest.fixture(scope="module")
def runner(bert_artifact: Path) -> Runner:
    return toolkit.load(bert_artifact, device="cpu", mode="eager")


@pytest.fixture(scope="module")
def half_runner(bert_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    out = tmp_path_factory.mktemp("half") / "bert"
    toolkit.convert(str(bert_checkpoint), out, dtype="bfloat16", verify=False)
    return toolkit.load(out, device="cpu", mode="eager")


def embeds(rows: int = 3, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)


def with_value(value: float) -> torch.Tensor:
    tensor = embeds()
    tensor[1, 7] = value
    return tensor


@pytest.fixture
def refused(runner: Runner) -> Iterator[Callable[[Any, str], None]]:
    """Check that an input is refused at its place among good ones, quickly, and that the next request works."""
    expected = runner.embed(GOOD)

    def check(bad: Any, words: str) -> None:
        begin = time.perf_counter()
        for run in (runner.embed, runner.token_states):
            with pytest.raises(InputError, match=rf"(?s)input 2\b.*{words}"):
                run([*GOOD, bad, *GOOD])
        assert time.perf_counter() - begin < 2

    yield check
    assert torch.equal(runner.embed(GOOD), expected)


BAD_EMBEDS: dict[str, tuple[Callable[[], Any], str]] = {
    "narrow": (lambda: embeds(width=WIDTH - 1), r"\(3, 39\).*40"),
    "wide": (lambda: embeds(width=WIDTH + 1), r"\(3, 41\).*40"),
    "transposed": (lambda: torch.zeros(WIDTH, 3), r"\(40, 3\)"),
    "scalar": (lambda: torch.tensor(1.0), "shape"),
    "rank 1": (lambda: torch.zeros(WIDTH), "shape"),
    "rank 3": (lambda: embeds()[None], "shape"),
    "rank 4": (lambda: embeds()[None, None], "shape"),
    "no rows": (lambda: torch.zeros(0, WIDTH), "empty"),
    "no columns": (lambda: torch.zeros(3, 0), "shape"),
    "float64": (lambda: embeds().double(), "float64"),
    "int64": (lambda: torch.zeros(3, WIDTH, dtype=torch.int64), "int64"),
    "int8": (lambda: torch.zeros(3, WIDTH, dtype=torch.int8), "int8"),
    "bool": (lambda: torch.zeros(3, WIDTH, dtype=torch.bool), "bool"),
    "complex": (lambda: torch.zeros(3, WIDTH, dtype=torch.complex64), "complex64"),
    "float8 e4m3": (lambda: embeds(dtype=torch.float8_e4m3fn), "float8"),
    "float8 e5m2": (lambda: embeds(dtype=torch.float8_e5m2), "float8"),
    "quantized": (lambda: torch.quantize_per_tensor(embeds(), 0.1, 0, torch.qint8), "dense"),
    "meta": (lambda: torch.zeros(3, WIDTH, device="meta"), "meta"),
    "meta, huge": (lambda: torch.zeros(2**40, WIDTH, device="meta"), "meta"),
    "sparse": (lambda: embeds().to_sparse(), "sparse"),
    "sparse, huge": (lambda: torch.sparse_coo_tensor(torch.zeros(2, 1).long(), [1.0], (2**40, WIDTH)), "sparse"),
    "sparse, huge square": (lambda: torch.sparse_coo_tensor(torch.zeros(2, 1).long(), [1.0], (2**31, 2**31)), "dense"),
    "csr": (lambda: embeds().to_sparse_csr(), "sparse"),
    "nested": (lambda: torch.nested.nested_tensor([embeds(2), embeds(3)]), ""),
    "jagged": (lambda: torch.nested.nested_tensor([embeds(2), embeds(3)], layout=torch.jagged), "dense"),
    "expanded, huge": (lambda: torch.zeros(1, WIDTH).expand(2**40, WIDTH), "at most 24"),
    "expanded width": (lambda: torch.zeros(3, 1).expand(3, 2**40), "shape"),
    "NaN": (lambda: with_value(float("nan")), "not finite"),
    "inf": (lambda: with_value(float("inf")), "not finite"),
    "-inf": (lambda: with_value(float("-inf")), "not finite"),
    "NaN in bfloat16": (lambda: with_value(float("nan")).bfloat16(), "not finite"),
    "too long": (lambda: embeds(LENGTH + 1), "25 tokens.*at most 24"),
    "numpy": (lambda: embeds().numpy(), "ndarray"),
    "list": (lambda: embeds().tolist(), "list"),
    "None": (lambda: None, "NoneType"),
    "str": (lambda: "the fox", "str"),
    "bytes": (lambda: b"\x80\x04", "bytes"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", BAD_EMBEDS)
def test_embeds_that_are_refused(refused: Callable[[Any, str], None], kind: str) -> None:
    """L3: named on the host, before anything is copied, moved or densified; also inside a MixedPrompt."""
    make, words = BAD_EMBEDS[kind]
    refused(PromptEmbeds(make()), words)
    refused(MixedPrompt([TokenIds([1]), PromptEmbeds(make())]), words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("trained", [False, True])
def test_embeds_dtypes_are_cast_explicitly(runner: Runner, dtype: torch.dtype, trained: bool) -> None:
    """L3: float32, float16, bfloat16, and tensors that require a gradient."""
    tensor = embeds(dtype=dtype).requires_grad_(trained)
    states = runner.token_states(PromptEmbeds(tensor))[0]
    assert torch.equal(states, runner.token_states(PromptEmbeds(tensor.detach().float()))[0])
    assert not states.requires_grad


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: embeds(WIDTH, 3).T,
    "every other row": lambda: embeds(6)[::2],
    "column slice": lambda: embeds(3, WIDTH + 9)[:, 5 : 5 + WIDTH],
    "every other column": lambda: embeds(3, 2 * WIDTH)[:, ::2],
    "expanded row": lambda: embeds(1).expand(3, WIDTH),
    "expanded value": lambda: torch.tensor(0.5).expand(3, WIDTH),
    "offset": lambda: embeds(5)[2:],
    "column major": lambda: embeds().T.contiguous().T,
    "inference": torch.inference_mode()(embeds),
    "parameter": lambda: torch.nn.Parameter(embeds()),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_equal_contiguous_embeds(runner: Runner, kind: str) -> None:
    """L3: layout in memory does not matter."""
    view = VIEWS[kind]()
    copy = torch.tensor(view.tolist())
    assert torch.equal(runner.embed(PromptEmbeds(view)), runner.embed(PromptEmbeds(copy)))
    mixed = [MixedPrompt([TokenIds([5]), PromptEmbeds(tensor), TokenIds([6])]) for tensor in (view, copy)]
    assert torch.equal(runner.embed(mixed[0]), runner.embed(mixed[1]))


def test_embeds_are_not_changed(runner: Runner) -> None:
    tensor = embeds()
    before = tensor.clone()
    runner.embed(PromptEmbeds(tensor))
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("value", [65520.0, 1e5, -1e38])
def test_values_that_overflow_the_models_dtype(value: float) -> None:
    """L3, M1: finite in float32, infinite in a float16 model."""
    half = Limits(vocab_size=VOCAB, segments=SEGMENTS, width=WIDTH, length=LENGTH, dtype=torch.float16)
    item = PromptEmbeds(with_value(value))
    with pytest.raises(InputError, match=r"input 0.*not finite.*float16"):
        check_row(item, half, "input 0")
    assert len(check_row(item, LIMITS, "input 0")) == 3
    assert len(check_row(PromptEmbeds(with_value(65504.0)), half, "input 0")) == 3


def test_an_artifact_in_half_precision_checks_its_own_dtype(half_runner: Runner) -> None:
    """L3, M1."""
    with pytest.raises(InputError, match=r"input 0.*not finite.*bfloat16"):
        half_runner.embed(PromptEmbeds(with_value(3.4e38)))
    assert half_runner.embed(PromptEmbeds(embeds())).isfinite().all()


BAD_IDS: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: [5, -1], "-1 is outside"),
    "vocabulary": (lambda: [5, VOCAB], "61 is outside"),
    "2^31": (lambda: [2**31], "2147483648 is outside"),
    "2^32 + 5": (lambda: [2**32 + 5], "is outside"),
    "2^70": (lambda: [2**70], ""),
    "-2^70": (lambda: [5, -(2**70)], ""),
    "uint64": (lambda: np.array([2**63], np.uint64), "is outside"),
    "bool": (lambda: [True, False], "bool"),
    "bool array": (lambda: np.array([True]), "bool"),
    "bool tensor": (lambda: torch.tensor([True]), "bool"),
    "float": (lambda: [5.0], "float"),
    "float among ints": (lambda: [5, 6.0], "float"),
    "float tensor": (lambda: torch.tensor([5.0]), "float"),
    "bfloat16 tensor": (lambda: torch.tensor([5.0]).bfloat16(), "float"),
    "float8 tensor": (lambda: torch.tensor([5.0]).to(torch.float8_e4m3fn), "float8"),
    "NaN": (lambda: [float("nan")], "float"),
    "complex": (lambda: torch.zeros(2, dtype=torch.complex64), "complex"),
    "2-d": (lambda: [[5, 6]], "2 dimensions"),
    "2-d array": (lambda: np.zeros((2, 2), int), "2 dimensions"),
    "2-d tensor": (lambda: torch.zeros(1, 3, dtype=torch.int64), "2 dimensions"),
    "0-d array": (lambda: np.array(5), "dimensions"),
    "0-d tensor": (lambda: torch.tensor(5), "dimensions"),
    "ragged": (lambda: [[5], [6, 7]], "flat"),
    "sparse tensor": (lambda: torch.tensor([5, 6]).to_sparse(), ""),
    "meta tensor": (lambda: torch.zeros(3, dtype=torch.int64, device="meta"), "meta"),
    "empty": (list, "empty"),
    "empty array": (lambda: np.zeros(0, int), "empty"),
    "empty tensor": (lambda: torch.zeros(0, dtype=torch.int64), "empty"),
    "text": (lambda: "56", "str"),
    "bytes": (lambda: b"\x05", "bytes"),
    "texts": (lambda: ["5"], ""),
    "None": (lambda: None, "NoneType"),
    "Nones": (lambda: [None], ""),
    "number": (lambda: 5, "int"),
    "set": (lambda: {5, 6}, "set"),
    "generator": (lambda: iter([5]), "iterator"),
    "dates": (lambda: np.array(["2020-01-01"], "datetime64[D]"), "datetime"),
    "too long": (lambda: [5] * (LENGTH + 1), "25 tokens.*at most 24"),
    "much too long": (lambda: np.full(2_000_000, 5), "2000000 tokens.*at most 24"),
}


@pytest.mark.parametrize("kind", BAD_IDS)
def test_ids_that_are_refused(refused: Callable[[Any, str], None], kind: str) -> None:
    """F4, A3: on the host, by name; also inside a MixedPrompt."""
    make, words = BAD_IDS[kind]
    refused(TokenIds(make()), words)
    refused(
        MixedPrompt([PromptEmbeds(embeds(1)), TokenIds(make())]),
        words.replace("25 t", "26 t").replace("2000000 t", "2000001 t"),
    )


@pytest.mark.parametrize("last", [0, VOCAB - 1])
@pytest.mark.parametrize(
    "convert",
    [list, tuple, np.array, torch.tensor, lambda v: np.array(v, np.uint8), lambda v: torch.tensor(v, dtype=torch.int8),
     lambda v: np.repeat(np.array(v), 2)[::2], lambda v: np.array(v, ">i8"), lambda v: [np.int64(x) for x in v]],
    ids="list tuple numpy torch uint8 int8 strided big-endian scalars".split(),
)  # fmt: skip
def test_ids_that_are_accepted(runner: Runner, convert: Callable[[list[int]], Any], last: int) -> None:
    """F4: the last row of the table, in any container of integers."""
    row = check_row(TokenIds(convert([5, 6, last])), LIMITS, "input 0")
    assert row.ids.tolist() == [5, 6, last]
    assert row.ids.dtype == np.int32
    assert torch.equal(runner.embed(TokenIds(convert([5, 6, last]))), runner.embed(TokenIds([5, 6, last])))


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([0, 1], "2 segments for 3 tokens"),
        ([0, 1, 2, 0], "4 segments for 3 tokens"),
        ([0, 1, SEGMENTS], "3 is outside the segment table"),
        ([0, -1, 0], "-1 is outside the segment table"),
        ([0.0, 1.0, 0.0], "segments have dtype float"),
        ([[0, 1, 0]], "2 dimensions"),
        ([], "segments are empty"),
        ("010", "segments are a str"),
        (1, "segments are a int"),
        (np.array(1), "dimensions"),
    ],
)
@pytest.mark.parametrize("path", ["ids", "embeds", "mixed"])
def test_segments_that_are_refused(refused: Callable[[Any, str], None], path: str, segments: Any, words: str) -> None:
    """G1: wrong length or outside of the table, on both paths."""
    ids, vectors = TokenIds([5, 6, 7], segments), PromptEmbeds(embeds(), segments)
    refused({"ids": ids, "embeds": vectors, "mixed": MixedPrompt([TokenIds([5]), vectors])}[path], words)


def test_segments_reach_the_model_on_both_paths(runner: Runner) -> None:
    """G1, L1: the last row of the segment table; ids path equals embeds path."""
    ids, segments = [5, 6, 7], [0, 1, SEGMENTS - 1]
    by_ids = runner.embed(TokenIds(ids, segments))
    by_embeds = runner.embed(PromptEmbeds(runner.embed_tokens(ids), segments))
    torch.testing.assert_close(by_ids, by_embeds, rtol=0, atol=1e-6)
    assert (by_ids - runner.embed(TokenIds(ids))).abs().max() > 0.01


def test_a_model_without_a_segment_table_takes_zeros_only() -> None:
    """G1: type_vocab_size = 0."""
    limits = Limits(vocab_size=VOCAB, segments=0, width=WIDTH, length=LENGTH, dtype=torch.float32)
    assert check_row(TokenIds([5], [0]), limits, "input 0").segments.tolist() == [0]
    with pytest.raises(InputError, match="1 is outside the segment table"):
        check_row(TokenIds([5], [1]), limits, "input 0")


@pytest.mark.parametrize("path", ["ids", "embeds", "mixed"])
def test_the_longest_sequence(runner: Runner, refused: Callable[[Any, str], None], path: str) -> None:
    """A3: the limit works and equals the reference path, one more is refused, on both paths."""

    def make(length: int) -> toolkit.TokenIds | toolkit.PromptEmbeds | toolkit.MixedPrompt:
        ids = [k % VOCAB for k in range(length)]
        table = runner.model.embed_tokens(torch.tensor(ids, dtype=torch.int32)).detach()
        if path == "mixed":
            return MixedPrompt([TokenIds(ids[:7]), PromptEmbeds(table[7:9]), TokenIds(ids[9:])])
        return TokenIds(ids) if path == "ids" else PromptEmbeds(table)

    states = runner.token_states(make(LENGTH))[0]
    expected = runner.token_states(TokenIds(list(range(LENGTH))))[0]
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)
    refused(make(LENGTH + 1), "25 tokens.*at most 24")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([], "at least one part"),
        ((), "at least one part"),
        (None, "MixedPrompt"),
        (["the fox"], "a part is a str"),
        ([TokenIds([5]), "fox"], "a part is a str"),
        ([[5, 6]], "a part is a list"),
        ([None], "a part is a NoneType"),
        ([MixedPrompt([TokenIds([5])])], "a part is a MixedPrompt"),
        ([torch.zeros(1, WIDTH)], "a part is a Tensor"),
        ("fox", "a part is a str"),
        (TokenIds([5]), "MixedPrompt"),
        ([TokenIds([5]), TokenIds([])], "empty"),
        ([TokenIds([5] * 13), PromptEmbeds(torch.zeros(12, WIDTH))], "25 tokens"),
    ],
)
def test_mixed_prompts_that_are_refused(refused: Callable[[Any, str], None], parts: Any, words: str) -> None:
    """L3."""
    refused(MixedPrompt(parts), words)


@pytest.mark.parametrize("item", [None, 5, [5, 6], b"fox", torch.zeros(2, WIDTH), np.array([5]), {"ids": [5]}, ["fox"]])
def test_other_kinds_of_input(refused: Callable[[Any, str], None], item: Any) -> None:
    """F4."""
    refused(item, f"{type(item).__name__}, expected str, TokenIds")


@pytest.mark.parametrize("ids", [[-1], [VOCAB], [], [2**70], "5", None, [5] * (LENGTH + 1)])
def test_embed_tokens_checks_its_ids(runner: Runner, ids: Any) -> None:
    """F4."""
    with pytest.raises(InputError, match="ids"):
        runner.embed_tokens(ids)
    assert runner.embed_tokens([5, VOCAB - 1]).shape == (2, WIDTH)


segments_of = st.integers(0, SEGMENTS - 1)
lengths = st.integers(1, 8)


@st.composite
def token_ids(draw: st.DrawFn) -> TokenIds:
    ids = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8))
    segments = draw(st.none() | st.lists(segments_of, min_size=len(ids), max_size=len(ids)))
    values: Any = draw(st.sampled_from([list, tuple, np.array, torch.tensor]))(ids)
    return TokenIds(values, segments)


@st.composite
def prompt_embeds(draw: st.DrawFn) -> PromptEmbeds:
    length = draw(lengths)
    value = draw(st.integers(-100, 100))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    rows = torch.arange(length)[:, None].expand(length, WIDTH)
    segments = draw(st.none() | st.lists(segments_of, min_size=length, max_size=length))
    return PromptEmbeds((rows + value).to(dtype), segments)


parts_of = token_ids() | prompt_embeds()


@settings(max_examples=150, deadline=None)
@given(parts_of.map(lambda part: (part, [part])) | st.lists(parts_of, min_size=1, max_size=3).map(
    lambda parts: (MixedPrompt(parts), parts)
))  # fmt: skip
def test_check_row_keeps_order_and_lengths(case: tuple[Any, list[Any]]) -> None:
    """L1, L3: parts follow one another, with their ids, segments and embeds at their places."""
    item, parts = case
    row = check_row(item, LIMITS, "input 0")
    pieces = dict(row.embeds)
    start = 0
    for part in parts:
        length = len(part.ids if isinstance(part, TokenIds) else part.embeds)
        place = slice(start, start + length)
        assert row.segments[place].tolist() == list(part.segments or [0] * length)
        if isinstance(part, TokenIds):
            assert row.ids[place].tolist() == [int(value) for value in part.ids]
        else:
            assert torch.equal(pieces.pop(start), part.embeds.float())
        start += length
    assert len(row) == len(row.segments) == start
    assert not pieces

"""The bucket of a step is the smallest that holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.decoding.ladder import StepLadder
from toolkit.graphs import Bucket

LADDERS = st.builds(
    StepLadder, step_tokens=st.integers(1, 9000), sequences=st.integers(1, 300), smallest=st.sampled_from([1, 2])
)


@given(LADDERS, st.data())
def test_steps_with_prompts(ladder: StepLadder, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(2, ladder.step_tokens + 40))
    sequences = data.draw(st.integers(1, min(tokens - 1, ladder.sequences)))
    longest = data.draw(st.integers(-(-tokens // sequences), tokens - sequences + 1))
    bucket = ladder.find(tokens, sequences, longest)
    if tokens > max(ladder.step_tokens, 16):
        assert bucket is None
        return
    assert bucket is not None
    assert bucket.tokens == min(size for size in ladder.mixed if size >= tokens)
    assert bucket.tokens >= tokens
    assert bucket.sequences >= sequences
    assert bucket.max_len >= longest
    assert sequences > 8 or bucket.sequences <= 8


@given(LADDERS, st.data())
def test_steps_of_one_token_each(ladder: StepLadder, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, ladder.sequences + 9))
    bucket = ladder.find(count, count, 1)
    if count > max(ladder.sequences, ladder.smallest):
        assert bucket is None
        return
    size = min(size for size in ladder.decode if size >= count)
    assert bucket == Bucket(tokens=size, sequences=size, max_len=1)


@given(LADDERS)
def test_sizes(ladder: StepLadder) -> None:
    """Ascending, without repetition, up to what can come, and with little tail."""
    for sizes, most in ((ladder.decode, ladder.sequences), (ladder.mixed, ladder.step_tokens)):
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= most
        assert [size for size in sizes if size >= most] == sizes[-1:]
    assert ladder.decode[0] == ladder.smallest
    assert ladder.decode[-1] == max(ladder.sequences, ladder.smallest)
    assert ladder.mixed[-1] == max(ladder.step_tokens, 16)
    assert all(after <= 1.5 * before for before, after in zip(ladder.mixed, ladder.mixed[1:], strict=False))


@given(LADDERS)
def test_default_buckets_are_those_that_steps_find(ladder: StepLadder) -> None:
    default = ladder.default()
    assert len(default) == len(set(default)) == len(ladder.mixed) + len(ladder.decode)
    prompts = default[: len(ladder.mixed)]
    assert prompts == [ladder.find(size, 1, size) for size in reversed(ladder.mixed)]
    assert default[len(prompts) :] == [ladder.find(size, size, 1) for size in reversed(ladder.decode)]


@pytest.mark.parametrize(("tokens", "sequences"), [(20, 9), (20, 20)])
def test_more_sequences_than_a_step_can_have(tokens: int, sequences: int) -> None:
    assert StepLadder(step_tokens=64, sequences=8, smallest=1).find(tokens, sequences, 2) is None

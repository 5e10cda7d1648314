"""Pages have one owner, or several that know what is in them; those used longest ago are taken first."""

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from toolkit.decoding.kvcache import PagePool, PageTables, page_digest
from toolkit.decoding.request import Request
from toolkit.decoding.sampling import SamplingParams
from toolkit.inputs import Row

CPU = torch.device("cpu")


def name(number: int) -> bytes:
    return number.to_bytes(4, "big")


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(5, caching=True)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    with pytest.raises(IndexError, match="1 pages wanted, 0 are free"):
        pool.take(1)
    pool.release(first)
    assert pool.free == 2
    assert sorted(pool.take(2)) == sorted(first)


def test_more_than_there_is_takes_nothing() -> None:
    pool = PagePool(3, caching=True)
    with pytest.raises(IndexError):
        pool.take(4)
    assert pool.free == 3
    assert len(set(pool.take(3))) == 3


def test_a_shared_page_is_free_when_its_last_user_gives_it_up() -> None:
    pool = PagePool(2, caching=True)
    (page,) = pool.take(1)
    pool.publish(page, name(1))
    pool.share([page])
    assert pool.unused([page]) == 0
    pool.release([page])
    assert pool.free == 1
    pool.release([page])
    assert (pool.free, pool.unused([page])) == (2, 1)
    with pytest.raises(AssertionError):
        pool.release([page])


def test_what_a_page_held_is_known_until_it_is_taken() -> None:
    pool = PagePool(2, caching=True)
    pages = pool.take(2)
    for page in pages:
        pool.publish(page, name(page))
    pool.release(pages)
    assert [pool.find(name(page)) for page in pages] == pages
    pool.share(pages[:1])
    assert (pool.free, pool.find(name(pages[0]))) == (1, pages[0])
    assert pool.take(1) == pages[1:]
    assert pool.find(name(pages[1])) is None
    assert pool.find(name(pages[0])) == pages[0]


def test_the_first_page_of_a_kind_counts() -> None:
    pool = PagePool(2, caching=True)
    first, second = pool.take(2)
    pool.publish(first, name(1))
    pool.publish(second, name(1))
    assert pool.find(name(1)) == first
    pool.release([second])
    assert pool.take(1) == [second]
    assert pool.find(name(1)) == first


def test_a_page_that_says_something_new_is_no_longer_found_by_what_it_said() -> None:
    pool = PagePool(1, caching=True)
    (page,) = pool.take(1)
    pool.publish(page, name(1))
    pool.publish(page, name(2))
    assert (pool.find(name(1)), pool.find(name(2))) == (None, page)


def test_without_caching_nothing_is_found() -> None:
    pool = PagePool(1, caching=False)
    (page,) = pool.take(1)
    pool.publish(page, name(1))
    assert pool.find(name(1)) is None


def test_order_in_which_pages_are_taken_anew() -> None:
    """Pages that hold nothing first; then those given up longest ago, and of one sequence its last ones."""
    pool = PagePool(7, caching=True)
    old, new = pool.take(3), pool.take(3)
    for page in [*old, *new[:2]]:
        pool.publish(page, name(page))
    pool.release(old)
    pool.release(new)
    taken = [pool.take(1)[0] for _ in range(7)]
    assert set(taken[:2]) == {6, new[2]}
    assert taken[2:] == [*reversed(old), new[1], new[0]]


def test_use_makes_a_page_young_again() -> None:
    pool = PagePool(3, caching=True)
    for number in range(3):
        (page,) = pool.take(1)
        pool.publish(page, name(number))
        pool.release([page])
    first = pool.find(name(0))
    assert first is not None
    pool.share([first])
    pool.release([first])
    taken = pool.take(2)
    assert first not in taken
    assert pool.find(name(0)) == first
    assert pool.find(name(1)) is None
    assert pool.find(name(2)) is None


@pytest.mark.parametrize("seed", range(8))
def test_any_course_of_events(seed: int) -> None:
    """L: against a model that only counts users and remembers what was said."""
    draw, pages = random.Random(seed), 9
    pool = PagePool(pages, caching=True)
    owners: list[list[int]] = []
    said: dict[int, bytes] = {}
    for step in range(600):
        users = Counter(page for own in owners for page in own)
        free = [page for page in range(pages) if not users[page]]
        assert pool.free == len(free)
        assert pool.unused(range(pages)) == len(free)
        assert {digest: pool.find(digest) for digest in said.values()} == {d: page for page, d in said.items()}
        action = draw.choice(["take", "take", "share", "release", "release", "publish"])
        if action == "take" and free:
            taken = pool.take(draw.randint(1, len(free)))
            assert len(set(taken)) == len(taken)
            assert set(taken) <= set(free)
            blank = sum(page not in said for page in free)
            assert sum(page not in said for page in taken) == min(blank, len(taken))
            for page in taken:
                said.pop(page, None)
            owners.append(taken)
        elif action == "share" and said:
            chosen = draw.sample(sorted(said), draw.randint(1, len(said)))
            pool.share(chosen)
            owners.append(chosen)
        elif action == "release" and owners:
            pool.release(owners.pop(draw.randrange(len(owners))))
        elif action == "publish" and owners:
            page = draw.choice(draw.choice(owners))
            if page not in said:
                said[page] = name(step)
                pool.publish(page, name(step))


def test_digests_differ_where_keys_and_values_do() -> None:
    ids, zeros = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
    some, others = np.array([True, False, False, False]), np.array([False, True, False, False])
    kinds = [
        page_digest(b"", ids, None, b""),
        page_digest(b"", ids[::-1].copy(), None, b""),
        page_digest(b"before", ids, None, b""),
        page_digest(b"", zeros, None, b""),
        page_digest(b"", zeros, np.zeros(4, np.bool_), b""),
        page_digest(b"", zeros, some, b"1234"),
        page_digest(b"", zeros, others, b"1234"),
        page_digest(b"", zeros, some, b"1235"),
        page_digest(b"before", zeros, some, b"1234"),
    ]
    assert len(set(kinds)) == len(kinds)
    assert page_digest(b"", ids.copy(), None, b"") == kinds[0]
    assert page_digest(b"", zeros.copy(), some.copy(), b"1234") == kinds[5]


def request(ids: list[int], *embeds: tuple[int, torch.Tensor]) -> Request:
    row = Row(ids=np.array(ids, np.int32), segments=np.zeros(len(ids), np.int32), embeds=embeds)
    return Request.of(1, row, SamplingParams(max_new_tokens=4))


def digests(ids: list[int], *embeds: tuple[int, torch.Tensor]) -> list[bytes]:
    made = request(ids, *embeds)
    return [made.digest(number, 4) for number in range(len(ids) // 4)]


VALUES = torch.arange(16.0).view(8, 2)
OTHERS: list[Callable[[], list[bytes]]] = [
    lambda: digests([0] * 8),
    lambda: digests([0] * 8, (1, VALUES[:6])),
    lambda: digests([0] * 8, (0, VALUES[:7])),
    lambda: digests([0] * 8, (0, VALUES.half())),
    lambda: digests([0] * 8, (0, VALUES + torch.eye(8, 2))),
]


@pytest.mark.parametrize("other", OTHERS, ids=["ids", "another place", "fewer", "another dtype", "other values"])
def test_equal_placeholders_are_not_enough(other: Callable[[], list[bytes]]) -> None:
    assert digests([0] * 8, (0, VALUES))[1] != other()[1]


def test_a_page_is_known_by_its_content_however_it_was_given() -> None:
    whole = digests([0] * 8, (0, VALUES))
    assert digests([0] * 8, (0, VALUES[:3]), (3, VALUES[3:])) == whole
    assert digests([0] * 8, (0, torch.cat([VALUES, VALUES], 1)[:, :2])) == whole  # not contiguous
    assert digests([*range(4), 0, 0, 0, 0], (5, VALUES[:2]))[0] == digests(list(range(8)))[0]
    assert digests([9, 1, 2, 3, 4, 5, 6, 7])[1] != digests(list(range(8)))[1], "the page before it counts"


def test_the_place_of_embeds_within_a_page_counts() -> None:
    assert digests([0] * 4, (0, VALUES[:3]))[0] != digests([0] * 4, (1, VALUES[:3]))[0]
    columns = torch.arange(8.0).view(2, 4).t()  # neighbours in memory are no neighbours here
    assert digests([0] * 4, (0, columns)) == digests([0] * 4, (0, columns.contiguous()))


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("stop", range(9))
def test_embeds_within_a_range(start: int, stop: int) -> None:
    made = request([0] * 8, (1, VALUES[:3]), (5, VALUES[3:5]))
    given = {1: 0, 2: 1, 3: 2, 5: 3, 6: 4}
    found = {
        start + place + k: value.tolist()
        for place, values in made.embeds_between(start, stop)
        for k, value in enumerate(values)
    }
    assert found == {place: VALUES[given[place]].tolist() for place in range(start, stop) if place in given}


def test_generated_tokens_are_part_of_pages() -> None:
    made = request([1, 2, 3])
    made.append(4)
    assert made.digest(0, 4) == digests([1, 2, 3, 4])[0]


def test_tables_hold_what_was_noted_and_nothing_else() -> None:
    draw = random.Random(0)
    tables = PageTables(3, 5, CPU)
    expected, address = np.zeros((4, 5), np.int32), tables.tensor.data_ptr()
    assert list(tables.lanes) == [1, 2, 3], "row 0 belongs to nobody"
    for _ in range(40):
        for _ in range(draw.randint(0, 3)):
            lane, first = draw.choice(tables.lanes), draw.randrange(5)
            pages = [draw.randrange(99) for _ in range(draw.randint(0, 5 - first))]
            tables.write(lane, first, pages)
            expected[lane, first : first + len(pages)] = pages
        found = tables.flush()
        assert found.dtype == torch.int32
        assert found.tolist() == expected.tolist()
    assert tables.flush().data_ptr() == address, "captured graphs read it there"


def test_tables_are_written_when_flushed() -> None:
    tables = PageTables(1, 2, CPU)
    tables.write(1, 0, [7, 8])
    assert not tables.tensor.any()
    assert tables.flush().tolist() == [[0, 0], [7, 8]]
    tables.tensor.zero_()
    assert not tables.flush().any(), "what was brought there is not brought again"

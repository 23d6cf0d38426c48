"""The page allocator in random orders: no page has two owners, and none is lost."""

import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dms_jax.cache import PageAllocator
from dms_jax.errors import CapacityError

LAYERS, SEQUENCES, KV_HEADS = 2, 4, 2
ROWS = (LAYERS, SEQUENCES, KV_HEADS)


def make(pages_per_shard=20, page_size=3, sequence_shards=1, head_shards=1) -> PageAllocator:
    return PageAllocator(
        num_layers=LAYERS,
        num_sequences=SEQUENCES,
        num_kv_heads=KV_HEADS,
        pages_per_shard=pages_per_shard,
        page_size=page_size,
        sequence_shards=sequence_shards,
        head_shards=head_shards,
    )


def shard_of(row: tuple[int, int, int], sequence_shards: int, head_shards: int) -> tuple[int, int]:
    """Consecutive sequences and heads share a shard."""
    _, sequence, head = row
    return sequence * sequence_shards // SEQUENCES, head * head_shards // KV_HEADS


def check(pages: PageAllocator, shards: tuple[int, int]) -> dict[tuple, list[int]]:
    """Asserts that each page is free or has one owner, and returns the pages of each row."""
    owned = {}
    by_shard: dict[tuple, list[int]] = {}
    for row in np.ndindex(ROWS):
        count = pages.reserved[row]
        owned[row] = pages.table[row][:count].tolist()
        assert (pages.table[row][count:] == pages.no_page).all()
        by_shard.setdefault(shard_of(row, *shards), []).extend(owned[row])
    for held in by_shard.values():
        assert len(set(held)) == len(held)
        assert all(0 <= page < pages.pages_per_shard for page in held)
    assert pages.pages_in_use == sum(map(len, owned.values()))
    fullest = max(len(held) for held in by_shard.values())
    assert pages.free_pages == pages.pages_per_shard - fullest
    return owned


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    shards=st.sampled_from([(1, 1), (2, 1), (1, 2), (4, 2)]),
    page_size=st.sampled_from([1, 3, 8]),
)
def test_every_page_has_one_owner_in_random_orders(seed, shards, page_size):
    random = np.random.default_rng(seed)
    pages = make(
        pages_per_shard=12, page_size=page_size, sequence_shards=shards[0], head_shards=shards[1]
    )
    refused = 0
    for _ in range(25):
        before = check(pages, shards)
        slots = random.integers(0, 4 * page_size + 1, ROWS)
        needed = -(-slots // page_size)
        action = random.choice(["reserve", "reserve", "trim", "release"])
        if action == "reserve":
            fits = pages.fits(slots)
            try:
                pages.reserve(slots)
            except CapacityError:
                assert not fits
                assert check(pages, shards) == before
                refused += 1
                continue
            assert fits
            after = check(pages, shards)
            for row, held in after.items():
                assert len(held) == max(len(before[row]), needed[row])
                assert held[: len(before[row])] == before[row]  # written pages do not move
        elif action == "trim":
            pages.trim(slots)
            for row, held in check(pages, shards).items():
                assert held == before[row][: needed[row]]
        else:
            sequences = np.flatnonzero(random.random(SEQUENCES) < 0.5)
            pages.release(sequences)
            for row, held in check(pages, shards).items():
                assert held == ([] if row[1] in sequences else before[row])
    pages.release(np.arange(SEQUENCES))
    assert pages.pages_in_use == 0
    assert pages.free_pages == pages.pages_per_shard


def test_table_has_any_sufficient_width():
    pages = make(page_size=2)
    slots = np.zeros(ROWS, int)
    slots[1, 2, 1] = 5
    pages.reserve(slots)
    wide = pages.table_of_width(8)
    chex.assert_shape(wide, (*ROWS, 8))
    chex.assert_trees_all_equal(wide[1, 2, 1] != pages.no_page, np.array([True] * 3 + [False] * 5))
    chex.assert_trees_all_equal(pages.table_of_width(3), wide[..., :3])
    with pytest.raises(CapacityError, match="more than 2 pages"):
        pages.table_of_width(2)


def test_copies_name_source_and_target_pages():
    """Two layers, four sequences over two shards of two, two heads over two shards."""
    pages = PageAllocator(
        num_layers=2,
        num_sequences=4,
        num_kv_heads=2,
        pages_per_shard=12,
        page_size=3,
        sequence_shards=2,
        head_shards=2,
    )
    assert [pages.shard_of(sequence) for sequence in range(4)] == [0, 0, 1, 1]
    slots = np.zeros((2, 4, 2), np.int64)
    slots[:, 0] = [[7, 1], [3, 0]]  # three pages and one; one and none
    slots[:, 3] = [[2, 4], [0, 6]]
    slots[:, 1], slots[:, 2] = slots[:, 0], slots[:, 3]
    pages.reserve(slots)
    copies = pages.copies({1: 0, 2: 3})
    assert [each.shape for each in copies] == [(2, 4), (2, 1), (2, 1), (2, 4)]
    for shard, (source, target) in enumerate(copies):
        sequences = (0, 1) if shard < 2 else (3, 2)
        held = [pages.table[:, sequence, shard % 2] for sequence in sequences]
        own = [table[table < pages.no_page].tolist() for table in held]
        assert [source.tolist(), target.tolist()] == own
    assert all(each.shape == (2, 0) for each in pages.copies({}))


# -- pages of prefixes -------------------------------------------------------------------------


def slots_of(sequence: int, slots: int) -> np.ndarray:
    found = np.zeros(ROWS, np.int64)
    found[:, sequence] = slots
    return found


def test_pages_only_prefixes_hold_are_reclaimed():
    pages, asked = make(pages_per_shard=20), []
    pages.reserve(slots_of(0, 12))  # 4 rows of 4 pages
    held = pages.pages_of(0, np.full((LAYERS, KV_HEADS), 12))
    assert held.tolist() == pages.table[:, 0, :, :4].ravel().tolist()

    def reclaim(number: int, count: int) -> None:
        asked.append((number, count))
        pages.drop(held)

    pages.reclaim = reclaim
    pages.hold(held)
    assert pages.yields(held).tolist() == [0]  # the sequence has them
    assert not pages.fits(pages.reserved * 3 + slots_of(1, 6))
    pages.release(np.array([0]))
    assert pages.pages_in_use == 0
    assert pages.free_pages == 4
    assert pages.pages_of_prefixes == 16
    assert pages.yields(held).tolist() == [16]
    assert pages.fits(slots_of(1, 15))
    assert not pages.fits(slots_of(1, 16))
    pages.reserve(slots_of(1, 4))  # 8 pages
    assert asked == [(0, 4)]
    assert pages.pages_of_prefixes == 0
    assert pages.free_pages == 12


def test_page_is_free_without_rows_and_prefixes():
    pages, freed = make(), []
    pages.on_free = lambda given: freed.append(sorted(given.tolist()))
    pages.reserve(slots_of(0, 6))  # 8 pages
    first, one = pages.pages_of(0, np.full((LAYERS, KV_HEADS), 3)), np.ones((LAYERS, KV_HEADS), int)
    held = np.sort(first)
    pages.hold(held)
    pages.give(1, one, first)
    pages.give(2, one, first)
    assert pages.reserved[:, 1].tolist() == [[1, 1], [1, 1]]
    assert pages.held_by_rows(held).all()
    assert pages.pages_in_use == 8
    pages.reserve(slots_of(1, 5))  # each one after its shared pages
    assert pages.pages_in_use == 12
    pages.release(np.array([0]))
    assert len(freed.pop()) == 4
    pages.release(np.array([1, 2]))  # which give them back together
    assert len(freed.pop()) == 4
    assert pages.pages_in_use == 0
    pages.drop(held)
    assert freed == [held.tolist()]
    assert sorted(np.concatenate(pages._free).tolist()) == list(range(20))


def test_prefixes_of_uneven_rows_take_and_return_pages():
    pages, counts, none = make(), np.array([[3, 1], [0, 2]]), np.zeros(0, np.int32)
    taken = pages.take(counts, none)
    assert taken is not None
    assert len(set(taken.tolist())) == 6
    assert pages.pages_of_prefixes == 6
    assert pages.take(np.full((LAYERS, KV_HEADS), 6), none) is None
    assert pages.can_take(np.full((LAYERS, KV_HEADS), 5), none)  # it would yield
    assert pages.can_take(np.array([[14, 0], [0, 0]]), besides=taken)
    assert not pages.can_take(np.array([[15, 0], [0, 0]]), besides=taken)
    pages.hold(taken)  # another prefix shares them, so none yields them
    assert not pages.can_take(np.array([[15, 0], [0, 0]]), besides=taken)
    pages.drop(taken)
    pages.give(2, counts, taken)
    pages.drop(taken)
    assert pages.pages_of_prefixes == 0
    assert pages.pages_of(2, counts * 3).tolist() == taken.tolist()
    assert pages.reserved[:, 2].tolist() == counts.tolist()
    pages.give(3, counts, np.full(6, pages.no_page))
    check(pages, (1, 1))
    pages.release(np.array([2, 3]))
    assert pages.free_pages == 20


def test_sequence_shares_some_pages_and_gets_others():
    pages, counts = make(), np.array([[3, 1], [0, 2]])
    pages.give(0, counts, np.full(6, pages.no_page))
    first = pages.pages_of(0, counts * 3)
    changing = np.array([False, False, True, True, False, True])
    pages.give(1, counts, np.where(changing, pages.no_page, first))
    second = pages.pages_of(1, counts * 3)
    assert (first == second).tolist() == (~changing).tolist()
    assert pages.pages_in_use == 9
    pages.release(np.array([0]))
    assert pages.pages_in_use == 6
    pages.release(np.array([1]))
    assert pages.free_pages == 20


@given(st.lists(st.tuples(st.integers(0, SEQUENCES - 1), st.integers(0, 12)), max_size=30))
@settings(max_examples=40, deadline=None)
def test_changes_update_an_old_table(orders):
    """Other cells keep their contents; too many changes become the whole table."""
    pages, width = make(pages_per_shard=200), 4
    old = pages.table_of_width(width).copy()
    for number, (sequence, slots) in enumerate(orders):
        wanted = np.zeros(ROWS, int)
        wanted[:, sequence] = slots
        if slots:
            pages.reserve(wanted)
        elif number % 2:
            pages.release(np.array([sequence]))
        else:
            pages.release(np.array([sequence]))
            pages.give(sequence, np.full((LAYERS, KV_HEADS), 2), np.full(8, pages.no_page))
        if number % 3 == 2:
            continue
        changes, new = pages.take_changes(), pages.table_of_width(width)
        if changes is not None:
            rows, columns = changes
            flat = old.reshape(-1, width)
            flat[rows, columns] = new.reshape(-1, width)[rows, columns]
            chex.assert_trees_all_equal(old, new)
        old = new.copy()
    assert pages.take_changes() is None or pages.take_changes().shape == (2, 0)

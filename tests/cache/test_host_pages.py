"""Pages in host memory: contents come back, and shared pages are stored once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.cache import host_pages
from dms_jax.cache.host_pages import NO_PAGE, HostPages, block_sizes

PAGES, PAGE_BYTES = 40, 20


def make(num_pages: int = 6) -> tuple[HostPages, list]:
    """Returns a pool on the host, and a device of numbered pages for its `add`."""
    pool = {"k": jnp.arange(PAGES * 4.0).reshape(PAGES, 4), "v": jnp.arange(PAGES)}

    def read(pages):
        return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), pool)

    return HostPages(num_pages, PAGE_BYTES, PAGES), [read, lambda: False]


def contents(host: HostPages, slots) -> list[int]:
    """Returns the device page numbers of the stored contents."""
    found = np.full(PAGES + 1, NO_PAGE)
    for targets, block in host.read(np.asarray(slots), np.arange(len(slots))):
        assert block["k"].sharding.memory_kind == "device"
        assert len(block["v"]) == len(targets)
        assert len(targets) in host.sizes
        assert (block["k"][:, 0] == 4 * block["v"]).all()
        found[targets] = block["v"]
    return found[: len(slots)].tolist()


def test_block_sizes_follow_the_pools():
    assert block_sizes(2**20, 2**15, 2**20) == (64, 512)
    assert block_sizes(100, 2**15, 2**20) == (6, 50)
    assert block_sizes(2**20, 2**15, 40) == (40,)
    assert block_sizes(1, 2**25, 2**20) == (1,)


def test_large_blocks_hold_most_pages():
    host = HostPages(80, PAGE_BYTES, 40)  # blocks of 5 and 40
    assert [host._split(count) for count in (0, 3, 12, 34, 36, 47)] == [
        [],
        [5],
        [5, 5, 5],
        [5] * 7,
        [40],
        [40, 5, 5],
    ]


def test_full_pool_makes_room_for_whole_blocks():
    host, (read, _) = make(32)  # blocks of 2 and 16
    states = [host.add(np.array(pages), read, lambda: False) for pages in ([7, 3, 11], [1, 2])]
    assert host.used == 6
    assert host.cost(np.array([7, 12, 13, 14])) == 2 * 16 * PAGE_BYTES
    assert host.cost(np.array([7, 3])) == 0

    def make_room():
        if states:
            host.drop(states.pop(0))
        return bool(states)

    host._host_of[:] = NO_PAGE  # the device's pages have changed
    slots = host.add(np.arange(28), read, make_room)
    assert slots is not None
    assert len(states) == 1
    assert host.used == 2 + 28
    assert contents(host, slots) == list(range(28))
    host.forget_device(np.arange(28))
    assert host.add(np.arange(33), read, make_room) is None  # it can never fit
    assert len(states) == 1


@pytest.mark.parametrize("in_flight", [0, 2**27])
def test_contents_come_back(in_flight, monkeypatch):
    monkeypatch.setattr(host_pages, "_IN_FLIGHT", in_flight)
    host, device = make()
    slots = host.add(np.array([7, 3, 11, 2, 19]), *device)
    assert slots is not None
    assert contents(host, slots[[4, 0, 2]]) == [19, 7, 11]
    assert contents(host, slots) == [7, 3, 11, 2, 19]
    assert host.used == 5


def test_shared_page_stays_until_its_last_prefix_goes():
    host, device = make()
    first = host.add(np.array([7, 3]), *device)
    second = host.add(np.array([7, 3, 11]), *device)
    assert first is not None
    assert second is not None
    assert second[:2].tolist() == first.tolist()
    assert host.used == 3
    host.drop(first)
    assert host.used == 3
    assert host.on_device(second).tolist() == [7, 3, 11]
    host.drop(second)
    assert host.used == 0
    third = host.add(np.array([3]), *device)  # copied again
    assert third is not None
    assert contents(host, third) == [3]


def test_changed_device_page_is_copied_again():
    host, device = make()
    first = host.add(np.array([7, 3]), *device)
    assert first is not None
    host.forget_device(np.array([7, 5]))
    assert host.on_device(first).tolist() == [NO_PAGE, 3]
    second = host.add(np.array([7, 3]), *device)
    assert second is not None
    assert host.used == 3
    assert second[0] not in first.tolist()
    host.match(first[:1], np.array([9]))  # written to page 9 again
    assert host.on_device(first).tolist() == [9, 3]

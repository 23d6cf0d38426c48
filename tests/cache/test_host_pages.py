"""Pages in host memory: contents come back, and shared pages are stored once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.cache import host_pages
from dms_jax.cache.host_pages import NO_PAGE, HostPages

PAGES, BLOCK = 20, 3


def make(num_pages: int = 6) -> tuple[HostPages, list]:
    """Returns a pool on the host, and a device of numbered pages for its `add`."""
    pool = {"k": jnp.arange(PAGES * 4.0).reshape(PAGES, 4), "v": jnp.arange(PAGES)}
    block = jax.tree.map(lambda x: jax.ShapeDtypeStruct((BLOCK, *x.shape[1:]), x.dtype), pool)

    def read(pages):
        padded = np.pad(pages, (0, BLOCK - len(pages)))
        return jax.tree.map(lambda x: x[padded], pool)

    return HostPages(block, num_pages, PAGES), [read, lambda: False]


def contents(host: HostPages, slots) -> list[int]:
    """Returns the device page numbers of the stored contents."""
    found = np.full(len(slots), NO_PAGE)
    for which, block in host.read(np.asarray(slots)):
        assert block["v"].shape == (BLOCK,)
        np_k, np_v = (block[name][: len(which)] for name in "kv")
        assert (np_k[:, 0] == 4 * np_v).all()
        found[which] = np_v
    return found.tolist()


@pytest.mark.parametrize("in_flight", [0, 8])
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

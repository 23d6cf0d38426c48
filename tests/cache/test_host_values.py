"""Values in host memory: a program's newest values, writes by the host, rounds over one context."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.cache import PageAllocator
from dms_jax.cache.host_values import HostValues, Tail
from dms_jax.errors import CapacityError, ConfigError
from dms_jax.generation import Sampling, generate
from dms_jax.policies import KCache

LAYERS, BATCH, HEADS, HEAD_DIM, PAGE_SIZE = 2, 2, 2, 4, 3


def table_of(random) -> np.ndarray:
    """Six pages per row, after two of layers whose values stay on the device."""
    rows = LAYERS * BATCH * HEADS
    return 2 + random.permutation(rows * 6).reshape(LAYERS, BATCH, HEADS, 6).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_programs_read_values_of_earlier_programs(dtype):
    """Tokens overwrite each other's slots, within a program and from one to the next."""
    dtype = jnp.dtype(dtype)
    random = np.random.default_rng(0)
    table = table_of(random)
    store = HostValues(
        first_page=2, num_pages=table.size, page_size=PAGE_SIZE, head_dim=HEAD_DIM, dtype=dtype
    )
    truth: dict[tuple, np.ndarray] = {}
    read = jax.jit(lambda rows, *args: rows.fetch_slots(*args, PAGE_SIZE))
    append = jax.jit(Tail.append)
    for program in range(4):
        length, seen = 5, np.array([5 * program, 3 * program], np.int32)
        tail = Tail.empty((LAYERS, BATCH, HEADS), length, HEAD_DIM, dtype, jnp.asarray(seen))
        for step in range(length):
            active = np.array([True, step < 3])
            for layer in range(LAYERS):
                v = random.normal(size=(BATCH, 1, HEADS, HEAD_DIM)).astype(dtype)
                slots = random.integers(0, 4, (BATCH, HEADS, 1)).astype(np.int32)
                if program < 2:  # write every slot at least once
                    slots[:] = (5 * program + step) % 4
                slots = np.where(active[:, None, None], slots, -1)
                positions = (seen + np.minimum(step, [4, 2]))[:, None].astype(np.int32)
                if not active[1]:  # an idle lane stays at the position after its last token
                    positions[1] = seen[1] + 3
                tail = append(tail, np.int32(layer), positions, v, slots)
                for row, head in np.ndindex(BATCH, HEADS):
                    if slots[row, head, 0] >= 0:
                        truth[layer, row, head, int(slots[row, head, 0])] = v[row, 0, head]
            for layer in range(LAYERS):
                asked = np.broadcast_to(np.arange(4, dtype=np.int32), (BATCH, HEADS, 4))
                got = read(store.rows, tail, np.int32(layer), table[layer], asked)
                for row, head, slot in np.ndindex(BATCH, HEADS, 4):
                    if (layer, row, head, slot) in truth:
                        want = truth[layer, row, head, slot]
                        chex.assert_trees_all_equal(got[row, head, slot], want)
        store.write(tail, table)
    assert len(truth) == LAYERS * BATCH * HEADS * 4
    whole = jax.jit(lambda rows, pages: rows.fetch_pages(pages, PAGE_SIZE))
    pages = np.asarray(whole(store.rows, table.ravel())).reshape(*table.shape, PAGE_SIZE, HEAD_DIM)
    for (layer, row, head, slot), want in truth.items():
        found = pages[layer, row, head, slot // PAGE_SIZE, slot % PAGE_SIZE]
        chex.assert_trees_all_equal(found, want)
    assert store.rows.rows.sharding.memory_kind == "pinned_host"
    assert store.nbytes == table.size * PAGE_SIZE * HEAD_DIM * dtype.itemsize
    store.delete()


def test_first_layers_have_separate_pages():
    options = dict(num_sequences=2, num_kv_heads=2, page_size=4)
    allocator = PageAllocator(num_layers=3, pages_per_shard=12, first=(1, 4), **options)
    slots = np.full((3, 2, 2), 4)
    allocator.reserve(slots)
    assert sorted(allocator.table[0, ..., 0].ravel()) == [0, 1, 2, 3]
    assert sorted(allocator.table[1:, ..., 0].ravel()) == list(range(4, 12))
    assert allocator.free_pages == 0
    slots[1] = 0
    allocator.trim(slots)
    more = slots.copy()
    more[0] = 8
    assert not allocator.fits(more)  # the free pages belong to the other layers
    with pytest.raises(CapacityError):
        allocator.reserve(more)
    more[0], more[2] = 4, 8
    allocator.reserve(more)
    assert allocator.table[2].min() >= 4


def stories_tokens(model, count: int) -> list[int]:
    text = " ".join(assets.stories("valid")[:8])
    return model.tokenizer.encode(text)[:count]


@pytest.mark.nightly
@pytest.mark.parametrize("first_layers", [2, 9])
def test_host_values_take_half_of_the_other_layers(stories, first_layers):
    policy = KCache(top=8, first_layers=first_layers)
    here = dataclasses.replace(policy, values="device")
    options = dict(page_size=16, sampling=Sampling(temperature=0, max_new_tokens=12))
    prompts = [stories_tokens(stories, 70), stories_tokens(stories, 33)[::-1]]
    away, home = (generate(stories, prompts, policy=p, **options) for p in (policy, here))
    assert away.tokens == home.tokens
    layers = stories.config.num_layers
    kept = min(first_layers, layers)
    total = home.usage.cache_bytes
    assert home.usage.host_bytes == 0
    assert away.usage.host_bytes == total * (layers - kept) // (2 * layers)
    assert away.usage.cache_bytes == total - away.usage.host_bytes
    assert away.usage.kv_reads == home.usage.kv_reads


def test_mesh_refuses_host_values():
    model = dms_jax.load(assets.path("stories260k"), mesh=dms_jax.make_mesh(2, 4))
    with pytest.raises(ConfigError, match="values='device'"):
        generate(model, [[1, 2]], policy=KCache(), sampling=Sampling(max_new_tokens=2))


@pytest.mark.gpu
def test_gpu_programs_read_values_written_by_the_host(stories):
    """The host writes a pinned array in place between programs."""
    policy = KCache(top=8, first_layers=1)
    options = dict(page_size=16, sampling=Sampling(temperature=0, max_new_tokens=40), chunk=8)
    prompts = [stories_tokens(stories, 70)]
    away = generate(stories, prompts, policy=policy, **options)
    home = generate(
        stories, prompts, policy=dataclasses.replace(policy, values="device"), **options
    )
    assert away.tokens == home.tokens

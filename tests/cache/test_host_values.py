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
from dms_jax.generation import Conversation, Engine, Sampling, generate
from dms_jax.policies import DMS, KCache, Vanilla

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


@pytest.fixture(scope="module")
def stories():
    return dms_jax.load(assets.path("stories260k"))


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


@pytest.mark.nightly
def test_host_values_may_be_quantized(stories):
    """The scales of all values stay on the device, which then has more scales than values."""
    policy = KCache(top=8, first_layers=2)
    here = dataclasses.replace(policy, values="device")
    options = dict(page_size=16, sampling=Sampling(temperature=0, max_new_tokens=12))
    away, home = (
        generate(
            stories, [stories_tokens(stories, 33)], policy=p, kv_dtype="float8_e4m3", **options
        )
        for p in (policy, here)
    )
    assert away.tokens == home.tokens
    assert away.usage.kv_reads == home.usage.kv_reads


def test_pool_bytes_equal_the_accounting(stories):
    engine = Engine(stories, KCache(first_layers=2), num_lanes=2, max_tokens=64, page_size=16)
    runner, config = engine.runner, stories.config
    pages = 2 * config.num_layers * config.num_kv_heads * 4
    page = 16 * config.head_dim * 4
    assert runner.cache.k_pages.nbytes == pages * page
    assert runner.cache.v_pages.nbytes == pages * page * 2 // config.num_layers
    assert runner.host.nbytes == pages * page * (config.num_layers - 2) // config.num_layers
    assert runner.cache.pool.tail is None


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "same"),
    [
        (KCache(top=6, first_layers=1), KCache(top=6, first_layers=1, values="device")),
        (KCache(top=500), Vanilla()),  # everything is fetched
    ],
)
def test_rounds_of_questions_over_one_context(stories, policy, same):
    """Each question may need another part of the context; KCache evicts nothing."""
    model = dataclasses.replace(
        stories, generation=dataclasses.replace(stories.generation, eos_token_ids=())
    )
    sampling = Sampling(temperature=0, max_new_tokens=10, logprobs=True)
    context, *questions = (
        stories_tokens(model, 90),
        *(model.tokenizer.encode(q)[1:] for q in ("The dog", "Then a girl", "So the bird")),
    )
    talk, device = (
        Conversation(model, each, max_tokens=256, page_size=16, chunk=4, prefill_chunk=32)
        for each in (policy, same)
    )
    prompts = [context + questions[0], *questions[1:]]
    for prompt in prompts:
        there, here = (one.say(prompt, sampling=sampling) for one in (talk, device))
        assert there.tokens == here.tokens
        chex.assert_trees_all_close(
            np.array(there.logprobs), np.array(here.logprobs), rtol=1e-7, atol=1e-5
        )
    assert there.usage.live_tokens == len(context) + sum(map(len, questions)) + 3 * 10 - 1


@pytest.mark.nightly
def test_host_values_work_with_cuts(stories):
    policy = KCache(top=5, first_layers=1, over=DMS(window=6, alpha_offset=0.0))
    model = dataclasses.replace(stories, policy=policy)
    sampling = Sampling(temperature=0, max_new_tokens=20)
    prompt = stories_tokens(stories, 60)
    away = generate(model, [prompt], sampling=sampling, page_size=8)
    here = dataclasses.replace(model, policy=dataclasses.replace(policy, values="device"))
    home = generate(here, [prompt], sampling=sampling, page_size=8)
    assert away.tokens == home.tokens
    assert away.usage.compression_ratio > 1.1
    assert away.usage.cache_bytes + away.usage.host_bytes == home.usage.cache_bytes


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


@dataclasses.dataclass(frozen=True)
class HostFirst(KCache):
    """Puts the values of its first layers on the host."""

    def groups(self, num_layers):
        return tuple(
            dataclasses.replace(group, host_values=not group.host_values)
            for group in super().groups(num_layers)
        )


def test_host_values_are_of_the_last_layers():
    model = dms_jax.load(assets.path("stories260k"))
    with pytest.raises(ConfigError, match="HostFirst: values in host memory are those of the last"):
        generate(model, [[1, 2, 3]], policy=HostFirst(first_layers=1))

"""Law 5: one device and a mesh of eight give the same logits, answers, scores and usage.

On a (2, 4) mesh both sequences and KV heads are split, or only sequences if four does not divide
the KV heads, or only heads if two does not divide the sequences. Everything is compared with the
simulation, like one device in the other laws.

Every row runs once with every layout, mostly nightly: answers on a mesh that splits both, logits on
one that splits sequences, scores on one that splits heads.
"""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import Engine, score
from dms_jax.model.language_model import LanguageModel
from dms_jax.sharding import DECODING_RULES
from dms_jax.training.parameters import parameters, rebuilder, shardings
from tests.laws.expected import LOGITS_PAGE_SIZE, simulate
from tests.laws.rows import BY_TOKEN, Row
from tests.laws.serving import ALMOST_GREEDY, check_completion, check_score, engine_of
from tests.laws.test_shared_prompts import LONG, SAMPLED, one_by_one, prefilled
from tests.laws.test_shared_prompts import PROMPTS as CHAINS
from tests.support.instances import nightly_but
from tests.support.models import oracle_weights, random_model, random_tokens, tiny_config

ROWS = [
    Row(dms_jax.DMS(window=3, shift=2), 2, 8),
    Row(dms_jax.TOVA(budget=5, prefill=BY_TOKEN), 2, 8),
    Row(dms_jax.AdaKV(dms_jax.SnapKV(budget=6, interval=3, window=3), alpha=0.4), 2, 3),
    Row(dms_jax.Quest(budget=8, over=dms_jax.DMS(window=3), dense_layers=0), 2, 4),
    Row(dms_jax.Vanilla(), 2, 8),
    Row(dms_jax.DMS(window=2, source="adapter", per="layer"), 2, 8),
    Row(dms_jax.DMS(window=3), 2, 8, "float8_e4m3"),
    Row(dms_jax.DMC(offset=0.2, window=3), 2, 8),
    Row(dms_jax.FixedPooling(every=3), 2, 8),
    Row(dms_jax.StreamingLLM(budget=6, sinks=2), 2, 8),
    Row(dms_jax.RandomEviction(window=2, rate=0.6), 2, 8),
    Row(dms_jax.H2O(budget=5), 2, 3),
    Row(dms_jax.RandomSelection(budget=5, interval=2), 2, 3),
    Row(dms_jax.ExpectedAttention(budget=6, interval=3, sinks=2), 2, 3),
    Row(dms_jax.KCache(top=3, first_layers=1, values="device"), 2, 8),
]
TOKENS = random_tokens(60, 4, 16)
PROMPTS = [row[:length].tolist() for row, length in zip(TOKENS, (5, 8, 1, 7), strict=True)]
TOLERANCE = 1e-10
# Only the sequences are split, or only the heads.
SEQUENCES, HEADS = (2, 4), (4, 3)  # KV heads and sequences
# A row with decisions per token, two in which a layer's heads interact, one that selects pages.
DECIDES, AVERAGES, COMPETES, SELECTS = FIRST = ROWS[:4]


def by_row(quick: list[Row], rows: list[Row] = ROWS):
    return pytest.mark.parametrize("row", nightly_but(quick, rows), ids=lambda row: row.name)


@functools.cache
def transformer_of(num_kv_heads: int):
    config = tiny_config(num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads)
    return random_model(config, adapter=True, seed=9)


@functools.cache
def sharded(num_kv_heads: int, experts: int = 1):
    """The model's parameters on a mesh of (2, 4) devices, or of (2, experts, ...)."""
    mesh = dms_jax.make_mesh(2, 4 // experts, experts=experts)
    one = transformer_of(num_kv_heads)
    places = shardings(one, mesh, DECODING_RULES)
    arrays = {name: jax.device_put(x, places[name]) for name, x in parameters(one).items()}
    return rebuilder(one)(arrays), mesh


def on_mesh(row: Row, num_kv_heads: int, experts: int = 1) -> LanguageModel:
    transformer, mesh = sharded(num_kv_heads, experts)
    return LanguageModel(transformer, policy=row.policy, mesh=mesh)


def test_parameters_and_pool_are_split_over_the_mesh():
    transformer, mesh = sharded(4)
    assert dict(mesh.shape) == {"data": 2, "model": 4}
    split = [x for x in parameters(transformer).values() if not x.is_fully_replicated]
    assert len(split) >= 4
    engine = Engine(on_mesh(ROWS[0], 4), num_lanes=4, max_tokens=16, page_size=8)
    pool = engine.runner.cache.k_pages
    assert len({shard.device for shard in pool.addressable_shards}) == 8
    assert pool.addressable_shards[0].data.nbytes * 8 == pool.nbytes


@by_row([DECIDES, SELECTS], [row for row in ROWS if not row.kv_dtype])
def test_logits(row):
    num_kv_heads, _ = SEQUENCES
    prompts = [len(prompt) for prompt in PROMPTS]
    got = on_mesh(row, num_kv_heads).logits(TOKENS, prompt_lengths=np.array(prompts))
    weights = oracle_weights(transformer_of(num_kv_heads))
    for tokens, prompt, logits in zip(TOKENS, prompts, np.asarray(got), strict=True):
        one = simulate(row, weights, tokens, prompt, LOGITS_PAGE_SIZE)
        assert np.abs(logits - one.logits).max() < TOLERANCE


# A model without experts uses the axis `experts` like `model`. Rows of a layer interact over both:
# in means, in a shared budget, in draws by row number.
OVER_TWO = [(2, row) for row in (AVERAGES, COMPETES, SELECTS, ROWS[5], ROWS[12])]


@pytest.mark.parametrize(
    ("experts", "row"),
    nightly_but([(1, row) for row in FIRST], [*((1, row) for row in ROWS), *OVER_TWO]),
    ids=lambda value: value.name if isinstance(value, Row) else ("one_axis", "two_axes")[value - 1],
)
def test_generate(experts, row):
    """Checks four lanes, two on each half of the mesh, with separate page numbers."""
    model = on_mesh(row, 4, experts)
    weights = oracle_weights(transformer_of(4))
    engine = engine_of(model, row)
    pool = engine.runner.cache.k_pages
    assert pool.addressable_shards[0].data.nbytes * 8 == pool.nbytes
    sampling = dataclasses.replace(ALMOST_GREEDY, max_new_tokens=8)
    completions = engine.generate(PROMPTS, sampling=sampling)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        check_completion(row, weights, model.config, prompt, completion, row.page_size)
    assert engine.runner.reservation.allocator.pages_in_use == 0


@by_row([AVERAGES, COMPETES])
def test_score(row):
    num_kv_heads, num_sequences = HEADS
    model = on_mesh(row, num_kv_heads)
    weights = oracle_weights(transformer_of(num_kv_heads))
    tokens = [row[:length] for row, length in zip(TOKENS, (16, 9, 2, 13), strict=True)]
    results = score(
        model,
        tokens[:num_sequences],
        chunk=16,
        page_size=row.page_size,
        kv_dtype=row.kv_dtype,
    )
    for index, result in enumerate(results):
        check_score(row, weights, model.config, tokens[index], result, row.page_size)


@by_row([AVERAGES])
def test_each_device_of_a_mesh_prefills_a_prompt_once(row):
    """On a (2, 4) mesh two lanes of four have their pages on the same devices.

    All lanes take part in every program there, so several prompts run in one.
    """
    model = on_mesh(row, 4)
    engine = engine_of(model, row)
    expected = one_by_one(engine, CHAINS, SAMPLED)
    found = engine.generate(CHAINS, sampling=SAMPLED)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        chex.assert_trees_all_close(one.logprobs, other.logprobs, rtol=0, atol=1e-10)
        assert one.usage.kv_reads == other.usage.kv_reads
        assert one.usage.live_tokens == other.usage.live_tokens
    assert sum(prefilled(found)) < sum(map(len, CHAINS))
    assert prefilled(engine.generate([LONG] * 4, sampling=SAMPLED)) == [19, 19, 0, 0]
    assert engine.runner.reservation.allocator.pages_in_use == 0

"""A step with heads split over devices communicates two sums per layer and little more.

The outputs of attention and feed-forward are summed over devices in the dtype of the residual
stream, and the token's embedding once a step. Everything else is a few numbers per sequence.
"""

import collections
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dms_jax
from dms_jax import sharding
from dms_jax.config import ModelConfig
from dms_jax.generation import programs
from dms_jax.generation.sampling import Sampling
from dms_jax.model import cached_attention
from dms_jax.model.caching import cache_specs, init_cache
from dms_jax.policies import DMS, H2O, AdaKV, Policy, Quest, SnapKV, Vanilla
from pallas_kernels import decode_attention, decode_plan
from tests.generation import launches
from tests.laws.compiled_steps import arguments
from tests.support.instances import further, nightly_but
from tests.support.models import random_model, tiny_config
from tests.training.collectives import collectives

BATCH, COLUMNS, STEPS = 32, 8, 8
CONFIG = dataclasses.replace(
    launches.CONFIG,
    vocab_size=1152,  # nine blocks of 128
    num_layers=3,
    hidden_size=96,
    intermediate_size=128,
    num_heads=8,
    num_kv_heads=8,
    qk_norm=True,
    model_type="qwen3",
)
POLICIES: dict[str, Policy] = {
    "Vanilla": Vanilla(),
    "DMS": DMS(window=64),
    "DMS with an adapter": DMS(window=64, source="adapter"),
    "H2O": H2O(budget=128),
    "Quest": Quest(budget=128, dense_layers=0),
    "AdaKV": AdaKV(SnapKV(budget=128, interval=64)),
}
GREEDY, TOP_P = Sampling(temperature=0), Sampling(temperature=0.6, top_p=0.95)
TINY = tiny_config(num_heads=8, num_kv_heads=4)
# Per sequence: the largest logit of each device and its token, a NaN flag, and counts of the rows,
# per layer if layers differ.
FEW = 2 + 1 + 2 * (CONFIG.num_layers + 1)


def split_arguments(
    policy: Policy, config: ModelConfig, mesh: Mesh, sampling: Sampling, *, batch: int = BATCH
) -> tuple:
    """Returns shapes for a chunk of steps, placed as by `Runner.decode` on a mesh."""
    given = arguments(policy, config, batch=batch, columns=COLUMNS)
    model, cache, host, table, tokens, remaining, seeds, policy, _, _, ends = given

    def placed(x, place):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

    def parameter(param):
        axes, value = param.get_metadata("axes"), param.get_value()
        return param.replace(placed(value, sharding.parameter_sharding(mesh, axes, value.shape)))

    model = jax.tree.map(parameter, model, is_leaf=lambda x: isinstance(x, nnx.Variable))
    with jax.set_mesh(mesh):
        specs = cache_specs(cache, config.num_kv_heads)
    cache = jax.tree.map(lambda x, spec: placed(x, NamedSharding(mesh, spec)), cache, specs)
    tokens = placed(tokens, NamedSharding(mesh, PartitionSpec()))
    return (
        model,
        cache,
        host,
        table,
        tokens,
        remaining,
        seeds,
        policy,
        sampling.filter,
        STEPS,
        ends,
    )


def of_a_step(text: str) -> dict[str, int]:
    """Returns the count of each collective in a step, without those of a whole chunk.

    # Out: {"all-reduce bf16[32,1024]": 64, ...}
    """
    found = collections.Counter()
    for kind, arrays, times in collectives(text):
        if times % STEPS == 0:
            results = arrays.partition("), ")[2] if arrays.startswith("((") else arrays
            found[" ".join([kind, *re.findall(r"\w+\[[\d,]*\]", results)])] += times // STEPS
    return dict(found)


def elements(arrays: str) -> int:
    """The number of elements of all arrays of a collective."""
    shapes = re.findall(r"\[([\d,]*)\]", arrays)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def of_small_step(policy, sampling, *, data: int, model: int) -> dict[str, int]:
    """Returns the collectives of a step that the partitioner makes on a CPU."""
    mesh = dms_jax.make_mesh(data, model)
    given = split_arguments(policy, CONFIG, mesh, sampling)
    with jax.set_mesh(mesh):
        text = programs.decode.lower(*given).compile().as_text()
    assert text is not None
    return of_a_step(text)


@pytest.mark.parametrize("name", nightly_but({"Vanilla", "DMS"}, POLICIES))
@pytest.mark.parametrize(("data", "model"), [(1, 2), *further((2, 2), (2, 4), (1, 8))])
def test_layer_has_two_all_reduces(name, data, model):
    found = of_small_step(POLICIES[name], GREEDY, data=data, model=model)
    own = BATCH // data
    stream = (
        f"all-reduce f32[{own},1,{CONFIG.hidden_size}]"  # the dtype in which a CPU sums bfloat16
    )
    assert found.pop(stream) == 2 * CONFIG.num_layers + 1
    if name == "AdaKV":  # its heads share one budget when rows are cut
        heads = f"all-gather f32[{own},1,{CONFIG.num_kv_heads},{64 * COLUMNS}]"
        assert found.pop(heads) == 1
    if name == "Quest":  # counts its reads in each layer; on GPUs XLA adds them up once a step
        assert found.pop(f"all-reduce s32[{own},1]") == CONFIG.num_layers
    assert set(found.values()) == {1}
    assert sum(map(elements, found)) <= model * own * FEW, found


@pytest.mark.nightly
def test_step_over_split_sequences_has_no_collective():
    assert of_small_step(POLICIES["DMS"], GREEDY, data=4, model=1) == {}
    # Whether one of the first trials is kept, for all sequences.
    assert of_small_step(POLICIES["DMS"], TOP_P, data=4, model=1) == {"all-reduce pred[]": 1}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Vanilla", "DMS with an adapter"])
def test_split_prompts_gather_last_states(name):
    """Four prompts in 32 lanes of four devices: entries, rows and pages stay on their device."""
    mesh, entries = dms_jax.make_mesh(4), 4
    model, cache, _, table, *_ = split_arguments(POLICIES[name], CONFIG, mesh, GREEDY)
    shapes = [(table.shape[0], entries, *table.shape[2:]), (entries,), (entries, 64), (entries,)]
    given = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    with jax.set_mesh(mesh):
        lowered = programs.extend.lower(
            model, cache, None, *given, None, POLICIES[name], True, None
        )
        text = lowered.compile().as_text()
    assert text is not None
    kinds = [kind for kind, _, _ in collectives(text)]
    assert kinds == ["all-gather"]
    assert collectives(text)[0][1].startswith(f"f32[{entries},1,{CONFIG.hidden_size}]")


@pytest.mark.parametrize(("data", "model"), [(2, 2), *further((1, 4), (3, 1))])
def test_each_device_plans_its_own_rows(data, model, monkeypatch):
    """Checks each call of the kernel against a plan for its own lengths; a wrong one gives NaN."""
    policy, mesh = dms_jax.Vanilla(), dms_jax.make_mesh(data, model)
    transformer, plans = random_model(TINY, dtype=jnp.float32), []

    def checked(q, k_pages, v_pages, page_table, lengths, *, plan, **options):
        out: Any = decode_attention(q, k_pages, v_pages, page_table, lengths, plan=plan, **options)
        if plan is None:  # called for the shapes of all rows
            return out
        _, page_size, head_dim = k_pages.shape
        own = decode_plan(
            lengths,
            columns=page_table.shape[1],
            page_size=page_size,
            head_dim=head_dim,
            dtype=k_pages.dtype,
        )
        plans.append(len(lengths))
        # A plan of several layers is longer than necessary.
        given, needed = (jax.tree.leaves(each) for each in (plan, own))
        right = [(x[: len(y)] == y).all() for x, y in zip(given, needed, strict=True)]
        return jnp.where(jnp.asarray(right).all(), out, jnp.nan)

    monkeypatch.setattr(cached_attention, "decode_attention", checked)
    lanes, width = 4, 40
    cache = init_cache(
        TINY,
        policy,
        num_sequences=lanes,
        num_pages=8,
        page_size=8,
        table_width=width,
        dtype=jnp.float32,
    )
    lengths = np.random.default_rng(3).integers(0, 8 * width, cache.lengths.shape)
    lengths[:, 1] = 0
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths, jnp.int32))
    counts, tokens = jnp.array([1, 1, 1, 0]), jnp.zeros((lanes, 1), jnp.int32)
    with jax.set_mesh(mesh):
        step = jax.jit(lambda: transformer.cached(tokens, counts, cache, policy, one_pass=False))
        passed = step()
    assert np.isfinite(np.asarray(passed.hidden[:3])).all()
    # Three devices do not divide four sequences, so each has all rows.
    assert set(plans) == {16 // (data * model) if data < 3 else 16}

"""A step with heads split over devices communicates two sums per layer and little more.

The outputs of attention and feed-forward are summed over devices in the dtype of the residual
stream, and the token's embedding once a step. Everything else is a few numbers per sequence.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax.generation import programs
from dms_jax.model import cached_attention
from dms_jax.model.caching import init_cache
from pallas_kernels import decode_attention, decode_plan
from tests.generation import split_steps
from tests.generation.split_steps import BATCH, CONFIG, GREEDY, LAYERS, ON_GPUS, POLICIES, TOP_P
from tests.support.for_gpus import told_by
from tests.support.instances import further, nightly_but
from tests.support.models import random_model, tiny_config
from tests.training.collectives import collectives

SMALL = dataclasses.replace(
    CONFIG, num_layers=3, hidden_size=96, intermediate_size=128, num_heads=8, num_kv_heads=8
)
TINY = tiny_config(num_heads=8, num_kv_heads=4)
# Per sequence: the largest logit of each device and its token, a NaN flag, and counts of the rows,
# per layer if layers differ.
FEW = 2 + 1 + 2 * (SMALL.num_layers + 1)


def elements(arrays: str) -> int:
    """The number of elements of all arrays of a collective."""
    shapes = re.findall(r"\[([\d,]*)\]", arrays)
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def of_small_step(policy, sampling, *, data: int, model: int) -> dict[str, int]:
    """Returns the collectives of a step that the partitioner makes on a CPU."""
    mesh = dms_jax.make_mesh(data, model)
    given = split_steps.split_arguments(policy, SMALL, mesh, sampling)
    with jax.set_mesh(mesh):
        text = programs.decode.lower(*given).compile().as_text()
    assert text is not None
    return split_steps.of_a_step(text)


@pytest.mark.parametrize("name", nightly_but({"Vanilla", "DMS"}, POLICIES))
@pytest.mark.parametrize(("data", "model"), [(1, 2), *further((2, 2), (2, 4), (1, 8))])
def test_layer_has_two_all_reduces(name, data, model):
    found = of_small_step(POLICIES[name], GREEDY, data=data, model=model)
    own = BATCH // data
    stream = (
        f"all-reduce f32[{own},1,{SMALL.hidden_size}]"  # the dtype in which a CPU sums bfloat16
    )
    assert found.pop(stream) == 2 * SMALL.num_layers + 1
    if name == "AdaKV":  # its heads share one budget when rows are cut
        heads = f"all-gather f32[{own},1,{SMALL.num_kv_heads},{64 * split_steps.COLUMNS}]"
        assert found.pop(heads) == 1
    if name == "Quest":  # counts its reads in each layer; on GPUs XLA adds them up once a step
        assert found.pop(f"all-reduce s32[{own},1]") == SMALL.num_layers
    assert set(found.values()) == {1}
    assert sum(map(elements, found)) <= model * own * FEW, found


@pytest.mark.nightly
def test_step_over_split_sequences_has_no_collective():
    assert of_small_step(POLICIES["DMS"], GREEDY, data=4, model=1) == {}
    # Whether one of the first trials is kept, for all sequences.
    assert of_small_step(POLICIES["DMS"], TOP_P, data=4, model=1) == {"all-reduce pred[]": 1}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Vanilla", "DMS with an adapter"])
def test_prompts_over_split_lanes_gather_their_last_states(name):
    """Four prompts in 32 lanes of four devices: entries, rows and pages stay on their device."""
    mesh, entries = dms_jax.make_mesh(4), 4
    model, cache, _, table, *_ = split_steps.split_arguments(POLICIES[name], SMALL, mesh, GREEDY)
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
    assert collectives(text)[0][1].startswith(f"f32[{entries},1,{SMALL.hidden_size}]")


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


@pytest.fixture(scope="module")
def on_gpus():
    return told_by("tests/generation/split_steps.py")


@pytest.mark.nightly
@pytest.mark.parametrize("name", [*ON_GPUS, "top-p"])
def test_split_steps_on_gpus_in_bfloat16(name, on_gpus):
    found = on_gpus[name]["collectives"]
    own = {f"all-reduce bf16[{BATCH},{rest}{CONFIG.hidden_size}]" for rest in ("", "1,")}
    assert sum(found.pop(each, 0) for each in own) == 2 * LAYERS + 1
    assert not any("bf16" in each for each in found)
    if name == "AdaKV":
        assert found.pop(f"all-gather f32[{BATCH},{CONFIG.num_kv_heads},512]") == 1
    most = 2 * (LAYERS + 4) if name != "top-p" else 17 * 128
    assert all(elements(each) <= BATCH * most for each in found), found
    assert sum(found.values()) <= (2 if name != "top-p" else 8), found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Vanilla", "DMS"])
def test_split_layer_adds_two_launches(name, on_gpus):
    """On a mesh, too, attention is planned once per step."""
    # As in `test_launches`, plus the norms of queries and keys, two sums, and slices for all layers
    # of a turn.
    layers, of_a_turn = split_steps.TURN * (10 + 1 + 2), 15
    assert layers <= on_gpus[name]["in_all"] <= layers + of_a_turn


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Vanilla", "DMS"])
def test_linked_gpus_use_xla_all_reduce_kernel(name, on_gpus):
    assert on_gpus[name]["own_sums"] == 2 * split_steps.TURN

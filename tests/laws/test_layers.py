"""Laws 1, 2 and 3 below the model: `attend_cached` equals the simulation, token by token.

Random queries, keys and values run through the attention of two layers, with no embedding, MLP or
engine around it. Outputs, kept tokens, slots, lengths and reads are compared after every call.

1. With nothing to evict, outputs equal vanilla attention.
2. A prompt in chunks of any size, whole or token by token, and then an answer in chunks or steps,
   equal the simulation of that split.
3. Kept tokens, slots, reads and peaks are those of the simulation.
"""

import dataclasses
import functools
from collections.abc import Iterator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.model.attention import attend_sequences
from dms_jax.policies import DMC, DMS, POLICIES, Policy, StreamingLLM, TriAttention, Vanilla
from dms_jax.policies.values import Static, Tokens
from tests.laws.expected import (
    HEAD_DIM,
    LENGTHS,
    SPLITS,
    TOLERANCE,
    WIDE,
    WIDTH,
    layer_inputs,
    layer_traces,
    run_and_compare,
)
from tests.laws.pairwise import pairs
from tests.laws.rows import (
    FACTORS,
    OPTIONS,
    ROWS,
    Row,
    of_other_groups,
    with_nothing_to_evict,
    with_other_numbers,
)
from tests.laws.simulations import LAYERS, THETA, dmc_neuron, dms_decisions
from tests.oracles import dmc, vanilla
from tests.oracles.transformer import LayerInput
from tests.support.cached_runs import Part, of_layers, ragged_parts
from tests.support.instances import further
from tests.support.models import tiny_config

CUT_BY = 14  # tokens; most budgets and intervals are smaller
FREQUENCIES = tuple((THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).tolist())


def static_of(row: Row) -> Static:
    return Static(
        page_size=row.page_size,
        scale=HEAD_DIM**-0.5,
        num_layers=LAYERS,
        frequencies=FREQUENCIES,
    )


def check_run(row: Row, prompts, parts, *, seed: int = 0) -> None:
    """Runs the parts and compares all results."""
    sequences = range(len(LENGTHS))
    inputs = [layer_inputs(row, sequence) for sequence in sequences]
    traces = [layer_traces(row, sequence, int(prompts[sequence])) for sequence in sequences]
    run_and_compare(
        row,
        tiny_config(num_heads=row.num_kv_heads * row.group, num_kv_heads=row.num_kv_heads),
        of_layers(row.policy, inputs, static_of(row)),
        prompts,
        parts,
        inputs=inputs,
        traces=traces,
        outputs=[np.stack([trace.outputs for trace in layers], axis=1) for layers in traces],
        seed=seed,
    )


def parts_of(row: Row, prompts, seed: int) -> Iterator[Part]:
    """Returns prompts and answers in the forms of the row.

    Answers begin when another prompt has been read almost to its cut. An answer in chunks ends in
    steps.
    """
    prompts = np.array(prompts, np.int32)
    of_prompt = {"chunks": WIDTH, "tokens": 1, "whole": WIDE}[row.prompts]
    of_answer = {"chunks": WIDTH, "steps": 1}[row.answers]
    chunks = [Part(prompts, WIDE, True, prompts > 0)]
    if row.prompts != "whole":
        chunks = ragged_parts(seed, prompts, prompts, width=of_prompt)
    left, done = np.subtract(LENGTHS, prompts), np.zeros_like(prompts)
    for part in chunks:
        yield part
        done += part.counts
        unfinished = done < prompts
        next_ones = np.where(unfinished, 0, np.minimum(left, 1 + of_answer // 4))
        if (unfinished & (done >= CUT_BY)).any() and next_ones.any():
            yield Part(next_ones.astype(np.int32), of_answer, False)
            left -= next_ones
    nothing, first = np.zeros_like(left), left // 2 if row.answers == "chunks" else 0 * left
    yield from ragged_parts(seed + 1, first, nothing, width=1, answers_width=of_answer)
    yield from ragged_parts(seed + 2, left - first, nothing, width=1)


def with_numbers(rows: list[Row]) -> list[Row]:
    """Returns each row, followed by rows that differ only in traced numbers."""
    changes = (lambda policy: policy, with_other_numbers, with_nothing_to_evict)
    policies = [(row, {change(row.policy): None for change in changes}) for row in rows]
    return [
        dataclasses.replace(row, policy=each) for row, some in policies for each in some if each
    ]


@pytest.mark.parametrize(
    "row", [*with_numbers(ROWS), *further(*of_other_groups(ROWS))], ids=lambda row: row.name
)
def test_prompts_and_answers(row):
    """Rows that differ only in traced numbers run in the same programs."""
    splits = SPLITS if row in ROWS else SPLITS[1:]
    for seed, prompts in enumerate(splits):
        check_run(row, prompts, parts_of(row, prompts, seed), seed=seed)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.policy.parallel == "never"], ids=lambda row: row.name
)
def test_prompt_within_budget_attends_in_one_pass(row):
    """One-pass chunks end at the budget; then come token-by-token chunks, and steps."""
    prompts, whole = SPLITS[0], [row.policy.kept_whole(length) for length in LENGTHS]
    assert min(whole) > 0
    parts = [*ragged_parts(8, LENGTHS, prompts, width=WIDTH, whole=whole)]
    assert any(part.whole and part.counts.max() > 1 for part in parts)
    check_run(row, prompts, parts, seed=6)


@pytest.mark.parametrize("prompts", ["chunks", "tokens"])
def test_ratio_window_cuts_chunked_prompts(prompts):
    """The rows above take this policy's prompts whole."""
    row = Row(StreamingLLM(compression_ratio=2.7, sinks=2), 2, 4, prompts=prompts)
    parts = parts_of(row, SPLITS[0], 9)
    check_run(row, SPLITS[0], parts, seed=9)


@functools.partial(jax.jit, static_argnames="static")
def attend(policy: Policy, tokens: Tokens, rotation, *, static: Static):
    options = dict(segment_ids=None, relaxation=None, marks=None, sinks=None)
    return attend_sequences(policy, tokens, rotation, static, **options)[0]


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.policy.parallel == "always" and row.kv_dtype is None],
    ids=lambda row: row.name,
)
def test_one_pass_over_a_whole_sequence(row):
    """Without a cache, from the decisions alone."""
    for layer in layer_inputs(row, 0):
        tokens = Tokens(
            *(x[None] for x in (layer.q, layer.k, layer.v)),
            positions=jnp.arange(LENGTHS[0])[None],
            layer=jnp.asarray(layer.index),
            adapter_logits=layer.own.T[None] if row.policy.retrofit.adapter else None,
        )
        out = attend(row.policy, tokens, (layer.cos[None], layer.sin[None]), static=static_of(row))
        want = layer_traces(row, 0, 0)[layer.index].outputs
        assert np.abs(np.asarray(out)[0] - want).max() < TOLERANCE


def test_simulations_without_eviction_equal_vanilla():
    """On queries and keys after the policy has zeroed the borrowed neurons."""
    for row in ROWS:
        if (policy := with_nothing_to_evict(row.policy)) is None:
            continue
        row = dataclasses.replace(row, policy=policy)
        for layer, trace in zip(layer_inputs(row, 0), layer_traces(row, 0, 9), strict=True):
            want = vanilla.simulate(*seen_tensors(policy, layer))
            chex.assert_trees_all_close(trace.outputs, want.outputs, rtol=0, atol=1e-12)
            assert trace.kept == want.kept


def seen_tensors(policy: Policy, layer: LayerInput) -> tuple:
    """Returns the queries, keys and values that attention sees."""
    if isinstance(policy, DMS):
        return dms_decisions(policy, layer)[1]
    if not isinstance(policy, DMC):
        return layer.rotated
    clear = functools.partial(dmc.without_neuron, neuron=dmc_neuron(policy))
    q, k, _ = dataclasses.replace(layer, q=clear(layer.q), k=clear(layer.k), stored=clear).rotated
    return clear(q), layer.stored(k), layer.stored(layer.v)


# -- the rows -------------------------------------------------------------------------------------


def test_every_pair_of_values_has_a_row():
    """Pairs of group size, page size, dtype, form and mechanism."""
    mechanism = {policy: name for name, policies in OPTIONS.items() for policy in policies}
    met = {
        pair
        for row in ROWS
        for pair in pairs(mechanism[row.policy], {name: getattr(row, name) for name in FACTORS})
    }
    values = {("kind", name) for name in OPTIONS}
    values |= {(name, value) for name, values in FACTORS.items() for value in values}
    wanted = {frozenset({a, b}) for a in values for b in values if a[0] != b[0]}
    assert met == wanted
    assert {row.policy for row in ROWS} == set(mechanism)


def test_every_policy_has_its_rows():
    met = {(type(row.policy), row.group) for row in [*ROWS, *of_other_groups(ROWS)]}
    assert met == {(policy, group) for policy in POLICIES.values() for group in FACTORS["group"]}
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_rows_distinguish_policies():
    """Checks that every row that evicts or selects differs clearly from vanilla attention."""
    for row in ROWS:
        plain = dataclasses.replace(row, policy=Vanilla())
        prompt_length = 9 if row.policy.parallel == "prompts" else 0  # if it makes a difference
        if isinstance(row.policy, TriAttention):
            prompt_length = 3  # it keeps the prompt, so the budget leaves room for answers
        got, want = (
            np.stack([trace.outputs for trace in layer_traces(one, 0, prompt_length)])
            for one in (row, plain)
        )
        assert (np.abs(got - want).max() > 1e-2) == (row.policy != Vanilla()), row.name

"""Laws 1, 2 and 3: the cached model equals the simulation, token by token and slot by slot.

1. With nothing to evict, outputs equal plain attention (borrowed neurons zeroed).
2. a. A prompt in chunks of any size and then steps equal the simulation of that split.
   b. Policies that declare it agree with one pass over the whole sequence, for every split.
3. Kept tokens, slots, reads and peaks are those of the simulation after every call.
"""

import numpy as np
import pytest

from tests.laws.simulations import (
    LENGTHS,
    TOKENS,
    WIDE,
    WIDTH,
    Difference,
    expected,
    live_totals,
    peak_slots,
    read_totals,
)
from tests.laws.table import ROWS, SPLIT_INVARIANT, Row, model_for
from tests.support.cached_runs import Part, drive, poisoned_cache, ragged_parts, stored_keys

TOLERANCE = 1e-10

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def check_run(row: Row, prompts, parts, *, seed: int = 0) -> float:
    """Runs the parts and compares everything; returns the largest difference of logits."""
    model, policy = model_for(row), row.policy
    passes = expected(row, prompts)
    cache = poisoned_cache(
        model,
        policy,
        peak_slots(passes),
        page_size=row.page_size,
        table_width=-(-max(LENGTHS) // row.page_size),
        seed=seed,
    )
    keys = [[row.keys(policy, layer) for layer in one.inputs] for one in passes]

    def slots_are_as_simulated(done, cache):
        for sequence, one in enumerate(passes):
            for layer, trace in enumerate(one.traces):
                live = trace.live[done[sequence] - 1] if done[sequence] else [[], []]
                for head in range(cache.lengths.shape[2]):
                    got = stored_keys(cache, layer, sequence, head)
                    assert len(got) == len(live[head])
                    want = keys[sequence][layer][live[head], head]
                    if not row.ordered:
                        got, want = (x[np.lexsort(x.T)] for x in (got, want))
                    np.testing.assert_allclose(got, want, atol=TOLERANCE)
        np.testing.assert_array_equal(cache.seen, done)

    out = drive(model, policy, TOKENS, cache, parts, after=slots_are_as_simulated)
    difference = Difference()
    for sequence, one in enumerate(passes):
        difference.update(out.logits[sequence], one.logits)
        np.testing.assert_array_equal(out.live[sequence], live_totals(one))
        reads = read_totals(row, one, prompts[sequence])
        np.testing.assert_array_equal(out.reads[sequence], reads)
    assert difference.largest < TOLERANCE
    return difference.largest


@every_row
def test_steps_alone(row, record_property):
    prompts = [0, 0, 0]
    parts = ragged_parts(1, LENGTHS, prompts, width=1)
    record_property("largest", check_run(row, prompts, parts))


@every_row
@pytest.mark.parametrize("prompts", [LENGTHS, (13, 1, 22), (5, 19, 0)], ids=str)
def test_ragged_chunks_of_a_prompt_then_steps(row, prompts, record_property):
    parts = ragged_parts(2, LENGTHS, prompts, width=WIDTH)
    record_property("largest", check_run(row, prompts, parts, seed=3))


@every_row
def test_one_pass_over_the_whole_sequence(row, record_property):
    model, policy = model_for(row), row.policy
    assert policy.split_invariant == (policy.name in SPLIT_INVARIANT)
    if not (policy.parallel(prompt=True) and policy.parallel(prompt=False)):
        pytest.skip("decides by attention as it goes; no pass without a cache exists")
    difference = Difference()
    padded = np.stack([np.pad(tokens, (0, WIDE - len(tokens))) for tokens in TOKENS])
    logits = np.asarray(model.unembed(model(padded, policy).hidden))
    for sequence, one in enumerate(expected(row, [0, 0, 0])):
        difference.update(logits[sequence, : LENGTHS[sequence]], one.logits)
    assert difference.largest < TOLERANCE
    record_property("largest", difference.largest)

"""Laws 1, 2 and 3: the cached model equals the simulation, token by token and slot by slot.

1. With nothing to evict, outputs equal vanilla attention (borrowed neurons zeroed).
2. a. A prompt in chunks of any size and then steps equal the simulation of that split.
   b. Policies that declare it agree with one pass over the whole sequence, for every split.
3. Kept tokens, slots, reads and peaks are those of the simulation after every call.

Every row runs a batch with a sequence that is all prompt, one that is all answer, and one of both;
for rows of group 2 whole batches are of a kind: of one row of every policy, and of every form.
"""

import dataclasses

import chex
import numpy as np
import pytest

from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMC, DMS, POLICIES, Vanilla
from dms_jax.policies.periodic_eviction import PeriodicEviction
from dms_jax.policies.selective import SelectiveReading
from tests.laws.row import Row, every_form_once, model_for, one_of_each_policy
from tests.laws.simulations import (
    LENGTHS,
    LOGITS_PAGE_SIZE,
    TOKENS,
    WIDE,
    WIDTH,
    Difference,
    expected,
    live_totals,
    peak_slots,
    read_again,
    read_totals,
    simulated,
)
from tests.laws.table import ROWS, SPLIT_INVARIANT, simulate_vanilla
from tests.support.cached_runs import Part, drive, poisoned_cache, ragged_parts
from tests.support.instances import first_of_each

TOLERANCE = 1e-10

MIXED = (5, 19, 0)  # of LENGTHS: both, all prompt, all answer
PLACES = 2 * WIDTH  # for the tokens of a chunk without padding
WHOLE_PROMPTS = 4  # query heads per KV head of the rows that read a whole prompt in one chunk


def by_row(rows: list[Row]):
    return pytest.mark.parametrize("row", one_of_each_policy(rows), ids=lambda row: row.name)


every_row = by_row(ROWS)
GROUP = [row for row in ROWS if row.group == 2]
FORMS = every_form_once(GROUP)
every_form = by_row(FORMS)


def check_run(row: Row, prompts, parts, *, seed: int = 0) -> float:
    """Runs the parts and compares all results; returns the largest difference of logits."""
    model, policy = model_for(row), row.policy
    passes = expected(row, prompts)
    cache = poisoned_cache(
        model,
        policy,
        peak_slots(passes),
        page_size=row.page_size,
        table_width=-(-max(LENGTHS) // row.page_size),
        kv_dtype=row.kv_dtype,
        seed=seed,
    )
    keys = [[row.keys(policy, layer) for layer in one.inputs] for one in passes]

    def slots_are_as_simulated(done, rows):
        pairs = []
        for sequence, one in enumerate(passes):
            for layer, trace in enumerate(one.traces):
                live = row.held(trace, int(done[sequence]), int(prompts[sequence]))
                for head in range(rows.lengths.shape[2]):
                    got = rows.keys(layer, sequence, head)
                    assert len(got) == len(live[head])
                    want = keys[sequence][layer][live[head], head]
                    if not row.ordered:
                        got, want = (x[np.lexsort(x.T)] for x in (got, want))
                    pairs.append((got, want))
        stored, simulated = (np.concatenate(side) for side in zip(*pairs, strict=True))
        chex.assert_trees_all_close(stored, simulated, rtol=1e-7, atol=TOLERANCE)
        chex.assert_trees_all_equal(rows.seen, done)

    out = drive(model, policy, TOKENS, cache, parts, after=slots_are_as_simulated)
    difference = Difference()
    for sequence, one in enumerate(passes):
        difference.update(out.logits[sequence], one.logits)
        chex.assert_trees_all_equal(out.live[sequence], live_totals(one))
        reads = read_totals(one, row.page_size) + read_again(row, one, int(prompts[sequence]))
        chex.assert_trees_all_equal(out.reads[sequence], reads)
    assert difference.largest < TOLERANCE
    return difference.largest


@every_form
def test_steps_alone(row, record_property):
    prompts = [0, 0, 0]
    parts = ragged_parts(1, LENGTHS, prompts, width=1)
    record_property("largest", float(check_run(row, prompts, parts)))


def split_of(row: Row) -> tuple[int, ...]:
    """Returns the lengths of the prompts of a row's ragged chunks.

    A policy that treats prompts like answers needs no prompt that ends to be met by both programs,
    the chunk and the step. Its rows of group 2 run both; of further groups one runs each, for which
    Vanilla runs both. Where a chunk goes token by token, it is the chunk.
    """
    if row.group == 2 or row.policy.parallel == "prompts" or isinstance(row.policy, Vanilla):
        return MIXED
    if row.policy.parallel == "never" or row.group == 8:
        return LENGTHS
    return (0, 0, 0) if row.group == 1 else MIXED


@every_row
def test_ragged_chunks_of_a_prompt_then_steps(row, record_property):
    """Rows that take a prompt whole below take chunks in the same program, with more padding."""
    padded = WIDE if row.group == WHOLE_PROMPTS else WIDTH
    prompts = split_of(row)
    parts = ragged_parts(2, LENGTHS, prompts, width=WIDTH, padded=padded)
    record_property("largest", float(check_run(row, prompts, parts, seed=3)))


@pytest.mark.parametrize(
    ("prompts", "row"),
    first_of_each(
        [(LENGTHS, row) for row in FORMS] + [((13, 1, 22), row) for row in GROUP],
        by=lambda pair: (pair[0], pair[1].policy.name),
        cost=lambda pair: pair[1].cost,
    ),
    ids=lambda value: value.name if isinstance(value, Row) else str(value),
)
def test_ragged_chunks_of_other_prompts(row, prompts, record_property):
    parts = ragged_parts(2, LENGTHS, prompts, width=WIDTH)
    record_property("largest", float(check_run(row, prompts, parts, seed=3)))


@every_form
def test_prompts_in_chunks_of_one_and_answers_in_chunks(row, record_property):
    """Checks answers in chunks, as when a preempted request recomputes its past.

    Their chunks are without padding, like those below.
    """
    prompts = (13, 1, 22)
    parts = [*ragged_parts(4, prompts, prompts, width=1)]
    answers = np.subtract(LENGTHS, prompts)
    parts += ragged_parts(5, answers, [0] * 3, width=1, answers_width=WIDTH, places=PLACES)
    record_property("largest", float(check_run(row, prompts, parts, seed=6)))


@every_form
def test_chunks_without_padding(row, record_property):
    """Some are as long as the chunk, some empty, and some leave places empty; answers too."""
    prompts = (17, 9, 22)
    parts = [*ragged_parts(7, LENGTHS, prompts, width=WIDTH, answers_width=WIDTH, places=PLACES)]
    counts = np.array([part.counts for part in parts])
    assert WIDTH in counts
    assert 0 in counts
    assert PLACES in counts.sum(1)
    record_property("largest", float(check_run(row, prompts, parts, seed=6)))


@by_row([row for row in ROWS if row.group == WHOLE_PROMPTS])
def test_a_chunk_that_holds_the_whole_prompt(row, record_property):
    parts = [Part(np.array(LENGTHS, np.int32), WIDE, True, np.ones(len(LENGTHS), bool))]
    record_property("largest", float(check_run(row, LENGTHS, parts)))


@by_row([row for row in ROWS if row.policy.parallel == "never"])
def test_what_is_kept_whole_of_a_prompt_attends_in_one_pass(row, record_property):
    """Chunks of it end at the budget; then come those whose tokens run one by one, and steps."""
    whole = [row.policy.kept_whole(length) for length in LENGTHS]
    assert min(whole) > 0
    parts = [*ragged_parts(8, LENGTHS, MIXED, width=WIDTH, places=PLACES, whole=whole)]
    assert any(part.whole and part.counts.max() > 1 for part in parts) == (max(whole) > 1)
    record_property("largest", float(check_run(row, MIXED, parts, seed=6)))


def has_a_pass_of_its_own(row: Row) -> bool:
    """Returns whether a row's pass over whole sequences says what that of no other row does.

    Through a cache, that is of forms. Without one it is of options, which rows of groups 1 and 2
    have, and of borrowed neurons, which are other ones for every group.
    """
    if row.policy.parallel != "always":
        return row in FORMS
    return row.group <= 2 or isinstance(row.policy, (DMS, DMC))


@by_row([row for row in ROWS if row.kv_dtype is None and has_a_pass_of_its_own(row)])
def test_one_pass_over_whole_sequences(row, record_property):
    """`LanguageModel.logits`: without a cache where that is possible, else through one of its own.

    Sequences are padded with tokens that must not matter.
    """
    model = LanguageModel(model_for(row), policy=row.policy)
    padded = np.stack([np.pad(tokens, (0, WIDE - len(tokens)), mode="wrap") for tokens in TOKENS])
    prompts = np.array((13, 1, 22))
    logits = np.asarray(model.logits(padded, prompt_lengths=prompts))
    difference = Difference()
    for sequence, one in enumerate(expected(row, prompts, LOGITS_PAGE_SIZE)):
        difference.update(logits[sequence, : LENGTHS[sequence]], one.logits)
    assert difference.largest < TOLERANCE
    record_property("largest", float(difference.largest))


def test_the_rows_tell_policies_apart():
    """Checks that every row with eviction differs clearly from vanilla attention."""
    for row in ROWS:
        plain = dataclasses.replace(row, simulate=simulate_vanilla)
        prompt_length = 9 if row.policy.parallel == "prompts" else 0  # where it makes a difference
        passes = (simulated(one, 0, prompt_length, row.page_size) for one in (row, plain))
        got, want = (one.logits for one in passes)
        neurons = row.policy.retrofit.borrowed_neurons is not None
        changed = neurons or not row.identity or row.kv_dtype is not None
        assert (np.abs(got - want).max() > 1e-2) == changed, row.name


def test_every_policy_has_its_rows():
    for policy in POLICIES.values():
        rows = [row for row in ROWS if type(row.policy) is policy]
        assert rows, policy
        if issubclass(policy, PeriodicEviction):  # scores of one mechanism share its rows
            rows = [row for row in ROWS if isinstance(row.policy, PeriodicEviction)]
        assert {row.group for row in rows} == {1, 2, 4, 8}, policy
        assert any(row.identity for row in rows), policy
        assert (policy().parallel != "prompts") == (policy.__name__ in SPLIT_INVARIANT)
        assert all(row.selects == (isinstance(row.policy, SelectiveReading)) for row in rows)

"""Laws 1, 2 and 3 for the whole model: logits equal those of the NumPy model.

One row of each mechanism; all policies, options and forms are compared below the model
(`test_layers.py`). These tests add the layers around attention, the layer loop with the pool in its
carry, chunks packed without padding, and passes without a cache.
"""

import dataclasses

import numpy as np
import pytest

import dms_jax
from dms_jax.model import transformer as model_transformer
from dms_jax.model.language_model import LanguageModel
from tests.laws.expected import (
    LENGTHS,
    LOGITS_PAGE_SIZE,
    SPLITS,
    TOKENS,
    TOLERANCE,
    WIDTH,
    expected,
    padded_tokens,
    run_and_compare,
)
from tests.laws.rows import MODEL_ROWS, Row, model_for
from tests.oracles import transformer as oracle_transformer
from tests.support.cached_runs import of_model, ragged_parts
from tests.support.instances import nightly_but

PLACES = 2 * WIDTH  # places for the tokens of a chunk without padding

# Keys in 8 bits lack the mean of their biases; scorers of keys get it back.
KEYDIFF = Row(dms_jax.KeyDiff(budget=9, interval=4), 3, 4, "float8_e4m3")
IN_8_BITS = [
    KEYDIFF,
    *(dataclasses.replace(row, group=3, kv_dtype="float8_e4m3") for row in MODEL_ROWS),
]

by_name = dict(ids=lambda row: row.name)
every_mechanism = pytest.mark.parametrize("row", MODEL_ROWS, **by_name)


def check_run(row: Row, prompts, parts, *, seed: int = 0) -> None:
    """Runs the parts and compares all results."""
    model, passes = model_for(row), expected(row, prompts)
    run_and_compare(
        row,
        model.config,
        of_model(row.policy, model, TOKENS),
        prompts,
        parts,
        inputs=[one.inputs for one in passes],
        traces=[one.traces for one in passes],
        outputs=[one.logits for one in passes],
        seed=seed,
    )


@every_mechanism
def test_prompts_and_answers(row):
    """Chunks have padding in the prompt, or in the first half of the answer; then come steps."""
    prompts, nothing = SPLITS[1], [0] * len(LENGTHS)
    rest = np.subtract(LENGTHS, prompts)
    of_prompt, of_answer = (None, PLACES) if MODEL_ROWS.index(row) % 2 else (PLACES, None)
    parts = [*ragged_parts(2, prompts, prompts, width=WIDTH, places=of_prompt)]
    more = dict(width=1, answers_width=WIDTH, places=of_answer)
    parts += ragged_parts(3, rest // 2, nothing, **more)
    parts += ragged_parts(4, rest - rest // 2, nothing, width=1)
    check_run(row, prompts, parts, seed=3)


@pytest.mark.parametrize("row", nightly_but(IN_8_BITS[:2], IN_8_BITS), **by_name)
def test_keys_with_biases_in_8_bits(row, monkeypatch):
    for module in (model_transformer, oracle_transformer):
        monkeypatch.setattr(module, "CENTERED", 16)
    monkeypatch.setattr(oracle_transformer, "LONGEST", 31)
    prompts = SPLITS[1]
    parts = [*ragged_parts(2, prompts, prompts, width=WIDTH)]
    parts += ragged_parts(3, np.subtract(LENGTHS, prompts), [0] * len(LENGTHS), width=1)
    check_run(row, prompts, parts, seed=3)


def test_unpadded_chunks_equal_the_simulation():
    """Some chunks are full, some empty, and some leave places unused."""
    parts = [*ragged_parts(7, LENGTHS, (17, 9, 22), width=WIDTH, places=PLACES)]
    counts = np.array([part.counts for part in parts if part.prompt])
    assert WIDTH in counts
    assert 0 in counts
    assert {PLACES} < set(counts.sum(1).tolist())
    row = MODEL_ROWS[0]
    check_run(row, (17, 9, 22), parts, seed=6)


@pytest.mark.parametrize(
    "row",
    nightly_but([row for row in MODEL_ROWS if not row.selects], MODEL_ROWS),
    **by_name,
)
def test_one_pass_over_whole_sequences(row):
    """`LanguageModel.logits`: without a cache if possible, otherwise with a temporary one."""
    model = LanguageModel(model_for(row), policy=row.policy)
    prompts = np.array(SPLITS[1])
    logits = np.asarray(model.logits(padded_tokens(), prompt_lengths=prompts))
    for sequence, one in enumerate(expected(row, prompts, LOGITS_PAGE_SIZE)):
        found = logits[sequence, : LENGTHS[sequence]]
        assert np.abs(found - one.logits).max() < TOLERANCE

"""The sequences of the laws, their expected results from the simulations, and the comparison.

Below the model a sequence is random queries, keys, values and outputs of an adapter for each of two
layers; in the model it is tokens.
"""

import functools
from collections.abc import Callable, Sequence

import chex
import numpy as np

from dms_jax.config import ModelConfig
from tests.laws.rows import Row, model_for
from tests.laws.simulations import LAYERS, STORED, THETA, in_tokens, stored_keys
from tests.laws.simulations import simulate as simulate_layer
from tests.oracles import kcache, rope, transformer
from tests.oracles.trace import Trace
from tests.support.cached_runs import drive, poisoned_cache
from tests.support.models import oracle_weights, random_tokens

LENGTHS = (26, 19, 23)
TOKENS = tuple(random_tokens(100 + index, length) for index, length in enumerate(LENGTHS))
WIDTH = 8  # width of a compiled prompt chunk: chunks of 0 to 8 tokens
WIDE = 32  # a chunk that holds a whole sequence
LOGITS_PAGE_SIZE = 16  # page size of the cache that `LanguageModel.logits` makes
HEAD_DIM = 8
# Prompts of sequences of 26, 19 and 23 tokens. Cuts fall within chunks and at their ends; one
# sequence is only prompt, one only answer.
SPLITS = (5, 19, 0), (13, 1, 22)
TOLERANCE = 1e-10


def padded_tokens() -> np.ndarray:
    """Returns the sequences with padding, whose tokens must not matter, [B, WIDE]."""
    return np.stack([np.pad(tokens, (0, WIDE - len(tokens)), mode="wrap") for tokens in TOKENS])


# -- below the model ------------------------------------------------------------------------------


@functools.cache
def layer_inputs(row: Row, sequence: int) -> list[transformer.LayerInput]:
    """Returns the inputs of each layer for a sequence, equal for all rows with one group size."""
    length, stored = LENGTHS[sequence], STORED[row.kv_dtype]
    random = np.random.default_rng((row.group, sequence))
    angles = rope.angles(np.arange(length), HEAD_DIM, THETA)
    heads = row.num_kv_heads * row.group, row.num_kv_heads, row.num_kv_heads
    return [
        transformer.LayerInput(
            index,
            *(random.normal(size=(length, number, HEAD_DIM)) for number in heads),
            *angles,
            *(0.5 * random.normal(size=(length, row.num_kv_heads)) for _ in range(2)),
            stored,
        )
        for index in range(LAYERS)
    ]


@functools.cache
def layer_traces(row: Row, sequence: int, prompt_length: int) -> list[Trace]:
    policy = in_tokens(row.policy, LENGTHS[sequence])
    return [
        simulate_layer(policy, layer, prompt_length, row.page_size)
        for layer in layer_inputs(row, sequence)
    ]


# -- the model ------------------------------------------------------------------------------------


@functools.cache
def weights_of(row: Row) -> transformer.Weights:
    return oracle_weights(model_for(row))


def simulate(
    row: Row, weights: transformer.Weights, tokens, prompt_length: int, page_size: int
) -> transformer.Pass:
    """Runs one sequence through the NumPy model, each layer under the row's simulation."""
    policy = in_tokens(row.policy, len(tokens))
    return transformer.run(
        weights,
        tokens,
        lambda layer: simulate_layer(policy, layer, prompt_length, page_size),
        STORED[row.kv_dtype],
    )


@functools.cache
def simulated(row: Row, sequence: int, prompt_length: int, page_size: int) -> transformer.Pass:
    return simulate(row, weights_of(row), TOKENS[sequence], prompt_length, page_size)


def expected(row: Row, prompts, page_size: int | None = None) -> list[transformer.Pass]:
    """Returns the passes of all sequences, cached if they do not depend on prompts and pages."""
    page_size = page_size or row.page_size
    if row.policy.parallel != "prompts":
        prompts, page_size = [0] * len(LENGTHS), row.page_size
    return [simulated(row, index, int(prompt), page_size) for index, prompt in enumerate(prompts)]


# -- both -----------------------------------------------------------------------------------------


def peak_slots(sequences: Sequence[list[Trace]]) -> np.ndarray:
    """Returns the most slots that each row ever holds, [L, B, K], of each sequence's layers."""
    peaks = np.array([[trace.peak for trace in traces] for traces in sequences])
    return np.swapaxes(peaks, 0, 1)


def live_totals(traces: list[Trace]) -> np.ndarray:
    """Returns the slots in use over all rows when each token attends, [T]."""
    return sum(trace.live_counts.sum(axis=1) for trace in traces)


def read_totals(traces: list[Trace], page_size: int) -> np.ndarray:
    """Returns the entries read over all rows by each token, [T].

    The query heads of a group read their common row once. Where they select pages (Quest), each
    reads its own, unless they select together, and the two bounds of every page count as one
    entry. If there is nothing to select, the row is read once.
    """
    totals = []
    for trace in traces:
        if isinstance(trace, kcache.Fetched):
            totals.append(trace.entries)
            continue
        kv_heads = trace.live_counts.shape[1]
        group = trace.reads.shape[1] // kv_heads
        live, reads = trace.live_counts, trace.reads.reshape(-1, kv_heads, group)
        together = reads[..., 0] if trace.shared else reads.sum(axis=2)
        chosen = together + -(-live // page_size)
        everything = (reads == live[:, :, None]).all(axis=2)
        totals.append(np.where(everything, live, chosen).sum(axis=1))
    return sum(totals)


def read_again(row: Row, traces: list[Trace], prompt_length: int) -> np.ndarray:
    """Returns the entries that each generated token reads again where its layer is cut, [T].

    Scoring reads all slots in use of the layer's rows.
    """
    totals = [np.zeros(len(traces[0].live), int)]
    if row.cuts != "always":
        return totals[0]
    for trace in traces:
        live = trace.live_counts.sum(axis=1)
        kept = np.array([sum(map(len, step)) for step in trace.kept])
        answer = np.arange(len(live)) >= prompt_length
        totals.append(np.where(answer & (kept < live), live, 0))
    return sum(totals)


def run_and_compare(
    row: Row,
    config: ModelConfig,
    run: Callable,
    prompts,
    parts,
    *,
    inputs,
    traces,
    outputs,
    seed: int,
) -> None:
    """Drives `run` over the parts, and compares all results with the simulations.

    Args:
      config: of the model, or of one whose layers have the row's heads.
      run: see `cached_runs.drive`.
      prompts: lengths of the prompts.
      parts: the tokens of each run.
      inputs, traces: the inputs of each layer for each sequence, and its simulation.
      outputs: the expected outputs of each sequence.
      seed: for the places of pages.
    """
    cache = poisoned_cache(
        config,
        row.policy,
        peak_slots(traces),
        page_size=row.page_size,
        table_width=-(-max(LENGTHS) // row.page_size),
        max_lengths=LENGTHS,
        kv_dtype=row.kv_dtype,
        seed=seed,
    )
    keys = [
        [stored_keys(row.policy, layer) - layer.key_center for layer in layers] for layers in inputs
    ]
    after = functools.partial(slots_are_as_simulated, row, prompts, traces, keys)
    out = drive(row.policy, LENGTHS, cache, parts, run, after=after)
    for sequence, layers in enumerate(traces):
        assert np.abs(out.outputs[sequence] - outputs[sequence]).max(initial=0.0) < TOLERANCE
        chex.assert_trees_all_equal(out.live[sequence], live_totals(layers))
        reads = read_totals(layers, row.page_size) + read_again(row, layers, int(prompts[sequence]))
        chex.assert_trees_all_equal(out.reads[sequence], reads)


def slots_are_as_simulated(row: Row, prompts, traces, keys, done, rows) -> None:
    """Compares the keys in all slots, by sequence and layer, after `done` tokens."""
    pairs = []
    for sequence, layers in enumerate(traces):
        for layer, trace in enumerate(layers):
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

"""The results that `generate` and `score` must return, computed from the simulation."""

import dataclasses
import math
from typing import Any

import chex
import numpy as np

import dms_jax
from dms_jax.cache.accounting import Usage
from dms_jax.config import ModelConfig
from dms_jax.generation import Engine, Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies.allocation import Allocation
from dms_jax.policies.delayed_eviction import DelayedEviction
from dms_jax.policies.merging import Merging
from dms_jax.policies.periodic_eviction import AnswerEviction, PeriodicEviction
from dms_jax.policies.selective import SelectiveReading
from dms_jax.policies.victims import VictimEviction
from tests.generation.support import log_softmax
from tests.laws.expected import live_totals, read_again, read_totals, simulate
from tests.laws.rows import Row
from tests.oracles import transformer

TOLERANCE = 1e-10
FLOAT64, FLOAT32, INT32 = 8, 4, 4
LANES, MAX_TOKENS, CHUNK, PREFILL_CHUNK = 4, 32, 4, 8
# Takes the most likely token, with the same compiled programs that sample at other temperatures.
ALMOST_GREEDY = Sampling(temperature=1e-30, logprobs=True)


def engine_of(model: LanguageModel, row: Row, **options: Any) -> Engine:
    """Returns an engine of the one shape that all laws use, so that they share programs."""
    shape = dict(num_lanes=LANES, max_tokens=MAX_TOKENS, chunk=CHUNK, prefill_chunk=PREFILL_CHUNK)
    return Engine(
        model,
        page_size=row.page_size,
        kv_dtype=row.kv_dtype,
        table_width=MAX_TOKENS // row.page_size,
        **(shape | options),
    )


def bytes_per_page(config: ModelConfig, row: Row) -> int:
    """Returns the bytes of keys, values and page state.

    Quest has bounds, H2O sums and positions, KVpop scores, StreamingLLM with a ratio positions.
    """
    numbers, scales = {
        None: (config.head_dim * FLOAT64, 0),
        "float8_e4m3": (config.head_dim, FLOAT32),
    }[row.kv_dtype]
    entry = numbers + scales
    away = isinstance(row.policy, dms_jax.KCache) and row.policy.values == "host"
    if away:  # of rows all of whose layers are fetched from
        assert row.policy.first_layers == 0
    bounds = 2 * isinstance(row.policy, dms_jax.Quest) * config.head_dim * FLOAT64
    slot = {dms_jax.H2O: FLOAT64 + INT32, dms_jax.KVpop: FLOAT64}.get(type(row.policy), 0)
    if has_positions(row.policy):
        slot = INT32
    return row.page_size * (2 * entry - away * numbers + slot) + bounds


def has_positions(policy: dms_jax.Policy) -> bool:
    """Whether a policy keeps the position of each slot's token instead of a ring."""
    return isinstance(policy, dms_jax.StreamingLLM) and policy.compression_ratio is not None


def bytes_per_row(config: ModelConfig, policy: dms_jax.Policy) -> int:
    """Returns the bytes of a policy's state per row: a ring of slots or scores, sums, a victim."""
    if isinstance(policy, PeriodicEviction):
        return bytes_of_queries(config, policy)
    if isinstance(policy, VictimEviction):
        own = max(policy.window, 1) if isinstance(policy, dms_jax.KVpop) else 0
        return INT32 + own * FLOAT64
    if isinstance(policy, SelectiveReading):
        return bytes_per_row(config, policy.over)
    if not isinstance(policy, DelayedEviction) or has_positions(policy):
        return 0
    ring = (policy.visible_window + 1) * INT32
    if not isinstance(policy, Merging):
        return ring
    entries = 1 if policy.merge_window is None else policy.merge_window - 1
    return ring + entries * (2 * config.head_dim + 1) * FLOAT64


def state_bytes(config: ModelConfig, policy: dms_jax.Policy) -> int:
    """Returns the bytes of the state of all rows of a sequence; a window takes a slot per token."""
    window = config.window or 0
    of_layers = [
        window * INT32 if windowed else bytes_per_row(config, policy)
        for windowed in config.windowed
    ]
    return config.num_kv_heads * sum(of_layers)


def bytes_of_queries(config: ModelConfig, policy: dms_jax.Policy) -> int:
    """Returns the bytes of a window of queries, or of moments of queries."""
    while isinstance(policy, Allocation):
        policy = policy.scorer
    numbers = 0
    if isinstance(policy, dms_jax.SnapKV | dms_jax.RKV):
        numbers = policy.window * config.head_dim
    if isinstance(policy, dms_jax.TriAttention):
        numbers = config.head_dim * 3 // 2
    if isinstance(policy, dms_jax.ExpectedAttention):
        numbers = config.head_dim * (1 + policy.covariance * config.head_dim)
    prompt = INT32 if isinstance(policy, AnswerEviction) else 0
    return config.num_heads // config.num_kv_heads * numbers * FLOAT64 + prompt


def left_in(row: Row, one: transformer.Pass, prompt_length: int) -> list[int]:
    """Returns the total slots in use of the sequence's rows at the end."""
    held = [row.held(trace, len(trace.live), prompt_length) for trace in one.traces]
    return [len(head) for layer in held for head in layer]


@dataclasses.dataclass
class Expected:
    """A simulated pass over all input tokens, and the usage figures that follow from it.

    Args:
      fed: number of tokens that go through the cache; the first `prompt_length` are the prompt.
      first_read: the first token whose reads count.
    """

    row: Row
    weights: transformer.Weights
    config: ModelConfig
    fed: Any
    prompt_length: int
    first_read: int
    page_size: int

    def __post_init__(self):
        self.run = simulate(self.row, self.weights, self.fed, self.prompt_length, self.page_size)
        self.logprobs = log_softmax(self.run.logits)

    def check_usage(self, usage: Usage) -> None:
        rows = self.config.num_layers * self.config.num_kv_heads
        live = live_totals(self.run.traces)
        reads = read_totals(self.run.traces, self.page_size)
        reads = (reads + read_again(self.row, self.run.traces, self.prompt_length))[
            self.first_read :
        ]
        policy = self.row.policy
        left = left_in(self.row, self.run, self.prompt_length)
        pages = sum(-(-slots // self.page_size) for slots in left)
        held = pages * bytes_per_page(self.config, self.row)
        held += state_bytes(self.config, policy)
        assert math.isclose(usage.kv_reads, reads.sum() / rows)
        assert math.isclose(usage.peak_tokens, live.max() / rows)
        assert math.isclose(usage.live_tokens, sum(left) / rows)
        assert math.isclose(usage.compression_ratio, len(self.fed) * rows / sum(left))
        assert usage.cache_bytes == held
        assert usage.peak_cache_bytes >= held


def check_completion(
    row: Row, weights, config: ModelConfig, prompt: list[int], completion, page_size: int
) -> None:
    """Checks a greedy answer and its usage."""
    answer = completion.tokens
    expected = Expected(
        row, weights, config, [*prompt, *answer[:-1]], len(prompt), len(prompt), page_size
    )
    logprobs = expected.logprobs[len(prompt) - 1 :]
    assert logprobs.argmax(-1).tolist() == answer
    given = np.array(completion.logprobs)
    chex.assert_trees_all_close(given, logprobs.max(-1), rtol=0, atol=TOLERANCE)
    expected.check_usage(completion.usage)
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.new_tokens == len(answer)


def check_score(row: Row, weights, config: ModelConfig, tokens, score, page_size: int) -> None:
    """Checks log-probabilities and usage of given tokens."""
    tokens = np.asarray(tokens)
    expected = Expected(row, weights, config, tokens[:-1], 0, 0, page_size)
    logprobs = expected.logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    chex.assert_trees_all_close(score.logprobs, logprobs, rtol=0, atol=TOLERANCE)
    expected.check_usage(score.usage)

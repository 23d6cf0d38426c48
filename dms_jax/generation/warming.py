"""The programs that requests need first, compiled at the same time instead of one by one.

They are traced here, one after the other, and compiled in threads; the calls that need them find
them compiled. Other shapes of prompts, and wider page tables, are compiled when they occur.
"""

import concurrent.futures
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from dms_jax.generation import programs
from dms_jax.generation.batches import Shapes
from dms_jax.generation.requests import Request
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Filter
from dms_jax.model.language_model import use_mesh


def compile_first(
    runner: Runner,
    shapes: Shapes,
    requests: Sequence[Request],
    rule: Filter,
    num_steps: int,
    end_tokens: tuple[int, ...],
    compiled: set[Hashable],
) -> None:
    """Compiles the first program of prompts, of tokens after them, and of steps.

    Args:
      runner: the runner that will launch them.
      shapes: the shapes of prompts.
      requests: the first requests, as many as there are lanes, none of them with a past.
      rule: sampling settings.
      num_steps: steps per program.
      end_tokens: token ids that end an answer.
      compiled: keys of what was compiled already; what is compiled now is added.
    """
    model, num_lanes = runner.model, len(runner.seen)
    # Equal prompts are read once.
    left = {tuple(request.prompt): len(request.prompt) for request in requests[:num_lanes]}
    longest = max(left.values())
    _, width, entries = shapes.next_batch(left)
    pages = [runner.table_width(min(longest, width)), runner.table_width(longest + num_steps)]
    key = (rule.switches, rule.logprobs, num_steps, end_tokens, width, entries, *pages)
    if key in compiled:
        return
    compiled.add(key)
    rows = None if runner.fixed_lanes else np.zeros(entries, np.int32)
    entries = num_lanes if rows is None else entries
    num_layers, _, num_kv_heads = runner.lengths.shape
    lanes, fresh = np.zeros(num_lanes, np.int32), np.zeros(num_lanes, bool)
    counts, ends = np.zeros(entries, np.int32), np.zeros(entries, bool)
    tokens = np.zeros((entries, width), np.int32)
    keys = programs.request_keys([0] * num_lanes, [0] * num_lanes)
    cached: tuple[Any, ...] = (model.transformer, runner.cache, runner.host_rows)
    tables = [
        np.zeros((num_layers, batch, num_kv_heads, width), np.int32)
        for batch, width in zip((entries, num_lanes), pages, strict=True)
    ]
    steps = (runner.placed(lanes), lanes, keys, runner.policy, rule, num_steps, end_tokens)
    calls: tuple[tuple[programs.Program, tuple[Any, ...]], ...] = (
        (
            programs.extend,
            (*cached, tables[0], rows, tokens, counts, ends, runner.policy, True),
        ),
        (programs.decode, (*cached, tables[1], *steps)),
        (
            programs.first_tokens,
            (model.transformer, runner.hidden, lanes, keys, lanes, rule, fresh, lanes),
        ),
    )
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads, use_mesh(model.mesh):
        running = [threads.submit(program.lower(*given).compile) for program, given in calls]
        for each in running:
            each.result()

"""The programs that requests need, compiled at the same time instead of one by one.

They are traced here, one after the other, and compiled in threads; the calls that need them find
them compiled. What nobody knows yet is compiled when it occurs: page tables for answers that
outgrow those of the prompts, and prompts that are recomputed after a preemption.
"""

import concurrent.futures
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from dms_jax.generation import compiling, programs
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
    """Compiles the programs of prompts, of tokens after them, and of steps.

    If requests wait for a lane, then also those of the few prompts that come when some end.

    Args:
      runner: the runner that will launch them.
      shapes: the shapes of prompts.
      requests: the requests, none of them with a past.
      rule: sampling settings.
      num_steps: steps per program.
      end_tokens: token ids that end an answer.
      compiled: keys of what was compiled already; what is compiled now is added.
    """
    model, num_lanes = runner.model, len(runner.seen)
    # Equal prompts are read once; those of chains are mostly one list.
    prompts = {id(request.prompt): request.prompt for request in requests[:num_lanes]}
    counts = [len(prompt) for prompt in {tuple(prompt) for prompt in prompts.values()}]
    refilled = len(requests) > num_lanes
    if refilled:
        counts = [len(request.prompt) for request in requests]
    batches = sorted(shapes.batches(counts, refilled=refilled))
    runner.expect(max(len(request.prompt) for request in requests) + num_steps)
    pages, pages_of_steps = runner.table_width(1), runner.table_width(1, steps=True)
    key = (rule.switches, rule.logprobs, num_steps, end_tokens, pages, pages_of_steps, *batches)
    if key in compiled:
        return
    compiled.add(key)
    num_layers, _, num_kv_heads = runner.lengths.shape
    lanes, fresh = np.zeros(num_lanes, np.int32), np.zeros(num_lanes, bool)
    keys = programs.request_keys([0] * num_lanes, [0] * num_lanes)
    cached: tuple[Any, ...] = (model.transformer, runner.cache, runner.host_rows)

    def table(batch: int, width: int) -> np.ndarray:
        return np.zeros((num_layers, batch, num_kv_heads, width), np.int32)

    def extend(width: int, entries: int) -> tuple[compiling.Program, tuple[Any, ...]]:
        entries = num_lanes if runner.fixed_lanes else entries
        counts, ends = np.zeros(entries, np.int32), np.zeros(entries, bool)
        rows = None if runner.fixed_lanes else counts
        tokens = np.zeros((entries, width), np.int32)
        given = (*cached, table(entries, pages), rows, tokens, counts, ends, runner.policy, True)
        return programs.extend, given

    calls: tuple[tuple[compiling.Program, tuple[Any, ...]], ...] = (
        *itertools.starmap(extend, batches),
        (
            programs.decode,
            (
                *cached,
                table(num_lanes, pages_of_steps),
                runner.everywhere(lanes),
                lanes,
                keys,
                runner.policy,
                rule,
                num_steps,
                end_tokens,
            ),
        ),
        (
            programs.first_tokens,
            (model.transformer, runner.hidden, lanes, keys, lanes, rule, fresh, lanes),
        ),
    )
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads, use_mesh(model.mesh):
        running = [threads.submit(program.lower(*given).compile) for program, given in calls]
        for each in running:
            each.result()

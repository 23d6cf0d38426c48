"""A row of the table of policies under the laws, and the models that rows run on.

A row is a policy with its options, its simulation, and the sizes of the model.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.policies.values import AdapterShape
from tests.oracles.trace import Trace
from tests.oracles.transformer import LayerInput
from tests.support.instances import first_of_each
from tests.support.models import random_model, tiny_config

Simulate = Callable[[Any, LayerInput, int, int], Trace]  # policy, layer, prompt length, page size


INNER = {"over": "over", "scorer": "of"}  # fields that hold another policy


def _options(policy: Policy) -> list[str]:
    """Returns the options that differ from the defaults, including those of an inner policy."""
    default = type(policy)()
    changed = {
        field.name: getattr(policy, field.name)
        for field in dataclasses.fields(policy)
        if getattr(policy, field.name) != getattr(default, field.name)
    }
    inner = {word: changed.pop(field) for field, word in INNER.items() if field in changed}
    options = [f"{name}={value}" for name, value in changed.items()]
    for word, one in inner.items():
        options += [f"{word} {one.name}", *_options(one)]
    return options


@dataclasses.dataclass(frozen=True)
class Row:
    """A policy under test.

    Attributes:
      policy: the policy that runs.
      simulate: the NumPy simulation.
      group: query heads per KV head.
      page_size: slots per page; does not divide the lengths of the tests.
      keys: the keys stored in the slots, by the ids of the trace; rotated keys by default.
      ordered: whether the simulation also gives the order of slots.
      selects: whether query heads read less than the cache holds.
      identity: whether nothing is ever evicted, so that the simulation is vanilla attention.
      kv_dtype: the dtype of the cache; the model's if None.
      cuts: whether rows are cut right after a token's attention.
    """

    policy: Policy
    simulate: Simulate
    group: int
    page_size: int
    keys: Callable[[Any, LayerInput], np.ndarray] = lambda policy, layer: layer.rotated[1]
    ordered: bool = True
    selects: bool = False
    identity: bool = False
    kv_dtype: str | None = None
    cuts: Literal["never", "after the prompt", "always"] = "never"

    def held(self, trace: Trace, done: int, prompt_length: int) -> list[list[int]]:
        """Returns the tokens in the slots of each KV head after `done` tokens."""
        if not done:
            return [[] for _ in trace.live[0]]
        after_prompt = self.cuts == "after the prompt" and done == prompt_length
        return (trace.kept if after_prompt or self.cuts == "always" else trace.live)[done - 1]

    @functools.cached_property
    def name(self) -> str:
        options = _options(self.policy)
        options += [f"G={self.group}", f"page={self.page_size}"]
        return "-".join([self.policy.name, *options, *([self.kv_dtype] if self.kv_dtype else [])])

    @property
    def num_kv_heads(self) -> int:
        return 2 if self.group < 8 else 1

    @property
    def cost(self) -> tuple[bool, ...]:
        """What makes a row dear: programs that no other law runs, layers that are not alike.

        Nothing evicted and a cache of few bits say less than the others, so they come last.
        """
        first = getattr(self.policy, "dense_layers", getattr(self.policy, "first_layers", 0))
        return self.group != 2, self.identity, self.kv_dtype is not None, bool(first)


def one_of_each_policy(rows: Sequence[Row]) -> list:
    """Returns rows as parameters, all `nightly` but the cheapest of each policy."""
    return first_of_each(rows, by=lambda row: row.policy.name, cost=lambda row: row.cost)


def forms(row: Row) -> set:
    """Returns what has code of its own in a row: the policy, what it is put over, prompts, bits."""
    policy = row.policy
    return {
        policy.name,
        (policy.name, type(getattr(policy, "over", None))),
        ("prefill", getattr(policy, "prefill", None)),
        ("bits", row.kv_dtype),
    }


def every_form_once(rows: Sequence[Row]) -> list[Row]:
    """Returns the cheapest rows in which each of the forms of `rows` is met, in their order.

    For laws that compile programs of their own: what else rows differ in, numbers and options, are
    met in the programs that all rows run.
    """
    chosen, met = [], set()
    for row in sorted(rows, key=lambda row: row.cost):
        if not forms(row) <= met:
            chosen.append(row)
            met |= forms(row)
    return [row for row in rows if row in chosen]


@functools.cache
def model_of(group: int, adapter: AdapterShape | bool | None) -> Transformer:
    """Returns a model of two layers, whose switches vary with the group size."""
    kv_heads = 2 if group < 8 else 1
    config = tiny_config(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        qk_norm=group in (1, 4),
        biases=group in (2, 4),
        tied=group in (1, 2),
    )
    return random_model(config, adapter=adapter, seed=group)


def model_for(row: Row) -> Transformer:
    return model_of(row.group, row.policy.retrofit.adapter)

"""The rows of the laws: policies with their options, and their sizes.

`ROWS` run below the model (`test_layers.py`): every option with separate code, with group sizes,
page sizes, dtypes and chunk forms combined pairwise, and each of these with every mechanism.
`MODEL_ROWS` run the whole model: one row for each of the seven mechanisms.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal

import dms_jax
from dms_jax.model.transformer import Transformer
from dms_jax.policies import POLICIES, Policy
from dms_jax.policies.periodic_eviction import PeriodicEviction, Scorer
from dms_jax.policies.selective import SelectiveReading
from dms_jax.policies.values import AdapterShape
from dms_jax.policies.victims import VictimEviction
from tests.laws.pairwise import covering
from tests.oracles import scored
from tests.oracles.trace import Trace
from tests.support.models import random_model, tiny_config

BY_TOKEN = "evict_past_budget"
PLENTY = 64  # longer than every sequence of the tests
LOW_OFFSET = dict(alpha_scale=2.0, alpha_offset=0.5)
# Options by mechanism. Numbers are varied only where they need no further program.
OPTIONS = {
    "append": [dms_jax.Vanilla()],
    "evict": [
        dms_jax.DMS(window=0, shift=0),
        dms_jax.DMS(window=4, source="adapter"),
        dms_jax.DMS(window=6, shift=6, per="layer"),
        dms_jax.DMS(window=3, shift=4, source="adapter", alpha_offset=40.0),
        dms_jax.DMS(window=2, decisions="bernoulli", seed=3, **LOW_OFFSET),
        dms_jax.StreamingLLM(budget=8, sinks=2),
        dms_jax.StreamingLLM(compression_ratio=2.7, sinks=2),
        dms_jax.StreamingLLM(compression_ratio=3.1, sinks=1, prefill=BY_TOKEN),
        dms_jax.RandomEviction(window=3, rate=0.7, spread=0.2, seed=7),
        dms_jax.KVzap(window=4, threshold=-5.5, sinks=1),
    ],
    "merge": [
        dms_jax.DMC(offset=0.4, neuron="first", window=2),
        dms_jax.DMC(offset=0.0),
        dms_jax.DMC(offset=0.1, per="layer", importance="uniform", window=3),
        dms_jax.DMC(offset=-0.3, window=None),
        dms_jax.FixedPooling(every=3),
    ],
    "victim": [
        dms_jax.TOVA(budget=8, prefill=BY_TOKEN),
        dms_jax.TOVA(budget=6, per="head"),
        dms_jax.H2O(budget=7, prefill=BY_TOKEN),
        dms_jax.H2O(compression_ratio=2.4),
        dms_jax.KVpop(budget=8, window=3, prefill=BY_TOKEN),
        dms_jax.KVpop(budget=9, window=4),
        dms_jax.KVpop(budget=2, window=0, prefill=BY_TOKEN),
    ],
    "cut": [
        *(
            POLICIES[name](**options)
            for name, ranking in scored.RANKINGS.items()
            for options in ranking.options
        ),
        dms_jax.AdaKV(dms_jax.SnapKV(budget=9, interval=4, window=3), alpha=0.5),
        dms_jax.PyramidKV(dms_jax.SnapKV(budget=8, interval=3, window=3), beta=3),
        dms_jax.RandomSelection(budget=8, interval=5, seed=3),
        dms_jax.AdaKV(dms_jax.PyramidKV(dms_jax.KeyDiff(budget=8, interval=3), beta=4)),
    ],
    "select pages": [
        dms_jax.Quest(budget=9, dense_layers=1, force_last_page=False),
        dms_jax.Quest(budget=8, dense_layers=0, per="kv_head"),
        dms_jax.Quest(budget=8, dense_layers=0, over=dms_jax.DMS(window=3)),
        dms_jax.Quest(compression_ratio=2.5, dense_layers=0),
    ],
    "fetch values": [
        dms_jax.KCache(top=5, first_layers=1),
        dms_jax.KCache(top=4, first_layers=0, over=dms_jax.DMS(window=3)),
        dms_jax.KCache(compression_ratio=4, first_layers=0, values="device"),
    ],
}
FACTORS = {
    "group": (1, 2, 4, 8),
    "page_size": (3, 4, 5, 7),  # they do not divide the lengths of the tests
    "kv_dtype": (None, "float8_e4m3"),
    "prompts": ("chunks", "whole", "tokens"),
    "answers": ("steps", "chunks"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A policy under test.

    Attributes:
      policy: the policy that runs.
      group: query heads per KV head.
      page_size: slots per page.
      kv_dtype: the dtype of the cache; the model's if None.
      prompts: whether prompts come in chunks, whole, or one token at a time.
      answers: whether answers run in steps, or at first in chunks, as after a preemption.
    """

    policy: Policy
    group: int
    page_size: int
    kv_dtype: str | None = None
    prompts: Literal["chunks", "whole", "tokens"] = "chunks"
    answers: Literal["steps", "chunks"] = "steps"

    @property
    def num_kv_heads(self) -> int:
        return 2

    @property
    def ordered(self) -> bool:
        """Whether the simulation gives the order of slots, too."""
        return not isinstance(self.policy, VictimEviction | dms_jax.StreamingLLM)

    @property
    def cuts(self) -> Literal["never", "after the prompt", "always"]:
        """When rows are cut immediately after a token's attention."""
        if isinstance(self.policy, PeriodicEviction):
            return "always"
        if in_one_pass_by_its_window(self.policy):
            return "never"
        dense = getattr(self.policy, "prefill", None) == "dense_then_evict"
        return "after the prompt" if dense else "never"

    @property
    def selects(self) -> bool:
        """Whether query heads read only a part of the cache."""
        return isinstance(self.policy, SelectiveReading)

    def held(self, trace: Trace, done: int, prompt_length: int) -> list[list[int]]:
        """Returns the tokens in the slots of each KV head after `done` tokens."""
        if not done:
            return [[] for _ in trace.live[0]]
        after_prompt = self.cuts == "after the prompt" and done == prompt_length
        return (trace.kept if after_prompt or self.cuts == "always" else trace.live)[done - 1]

    @functools.cached_property
    def name(self) -> str:
        sizes = [f"G={self.group}", f"page={self.page_size}"]
        forms = [value for value in (self.kv_dtype, self.prompts, self.answers) if value]
        forms = forms if (self.prompts, self.answers) != ("chunks", "steps") else forms[:-2]
        return "-".join([self.policy.name, *_options(self.policy), *sizes, *forms])


def in_one_pass_by_its_window(policy: Policy) -> bool:
    """Returns whether each prompt token sees a window of the same size, for any `prefill`."""
    return isinstance(policy, dms_jax.StreamingLLM) and policy.compression_ratio is None


INNER = {"over": "over", "scorer": "of"}  # fields that contain another policy


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


POLICY_ROWS = [(mechanism, policy) for mechanism, all_ in OPTIONS.items() for policy in all_]
ROWS = [Row(policy, **values) for policy, values in covering(POLICY_ROWS, FACTORS)]


def of_other_groups(rows: Iterable[Row]) -> list[Row]:
    """Returns a row for every policy and each group size that `rows` lacks for it."""
    met = {(row.policy.name, row.group) for row in rows}
    first = {policy.name: policy for _, policy in reversed(POLICY_ROWS)}
    return [
        Row(policy, group, page_size, answers="chunks")
        for name, policy in first.items()
        for group, page_size in zip(FACTORS["group"], FACTORS["page_size"], strict=True)
        if (name, group) not in met
    ]


# Other values of traced numbers.
OTHER = {
    "budget": lambda value: value + 2,
    "compression_ratio": lambda value: value + 0.9,
    "interval": lambda value: value + 1,
    "sinks": lambda value: value + 1,
    "recent": lambda value: value + 1,
    "seed": lambda value: value + 1,
    "alpha_scale": lambda value: 0.6 * value,
    "alpha_offset": lambda value: -0.4 * value,
    "offset": lambda value: value + 0.3,
    "epsilon": lambda value: value + 0.1,
    "mix": lambda value: value / 2,
    "threshold": lambda value: value - 1.5,
    "rate": lambda value: value - 0.3,
    "spread": lambda value: value + 0.1,
    "alpha": lambda value: value / 2,
    "beta": lambda value: value + 1,
    "over": lambda value: with_other_numbers(value) or value,
    "scorer": lambda value: with_other_numbers(value),
}
SHAPES = {dms_jax.StreamingLLM: {"budget", "sinks"}}  # fields that are sizes of its window


def with_other_numbers(policy: Policy) -> Policy | None:
    """Returns the policy with other traced numbers; None if it has none."""
    fields = {field.name for field in dataclasses.fields(policy)} - SHAPES.get(type(policy), set())
    old = {name: getattr(policy, name) for name in OTHER if name in fields}
    new = {name: OTHER[name](value) for name, value in old.items() if value is not None}
    if isinstance(policy, dms_jax.Quest) and new["budget"] > policy.bound("budget"):
        new["budget"] = policy.budget - 1  # not beyond the power of two that sizes page tables
    if getattr(policy, "compression_ratio", None):
        new.pop("budget", None)
    changed = dataclasses.replace(policy, **new)
    return None if changed == policy else changed


def with_nothing_to_evict(policy: Policy) -> Policy | None:
    """Returns the policy with numbers that make it vanilla attention, in the same programs."""
    if getattr(policy, "compression_ratio", None):
        whole = not isinstance(policy, dms_jax.Quest)  # it reads only whole pages
        return dataclasses.replace(policy, compression_ratio=1) if whole else None
    match policy:
        case dms_jax.DMS():
            return dataclasses.replace(policy, alpha_offset=1e6)
        case dms_jax.DMC():
            return dataclasses.replace(policy, offset=1e6)
        case dms_jax.KVzap():
            return dataclasses.replace(policy, threshold=-1e6)
        case dms_jax.RandomEviction():
            return dataclasses.replace(policy, rate=0, spread=0)
        case VictimEviction() | Scorer():
            return dataclasses.replace(policy, budget=PLENTY)
        case dms_jax.PyramidKV():
            return dataclasses.replace(policy, beta=1, scorer=with_nothing_to_evict(policy.scorer))
        case dms_jax.AdaKV():
            return dataclasses.replace(policy, scorer=with_nothing_to_evict(policy.scorer))
    return None


def layer_law(start: str) -> str:
    """Returns the pytest id of the row whose name begins with the argument.

    The rest of its name changes when an option is added to the table.
    """
    (name,) = [row.name for row in ROWS if row.name.startswith(start)]
    return f"tests/laws/test_layers.py::test_prompts_and_answers[{name}]"


# -- the whole model ------------------------------------------------------------------------------

# Group sizes are those of models with other switches (`model_of`).
MODEL_ROWS = [
    Row(dms_jax.Vanilla(), 1, 3),
    Row(dms_jax.DMS(window=4, source="adapter"), 2, 5),
    Row(dms_jax.DMC(offset=0.4, neuron="first", window=2), 2, 4),
    Row(dms_jax.TOVA(budget=8, prefill=BY_TOKEN), 4, 5),
    Row(dms_jax.SnapKV(budget=9, interval=4, window=3), 2, 4),
    Row(dms_jax.Quest(budget=8, dense_layers=1), 8, 4),
    Row(dms_jax.KCache(top=3, first_layers=0), 2, 5),
]


@functools.cache
def model_of(group: int, adapter: AdapterShape | bool | None) -> Transformer:
    """Returns a model of two layers, whose switches vary with the group size.

    With groups of 3 biases are ten times as long as in the others, and there are so few positions
    that the slowest plane turns by less than a radian.
    """
    config = tiny_config(
        num_heads=2 * group,
        num_kv_heads=2,
        qk_norm=group in (1, 4),
        biases=group in (2, 3, 4),
        tied=group in (1, 2),
    )
    if group == 3:
        config = dataclasses.replace(config, max_position_embeddings=31)
    return random_model(config, adapter=adapter, seed=group, biases=3.0 if group == 3 else 0.3)


def model_for(row: Row) -> Transformer:
    return model_of(row.group, row.policy.retrofit.adapter)

"""What is asked, what is trained, and what needs no training.

Everything is trained from one base model on documents that it wrote itself, and a training is named
by what it changes. Trained models, and policies that need no training, answer the questions of
several *measures*.
"""

import dataclasses
from typing import Any

import dms_jax
from dms_jax.data.tasks import (
    Arithmetic,
    LinearEquation,
    Needle,
    Task,
    VariableTracking,
    WordChain,
)
from dms_jax.policies import Policy
from dms_jax.training import Recipe, Stage
from experiments.reproduction.claims.settings import Config

VANILLA = "vanilla"
DMS, DMC = "dms", "dmc"
LENGTHS = (128, 256, 512, 1024)  # L, the longest answers of the frontier
RATIOS = (2.0, 3.0, 4.0, 8.0)  # of DMS on the frontier
FREE_RATIOS = (2.0, 4.0, 8.0)  # of what is not trained
SHORT = 512  # tokens of a sequence in trainings whose models are then asked longer ones
HAYSTACKS = {450: (190, 12), 950: (450, 30), 1800: (830, 64)}  # tokens -> words, repetitions
KCACHE_TOPS, KCACHE_LAYERS = (8, 16, 32, 64), (0, 1, 2, 4)
# DMS as the first curve chose it on validation problems; DMC as the comparison page did.
POLICY = dms_jax.DMS(window=16, source="query_neuron", shift=1)
MERGING = dms_jax.DMC()


@dataclasses.dataclass(frozen=True)
class Measure:
    """Questions to a system.

    Attributes:
      tasks: asked in turn.
      problems, chains: how many, and answers to each.
      new_tokens: longest answer.
    """

    tasks: tuple[Task, ...]
    problems: int
    chains: int
    new_tokens: int


def measures(config: Config) -> dict[str, Measure]:
    """All measures by name."""
    reasoning = (
        LinearEquation(coefficient=9999, constant=999_999, solution=999),
        Arithmetic(operations=(6, 12)),
        WordChain(steps=(8, 24), distractors=(0, 12)),
    )
    known = {"reasoning": Measure(reasoning, config.problems, 4, 700)}
    for length in LENGTHS:
        known[f"frontier{length}"] = Measure(
            reasoning, config.frontier_problems, config.frontier_chains, length
        )
    for tokens, (words, repetitions) in HAYSTACKS.items():
        for name, task in (
            ("needle", Needle(size=words)),
            ("tracking", VariableTracking(size=repetitions)),
        ):
            known[f"{name}{tokens}"] = Measure((task,), config.retrieval_problems, 1, 128)
    return known


FRONTIER = tuple(f"frontier{length}" for length in LENGTHS)
TABLE = ("reasoning", "tracking950")
LONGER = tuple(f"{task}{tokens}" for tokens in HAYSTACKS for task in ("needle", "tracking"))


@dataclasses.dataclass(frozen=True)
class Training:
    """One way to train the base model.

    Attributes:
      name: for files and tables.
      policy: what decides; None for the control, which evicts nothing.
      ratio: the compression ratio that it reaches.
      snapshots: ratios on the way at which it is measured too.
      measures: what is asked of all of these.
      per_ratio: steps a unit of ratio as a multiple of the plan's.
      decay, settle: steps of the other stages, likewise.
      rate: learning rate.
      decay_rate: learning rate while the neuron fades.
      at_once: the target is the final one from the first step on.
      short: sequences of `SHORT` tokens.
      scratch: from random weights.
      changes: fields of the recipe that differ.
      seeds: how many at most; None for the plan's.
    """

    name: str
    policy: Policy | None
    ratio: float = 4.0
    snapshots: tuple[float, ...] = ()
    measures: tuple[str, ...] = TABLE
    per_ratio: float = 1.0
    decay: float = 1.0
    settle: float = 0.0
    rate: float = 3e-5
    decay_rate: float = 5e-5
    at_once: bool = False
    short: bool = False
    scratch: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    seeds: int | None = None

    @property
    def settings(self) -> tuple[float, ...]:
        """The ratios at which it is measured."""
        return (*self.snapshots, self.ratio)

    def recipe(self, config: Config) -> Recipe:
        """Everything but model, policy and data."""
        ramp = round((self.ratio - 1) * self.per_ratio * config.steps_per_ratio)
        settle = round(self.settle * config.settle_steps)
        if self.at_once:
            ramp, settle = 1, ramp + settle - 1
        stages = [Stage("neuron_decay", round(self.decay * config.decay_steps), self.decay_rate)]
        stages.append(Stage("ramp", max(ramp, 1), self.rate, self.ratio))
        if settle:
            last = self.rate / 10 if self.settle else None
            stages.append(Stage("train", settle, self.rate, final_learning_rate=last))
        length = SHORT if self.short else config.sequence_length
        recipe = Recipe(
            name=self.name,
            stages=tuple(stages),
            sequence_length=length,
            batch_size=max(1, config.batch_tokens // length),
            weight_decay=0.1,
            remat="nothing",
            unroll=True,
            packing="first_fit",
            snapshots=self.snapshots,
            **dict(self.changes),
        )
        return recipe if self.policy is not None else recipe.control(POLICY)


def _windows() -> tuple[Training, ...]:
    """Table 6 of the DMS paper: windows, decisions in advance and as the token leaves."""
    rows = [("dms-w0", dms_jax.DMS(window=0, shift=0))]
    for window in (16, 64, 256):
        for name, shift in (("delayed", 1), ("immediate", window)):
            if (window, shift) != (POLICY.window, POLICY.shift):
                rows.append((f"dms-w{window}-{name}", dms_jax.DMS(window=window, shift=shift)))
    return tuple(Training(name, policy, snapshots=(2.0, 3.0)) for name, policy in rows)


def _merging(name: str, policy: Policy = MERGING, **changes: Any) -> Training:
    """DMC: its own rates, two ratios, and a stage in which it settles."""
    own = dict(snapshots=(2.0,), settle=1.0, rate=3e-4, decay_rate=2e-4)
    recipe = {"compression_weight": 10.0, **changes.pop("recipe", {})}
    return Training(name, policy, **{**own, **changes}, changes=tuple(recipe.items()))


_LANGUAGE = ("loss", "language_modeling")
TRAININGS = {
    training.name: training
    for training in (
        # The frontier of figures 2 to 4.
        Training(DMS, POLICY, ratio=8.0, snapshots=(2.0, 3.0, 4.0), measures=(*FRONTIER, *TABLE)),
        _merging(DMC, measures=("frontier512", "frontier1024", *TABLE)),
        # DMC given the tokens that the paper gives it: a long ramp, a long settling.
        _merging("dmc-long", per_ratio=5.0, settle=5.0, snapshots=(), seeds=2),
        Training("further", None, ratio=8.0, measures=TABLE),
        *_windows(),
        # Tables 5 and 8: the language modelling loss in place of distillation.
        Training("dms-lm", POLICY, snapshots=(2.0, 3.0), changes=(_LANGUAGE,)),
        _merging("dmc-lm", recipe=dict((_LANGUAGE,))),
        # Ablations of DMC (appendices D and E of its paper).
        _merging("dmc-c", recipe={"head_balance": 1.0}),
        _merging("dmc-hard-c", dms_jax.DMC(per="layer")),
        _merging("dmc-local-prior", recipe={"prior": "layer"}),
        _merging("dmc-uniform", dms_jax.DMC(importance="uniform")),
        _merging("dmc-immediate", snapshots=(), at_once=True),
        # Tokens of training.
        Training("dms-tenth", POLICY, per_ratio=0.1),
        Training("dms-third", POLICY, per_ratio=1 / 3),
        Training("dms-triple", POLICY, per_ratio=3.0),
        _merging("dmc-third", per_ratio=1 / 3, settle=1 / 3, snapshots=()),
        # Table 7: contexts beyond the length of the training.
        Training("dms-short", POLICY, snapshots=(2.0,), measures=LONGER, short=True),
        _merging("dmc-short", measures=LONGER, short=True),
        # The loss on the ratio, and a target without a ramp.
        Training("dms-kl", POLICY, snapshots=(2.0, 3.0), changes=(("regulariser", "kl"),)),
        Training("dms-at-once", POLICY, at_once=True),
        # From nothing, on the same tokens.
        _merging("dmc-scratch", recipe=dict((_LANGUAGE,)), scratch=True, snapshots=(), seeds=1),
    )
}


@dataclasses.dataclass(frozen=True)
class Free:
    """A policy that needs no training, or that asks a trained model in another way.

    Attributes:
      name: for files and tables.
      settings: setting -> policy.
      measures: what is asked.
      model: the training whose models are asked, at the same setting; None for the base model.
      seeds: how many; None for the plan's.
    """

    name: str
    settings: tuple[tuple[str, Policy], ...]
    measures: tuple[str, ...]
    model: str | None = None
    seeds: int | None = None


def _ratios(make: Any, **options: Any) -> tuple[tuple[str, Policy], ...]:
    return tuple((f"{ratio:g}", make(compression_ratio=ratio, **options)) for ratio in FREE_RATIOS)


def _grid() -> tuple[tuple[str, Policy], ...]:
    return tuple(
        (f"N{top}L{layers}", dms_jax.KCache(top=top, first_layers=layers, values="device"))
        for top in KCACHE_TOPS
        for layers in KCACHE_LAYERS
    )


# As the DMS paper ran them (appendix G.1): a prompt takes no more than the budget.
_BY_TOKEN = dict(prefill="evict_past_budget")
_DRAWN = dataclasses.replace(POLICY, decisions="bernoulli")
FREE = {
    free.name: free
    for free in (
        Free(VANILLA, (("1", dms_jax.Vanilla()),), (*FRONTIER, *TABLE, *LONGER)),
        Free(
            "tova",
            _ratios(dms_jax.TOVA, **_BY_TOKEN),
            (*FRONTIER, *TABLE, *LONGER),
            seeds=1,
        ),
        Free("quest", _ratios(dms_jax.Quest), (*FRONTIER, *TABLE, *LONGER), seeds=1),
        Free(
            "streaming",
            _ratios(dms_jax.StreamingLLM, **_BY_TOKEN),
            (*FRONTIER, *TABLE),
            seeds=1,
        ),
        Free(
            "h2o",
            _ratios(dms_jax.H2O, **_BY_TOKEN),
            (*FRONTIER, *TABLE, *LONGER),
            seeds=1,
        ),
        Free(
            "dms-drawn",
            tuple((f"{ratio:g}", _DRAWN) for ratio in RATIOS),
            TABLE,
            model=DMS,
        ),
        Free("kcache", _grid(), ("reasoning",), seeds=1),
    )
}

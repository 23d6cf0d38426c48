"""What is trained and asked, and where the files are.

    data/SHARD.npz                 documents that the base model wrote itself
    trainings/NAME/                a run directory of `dms_jax.train`: log, snapshots, model
    summaries/NAME.json            the thinned log of a training that is done
    results/NAME-SETTING.json      loss, answers and kept shares of a system
    jobs/, locks/, failed/         see `experiments.reproduction.queue`

Systems are compared at the same live tokens. A setting is a share: of the tokens beyond the window
each system is to keep that many. Where tokens decide for themselves (DMS, KVzap) a threshold is
calibrated to it on held-out text; a budget is the window and that share of a usual sequence.
"""

import dataclasses
import pathlib
from typing import Literal

import dms_jax
from dms_jax.data.tasks import Arithmetic, LinearEquation, Needle, Task, VariableTracking, WordChain
from dms_jax.policies import Policy
from dms_jax.policies.budget import Prefill
from dms_jax.training import Recipe, recipes
from experiments.reproduction.queue import Places

WINDOW = 16  # of the reasoner's DMS (the first curve); its sequences are short
RATIOS = (4.0, 8.0)
# Tokens of a usual sequence of vanilla's at its end, from which budgets are shares.
LENGTHS = {"reasoning": 420, "retrieval": 960}


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare learned evictions on a small reasoning model."""

    out: pathlib.Path = pathlib.Path("runs/learned_evictions")
    """Run directory. What is there already is not done again."""
    pages: pathlib.Path | None = None
    """Folder for README.md and results.json; the run directory unless given."""
    model: str = ""
    """Hugging Face directory of the base model; the shipped reasoning model unless given."""
    processes: int = 1
    """Workers, which share the GPU: one compiles while another runs."""
    deadline_minutes: float = 1e6
    """Nothing starts later than this after the beginning."""
    only: Literal["all", "report"] = "all"
    """"report" does no job and writes the page from what is there."""
    systems: tuple[str, ...] = ()
    """Only these systems; all unless given."""

    shards: int = 4
    """Jobs that the generation of the data is split into."""
    documents: int = 24_000
    """Self-written documents of all shards together."""
    document_tokens: int = 1000
    """Longest completion of the training data."""
    document_temperature: float = 1.0
    """Sampling temperature of the training data."""
    sequence_length: int = 2048
    """Tokens of a training sequence."""
    batch_tokens: int = 65_536
    """Tokens of an optimizer step."""
    steps: int = 800
    """Optimizer steps of every training."""
    learning_rate: float = 3e-5
    """Learning rate of all weights but the adapter, where they are trained."""
    adapter_learning_rate: float = 3e-4
    """Learning rate of the adapter of DMS."""
    scorer_learning_rate: float = 1e-3
    """Learning rate of the scorers of KVzap and KVpop."""
    hidden: int = 64
    """Hidden units of these scorers."""
    measures: tuple[Literal["reasoning", "retrieval"], ...] = ("reasoning", "retrieval")
    """What is asked: problems of reasoning, of retrieval, or both."""
    problems: int = 240
    """Reasoning problems, a third of each kind."""
    chains: int = 4
    """Answers to each problem of reasoning."""
    retrieval_problems: int = 160
    """Needle and tracking problems, half of each."""
    new_tokens: int = 700
    """Longest answer to a reasoning problem."""
    texts: int = 192
    """Worked problems of the validation split whose loss is measured, one token at a time."""
    temperature: float = 0.7
    """Sampling temperature of every answer; 0 takes the most likely token."""
    lanes: int = 2048
    """Sequences in the cache at a time."""
    page_size: int = 64
    """Tokens a page of the cache."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise dms_jax.ConfigError(f"{field.name} must be positive, got {value}")
        if unknown := set(self.systems) - SYSTEMS.keys():
            known = ", ".join(SYSTEMS)
            raise dms_jax.ConfigError(
                f"there is no system {sorted(unknown)[0]!r}; there are {known}"
            )

    def tasks(self, measure: str) -> tuple[Task, ...]:
        """What is asked under a name."""
        if measure == "reasoning":
            return (
                LinearEquation(coefficient=9999, constant=999_999, solution=999),
                Arithmetic(operations=(6, 12)),
                WordChain(steps=(8, 24), distractors=(0, 12)),
            )
        return (Needle(size=450), VariableTracking(size=30))

    @property
    def tokens(self) -> int:
        """Tokens of every training."""
        return self.steps * self.batch_tokens


@dataclasses.dataclass(frozen=True)
class System:
    """One way to keep the cache small.

    Attributes:
      label: for tables.
      policy: what is trained and runs, before it is fitted to a setting; None for the plain cache.
      recipe: name of its recipe (`dms_jax.recipes`); None for what is not trained.
      trainable: what its training changes.
    """

    label: str
    policy: Policy | None
    recipe: Literal["dms_self_taught", "dms_layer_floor", "dms_warm_up", "kvzap", "kvpop"] | None
    trainable: Literal["adapter", "all"] = "adapter"

    def make_recipe(self, config: Config) -> Recipe:
        """Returns the recipe; every system sees the same tokens."""
        assert self.recipe is not None
        sizes = dict(
            tokens=config.tokens,
            sequence_length=config.sequence_length,
            batch_size=max(1, config.batch_tokens // config.sequence_length),
        )
        if self.recipe in ("kvzap", "kvpop"):
            recipe = getattr(recipes, self.recipe)(
                learning_rate=config.scorer_learning_rate, **sizes
            )
        else:
            recipe = getattr(recipes, self.recipe)(
                RATIOS[-1],
                trainable=self.trainable,
                learning_rate=config.learning_rate,
                adapter_learning_rate=config.adapter_learning_rate,
                settle=0,
                **sizes,
            ).warmed(0)
            recipe = dataclasses.replace(recipe, snapshots=RATIOS[:-1])
        return dataclasses.replace(recipe, micro_batch_size=None, remat="nothing", unroll=True)

    def budgeted(self, ratio: float, measure: str) -> Policy | None:
        """Returns the policy with the budget of a setting; None if it has no budget."""
        rest = (LENGTHS[measure] - WINDOW - 1) / ratio
        tokens = round(WINDOW + 1 + rest)
        match self.policy:
            case dms_jax.KVpop() | dms_jax.TOVA():  # one more is live while a query attends
                return dataclasses.replace(self.policy, budget=tokens - 1)
            case dms_jax.StreamingLLM():
                return dataclasses.replace(self.policy, budget=tokens)
        return None


_DMS = dms_jax.DMS(window=WINDOW, source="adapter", shift=0)
VANILLA = "vanilla"


def systems(hidden: int = 64) -> dict[str, System]:
    """Returns all systems by name, in the order in which they are begun."""
    kvzap = dms_jax.KVzap(window=WINDOW, hidden=hidden)
    prefill: Prefill = "evict_past_budget"  # prompts take no more than the budget
    kvpop = dms_jax.KVpop(budget=128, window=WINDOW, hidden=hidden, prefill=prefill)
    return {
        VANILLA: System("vanilla", None, None),
        "dms": System("DMS", _DMS, "dms_self_taught", "all"),
        "kvzap": System("KVzap", kvzap, "kvzap"),
        "kvpop": System("KVpop", kvpop, "kvpop"),
        "dms-frozen": System("DMS, frozen weights", _DMS, "dms_self_taught"),
        "dms-warm-up": System("DMS after a warm-up", _DMS, "dms_warm_up", "all"),
        "dms-floor": System("DMS with a floor", _DMS, "dms_layer_floor", "all"),
        "dms-warm-up-frozen": System(
            "DMS after a warm-up, frozen weights", _DMS, "dms_warm_up", "adapter"
        ),
        "tova": System("TOVA", dms_jax.TOVA(prefill=prefill), None),
        "streaming": System("StreamingLLM", dms_jax.StreamingLLM(sinks=4), None),
    }


SYSTEMS = systems()


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work for one process.

    Attributes:
      kind: what is done.
      system: name of what is trained or asked.
      ratio: setting at which it is asked; shard of the data.
    """

    kind: Literal["data", "training", "asking"]
    system: str
    ratio: float = 1.0

    @property
    def name(self) -> str:
        """For files."""
        return f"{self.kind}-{self.system}-{self.ratio:g}"


def jobs(config: Config) -> list[Job]:
    """Everything, in the order in which it is begun: what the others need comes first."""
    wanted = {name: SYSTEMS[name] for name in config.systems or SYSTEMS}
    order = [Job("data", "data", shard) for shard in range(config.shards)]
    order += [Job("training", name) for name, system in wanted.items() if system.recipe]
    order += [Job("asking", name) for name, system in wanted.items() if system.policy is None]
    for ratio in RATIOS:
        order += [Job("asking", name, ratio) for name in wanted if wanted[name].policy is not None]
    return order


class Paths(Places):
    """Where things are in the run directory."""

    def __init__(self, config: Config):
        super().__init__(config.out)
        self.config = config

    def data(self, shard: int) -> pathlib.Path:
        return self.root / "data" / f"{shard}.npz"

    def training(self, system: str) -> pathlib.Path:
        return self.root / "trainings" / system

    def model(self, system: str, ratio: float) -> pathlib.Path:
        """What was trained for a setting: scorers are the same at all of them."""
        snapshot = self.training(system) / "snapshots" / f"{ratio:g}"
        return snapshot if snapshot.exists() else self.training(system) / "model"

    def summary(self, system: str) -> pathlib.Path:
        return self.root / "summaries" / f"{system}.json"

    def result(self, system: str, ratio: float) -> pathlib.Path:
        return self.root / "results" / f"{system}-{ratio:g}.json"

    def product(self, job: Job) -> pathlib.Path:
        """The file that a job is there to write."""
        if job.kind == "data":
            return self.data(int(job.ratio))
        if job.kind == "training":
            return self.summary(job.system)
        return self.result(job.system, job.ratio)

    def done(self, job: Job) -> bool:
        return self.product(job).exists()

    def ready(self, job: Job) -> bool:
        """Whether what a job needs is there."""
        if job.kind == "training":
            return all(self.data(shard).exists() for shard in range(self.config.shards))
        if job.kind == "asking" and SYSTEMS[job.system].recipe is not None:
            return self.summary(job.system).exists()
        return True

"""What the first curve measures: systems, settings, tasks, and the jobs that do it.

A job is done when its files are there, so that nothing is repeated and a run can be cut off
anywhere. The layout of the run directory:

    data/SHARD.npz                             self-generated documents
    training/SYSTEM-SEED.json                  log of a training run, thinned out
    models/SYSTEM-SEED-RATIO/                  snapshots, Hugging Face directories
    results/SYSTEM/SETTING-SEED-TASK.json      one evaluation each; `Config.choice` is a task too
    jobs/NAME.json                             seconds of each job, on one GPU
    locks/NAME                                 process that does a job
    failed/NAME.txt                            why a job failed
"""

import dataclasses
import pathlib
from typing import Literal

import dms_jax
from dms_jax.command_line.comparison import texts
from dms_jax.data.tasks import Needle, Split, Task, VariableTracking
from experiments.reproduction.queue import Places

TASKS = ("reasoning", "needle", "tracking")
CHOICE_RATIO = 4.0  # at which the DMS variants stand for election
CHOICE_START = 100_000  # first problem they answer for it: those from 0 on chose the recipe
TRAINING_FREE = ("TOVA", "StreamingLLM", "RandomEviction")


_COUNTS = (
    *("processes", "shards", "documents", "document_tokens", "sequence_length", "batch_size"),
    *("micro_batch_size", "decay_steps", "steps_per_ratio", "seeds", "problems"),
    *("retrieval_problems", "chains", "max_new_tokens", "needle_size", "tracking_size"),
    *("lanes", "page_size"),
)
_NOT_NEGATIVE = (
    *("deadline_minutes", "document_temperature", "temperature"),
    *("learning_rate", "decay_learning_rate", "adapter_learning_rate"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure accuracy against live tokens and reads, for DMS and its rivals."""

    out: pathlib.Path = pathlib.Path("runs/first_curve")
    """Run directory. What is there already is not done again."""
    model: str = ""
    """Hugging Face directory of the base model; the shipped reasoning model unless given."""
    pages: pathlib.Path | None = None
    """Folder for README.md, figure.png and results.json; the run directory unless given."""
    pack: pathlib.Path | None = None
    """Folder for results.tar.gz and the best DMS model in parts; nowhere unless given."""
    processes: int = 1
    """Workers, which take turns on the GPUs. Two on each keep it busy while programs compile."""
    deadline_minutes: float = 1e6
    """No job and no evaluation starts later than this after the beginning."""
    only: Literal["all", "data", "report"] = "all"
    """"data" stops when the documents are written; "report" does no job and writes the page from
    what is there."""

    shards: int = 8
    """Jobs that the generation of the data is split into."""
    documents: int = 60_000
    """Self-generated documents of all shards together."""
    document_tokens: int = 1000
    """Longest completion of the training data."""
    document_temperature: float = 1.0
    """Sampling temperature of the training data. Colder draws would sharpen who learns to write
    them, the control above all."""
    sequence_length: int = 2048
    """Tokens a training sequence; shorter documents share one."""
    batch_size: int = 32
    """Sequences of an optimizer step."""
    micro_batch_size: int | None = None
    """Sequences a pass forward and back; the whole batch unless given."""
    decay_steps: int = 300
    """Steps in which the borrowed neuron is faded out (Stage 1 of the paper, 2000 there)."""
    decay_learning_rate: float = 5e-5
    """Learning rate of all weights in those steps."""
    steps_per_ratio: int = 300
    """Steps a unit of compression ratio (100 in the paper; `choose_recipe.py` compares)."""
    learning_rate: float = 3e-5
    """Learning rate of all weights, constant (`choose_recipe.py` compares)."""
    adapter_learning_rate: float = 3e-4
    """Learning rate of the adapter; three times as much costs the model digits (see the page)."""
    variants: tuple[str, ...] = ()
    """Only these ways to retrofit DMS; all unless given."""
    ratios: tuple[float, ...] = (2.0, 3.0, 4.0, 8.0)
    """Compression ratios at which DMS is evaluated; one run passes through all."""
    seeds: int = 3
    """Seeds of the retrofits, and of the draws of what is not trained."""
    ladder: tuple[float, ...] = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
    """How many times fewer live tokens than vanilla's the training-free systems are given."""

    split: Split = "test"
    """Split that the problems are of; "validation" to choose settings."""
    asked: tuple[str, ...] = TASKS
    """Which tasks are asked. The DMS variant that the page speaks of is chosen on validation
    problems of the first."""
    problems: int = 480
    """Reasoning problems, a third of each kind."""
    retrieval_problems: int = 320
    """Needle problems, and tracking problems."""
    chains: int = 4
    """Answers to each reasoning problem; retrieval has one."""
    temperature: float = 0.7
    """Sampling temperature of every answer; 0 takes the most likely token."""
    max_new_tokens: int = 700
    """Longest answer to a reasoning problem."""
    needle_size: int = 450
    """Words of a needle's haystack; 450 make about 950 tokens."""
    tracking_size: int = 30
    """Repetitions of the noise around the assignments; 30 make about 920 tokens."""
    lanes: int = 4096
    """Sequences in the cache at a time."""
    page_size: int = 64
    """Tokens a page of the cache."""

    def __post_init__(self):
        for name in self.variants:
            if name not in VARIANTS:
                known = ", ".join(VARIANTS)
                raise dms_jax.ConfigError(f"there is no variant {name!r}; there are {known}")
        for name in self.asked:
            if name not in TASKS:
                known = ", ".join(TASKS)
                raise dms_jax.ConfigError(f"there is no task {name!r}; there are {known}")
        for name in ("ratios", "ladder"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise dms_jax.ConfigError(f"{name} must be numbers >= 1, at least one of them")
        for name in _COUNTS:
            if (count := getattr(self, name)) is not None and count < 1:
                raise dms_jax.ConfigError(f"{name} must be >= 1, got {count}")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise dms_jax.ConfigError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.asked:
            raise dms_jax.ConfigError("asked must name at least one task")

    def tasks(self) -> dict[str, tuple[Task, ...]]:
        """What is asked, by name."""
        known = {
            "reasoning": texts.TASKS["reasoning"],
            "needle": (Needle(size=self.needle_size),),
            "tracking": (VariableTracking(size=self.tracking_size),),
        }
        return {name: known[name] for name in self.asked}

    @property
    def choice(self) -> str:
        """Name, in files and results, of what the DMS variants are chosen by."""
        return f"choice_{self.asked[0]}"

    def new_tokens(self, task: str) -> int:
        """The longest answer to a task (RULER: 128 for needles, 30 words for tracking)."""
        return {"reasoning": self.max_new_tokens, "needle": 128, "tracking": 128}[task]

    def total_steps(self) -> int:
        """Optimizer steps of a whole retrofit that borrows a neuron."""
        return self.decay_steps + round((max(self.ratios) - 1) * self.steps_per_ratio)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to retrofit DMS.

    Attributes:
      source, shift, window: of the policy.
      trainable: all weights, or the adapter alone.
    """

    source: Literal["query_neuron", "adapter"]
    shift: int
    window: int
    trainable: Literal["all", "adapter"] = "all"

    @property
    def policy(self) -> dms_jax.DMS:
        return dms_jax.DMS(window=self.window, source=self.source, shift=self.shift)

    @property
    def name(self) -> str:
        """For files and tables."""
        source = {"query_neuron": "neuron", "adapter": "adapter"}[self.source]
        frozen = "-frozen" if self.trainable == "adapter" else ""
        return f"dms-{source}{frozen}-shift{self.shift}-w{self.window}"


MAIN = tuple(
    Variant(source, shift, 16) for source in ("query_neuron", "adapter") for shift in (1, 0)
)
# Repeated with other seeds: the form of NVIDIA's checkpoints, and the adapter that decides on a
# token when it sees it.
SEEDED = (Variant("query_neuron", 1, 16), Variant("adapter", 0, 16))
ABLATIONS = (
    *(Variant(source, shift, 64) for source in ("query_neuron", "adapter") for shift in (1, 0)),
    *(Variant("adapter", shift, 16, "adapter") for shift in (1, 0)),
)
VARIANTS = {variant.name: variant for variant in (*MAIN, *ABLATIONS)}
# Whose steps the control takes: what borrows no neuron has none to fade, and takes fewer.
LONGEST = SEEDED[0]
FURTHER = "further"  # the control: the vanilla model trained on the same tokens, nothing evicted


@dataclasses.dataclass(frozen=True)
class Job:
    """A piece of work for one process.

    Attributes:
      kind: what is done.
      system: name of what is trained or evaluated.
      index: seed of a training run or of vanilla's draws; rung of the ladder; shard of the data.
    """

    kind: Literal["data", "vanilla", "training_free", "further", "retrofit"]
    system: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.system}-{self.index}"


def jobs(config: Config) -> list[Job]:
    """Everything, in the order in which it is begun: what cannot be done without comes first."""
    order = [Job("data", "data", shard) for shard in range(config.shards)]
    order.append(Job("vanilla", "vanilla", 0))

    def trained(seed: int) -> list[Job]:
        return [*retrofits(MAIN if seed == 0 else SEEDED, seed), Job("further", FURTHER, seed)]

    def retrofits(variants: tuple[Variant, ...], seed: int) -> list[Job]:
        names = [variant.name for variant in variants]
        return [
            Job("retrofit", name, seed)
            for name in names
            if name in config.variants or not config.variants
        ]

    def free(name: str) -> list[Job]:
        # The rungs of compression 4 and 8 first.
        rungs = sorted(
            range(len(config.ladder)), key=lambda rung: config.ladder[rung] not in (4, 8)
        )
        return [Job("training_free", name, rung) for rung in rungs]

    order += [*trained(0), *free("TOVA"), *free("StreamingLLM")]
    for seed in range(1, config.seeds):
        order += [Job("vanilla", "vanilla", seed), *trained(seed)]
    order += retrofits(ABLATIONS, 0)
    return order + free("RandomEviction")


def left(config: Config) -> list[Job]:
    """What is not done yet; data only where something is to be trained on it."""
    paths = Paths(config)
    wanted = [job for job in jobs(config) if not paths.done(job)]
    if config.only == "data":
        return [job for job in wanted if job.kind == "data"]
    if not any(job.kind in ("further", "retrofit") for job in wanted):
        wanted = [job for job in wanted if job.kind != "data"]
    return wanted


class Paths(Places):
    """Where things are in the run directory."""

    def __init__(self, config: Config):
        super().__init__(config.out)
        self.config = config

    def data(self, shard: int) -> pathlib.Path:
        return self.root / "data" / f"{shard}.npz"

    def training(self, job: Job) -> pathlib.Path:
        return self.root / "training" / f"{job.name}.json"

    def model(self, system: str, seed: int, ratio: float) -> pathlib.Path:
        return self.root / "models" / f"{system}-{seed}-{ratio:g}"

    def result(self, system: str, setting: str, seed: int, task: str) -> pathlib.Path:
        return self.root / "results" / system / f"{setting}-{seed}-{task}.json"

    def products(self, job: Job) -> list[pathlib.Path]:
        """The files that a job is there to write."""
        config = self.config
        if job.kind == "data":
            return [self.data(job.index)]
        if job.kind == "retrofit":
            settings = [f"{ratio:g}" for ratio in config.ratios]
        elif job.kind == "training_free":
            settings = [f"{config.ladder[job.index]:g}"]
        else:
            settings = ["1"]
        seeds = range(config.seeds) if job.kind == "training_free" else [job.index]
        results = [
            self.result(job.system, setting, seed, task)
            for setting in settings
            for seed in seeds
            for task in config.asked
        ]
        if job.kind == "retrofit" and CHOICE_RATIO in config.ratios:
            setting = f"{CHOICE_RATIO:g}"
            results.append(self.result(job.system, setting, job.index, config.choice))
        return results

    def done(self, job: Job) -> bool:
        return all(path.exists() for path in self.products(job))

    def ready(self, job: Job) -> bool:
        """Whether what a job needs is there."""
        if job.kind == "training_free":
            return self.done(Job("vanilla", "vanilla", 0))
        if job.kind in ("further", "retrofit"):
            return all(self.data(shard).exists() for shard in range(self.config.shards))
        return True

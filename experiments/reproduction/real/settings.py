"""Settings of the measurement of real models."""

import dataclasses
import pathlib
from typing import Literal

import dms_jax


@dataclasses.dataclass(frozen=True)
class Config:
    """Retrofit real language models with DMS on their own answers, and measure every method."""

    out: pathlib.Path = pathlib.Path("runs/real-models")
    """Run directory. What is there already is not done again."""
    qwen: str = ""
    """Qwen2.5-Coder-0.5B-Instruct: GGUF file, Hugging Face directory or hub id. Left out if not
    given."""
    smollm2: str = ""
    """SmolLM2-135M-Instruct, in any of these forms. Left out if not given."""
    data: pathlib.Path | None = None
    """Folder with gsm8k/train.jsonl and test.jsonl; for SmolLM2 also text/*.txt (trained on),
    text/wikitext-2/test.txt, arc/arc_easy.jsonl, arc/ARC-Challenge-Test.jsonl,
    commonsense/hellaswag_sample.jsonl and commonsense/piqa.jsonl; for Qwen's other tasks
    math500/test.jsonl and humaneval/HumanEval.jsonl.gz."""
    pages: pathlib.Path | None = None
    """Folder for README.md, results.json and the pictures; the run directory unless given."""
    pack: pathlib.Path | None = None
    """Folder for an archive of results and adapters; nowhere unless given."""
    processes: int = 1
    """Workers, which take turns on the GPUs."""
    join: bool = False
    """Work beside a command that is at work in the run directory already, on another GPU."""
    run: int = 1
    """Number of this run among those whose figures the page shows."""
    also: tuple[pathlib.Path, ...] = ()
    """Run directories whose figures are of this run too, such as those of another machine. What
    several of them hold is taken from the first, and from `--out` before all."""
    earlier: pathlib.Path | None = None
    """A page's results.json: what runs of other numbers measured is shown beside this one's."""
    deadline_minutes: float = 1e6
    """Nothing starts later than this after the beginning, and trainings stop at a checkpoint."""
    only: Literal["all", "jobs", "speed", "list", "report"] = "all"
    """"jobs" writes no page; nor does "speed", which times steps and does no other job; "list"
    says what every job is called and how it stands; "report" does no job and writes the page from
    what is there."""
    parts: tuple[str, ...] = ()
    """Only these jobs, in this order: names of `--only list`, or patterns such as
    "asking-qwen-*-gsm8k". With `--join`, of the GPU that joins."""
    judged: str = ""
    """The training that the verdicts are about, where it is decided before the run, or was before
    an earlier one that is shown beside it; unless given, training questions in no lesson choose
    between two."""
    trainings: tuple[str, ...] = ()
    """Only these trainings, those that are not in a verdict in this order; all unless given."""

    shards: int = 2
    """Jobs that the sampling of Qwen's answers is split into; SmolLM2's are a quarter of them."""
    self_taught: pathlib.Path | None = None
    """Run directory of `dms-jax retrofit self-taught` with the same settings: Qwen's answers and
    the planned retrofit are taken from there, as soon as they are; `--shards 1` goes with it."""
    questions: int = 6345
    """Training questions of GSM8K that are answered, the first ones."""
    unseen: int = 1000
    """Training questions after them, in no lesson, that are asked to choose between retrofits."""
    held_out: int = 128
    """The last training questions; nothing is trained on them, and each training's divergence is
    measured on answers to them."""
    temperatures: tuple[float, ...] = (0.7, 1.0, 0.0)
    """Sampling temperatures; each question is answered once at every one of them."""
    max_new_tokens: int = 400
    """Most new tokens of an answer."""
    unended: bool = False
    """Train on answers that were cut off too."""
    needles: int = 400
    """Documents of retrieval that SmolLM2, and of Qwen the mixed trainings, read beside texts and
    own answers."""

    sequence_length: int = 2048
    """Tokens of a training sequence."""
    batch_size: int = 16
    """Sequences of an optimizer step."""
    micro_batch_size: int = 8
    """Sequences that a device passes forward and back at a time."""
    tokens: int = 610 * 32768
    """Tokens of a training of Qwen; those that are compared among themselves take a share."""
    small_tokens: int = 8_000_000
    """Tokens of a training of SmolLM2."""
    sweep_tokens: int = 93 * 32768
    """Tokens of each training of Qwen that tries one setting of the recipe."""

    problems: int | None = None
    """Test problems of GSM8K; all unless given."""
    choices: int = 1000
    """Questions of each multiple-choice task."""
    text_tokens: int = 131_072
    """Tokens of the held-out text."""
    window: int = 2048
    """Tokens of it that are predicted together."""
    needle_problems: int = 100
    """Problems of each retrieval task of RULER."""
    ruler_length: int = 2048
    """Tokens of each of them; some systems are asked with twice and four times as many, too."""
    other_problems: int | None = None
    """Problems of MATH-500 and of HumanEval; all unless given."""
    other_new_tokens: int = 1024
    """Longest answer to one of them."""
    long_ruler_length: int = 4096
    """Tokens of each retrieval problem that Qwen reads; some with twice and four times as many."""
    ruler_problems: int = 50
    """Problems of each of RULER's other tasks, of as many tokens."""
    frontier_problems: int | None = None
    """Test problems of GSM8K of the frontier; all unless given."""
    frontier_chains: int = 8
    """W, chains of each problem of the frontier."""
    frontier_temperature: float = 0.7
    """Sampling temperature of the chains of the frontier."""
    speed_context: int = 4096
    """Tokens that each sequence has seen whose steps are timed."""
    speed_batch: int = 64
    """Sequences whose steps are timed."""
    lanes: int = 1320
    """Sequences in the cache at a time."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not value > 0:
                raise dms_jax.ConfigError(f"{field.name} must be positive, got {value}")

    @property
    def models(self) -> dict[str, str]:
        """Name -> where it is, of the models that are measured."""
        given = {"qwen": self.qwen, "smollm2": self.smollm2}
        return {name: path for name, path in given.items() if path}

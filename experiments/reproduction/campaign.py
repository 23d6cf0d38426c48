r"""The papers' claims on one chat model, in pieces of at most 25 minutes of one GPU.

    python -m experiments.reproduction.campaign --model coder-1.5b.gguf --data data --only list
    python -m experiments.reproduction.campaign --model coder-1.5b.gguf --data data --minutes 25
    python -m experiments.reproduction.campaign --model coder-1.5b.gguf --data data --only record \
        --record experiments/results/real_models/qwen2.5-coder-1.5b.json

Each call does the pieces that are left, in their order or that of the patterns of `--only`, and is
interrupted after `--minutes`. What a piece has made lies in `done/PIECE.json` of the run directory,
so that the same call goes on, also inside a piece: answers, trainings and lessons have journals and
checkpoints of their own. A piece that fails says why, and the others go on. `--only record` gathers
what is done into one file with the score of every problem, which `experiments.reproduction.claims`
reads. Trainings of other `--seeds` may run elsewhere, in a run directory with copies of `data`,
`lessons` and `done/lessons-*`; the files of its `done`, copied back, belong to the record.

    lessons-SET              own answers to training problems, greedy ones among them; correct ones
                             are trained on. The last `held_out` questions of GSM8K are in no lesson
    train-NAME-SEED          a retrofit, a control (the same tokens, nothing evicted), or KVpop
    ask-TASK-SYSTEM          one answer a problem, greedily; AMC23 and AIME24: 32 at 0.7
    frontier-TASK-SYSTEM-T   chains for votes at a temperature, with one greedy chain (T = 0 alone)

Decide on recipes with `ask-held-out-*` alone. Rivals without training are asked twice: holding what
the retrofit was measured to hold at its peak (`peak`), and by the papers' rule, a share of the
prompt and the longest answer (`share`). After eight worked examples (`gsm8k-8shot`) a prompt has a
thousand tokens, so that a budget holds more than the question.
"""

import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

import dms_jax
from dms_jax import recipes
from dms_jax.command_line.options import find_model
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.command_line.self_taught.answering import choose, read_lessons, sample
from dms_jax.command_line.self_taught.questions import read_questions
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.data import Documents
from dms_jax.evaluation import (
    Chat,
    Hyperscaling,
    Serving,
    System,
    evaluate,
    evaluate_choices,
    hyperscale,
)
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks import AIME, ARC, GSM8K, MATH500, MMLU, RULER, HumanEval, Mathematics
from dms_jax.evaluation.tasks.ruler import ruler_tasks
from dms_jax.generation import Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy
from dms_jax.training import Recipe, calibrate_queries

DMS = dms_jax.DMS(window=16, source="adapter")
PLAIN = "plain"
REFERENCE = "dms-3.3:0"  # whose measured peak rivals without training are given
NEEDLES = ("niah_single_1", "niah_single_2")


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure the papers' claims on one chat model, piece by piece."""

    model: str = ""
    """Hugging Face directory, GGUF file or hub id of a model with a chat template."""
    data: pathlib.Path = pathlib.Path("data")
    """Folder with gsm8k/train.jsonl and test.jsonl, math/train.jsonl ("problem" and "solution" or
    "answer"), math500/test.jsonl, amc23/test.jsonl, aime24/test.jsonl, mmlu/test,
    humaneval/HumanEval.jsonl.gz, arc/ARC-Challenge-Test.jsonl. A piece whose file is missing is
    left out, and says so."""
    out: pathlib.Path = pathlib.Path("runs/campaign")
    """Run directory. The same command goes on with what is there."""
    only: tuple[str, ...] = ("*",)
    """Pieces to do, as patterns ("train-dms-3.3-*"), those of the first one first; "list" says how
    all stand, "record" gathers what is done."""
    record: pathlib.Path | None = None
    """File for --only record; record.json in the run directory unless given."""
    minutes: float = 25.0
    """Until pieces are interrupted, to go on with the same call."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and cache."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Trainings of each retrofit and of the control."""
    questions: int | None = None
    """Training problems of each set; all but those held out unless given."""
    held_out: int = 1000
    """Training problems of GSM8K to decide with, the last ones."""
    tokens: int = 610 * 32768
    """Tokens of a training."""
    sequence_length: int = 2048
    """Tokens of a training sequence."""
    batch_size: int = 16
    """Sequences of an optimizer step."""
    keep: Literal["all", "ended", "correct"] = "correct"
    """Which answers are trained on."""
    problems: int | None = None
    """Problems of each task; all of its file unless given."""
    ruler_problems: int = 50
    """Problems of each of RULER's tasks."""
    new_tokens: int = 400
    """Longest answer to a problem of GSM8K and of a lesson on it."""
    long_new_tokens: int = 2048
    """Longest answer to a problem of MATH-500, AMC23, AIME24 and HumanEval."""
    chains: tuple[int, ...] = (1, 3, 5, 9, 17)
    """W of the frontiers: odd."""
    temperatures: tuple[float, ...] = (0.5, 0.7, 1.0)
    """Temperatures of the frontiers, beside greedy answers."""
    repeats: int = 32
    """Answers to each problem of AMC23 and AIME24, whose mean counts."""
    lanes: int = 1024
    """Sequences in the cache at a time."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not value > 0:
                raise dms_jax.ConfigError(f"--{field.name.replace('_', '-')} must be positive.")


# -- trainings ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """One kind of training, repeated with seeds.

    Attributes:
      ratios: at which it is exported; the last one is where it ends.
      trainable: low-rank updates beside frozen weights, or all weights.
      make: its recipe, from the settings; the self-taught one, from attention first, unless given.
      policy: what is learned; None for the control.
    """

    ratios: tuple[float, ...] = (2.0, 3.3)
    trainable: Literal["low_rank", "all", "adapter"] = "low_rank"
    make: Callable[..., Recipe] = recipes.dms_warm_up
    policy: Policy | None = DMS

    def recipe(self, config: Config) -> Recipe:
        """The recipe of this many tokens."""
        sizes: Any = dict(
            tokens=config.tokens,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
        )
        if self.make is recipes.kvpop:
            return recipes.kvpop(**sizes)
        recipe = self.make(self.ratios[-1], trainable=self.trainable, **sizes)
        recipe = dataclasses.replace(recipe, snapshots=self.ratios)
        return recipe if self.policy is not None else recipe.control(DMS)


TRAININGS = {
    "dms-3.3": Training(),
    "control": Training(policy=None),
    "dms-8": Training(ratios=(8.0,)),
    "all-3.3": Training(trainable="all"),
    "kvpop": Training(
        trainable="adapter",
        make=recipes.kvpop,
        policy=dms_jax.KVpop(budget=128, window=16),
    ),
}
SEVERAL = ("dms-3.3", "control", "dms-8")  # trained with every seed; the others with the first


# -- systems --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rival:
    """A method without training.

    Attributes:
      make: policy from `budget` in tokens, or `compression_ratio`.
      grows: tokens that rows hold beside the budget at their peak: a number, or "answer" where
        rows are cut once, after the prompt.
      kv_dtype: of the cache.
    """

    make: Callable[..., Policy]
    grows: int | Literal["answer"] = 0
    kv_dtype: str | None = None


def _expected(**budget: Any) -> Policy:
    """As its authors publish it: AdaKV around it, epsilon, and the question kept."""
    scorer = dms_jax.ExpectedAttention(epsilon=1e-2, interval=None, recent=64, **budget)
    return dms_jax.AdaKV(scorer)


EVERY = 16  # generated tokens between two cuts where a peak of some hundred tokens is to be held
RIVALS = {
    "snapkv-32": Rival(functools.partial(dms_jax.SnapKV, window=32, interval=None), "answer"),
    "snapkv-64": Rival(functools.partial(dms_jax.SnapKV, window=64, interval=None), "answer"),
    "expected": Rival(_expected, "answer"),
    "h2o": Rival(dms_jax.H2O, 1),
    "tova": Rival(dms_jax.TOVA, 1),
    "streamingllm": Rival(dms_jax.StreamingLLM, 1),
    "quest": Rival(functools.partial(dms_jax.Quest, per="kv_head")),
    "rkv": Rival(functools.partial(dms_jax.RKV, interval=EVERY), EVERY),
    "triattention": Rival(
        functools.partial(dms_jax.TriAttention, interval=EVERY, counts_prompt=True), EVERY
    ),
}
RULES = ("peak", "share")
SHARE = 3.3  # of the papers' rule
FLOAT8 = "float8_e4m3"
ON_FRONTIERS = ("quest", "tova", "rkv")


# -- pieces ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of work.

    Attributes:
      name: for files and patterns.
      needs: pieces that must be done before.
      work: does it and returns what `done/NAME.json` holds.
      file: what it reads, below the data; empty for nothing.
    """

    name: str
    needs: tuple[str, ...]
    work: Callable[["Campaign"], Any]
    file: str = ""


class Campaign:
    """What the pieces share: settings, models that were read, and the time that is left."""

    def __init__(self, config: Config):
        self.config = config
        self.end = time.monotonic() + 60 * config.minutes
        self._loaded: tuple[str, LanguageModel] | None = None

    def mark(self, piece: str) -> pathlib.Path:
        """The file that says that a piece is done."""
        return self.config.out / "done" / f"{_safe(piece)}.json"

    def told(self, piece: str) -> Any:
        """What a piece that is done has made."""
        return json.loads(self.mark(piece).read_text(encoding="utf-8"))

    # -- models ---------------------------------------------------------------------------------

    def model(self, system: str) -> LanguageModel:
        """The model of a system; the last one read stays in memory."""
        trained = self.export(system)
        key = str(trained)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None
            base = find_model(self.config.model)
            if trained is None:
                model = dms_jax.load(base, dtype=self.config.dtype)
            elif (trained / "dms_adapter.json").exists():
                model = dms_jax.load(base, dtype=self.config.dtype, adapter=trained)
            else:
                model = dms_jax.load(trained, dtype=self.config.dtype)
            self._loaded = (key, model)
        return self._loaded[1]

    def export(self, system: str) -> pathlib.Path | None:
        """Where the model of a system lies: "dms-3.3:1", or "dms-3.3@2:1" at a ratio on the way."""
        label, _, seed = system.partition(":")
        name, _, ratio = label.partition("@")
        if name not in TRAININGS:
            return None
        run = self.config.out / "trainings" / f"{name}-{seed}"
        return run / "snapshots" / ratio if ratio else run / "model"

    def file(self, name: str) -> pathlib.Path:
        """A file of the data; of problems whose answers are numbers or within solutions, a copy."""
        path = self.config.data / name
        if name.partition("/")[0] not in ("math", "amc23", "aime24"):
            return path
        copy = self.config.out / "data" / name.replace("/", "-")
        if not copy.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            found = [answered(json.loads(line)) for line in lines if line.strip()]
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in found if row is not None)
            copy.write_text(text, encoding="utf-8")
        return copy

    # -- lessons and trainings --------------------------------------------------------------------

    def self_taught(self, kind: str) -> SelfTaught:
        """How the model answers a set of training problems."""
        config = self.config
        gsm8k = kind == "gsm8k"
        return SelfTaught(
            model=config.model,
            prompts=self.file(FILES["held-out"] if gsm8k else "math/train.jsonl"),
            out=config.out / "lessons" / kind,
            questions=config.questions,
            held_out=config.held_out if gsm8k else 1,
            judge="gsm8k" if gsm8k else "mathematics",
            style="boxed",
            temperatures=(0.7, 1.0, 0.0),
            max_new_tokens=config.new_tokens if gsm8k else config.long_new_tokens // 2,
            keep=config.keep,
            dtype=config.dtype,
            lanes=config.lanes,
        )

    def lessons(self, kind: str) -> dict[str, Any]:
        """Samples and filters answers; other calls go on after those that are there."""
        own = self.self_taught(kind)
        make_folder("--out", own.out)
        model = self.model(PLAIN)
        questions = read_questions(own, model)
        answers = sample(own, model, questions, own.out / "answers")
        return choose(own, questions, answers, own.out).figures

    def documents(self) -> list[Any]:
        """The lessons of all sets that are done."""
        found: list[Any] = []
        for kind in LESSONS:
            if self.mark(f"lessons-{kind}").exists():
                found += read_lessons(self.config.out / "lessons" / kind)
        return found

    def train(self, name: str, seed: int) -> dict[str, Any]:
        """Trains, or goes on."""
        training, folder = TRAININGS[name], self.config.out / "trainings" / f"{name}-{seed}"
        recipe = training.recipe(self.config)
        options: Any = dict(
            recipe=recipe,
            data=Documents(self.documents()),
            out=folder,
            seed=seed,
            adapter_only=training.trainable != "all",
            checkpoint_every=100,
            progress=False,
        )
        model = self.model(PLAIN)
        if training.policy is None:
            dms_jax.train(model, **options)
        else:
            dms_jax.retrofit(model, training.policy, **options)
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return {"training": name, "seed": seed, "steps": len(lines), "last": json.loads(lines[-1])}

    # -- questions --------------------------------------------------------------------------------

    def policy(self, system: str, task: str) -> tuple[Policy | None, str | None]:
        """The policy of a system for a task, and the type of its cache."""
        label, _, rule = system.partition("/")
        if label == "float8":
            return dms_jax.Vanilla(), FLOAT8
        if system.startswith("kvpop"):
            return dms_jax.KVpop(budget=self.peak(REFERENCE, task), window=16), None
        if label not in RIVALS:
            return None, None  # the model's own
        rival = RIVALS[label]
        made: dict[str, Any] = {}
        if label == "triattention":
            made["statistics"] = self.centres()
        if rule == "share":
            return rival.make(compression_ratio=SHARE, **made), rival.kv_dtype
        peak = self.peak(REFERENCE, task)
        grows = rival.grows
        if grows == "answer":
            grows = round(self.told(f"ask-{task}-{PLAIN}")["new_tokens"])
        # A window of 64 and as much beside it. Where one cut cannot hold so small a peak, its row
        # says so by the one that was measured.
        least = 129 if rival.grows == "answer" else 24
        return rival.make(budget=max(peak - grows, least), **made), rival.kv_dtype

    def peak(self, system: str, task: str) -> int:
        """The measured peak of live tokens of an answer."""
        return max(round(self.told(f"ask-{task}-{system}")["peak"]), 24)

    def centres(self) -> str:
        """TriAttention's centres, of texts of the lessons."""
        path = self.config.out / "centres.safetensors"
        if not path.exists():
            model = self.model(PLAIN)
            rows = np.concatenate(
                [np.concatenate([x.prompt, x.response]) for x in self.documents()[:64]]
            )
            length = min(len(rows), 2048, model.config.max_position_embeddings)
            rows = rows[: len(rows) // length * length][: 4 * length]
            calibrate_queries(model, rows.reshape(-1, length), path)
        return str(path)

    def ask(self, task: str, system: str) -> dict[str, Any]:
        """One answer a problem, greedily, or the mean of many."""
        policy, kv_dtype = self.policy(system, task)
        model = self.model(system)
        serving = Serving(lanes=self.config.lanes, page_size=16, kv_dtype=kv_dtype)
        told: Any = dict(policy=policy, serving=serving)
        tasks = TASKS[task](self.file(FILES.get(task, "")))
        row: dict[str, Any] = dict(system=system.partition(":")[0], measure=task)
        row["run"] = int(system.partition(":")[2] or 0)
        if isinstance(tasks, ARC | MMLU):
            found = evaluate_choices(model, tasks, problems=self.config.problems, **told)
            right = found.chosen == found.gold
            return row | dict(
                policy=model.resolve_policy(policy).to_dict(),
                kv_dtype=kv_dtype,
                problems=len(right),
                peak=float(found.peak.mean()),
                scores="".join("01"[int(each)] for each in right),
            )
        many = task in SAMPLED
        sizes: Any = dict(problems=self.config.problems)
        if task == "held-out":
            sizes = dict(start=len(tasks.records) - self.config.held_out)
            sizes["problems"] = min(self.config.problems or 10**9, self.config.held_out)
        chat = _chat(model)
        if task.startswith(("ruler", "needles")):
            chat, sizes = None, dict(problems=len(tasks) * self.config.ruler_problems)
        found = evaluate(
            model,
            tasks,
            sampling=Sampling(temperature=0.7 if many else 0, **longest(self.config, task)),
            chat=chat,
            chains=self.config.repeats if many else 1,
            out=self.config.out / "answers" / task / _safe(system),
            **sizes,
            **told,
        )
        scores = found.scores.mean(1)
        binary = set(np.unique(scores)) <= {0.0, 1.0}
        return row | dict(
            policy=model.resolve_policy(policy).to_dict(),
            kv_dtype=kv_dtype,
            problems=len(scores),
            peak=round(float(found.peak.mean()), 2),
            reads=round(float(found.reads.mean())),
            cache_bytes=round(float(found.cache_bytes.mean())),
            new_tokens=round(float(found.new_tokens.mean()), 1),
            ended=round(float(found.ended.mean()), 4),
            scores="".join("01"[int(x)] for x in scores) if binary else scores.round(4).tolist(),
        )

    def frontier(self, task: str, system: str, temperature: float) -> list[dict[str, Any]]:
        """Chains at a temperature for every length, as rows of `votes`; greedy ones at 0."""
        config = self.config
        model = self.model(system)
        rival = RIVALS.get(system)
        policy = None if rival is None else rival.make(compression_ratio=SHARE)
        if system.startswith("kvpop"):
            policy = dms_jax.KVpop(compression_ratio=SHARE, window=16)
        found = hyperscale(
            model,
            TASKS[task](self.file(FILES[task])),
            [System(system, policy, compression_ratio=None if rival is None else SHARE)],
            lengths=LENGTHS[task](config),
            chains=config.chains if temperature else (1,),
            temperatures=(temperature,),
            problems=config.problems,
            chat=_chat(model),
            serving=Serving(lanes=config.lanes, page_size=16),
            out=config.out / "frontiers" / task / _safe(system),
        )
        return votes(found, system, temperature)


def answered(row: dict[str, Any]) -> dict[str, str] | None:
    r"""A problem with its answer as text, which may be the last box of its solution.

    # In: {"question": "1 + 1?", "answer": 2.0}  Out: {"problem": "1 + 1?", "answer": "2"}
    # In: {"problem": "1 + 1?", "solution": "It is \boxed{2}."}  Out: the same
    """
    answer = row.get("answer")
    if answer is None:
        _, box, rest = row.get("solution", "").rpartition("\\boxed{")
        depth, end = 1, 0
        while depth and end < len(rest):
            depth += (rest[end] == "{") - (rest[end] == "}")
            end += 1
        if not box or depth:
            return None
        answer = rest[: end - 1]
    text = f"{answer:g}" if isinstance(answer, int | float) else str(answer)
    return {"problem": row.get("problem") or row["question"], "answer": text}


def votes(found: Hyperscaling, system: str, temperature: float) -> list[dict[str, Any]]:
    """The points of one temperature as the record has them: a row a length.

    Scores are the number of groups of chains whose vote was right, a digit of base 36 a problem;
    reads and peak are those of one chain, a number a problem, of the most chains.
    """
    label, _, seed = system.partition(":")
    rows = []
    for length in sorted({point.length for point in found.points}):
        own = [p for p in found.points if (p.length, p.temperature) == (length, temperature)]
        most = max(own, key=lambda point: point.chains)
        rows.append(
            dict(
                system=label,
                run=int(seed or 0),
                length=length,
                temperature=temperature,
                policy=dict(most.policy),
                chains=most.chains,
                new_tokens=round(most.new_tokens, 1),
                ended=round(most.ended, 4),
                scores={
                    str(p.chains): "".join(
                        np.base_repr(round(x * (most.chains // p.chains)), 36).lower()
                        for x in p.scores["vote"][0]
                    )
                    for p in own
                },
                reads=np.round(most.reads[0] / most.chains).astype(int).tolist(),
                peak=np.round(most.peak[0] / most.chains, 1).tolist(),
            )
        )
    return rows


# -- the plan -------------------------------------------------------------------------------------

LESSONS = ("gsm8k", "math")
SAMPLED = ("amc23", "aime24")


def _others(length: int) -> list[RULER]:
    return [task for task in ruler_tasks(length) if task.name not in NEEDLES]


FILES = {  # of a task, below the data
    "held-out": "gsm8k/train.jsonl",
    "gsm8k": "gsm8k/test.jsonl",
    "gsm8k-8shot": "gsm8k/test.jsonl",
    "math500": "math500/test.jsonl",
    "amc23": "amc23/test.jsonl",
    "aime24": "aime24/test.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
    "mmlu": "mmlu/test",
    "arc": "arc/ARC-Challenge-Test.jsonl",
}
TASKS: dict[str, Callable[[pathlib.Path], Any]] = {
    "held-out": functools.partial(GSM8K, style="boxed"),
    "gsm8k": functools.partial(GSM8K, style="boxed"),
    "gsm8k-8shot": lambda path: GSM8K(
        path, few_shot=8, examples=path.with_name("train.jsonl"), style="boxed"
    ),
    "math500": functools.partial(MATH500, style="boxed"),
    "amc23": functools.partial(Mathematics, style="boxed"),
    "aime24": functools.partial(AIME, style="boxed"),
    "humaneval": lambda path: HumanEval(path, style="instruct", sandbox=Sandbox()),
    "ruler-4k": lambda _: _others(4096),
    "ruler-16k": lambda _: _others(16384),
    "needles-16k": lambda _: [RULER(name, length=16384) for name in NEEDLES],
    "mmlu": MMLU,
    "arc": ARC,
}
LENGTHS: dict[str, Callable[[Config], tuple[int, ...]]] = {
    "gsm8k": lambda c: (max(c.new_tokens // 2, 1), c.new_tokens),
    "math500": lambda c: tuple(max(c.long_new_tokens // n, 1) for n in (8, 4, 2, 1)),
}


def longest(config: Config, task: str) -> dict[str, Any]:
    """The longest answer to a problem, as an argument; RULER's tasks have their own."""
    if task.startswith(("ruler", "needles")):
        return {}
    short = task.startswith("gsm8k") or task == "held-out"
    return {"max_new_tokens": config.new_tokens if short else config.long_new_tokens}


def _chat(model: LanguageModel) -> Chat | None:
    return Chat() if getattr(model.tokenizer, "chat_template", None) else None


def trained(config: Config, *names: str) -> list[str]:
    """The systems of trainings, each with its seed."""
    return [
        f"{name}:{seed}"
        for name in names
        for seed in (config.seeds if name in SEVERAL else config.seeds[:1])
    ]


def pieces(config: Config) -> Iterator[Piece]:
    """All pieces, in the order of their worth."""
    for kind in LESSONS:
        work = functools.partial(Campaign.lessons, kind=kind)
        yield Piece(f"lessons-{kind}", (), work, f"{kind}/train.jsonl")
    yield _ask("held-out", PLAIN)
    yield _ask("gsm8k", PLAIN)
    yield _ask("math500", PLAIN)
    for name in ("dms-3.3", "control", "dms-8", "kvpop", "all-3.3"):
        for system in trained(config, name):
            yield _train(*system.split(":"))
            yield _ask("held-out", system)
            yield _ask("gsm8k", system)
            yield _ask("math500", system)
    yield _ask("gsm8k", "dms-3.3@2:0")
    systems = [PLAIN, *trained(config, "dms-3.3", "control", "dms-8", "kvpop", "all-3.3")]
    every = (PLAIN, *trained(config, "dms-3.3", "dms-8", "kvpop"), *ON_FRONTIERS)
    first = tuple(each for each in every if each.endswith(":0") or ":" not in each)
    main_, *more = sorted(config.temperatures, key=lambda each: abs(each - 0.7))
    for temperature in (0.0, main_, *more):
        for system in every if temperature in (0.0, main_) else first:
            for task in LENGTHS:  # those of one model together: it is read once
                yield _frontier(task, system, temperature)
    others = ("gsm8k-8shot", "humaneval", "ruler-4k", "ruler-16k", "needles-16k")
    for system in systems:
        for task in (*others, *SAMPLED, "mmlu", "arc"):
            yield _ask(task, system)
    for task in ("gsm8k", "gsm8k-8shot", "math500", "ruler-4k", "ruler-16k"):
        yield _ask(task, "float8")
        for rule in RULES:
            for name in RIVALS:
                yield _ask(task, f"{name}/{rule}")


def _train(name: str, seed: str) -> Piece:
    needs = ("lessons-gsm8k",)
    work = functools.partial(Campaign.train, name=name, seed=int(seed))
    return Piece(f"train-{name}-{seed}", needs, work)


def _training_of(system: str) -> tuple[str, ...]:
    label, _, seed = system.partition(":")
    name = label.partition("@")[0]
    return (f"train-{name}-{seed}",) if name in TRAININGS else ()


def _ask(task: str, system: str) -> Piece:
    needs = _training_of(system)
    if system.endswith("/peak") or system.startswith("kvpop"):
        needs += (f"ask-{task}-{REFERENCE}", f"ask-{task}-{PLAIN}")
    if system.startswith("triattention"):
        needs += ("lessons-gsm8k",)
    work = functools.partial(Campaign.ask, task=task, system=system)
    return Piece(_safe(f"ask-{task}-{system}"), needs, work, FILES.get(task, ""))


def _frontier(task: str, system: str, temperature: float) -> Piece:
    name = _safe(f"frontier-{task}-{system}-{temperature:g}")
    work = functools.partial(Campaign.frontier, task=task, system=system, temperature=temperature)
    return Piece(name, _training_of(system), work, FILES[task])


# -- the call -------------------------------------------------------------------------------------


def main(config: Config) -> int:
    """Does what is left of the pieces that are asked for; 1 if one failed or has no file."""
    campaign = Campaign(config)
    plan = list(pieces(config))
    if config.only == ("list",):
        for piece in plan:
            print(f"{'done' if campaign.mark(piece.name).exists() else 'left':5} {piece.name}")
        return 0
    make_folder("--out", config.out / "done")
    if not config.model:
        raise dms_jax.ConfigError("give --model, a chat model.")
    if config.only == ("record",):
        gather(campaign, plan)
        return 0
    left_out = 0
    for piece in _wanted(plan, config.only):
        if campaign.mark(piece.name).exists():
            continue
        if time.monotonic() > campaign.end:
            print("The time is over; the same command goes on.")
            break
        if waits := [each for each in piece.needs if not campaign.mark(each).exists()]:
            print(f"{piece.name}: waits for {', '.join(map(_safe, waits))}")
            continue
        if piece.file and not (config.data / piece.file).exists():
            print(f"{piece.name}: left out: there is no {config.data / piece.file}")
            left_out += 1
            continue
        begin = time.monotonic()
        left = (campaign.end - begin) / 60
        print(f"{piece.name}: begins, {left:.1f} minutes are left", flush=True)
        try:
            with _interrupted_at(campaign.end):
                made = piece.work(campaign)
        except KeyboardInterrupt:
            if time.monotonic() < campaign.end:  # not ours
                raise
            print(f"{piece.name}: the time is over; the same command goes on.")
            break
        except Exception:  # the machine is lent for a while: what does not depend on it goes on
            traceback.print_exc()
            print(f"{piece.name}: failed", flush=True)
            left_out += 1
            continue
        seconds = time.monotonic() - begin
        write_json(campaign.mark(piece.name), made)
        print(f"{piece.name}: {seconds:.0f} s", flush=True)
    return 1 if left_out else 0


def _wanted(plan: list[Piece], patterns: tuple[str, ...]) -> list[Piece]:
    """The pieces of the first pattern, then those of the next.

    Raises:
      ConfigError: there are none of a pattern.
    """
    found: dict[str, Piece] = {}
    for pattern in patterns:
        own = {each.name: each for each in plan if fnmatch.fnmatchcase(each.name, pattern)}
        if not own:
            raise dms_jax.ConfigError(f"--only {pattern}: no piece is called so; see --only list.")
        found = {**found, **own}  # a piece stays where it was found first
    return list(found.values())


@contextlib.contextmanager
def _interrupted_at(end: float) -> Iterator[None]:
    """Ctrl-C comes at a time of `time.monotonic`, unless the block has ended.

    A shell has commands in the background ignore Ctrl-C, so the block has a handler of its own.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    wait = max(end - time.monotonic(), 0)
    timer = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        try:
            timer.cancel()
            timer.join()  # a signal that is on its way comes here, not behind the block
        finally:
            signal.signal(signal.SIGINT, before)


def _safe(name: str) -> str:
    """A name for files: "ask-gsm8k-rkv/peak" and "dms-3.3:0" without signs that paths have."""
    return name.replace("/", "+").replace(":", "-")


def gather(campaign: Campaign, plan: list[Piece]) -> None:
    """Writes the record: what `experiments.reproduction.claims` reads."""
    config = campaign.config
    rows, curves, trainings = [], [], []
    for piece in plan:
        if not campaign.mark(piece.name).exists():
            continue
        made = campaign.told(piece.name)
        if piece.name.startswith("ask-"):
            rows.append(made)
        elif piece.name.startswith("frontier-"):
            task = piece.name.split("-")[1]
            curves += [each | {"measure": task} for each in made]
        else:
            trainings.append({"piece": piece.name} | made)
    if not rows:
        raise dms_jax.ConfigError(f"--only record: nothing of {config.out} is done yet.")
    head = {"model": config.model, **provenance(config), "groups": {}, "trainings": trainings}
    path = config.record or config.out / "record.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, values in (("rows", rows), ("votes", curves)):
        own = ",\n".join(json.dumps(each, separators=(",", ":")) for each in values)
        lines.append(f"{json.dumps(name)}: [\n{own}\n]")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"The record is {path}: {len(rows)} rows, {len(curves)} curves.")


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))

r"""Measure the papers' claims on one chat model, in calls of at most 25 minutes of one GPU.

    python -m experiments.reproduction.campaign --model coder-1.5b.gguf --data data --only list
    python -m experiments.reproduction.campaign --model coder-1.5b.gguf --data data --minutes 25
    python -m experiments.reproduction.campaign --model coder-1.5b.gguf --data data --only record \
        --record experiments/results/real_models/qwen2.5-coder-1.5b.json

Each call runs the remaining pieces, in their order or that of the patterns of `--only`, and stops
after `--minutes`. The result of a piece is `done/PIECE.json` in the run directory, so the same call
resumes, also inside a piece, because answers, trainings and lessons have journals and checkpoints.
A piece that fails prints its error, and the others continue. `--only record` writes all results to
one file with scores by problem, which `experiments.reproduction.claims` reads. Other `--seeds` may
be trained elsewhere, in a run directory with copies of `data`, `lessons` and `done/lessons-*`; copy
the files of its `done` back.

    lessons-SET              the model's own answers to training problems, greedy ones among them;
                             correct ones are trained on. The last `held_out` questions of GSM8K
                             are in no lesson
    train-NAME-SEED          a retrofit, a control (the same tokens, nothing evicted), or KVpop
    ask-TASK-SYSTEM          one greedy answer a problem; AMC23 and AIME24: 32 at 0.7
    frontier-TASK-SYSTEM-T   chains for votes at a temperature, one greedy chain at T = 0

Choose recipes only by `ask-held-out-*`. Training-free rivals are measured twice: with the
retrofit's measured peak of tokens (`peak`), and by the papers' rule, a share of the prompt and the
longest answer (`share`). After eight worked examples (`gsm8k-8shot`) a prompt has a thousand
tokens, so that a budget holds more than the question.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

import dms_jax
from dms_jax import recipes
from dms_jax.command_line.options import find_model
from dms_jax.command_line.reports import make_folder, provenance
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
    hyperscale,
)
from dms_jax.evaluation.mathematics import require_math_verify
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks import AIME, GSM8K, MATH500, RULER, HumanEval, Mathematics
from dms_jax.evaluation.tasks.ruler import ruler_tasks
from dms_jax.generation import Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import Policy
from dms_jax.training import Recipe, calibrate_queries
from experiments.benchmarks.settings import check_numbers
from experiments.reproduction import retrieval_lessons
from experiments.reproduction.pieces import Piece, Results, chosen, do_pieces

DMS = dms_jax.DMS(window=16, source="adapter")
DMS_128 = dms_jax.DMS(window=128, source="adapter")
PLAIN = "plain"
REFERENCE = "dms-3.3:0"  # its measured peak is the budget of training-free rivals
NEEDLES = ("niah_single_1", "niah_single_2")


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure the papers' claims on one chat model, piece by piece."""

    model: str = ""
    """Hugging Face directory, GGUF file or hub id of a model with a chat template."""
    data: pathlib.Path = pathlib.Path("data")
    """Folder with gsm8k/train.jsonl and test.jsonl, math/train.jsonl ("problem" and "solution" or
    "answer"), math500/test.jsonl, amc23/test.jsonl, aime24/test.jsonl and
    humaneval/HumanEval.jsonl.gz. Pieces without their file are left out, with a message.
    """
    out: pathlib.Path = pathlib.Path("runs/campaign")
    """Run directory. The same command resumes a run."""
    only: tuple[str, ...] = ("*",)
    """Pieces to run, as patterns ("train-dms-3.3-*"), in order; "list" shows completed ones,
    "record" writes the record.
    """
    record: pathlib.Path | None = None
    """File for --only record; record.json in the run directory unless given."""
    minutes: float = 25.0
    """Minutes until the call stops; the same call resumes."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and cache."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Trainings of each retrofit and of the control."""
    questions: int | None = None
    """Training problems of each set; all but the held-out ones unless given."""
    lesson_temperatures: tuple[float, ...] = (0.7, 1.0, 0.0)
    """Temperatures of the answers to each training problem."""
    held_out: int = 1000
    """The last training problems of GSM8K, for choosing recipes."""
    tokens: int = 610 * 32768
    """Tokens of a training."""
    sequence_length: int = 2048
    """Tokens of a training sequence."""
    batch_size: int = 16
    """Sequences of an optimizer step."""
    retrieval_problems: int = 1200
    """Problems of retrieval in mixed lessons, up to twice the sequence length."""
    novel_windows: int = 150
    """Pieces of novels in mixed lessons, of twice the sequence length."""
    keep: Literal["all", "ended", "correct"] = "correct"
    """Answers to train on."""
    problems: int | None = None
    """Problems of each task; all of its file unless given."""
    ruler_problems: int = 50
    """Problems of each of RULER's tasks."""
    new_tokens: int = 400
    """Longest answer to a problem of GSM8K, in tests and in training data."""
    long_new_tokens: int = 2048
    """Longest answer to a problem of MATH-500, AMC23, AIME24 and HumanEval."""
    chains: tuple[int, ...] = (1, 3, 5, 9, 17)
    """Numbers of chains W of the frontiers, odd."""
    temperatures: tuple[float, ...] = (0.5, 0.7, 1.0)
    """Temperatures of the frontiers, beside greedy answers."""
    repeats: int = 32
    """Answers to each problem of AMC23 and AIME24, which are averaged."""
    lanes: int = 1024
    """Sequences in the cache at a time."""

    def __post_init__(self):
        check_numbers(self, may_be_zero=("seeds", "lesson_temperatures"))


# -- trainings ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """One kind of training, repeated with seeds.

    Attributes:
      ratios: compression ratios at which it is exported; the last one is the target.
      trainable: the adapter alone, with low-rank updates of frozen weights, or with all weights.
      policy: the trained policy; None for the control.
      mixed: whether it also reads novels and problems of retrieval, in sequences of double length.
      changes: changed fields of the recipe.
    """

    ratios: tuple[float, ...] = (2.0, 3.3)
    trainable: Literal["adapter", "low_rank", "all"] = "low_rank"
    policy: Policy | None = DMS
    mixed: bool = False
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def recipe(self, config: Config) -> Recipe:
        """The recipe for the settings."""
        longer = 1 + self.mixed
        sizes: Any = dict(
            tokens=config.tokens,
            sequence_length=config.sequence_length * longer,
            batch_size=config.batch_size // longer,
        )
        if isinstance(self.policy, dms_jax.KVpop):
            return recipes.kvpop(**sizes)
        recipe = recipes.dms_warm_up(self.ratios[-1], trainable=self.trainable, **sizes)
        recipe = dataclasses.replace(recipe, snapshots=self.ratios, **self.changes)
        return recipe if self.policy is not None else recipe.control(DMS)


TRAININGS = {
    "dms-3.3": Training(),
    "control": Training(policy=None),
    "dms-8": Training(ratios=(8.0,)),
    "text-3.3": Training(changes=dict(answers_only=True, text_weight=0.5)),
    "mixed-3.3": Training(
        policy=DMS_128, mixed=True, changes=dict(answers_only=True, text_weight=0.5)
    ),
    "mixed16-3.3": Training(mixed=True, changes=dict(answers_only=True, text_weight=0.5)),
    "wide-3.3": Training(changes=dict(low_rank=LowRank(rank=128, alpha=256.0))),
    "wide-text-3.3": Training(
        changes=dict(answers_only=True, text_weight=0.5, low_rank=LowRank(rank=128, alpha=256.0))
    ),
    "all-3.3": Training(trainable="all"),
    "adapter-3.3": Training(trainable="adapter"),
    "kvpop": Training(policy=dms_jax.KVpop(budget=128, window=16)),
}
SEVERAL = ("dms-3.3", "control", "dms-8")  # trained with every seed; the others with the first seed


# -- systems --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rival:
    """A training-free method.

    Attributes:
      make: its policy, from `budget` in tokens or `compression_ratio`.
      grows: tokens above the budget at the peak: a number, or "answer" if rows are cut only once,
        after the prompt.
    """

    make: Callable[..., Policy]
    grows: int | Literal["answer"] = 0


def _expected(**budget: Any) -> Policy:
    """ExpectedAttention as published: in AdaKV, with epsilon, and the question kept."""
    scorer = dms_jax.ExpectedAttention(epsilon=1e-2, interval=None, recent=64, **budget)
    return dms_jax.AdaKV(scorer)


INTERVAL = 16  # generated tokens between two cuts; small, since peaks are a few hundred tokens
RIVALS = {
    "snapkv-32": Rival(functools.partial(dms_jax.SnapKV, window=32, interval=None), "answer"),
    "snapkv-64": Rival(functools.partial(dms_jax.SnapKV, window=64, interval=None), "answer"),
    "expected": Rival(_expected, "answer"),
    "h2o": Rival(dms_jax.H2O, 1),
    "tova": Rival(dms_jax.TOVA, 1),
    "streamingllm": Rival(dms_jax.StreamingLLM, 1),
    "quest": Rival(functools.partial(dms_jax.Quest, per="kv_head")),
    "rkv": Rival(functools.partial(dms_jax.RKV, interval=INTERVAL), INTERVAL),
    "triattention": Rival(
        functools.partial(dms_jax.TriAttention, interval=INTERVAL, counts_prompt=True), INTERVAL
    ),
}
RULES = ("peak", "share")
SHARE = 3.3  # compression ratio of the papers' rule
FLOAT8 = "float8"  # the whole cache in 8 bits
# Trainings on the frontiers.
VOTING = (
    *("dms-3.3", "control", "text-3.3", "mixed16-3.3", "wide-3.3", "wide-text-3.3", "all-3.3"),
    *("dms-8", "kvpop"),
)
ON_FRONTIERS = ("quest", "tova", "rkv")


# -- the work -------------------------------------------------------------------------------------


class Campaign:
    """The work of all pieces, with the last model in memory."""

    def __init__(self, config: Config):
        self.config = config
        self.results = Results(config.out / "done")
        self._loaded: tuple[str, LanguageModel] | None = None

    # -- models ---------------------------------------------------------------------------------

    def model(self, system: str) -> LanguageModel:
        """The model of a system; the last one loaded stays in memory."""
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
        """The folder of a trained model: "dms-3.3:1", or "dms-3.3@2:1" at a ratio on the way."""
        label, _, seed = system.partition(":")
        name, _, ratio = label.partition("@")
        if name not in TRAININGS:
            return None
        run = self.config.out / "trainings" / f"{name}-{seed}"
        return run / "snapshots" / ratio if ratio else run / "model"

    def file(self, name: str) -> pathlib.Path:
        """A file of the data; a copy with answers as text if they are numbers or in solutions."""
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
        """The settings with which the model answers a set of training problems."""
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
            temperatures=config.lesson_temperatures,
            max_new_tokens=config.new_tokens if gsm8k else config.long_new_tokens // 2,
            keep=config.keep,
            dtype=config.dtype,
            lanes=config.lanes,
        )

    def lessons(self, kind: str) -> dict[str, Any]:
        """Samples and filters answers; resumes after those of earlier calls."""
        own = self.self_taught(kind)
        make_folder("--out", own.out)
        model = self.model(PLAIN)
        questions = read_questions(own, model)
        answers = sample(own, model, questions, own.out / "answers")
        return choose(own, questions, answers, own.out).figures

    def documents(self, *, mixed: bool = False) -> list[Any]:
        """The documents of all completed sets; `mixed` adds novels and problems of retrieval."""
        config, found = self.config, list[Any]()
        for kind in LESSONS:
            if self.results.has(f"lessons-{kind}"):
                found += read_lessons(config.out / "lessons" / kind)
        if mixed:
            sizes: Any = dict(problems=config.retrieval_problems, windows=config.novel_windows)
            tokenizer = self.model(PLAIN).tokenizer
            found += retrieval_lessons.lessons(tokenizer, 2 * config.sequence_length, **sizes)
        return found

    def train(self, name: str, seed: int) -> dict[str, Any]:
        """Trains, or resumes a training."""
        training, folder = TRAININGS[name], self.config.out / "trainings" / f"{name}-{seed}"
        recipe = training.recipe(self.config)
        options: Any = dict(
            recipe=recipe,
            data=Documents(self.documents(mixed=training.mixed)),
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

    # -- answers ----------------------------------------------------------------------------------

    def policy(self, system: str, task: str) -> Policy | None:
        """The policy of a system for a task; None for the model's own."""
        label, _, rule = system.partition("/")
        if label == FLOAT8:
            return dms_jax.Vanilla()
        if system.startswith("kvpop"):
            return dms_jax.KVpop(budget=self.peak(REFERENCE, task), window=16)
        if label not in RIVALS:
            return None
        rival = RIVALS[label]
        made: dict[str, Any] = {}
        if label == "triattention":
            made["statistics"] = self.centres()
        if rule == "share":
            return rival.make(compression_ratio=SHARE, **made)
        peak = self.peak(REFERENCE, task)
        grows = rival.grows
        if grows == "answer":
            grows = round(self.results.read(f"ask-{task}-{PLAIN}")["new_tokens"])
        # A window of 64 and as much beside it. If one cut cannot reach so small a peak, the record
        # has the measured one.
        least = 129 if rival.grows == "answer" else 24
        return rival.make(budget=max(peak - grows, least), **made)

    def peak(self, system: str, task: str) -> int:
        """The measured peak of live tokens of an answer."""
        return max(round(self.results.read(_safe(f"ask-{task}-{system}"))["peak"]), 24)

    def centres(self) -> str:
        """TriAttention's centres, calibrated on texts of the lessons."""
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
        policy = self.policy(system, task)
        kv_dtype = "float8_e4m3" if system == FLOAT8 else None
        model = self.model(system)
        serving = Serving(lanes=self.config.lanes, page_size=16, kv_dtype=kv_dtype)
        common: Any = dict(policy=policy, serving=serving)
        tasks = TASKS[task](self.file(FILES.get(task, "")))
        row: dict[str, Any] = dict(system=system.partition(":")[0], measure=task)
        row["run"] = int(system.partition(":")[2] or 0)
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
            **common,
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
        """Chains of every length at a temperature, greedy at 0, as rows of `votes`."""
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
    r"""A problem with its answer as text; the answer may be the last box of its solution.

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
    """The points of one temperature in the form of the record, a row for each length.

    Scores count the groups of chains whose vote is right, a digit of base 36 a problem; reads and
    peak are means over chains, a number a problem.
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


FILES = {  # path of a task's file in the data
    "held-out": "gsm8k/train.jsonl",
    "gsm8k": "gsm8k/test.jsonl",
    "gsm8k-8shot": "gsm8k/test.jsonl",
    "math500": "math500/test.jsonl",
    "amc23": "amc23/test.jsonl",
    "aime24": "aime24/test.jsonl",
    "humaneval": "humaneval/HumanEval.jsonl.gz",
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


def pieces(campaign: Campaign) -> Iterator[Piece]:
    """All pieces, the most valuable first."""
    config = campaign.config
    train, ask, frontier = (functools.partial(x, campaign) for x in (_train, _ask, _frontier))
    for kind in LESSONS:
        work = functools.partial(campaign.lessons, kind)
        yield Piece(f"lessons-{kind}", (), work, config.data / f"{kind}/train.jsonl")
    yield ask("held-out", PLAIN)
    yield ask("gsm8k", PLAIN)
    yield ask("math500", PLAIN)
    systems = trained(config, *TRAININGS)
    for system in systems:
        yield train(system)
        yield ask("held-out", system)
        yield ask("gsm8k", system)
        yield ask("math500", system)
    yield ask("gsm8k", "dms-3.3@2:0")
    every = (PLAIN, *trained(config, *VOTING), *ON_FRONTIERS)
    first = tuple(each for each in every if each.endswith(":0") or ":" not in each)
    main_, *more = sorted(config.temperatures, key=lambda each: abs(each - 0.7))
    for temperature in (0.0, main_, *more):
        for system in every if temperature in (0.0, main_) else first:
            for task in LENGTHS:  # all tasks of a model in sequence, so that it is loaded once
                yield frontier(task, system, temperature)
    others = ("gsm8k-8shot", "humaneval", "ruler-4k", "ruler-16k", "needles-16k")
    for system in (PLAIN, *systems):
        for task in (*others, *SAMPLED):
            yield ask(task, system)
    for task in ("gsm8k", "gsm8k-8shot", "math500", "ruler-4k", "ruler-16k"):
        yield ask(task, FLOAT8)
        for rule in RULES:
            for name in RIVALS:
                yield ask(task, f"{name}/{rule}")


def _train(campaign: Campaign, system: str) -> Piece:
    name, _, seed = system.partition(":")
    work = functools.partial(campaign.train, name, int(seed))
    return Piece(f"train-{name}-{seed}", ("lessons-gsm8k",), work)


def _training_of(system: str) -> tuple[str, ...]:
    label, _, seed = system.partition(":")
    name = label.partition("@")[0]
    return (f"train-{name}-{seed}",) if name in TRAININGS else ()


def _ask(campaign: Campaign, task: str, system: str) -> Piece:
    needs = _training_of(system)
    if system.endswith("/peak") or system.startswith("kvpop"):
        needs += (_safe(f"ask-{task}-{REFERENCE}"), f"ask-{task}-{PLAIN}")
    if system.startswith("triattention"):
        needs += ("lessons-gsm8k",)
    work = functools.partial(campaign.ask, task, system)
    file = campaign.config.data / FILES[task] if task in FILES else None
    return Piece(_safe(f"ask-{task}-{system}"), needs, work, file)


def _frontier(campaign: Campaign, task: str, system: str, temperature: float) -> Piece:
    name = _safe(f"frontier-{task}-{system}-{temperature:g}")
    work = functools.partial(campaign.frontier, task, system, temperature)
    return Piece(name, _training_of(system), work, campaign.config.data / FILES[task])


def _safe(name: str) -> str:
    """A name for files: "ask-gsm8k-rkv/peak" is "ask-gsm8k-rkv+peak", "dms-3.3:0" "dms-3.3-0"."""
    return name.replace("/", "+").replace(":", "-")


# -- the command ----------------------------------------------------------------------------------


def main(config: Config) -> int:
    """Runs the remaining chosen pieces; returns 1 if one failed or its file is missing."""
    campaign = Campaign(config)
    plan = list(pieces(campaign))
    if config.only == ("list",):
        for piece in plan:
            print(f"{'done' if campaign.results.has(piece.name) else 'left':5} {piece.name}")
        return 0
    make_folder("--out", campaign.results.folder)
    if not config.model:
        raise dms_jax.ConfigError("give --model, a chat model.")
    if config.only == ("record",):
        gather(campaign, plan)
        return 0
    require_math_verify("mathematics")  # nearly all pieces need it: before a model is loaded
    return do_pieces(chosen(plan, config.only), campaign.results, minutes=config.minutes)


def gather(campaign: Campaign, plan: list[Piece]) -> None:
    """Writes the record, which `experiments.reproduction.claims` reads."""
    config = campaign.config
    rows, curves, trainings = [], [], []
    for piece in plan:
        if not campaign.results.has(piece.name):
            continue
        result = campaign.results.read(piece.name)
        if piece.name.startswith("ask-"):
            rows.append(result)
        elif piece.name.startswith("frontier-"):
            task = piece.name.split("-")[1]
            curves += [each | {"measure": task} for each in result]
        else:
            trainings.append({"piece": piece.name} | result)
    if not rows:
        raise dms_jax.ConfigError(f"--only record: no piece of {config.out} is done yet.")
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

"""RULER's 13 tasks at any length (Hsieh et al., arXiv 2404.06654), in its exact wording.

    evaluate(model, RULER("niah_single_2", length=4096), sampling=Sampling(temperature=0))
    evaluate(model, ruler_tasks(4096, squad="dev-v2.0.json"), sampling=Sampling(temperature=0))

The length counts the prompt, as the model reads it, and the longest answer (128 tokens for needles,
30, 120 and 50 for `vt`, `cwe` and `fwe`, 32 for questions), in tokens of the model. The context is
the largest that fits, or within half a percent of it (`largest_size`): a search finds the size for
one problem of the task, and the others start from there.

Formats, settings and scores are RULER's. Differences, besides the filling text (`filling.py`):

- The problems are not those of RULER's seed 42: each depends only on the seed, the split and its
  number. RULER has no splits; here splits are different draws (of the same questions for `qa`).
- RULER searches in steps (500 words of an essay), so its prompts are often shorter by up to a step,
  and no context is smaller than a step. Ours come closer to the length.
- Keys, and values of variables, differ within a problem. In RULER two may be the same by chance.
- In a chat the user's turn is the whole problem, worked examples included, and the answer prefix
  starts the assistant's. RULER repeats its model template around the example of `cwe`, and its
  replacement of "are" by "is" also changes the template.

RULER decodes greedily, and reports the mean over tasks in percent.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import random
from collections.abc import Callable
from typing import Annotated, Any

from dms_jax.checks import Count, Number, Range, Whole, check, require
from dms_jax.data.tasks import Problem, Split, Task
from dms_jax.errors import ConfigError
from dms_jax.evaluation.tasks.ruler.counting import COMMON, SHORT, CommonWords, FrequentWords
from dms_jax.evaluation.tasks.ruler.filling import Path, read_essay, read_words
from dms_jax.evaluation.tasks.ruler.formats import NEEDLE_TASKS, RULER_TASKS, Family, RulerName
from dms_jax.evaluation.tasks.ruler.needles import Needles
from dms_jax.evaluation.tasks.ruler.questions import read_hotpotqa, read_squad
from dms_jax.evaluation.tasks.ruler.tracking import EXAMPLE_TOKENS, Tracking

SEED = 42  # RULER's
DEFAULT_LENGTH = 4096
CLOSE = 200  # a context is large enough within 1 / CLOSE of the length
_FILES = {"qa_1": "SQuAD's dev-v2.0.json", "qa_2": "HotpotQA's hotpot_dev_distractor_v1.json"}

Measure = Callable[[Problem], int]


@dataclasses.dataclass(frozen=True)
class RULER(Task):
    """A task of RULER.

    Attributes:
      task: niah_single_1 to 3, niah_multikey_1 to 3, niah_multivalue, niah_multiquery, vt, cwe,
        fwe, qa_1 or qa_2.
      length: the most tokens of a prompt and its answer.
      essays: file of the essay: JSON with "text", or plain text. The shipped novels unless given.
      words: file of words, one per line, or a folder with wonderwords' lists (its `assets`).
      questions: SQuAD's dev-v2.0.json for qa_1, HotpotQA's hotpot_dev_distractor_v1.json for qa_2.
      chains, hops: chains and hops of vt. The DMS paper takes 40 and 0, without the worked example.
      worked_example: whether a worked example precedes the question of vt, as in RULER.
      depth: percent of the haystack before a single needle; None for RULER's random depths.
      seed: seed of the problems.
      measure: function that returns the tokens of a problem; `evaluate` sets the model's.
    """

    task: RulerName
    length: Count = DEFAULT_LENGTH
    essays: Path | None = None
    words: Path | None = None
    questions: Path | None = None
    chains: Count = 1
    hops: Whole = 4
    worked_example: bool = True
    depth: Annotated[Number, Range(0, 100)] | None = None
    seed: Whole = dataclasses.field(default=SEED, kw_only=True)
    measure: Measure | None = dataclasses.field(default=None, kw_only=True, repr=False)

    def __post_init__(self):
        super().__post_init__()
        require(
            self.task == "vt" or (self.chains, self.hops, self.worked_example) == (1, 4, True),
            f"RULER: chains, hops and worked_example are of vt, not of {self.task}.",
        )
        settings = NEEDLE_TASKS.get(self.task)
        require(
            self.depth is None or (settings is not None and settings.keys * settings.values == 1),
            f"RULER: depth is that of a single needle, and {self.task} does not hide one.",
        )
        require(
            (self.task in _FILES) == (self.questions is not None),
            f"RULER: {self.task} reads its questions from a file: questions={_FILES[self.task]}."
            if self.task in _FILES
            else f"RULER: questions is a file of qa_1 or qa_2, not of {self.task}.",
        )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The name of the task."""
        return self.task

    def fitted(self, measure: Measure) -> "RULER":
        """The task for a model; `measure` returns the tokens of a problem as the model reads it."""
        return dataclasses.replace(self, measure=measure)

    def problem(self, split: Split, index: int) -> Problem:
        """Returns problem `index` of a split, deterministically.

        Raises:
          ConfigError: no model was given, the split is unknown, or the smallest context exceeds the
            length.
          DataError: the question does not exist, or a file cannot be read.
        """
        split = check(f"{self.name}: split", split, Split)
        index = check(f"{self.name}: problem", index, Whole)
        return self._fit(split, index, _probe_size(self))[1]

    def draw(self, rng: random.Random) -> Problem:
        """Any problem of the test split."""
        number = getattr(self.family, "questions", range(2**31))
        return self.problem("test", rng.randrange(len(number)))

    def answer(self, completion: str) -> str | None:
        """The first distinct answers, as many as asked for, sorted alphabetically."""
        found = list(dict.fromkeys(self.family.found(completion)))[: self._num_answers]
        return " ".join(sorted(found)) if found else None

    def score(self, problem: Problem, completion: str) -> float:
        return self.family.score(completion, problem.answers)

    def to_dict(self) -> dict[str, Any]:
        """Returns the task as JSON data: its name and every field."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["measure"]
        for name in ("essays", "words", "questions"):
            fields[name] = None if fields[name] is None else str(fields[name])
        return {"name": self.name, **fields}

    @functools.cached_property
    def family(self) -> Family:
        """The task's `Family`, with words and texts loaded.

        Raises:
          DataError: a file cannot be read.
        """
        if settings := NEEDLE_TASKS.get(self.task):
            essay = read_essay(self.essays) if settings.haystack == "essay" else ()
            words = read_words(self.words)
            return Needles(settings, words, essay, self.seed, self.depth)
        if self.task == "vt":
            example = functools.partial(_example_size, self) if self.worked_example else None
            return Tracking(self.chains, self.hops, self.seed, example)
        if self.task == "cwe":
            return CommonWords(read_words(self.words).counted, self.length, self.seed)
        if self.task == "fwe":
            return FrequentWords.of_length(self.length, self.seed)
        read = read_squad if self.task == "qa_1" else read_hotpotqa
        return read(pathlib.Path(self.questions or ""), self.seed)

    @property
    def _num_answers(self) -> int:
        """The number of answers of a problem."""
        if settings := NEEDLE_TASKS.get(self.task):
            return settings.values * settings.queries
        return {"vt": self.hops + 1, "cwe": COMMON, "fwe": 3}.get(self.task, 1)

    def _make_problem(self, split: str, index: int, size: int) -> Problem:
        """Problem `index` with a context of `size`; its first draws do not depend on the size."""
        rng = random.Random(f"RULER {self.task} {self.seed} {split} {index}")
        filled = self.family.fill(rng, size, index)
        return Problem(
            prompt=filled.prompt,
            solution=filled.solution,
            answers=filled.answers,
            identity=f"{self.task} {split} {index}: {' '.join(filled.answers)}",
            answer_prefix=filled.answer_prefix,
            answer_tokens=self.family.format.answer_tokens,
        )

    def _fit(self, split: str, index: int, start: int) -> tuple[int, Problem]:
        """The size of a problem's context, and the problem."""
        made: dict[int, Problem] = {}

        def count(size: int) -> int:
            made[size] = self._make_problem(split, index, size)
            return self._tokens(made[size])

        bounds = Bounds(self.length, self.family.least, self.family.most)
        size = largest_size(count, bounds, start)
        if size is None:
            needed = self._tokens(made[self.family.least])
            shorter = self.task == "cwe" and self.length >= SHORT
            raise ConfigError(
                f"RULER: {self.task} with {self.family.format.answer_tokens} tokens for the answer "
                f"does not fit {self.length} tokens of this model: its smallest problem takes "
                f"{needed} tokens: give a length of at least that"
                + (f", or one below {SHORT}, where its lists are shorter." if shorter else ".")
            )
        return size, made[size]

    def _tokens(self, problem: Problem) -> int:
        """Tokens of a problem and of its answer."""
        return self._counter(problem) + self.family.format.answer_tokens

    @property
    def _counter(self) -> Measure:
        if self.measure is None:
            raise ConfigError(
                f"RULER: the length of {self.task} is in tokens of a model. evaluate gives it; to "
                "make problems without, fit_task(model, task) of dms_jax.evaluation.prompting."
            )
        return self.measure


def ruler_tasks(
    length: int = DEFAULT_LENGTH,
    *,
    squad: Path | None = None,
    hotpotqa: Path | None = None,
    essays: Path | None = None,
    words: Path | None = None,
    seed: int = SEED,
) -> list[RULER]:
    """RULER's tasks at a length: all 13, or those whose data is given.

    Args:
      length: the most tokens of a prompt and its answer.
      squad: SQuAD's dev-v2.0.json; qa_1 is left out without it.
      hotpotqa: HotpotQA's hotpot_dev_distractor_v1.json; qa_2 is left out without it.
      essays, words, seed: see `RULER`.
    """
    questions = {"qa_1": squad, "qa_2": hotpotqa}
    return [
        RULER(name, length, essays=essays, words=words, questions=questions.get(name), seed=seed)
        for name in RULER_TASKS
        if name not in questions or questions[name] is not None
    ]


@functools.lru_cache(maxsize=256)
def _probe_size(task: RULER) -> int:
    """The size of a context that fits, found on a problem outside every split."""
    return task._fit("probe", 0, task.family.least)[0]


@functools.lru_cache(maxsize=256)
def _example_size(task: RULER) -> int:
    """Repetitions of noise in the worked example of `vt`, which has at most 500 tokens.

    Raises:
      ConfigError: its chains alone take more tokens.
    """
    tracking, measure = task.family, task._counter
    assert isinstance(tracking, Tracking)

    def count(size: int) -> int:
        text = tracking.worked(random.Random(f"RULER example {task.seed}"), size)
        return measure(Problem(text, "", (), ""))

    size = largest_size(count, Bounds(EXAMPLE_TOKENS, tracking.least), tracking.least)
    if size is None:
        raise ConfigError(
            f"RULER: the worked example of vt has at most {EXAMPLE_TOKENS} tokens, which do not "
            f"hold {task.chains} chains of {task.hops} hops. Set worked_example=False."
        )
    return size


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The range of sizes to choose from.

    Attributes:
      length: the most tokens.
      least: the smallest size.
      most: the largest, if there is one.
    """

    length: int
    least: int
    most: int | None = None

    def clipped(self, size: int) -> int:
        """The nearest size within the bounds."""
        return max(self.least, size if self.most is None else min(size, self.most))


def largest_size(count: Callable[[int], int], bounds: Bounds, start: int) -> int | None:
    """Returns a size that fits, the largest or one within half a percent of the length; or None.

    Counting tokens is slow, so few sizes are tried. Tokens grow roughly in proportion to the size:
    the next size is where a line through the two nearest known sizes meets the length. Every fourth
    try bisects, in case the line misleads.

    Args:
      count: function that returns the tokens of a size.
      bounds: the length, and the range of sizes.
      start: the size to begin with.
    """
    length = bounds.length
    below: list[tuple[int, int]] = []  # sizes that fit and their tokens, growing
    above: list[tuple[int, int]] = []  # sizes that do not fit, shrinking
    size = bounds.clipped(start)
    for turn in itertools.count():
        tokens = count(size)
        (below if tokens <= length else above).append((size, tokens))
        if tokens <= length and (size == bounds.most or length - tokens <= length // CLOSE):
            return size
        if tokens > length and size == bounds.least:
            return None
        if below and above:
            (low, fewer), (high, more) = below[-1], above[-1]
            if high - low == 1:
                return low
            size = low + (length - fewer) * (high - low) // max(1, more - fewer)
            size = (low + high) // 2 if turn % 4 == 3 else size
            size = min(max(size, low + 1), high - 1)
        elif below:
            low, fewer = below[-1]
            before, fewest = below[-2] if len(below) > 1 else (0, 0)
            growth = (low - before) / max(1, fewer - fewest)
            size = bounds.clipped(low + max(1, int((length - fewer) * growth)))
        else:  # tokens independent of the size make the line too steep: go twice as far
            high, more = above[-1]
            size = bounds.clipped(high - 2 * math.ceil(high * (more - length) / more))
    raise AssertionError

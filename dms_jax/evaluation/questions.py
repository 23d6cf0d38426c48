"""Turn the problems of an evaluation into requests, and judge the answers.

Problem i of n tasks is number i // n of task i % n. Every chain of every problem derives its
sampling seed from one seed, so adding chains or problems does not change the first ones.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.checks import Count, Whole, check
from dms_jax.data.tasks import Problem, Split, Task
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.prompting import (
    Chat,
    encode_problem,
    fit_task,
    limit_answer,
    prompt_text,
)
from dms_jax.evaluation.tasks.files import FileTask
from dms_jax.evaluation.tasks.ruler import RULER
from dms_jax.generation import Sampling
from dms_jax.generation.answer_readers import AnswerForm
from dms_jax.generation.answers import Answer, answer_form, with_shown_markers
from dms_jax.generation.requests import Request, make_requests
from dms_jax.model.language_model import LanguageModel

DRAWN_PROBLEMS = 200  # default of tasks that draw problems
PerChain = Float[np.ndarray, "problems chains"]


@dataclasses.dataclass(frozen=True)
class Questions:
    """The problems of a call.

    Attributes:
      what: name of the call, for messages.
      tasks: the tasks.
      split, start: split and first problem of each task.
      chat: options of the chat template; None for plain text.
      task_of: the task of each problem.
      problems: the problems.
    """

    what: str
    tasks: tuple[Task, ...]
    split: Split
    start: int
    chat: Chat | None
    task_of: tuple[int, ...]
    problems: tuple[Problem, ...]

    @classmethod
    def given(
        cls,
        what: str,
        model: LanguageModel,
        task: Any,
        *,
        count: int | None,
        split: Split,
        start: int,
        chat: Chat | None,
    ) -> "Questions":
        """Checks the arguments of a call, and reads or draws the problems.

        Tasks with a length in tokens count them with the model's tokenizer.

        Raises:
          ConfigError: an argument does not fit.
          DataError: there are too few problems, or no tokenizer to count tokens.
        """
        tasks = tuple(task) if isinstance(task, Iterable) else (task,)
        if not tasks or not all(isinstance(each, Task) for each in tasks):
            raise ConfigError(
                f"{what} needs a task of dms_jax.data.tasks, or several, got {task!r}."
            )
        names = tuple(each.name for each in tasks)
        if len(set(names)) < len(names):
            raise ConfigError(f"{what} tells tasks apart by their names, got {', '.join(names)}.")
        count = check(f"{what}: problems", count, Count | None)
        check(f"{what}: chat", chat, Chat | None)
        start = check(f"{what}: start", start, Whole)
        if count is not None and count < len(tasks):
            raise ConfigError(f"{what}: {count} problems are too few for {len(tasks)} tasks.")
        tasks = tuple(fit_task(model, each, chat) for each in tasks)
        task_of, problems = _problems(what, tasks, split, start, count)
        return cls(what, tasks, split, start, chat, task_of, problems)

    def requests(
        self,
        model: LanguageModel,
        sampling: Sampling,
        *,
        chains: int,
        seed: int,
    ) -> list[Request]:
        """A request for every chain of every problem; chain c of problem i is i * chains + c.

        Args:
          model: a model with a tokenizer.
          sampling: how the answers are sampled; its seed is ignored.
          chains: chains of each problem.
          seed: base seed of the chains' seeds.

        Raises:
          DataError: there is no tokenizer, or a prompt leaves no room for an answer.
        """
        if model.tokenizer is None:
            raise DataError(f"{self.what} needs a tokenizer, and this model has none.")
        prompts = [
            encode_problem(model, problem, self.chat, name=self.tasks[number].name)
            for number, problem in zip(self.task_of, self.problems, strict=True)
        ]
        sampling = dataclasses.replace(sampling, seed=_seeds(seed, len(prompts), chains))
        requests = make_requests(
            model.config, [prompt for prompt in prompts for _ in range(chains)], sampling
        )
        for request in requests:
            limit_answer(request, self.problems[request.index // chains])
        return requests

    def shown(self, model: LanguageModel) -> LanguageModel:
        """The model; in a chat, with a tokenizer that keeps the markers of thoughts in texts."""
        return model if self.chat is None else with_shown_markers(model)

    def to_dict(self) -> dict[str, Any]:
        """The settings that determine the prompts, as JSON data."""
        return {
            "task": [each.to_dict() for each in self.tasks],
            "split": self.split,
            "start": self.start,
            "chat": None if self.chat is None else dataclasses.asdict(self.chat),
        }


class Judge:
    """Scores completions and caches the scores, because judging can be slow.

    In a chat it ignores thoughts before the answer.

    Args:
      questions: the problems.
      tokenizer: the tokenizer of the model, whose chat template shows how thoughts are marked.
    """

    def __init__(self, questions: Questions, tokenizer: Tokenizer | None):
        self._questions, self._tokenizer = questions, tokenizer
        self._scores: dict[tuple[int, str], float] = {}
        self._answers: dict[tuple[int, str], str] = {}  # (problem, vote) -> first answer
        self._forms: dict[int, AnswerForm] = {}

    def __call__(self, problem: int, text: str) -> float:
        """Returns the score of a completion of a problem."""
        if (problem, text) not in self._scores:
            own, task = self._questions.problems[problem], self.task(problem)
            self._scores[problem, text] = task.score(own, self.said(problem, text))
        return self._scores[problem, text]

    def together(self, completions: Iterable[tuple[int, str]]) -> None:
        """Scores (problem, completion) pairs, in parallel if their task supports it."""
        waiting: dict[int, list[tuple[int, str]]] = {}
        for problem, text in dict.fromkeys(completions):
            if (problem, text) not in self._scores:
                waiting.setdefault(self._questions.task_of[problem], []).append((problem, text))
        for number, pairs in waiting.items():
            problems = self._questions.problems
            given = [(problems[problem], self.said(problem, text)) for problem, text in pairs]
            scores = self._questions.tasks[number].scores(given)
            self._scores |= zip(pairs, scores, strict=True)

    def said(self, problem: int, text: str) -> str:
        """A completion without thoughts before the answer."""
        chat = self._questions.chat
        if chat is None or self._tokenizer is None:
            return text
        if problem not in self._forms:
            own, name = self._questions.problems[problem], self.task(problem).name
            prompt = prompt_text(self._tokenizer, own, chat, name=name)
            self._forms[problem] = answer_form(self._tokenizer, prompt)
        return Answer.of(self._forms[problem], text).text

    def task(self, problem: int) -> Task:
        """The task of a problem."""
        return self._questions.tasks[self._questions.task_of[problem]]

    def answer(self, problem: int, text: str) -> str | None:
        """The answer of a completion; equal votes share the first answer seen."""
        task = self.task(problem)
        own = task.answer(self.said(problem, text))
        return None if own is None else self._answers.setdefault((problem, task.vote(own)), own)

    def answer_score(self, problem: int, answer: str | None) -> float:
        """The score of the answer alone; 0 without one."""
        if answer is None:
            return 0.0
        return self.task(problem).score_answer(self._questions.problems[problem], answer)

    def chains(
        self, texts: Sequence[Sequence[str]]
    ) -> tuple[list[list[str | None]], PerChain, PerChain]:
        """The answer, score, and score of the answer alone, for each chain of each problem.

        Args:
          texts: the completions of each problem.
        """
        self.together((i, text) for i, own in enumerate(texts) for text in own)
        answers = [[self.answer(i, text) for text in own] for i, own in enumerate(texts)]
        scores = [[self(i, text) for text in own] for i, own in enumerate(texts)]
        alone = [[self.answer_score(i, each) for each in own] for i, own in enumerate(answers)]
        return answers, np.asarray(scores, np.float64), np.asarray(alone, np.float64)


def _problems(
    what: str, tasks: tuple[Task, ...], split: Split, start: int, count: int | None
) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    """The task of each problem, and the problems.

    Raises:
      DataError: there are too few problems.
    """
    most = [len(task.records) if isinstance(task, FileTask) else None for task in tasks]
    if count is None and None in most:
        count = max(DRAWN_PROBLEMS, len(tasks))
    places = [
        (number, index)
        for index in range(start, start + (count or max(filter(None, most), default=0)))
        for number, size in enumerate(most)
        if size is None or index < size
    ][:count]
    if not places or len(places) < (count or 1):
        raise DataError(
            f"{what}: {count or 'more'} problems were requested from number {start} on, and "
            f"there are {len(places)} ({', '.join(task.name for task in tasks)})."
        )
    return (
        tuple(number for number, _ in places),
        tuple(
            task.problem(split, index)  # not cached: a file may change, or its text be long
            if isinstance(task := tasks[number], FileTask | RULER)
            else _drawn(task, split, index)
            for number, index in places
        ),
    )


@functools.lru_cache(maxsize=1 << 14)  # many systems answer the same problems
def _drawn(task: Task, split: Split, index: int) -> Problem:
    return task.problem(split, index)


def _seeds(seed: int, problems: int, chains: int) -> list[int]:
    """One seed per chain of each problem; adding chains does not change existing seeds."""
    drawn = [
        np.random.SeedSequence([seed, problem]).generate_state(chains)
        for problem in range(problems)
    ]
    return np.concatenate(drawn).tolist()

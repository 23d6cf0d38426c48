"""`evaluate`: answers to the problems of a task, decoded from the real paged cache and scored."""

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dms_jax.checks import Count, CountOnDevice, Whole, check
from dms_jax.data.tasks import Problem, Split, Task
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.answering import answer
from dms_jax.evaluation.journal import Journal, model_mark
from dms_jax.evaluation.progress import progress_bar
from dms_jax.evaluation.prompting import Chat, encode_problem
from dms_jax.evaluation.result import Result, summary_table
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.tasks.files import FileTask
from dms_jax.generation import Sampling
from dms_jax.generation.calls import keep_finished
from dms_jax.generation.prompts import check_call
from dms_jax.generation.requests import Completion, finished, make_requests
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy

DRAWN_PROBLEMS = 200  # of tasks that draw them, unless more or fewer are asked for
SAMPLING = Sampling(temperature=0.7, max_new_tokens=512)  # of answers, unless given


def evaluate(
    model: LanguageModel,
    task: Task | Sequence[Task],
    *,
    policy: Policy | None = None,
    problems: int | None = None,
    split: Split = "test",
    start: int = 0,
    chains: int = 1,
    sampling: Sampling | None = None,
    chat: Chat | None = None,
    seed: int = 0,
    max_length: int | Sequence[int] | None = None,
    serving: Serving | None = None,
    out: str | pathlib.Path | None = None,
    progress: bool = False,
) -> Result:
    """Answers problems with a cache that holds only what the policy keeps, and scores the answers.

    Args:
      model: a model with a tokenizer.
      task: one task, or several whose problems alternate: problem i is number i // n of task
        i % n. A file that runs out of problems is left out from there on.
      policy: the checkpoint's own if None.
      problems: number of problems, over all tasks; None for every problem of tasks on files, and
        for 200 of tasks that draw them from seeds.
      split: which split; use "validation" to tune anything.
      start: the first problem of each task.
      chains: W, independent answers to each problem.
      sampling: `SAMPLING` if None: temperature 0.7, at most 512 new tokens. Its seed is ignored.
      chat: options of the model's chat template; None for plain text prompts.
      seed: every chain of every problem derives its own sampling seed from it.
      max_length: tokens of which a policy with a compression_ratio takes its share, one number or
        one for each task; if None each problem has its own, its prompt and the longest answer.
      serving: options of the cache; `Serving()` if None.
      out: a folder for `answers.jsonl`, to which every answer is written as soon as it ends, and
        for `results.json` and `table.md` at the end. If the folder holds answers of the same
        settings, the evaluation resumes after them.
      progress: whether to show a progress bar with the running score on standard error.

    Raises:
      ConfigError: an argument or the policy does not fit, or a task has too few problems.
      DataError: a prompt leaves no room for an answer, or `out` holds answers of other settings.
      CapacityError: the memory does not hold a single sequence.

    What interrupts it, KeyboardInterrupt too, carries the completions that had ended:
    `error.finished` is {i * chains + chain: Completion} of problem i.
    """
    check_model(model)
    tasks = tuple(task) if isinstance(task, Iterable) else (task,)
    if not tasks or not all(isinstance(each, Task) for each in tasks):
        raise ConfigError(f"evaluate wants a task of dms_jax.data.tasks, or several, got {task!r}.")
    names = tuple(each.name for each in tasks)
    if len(set(names)) < len(names):
        raise ConfigError(f"evaluate tells tasks apart by their names, got {', '.join(names)}.")
    problems = check("evaluate: problems", problems, Count | None)
    check("evaluate: chat", chat, Chat | None)
    chains = check("evaluate: chains", chains, Count)
    start, seed = check("evaluate: start", start, Whole), check("evaluate: seed", seed, Whole)
    if problems is not None and problems < len(tasks):
        raise ConfigError(f"evaluate: {problems} problems are too few for {len(tasks)} tasks.")
    if model.tokenizer is None:
        raise DataError("evaluate needs a tokenizer, and this model came without one.")
    max_lengths = _max_lengths(max_length, len(tasks))
    sampling = check_call(SAMPLING if sampling is None else sampling, None)
    task_of, given = _problems(tasks, split, start, problems)
    sampling = dataclasses.replace(sampling, seed=_seeds(seed, len(given), chains))
    begin = time.perf_counter()
    prompts = [
        encode_problem(model, problem, chat, name=tasks[number].name)
        for number, problem in zip(task_of, given, strict=True)
    ]
    requests = make_requests(
        model.config, [prompt for prompt in prompts for _ in range(chains)], sampling
    )
    for request in requests:
        given_length = max_lengths[task_of[request.index // chains]]
        request.max_length = given_length or request.max_length
    policy, serving = model.resolve_policy(policy), Serving.given("evaluate", serving)
    settings = {
        "task": [each.to_dict() for each in tasks],
        "policy": policy.to_dict(),
        "split": split,
        "start": start,
        "seed": seed,
        "kv_dtype": serving.kv_dtype,
        "page_size": serving.page_size,
        "max_length": max_lengths,
        "chat": None if chat is None else dataclasses.asdict(chat),
        "sampling": {
            name: getattr(sampling, name)
            for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop")
        },
    }
    journal = None if out is None else Journal(out, {**settings, "model": model_mark(model)})
    known = {} if journal is None else journal.answers
    done = {
        problem * chains + chain: completion
        for (problem, chain), completion in known.items()
        if problem < len(given) and chain < chains
    }
    waiting = [request for request in requests if request.index not in done]
    judge = Judge(tasks, task_of, given)
    ended = keep_finished(lambda: done | finished(waiting, sampling))
    with progress_bar(len(requests), shown=progress) as tick, ended:

        def keep(index: int, completion: Completion) -> None:
            done[index] = completion
            if journal is not None and (place := divmod(index, chains)) not in known:
                journal.add(*place, completion)
            if progress:
                tick(judge(index // chains, completion.text))

        try:
            for index, completion in done.items():
                keep(index, completion)
            watched = keep if progress or journal is not None else None
            answers = answer(model, policy, waiting, sampling, serving, watched)
        finally:
            if journal is not None:
                journal.close()
        done |= {request.index: each for request, each in zip(waiting, answers, strict=True)}
        completions = [done[index] for index in range(len(requests))]
        seconds = time.perf_counter() - begin
        result = _scored(settings, tasks, judge, completions, chains, seconds)
    if out is not None:
        _write(pathlib.Path(out), result)
    return result


class Judge:
    """Scores completions and remembers the scores: judging can be slow."""

    def __init__(
        self, tasks: tuple[Task, ...], task_of: tuple[int, ...], problems: tuple[Problem, ...]
    ):
        self.tasks, self.task_of, self.problems = tasks, task_of, problems
        self._scores: dict[tuple[int, str], float] = {}

    def __call__(self, problem: int, text: str) -> float:
        """Returns the score of a completion of a problem."""
        if (problem, text) not in self._scores:
            task = self.tasks[self.task_of[problem]]
            self._scores[problem, text] = task.score(self.problems[problem], text)
        return self._scores[problem, text]

    def together(self, completions: Iterable[tuple[int, str]]) -> None:
        """Scores completions of problems, side by side where their task can."""
        waiting: dict[int, list[tuple[int, str]]] = {}
        for problem, text in dict.fromkeys(completions):
            if (problem, text) not in self._scores:
                waiting.setdefault(self.task_of[problem], []).append((problem, text))
        for number, pairs in waiting.items():
            given = [(self.problems[problem], text) for problem, text in pairs]
            self._scores |= zip(pairs, self.tasks[number].scores(given), strict=True)


def _write(folder: pathlib.Path, result: Result) -> None:
    """Writes the figures and their table beside the answers."""
    data = result.to_dict(problems=True)
    rows = [{"label": ", ".join(result.tasks), **data}]
    if len(result.tasks) > 1:
        rows += [{"label": name, **result.of_task(name).to_dict()} for name in result.tasks]
    for name, content in (
        ("results.json", json.dumps(data, indent=1) + "\n"),
        ("table.md", summary_table(rows) + "\n"),
    ):
        part = folder / f"{name}.part"
        part.write_text(content, encoding="utf-8")
        part.replace(folder / name)


def _problems(
    tasks: tuple[Task, ...], split: Split, start: int, count: int | None
) -> tuple[tuple[int, ...], tuple[Problem, ...]]:
    """The task of each problem, and the problems.

    Raises:
      DataError: there are fewer.
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
            f"evaluate: {count or 'more'} problems were asked for from number {start} on, and "
            f"there are {len(places)} ({', '.join(task.name for task in tasks)})."
        )
    return (
        tuple(number for number, _ in places),
        tuple(
            task.problem(split, index)  # a file may change between calls
            if isinstance(task := tasks[number], FileTask)
            else _drawn(task, split, index)
            for number, index in places
        ),
    )


@functools.lru_cache(maxsize=1 << 14)  # many systems answer the same problems
def _drawn(task: Task, split: Split, index: int) -> Problem:
    return task.problem(split, index)


def _max_lengths(max_length: int | Sequence[int] | None, tasks: int) -> list[int | None]:
    """The max_length of each task."""
    if max_length is None:
        return [None] * tasks
    given = list(max_length) if isinstance(max_length, Iterable) else [max_length] * tasks
    if len(given) != tasks:
        raise ConfigError(f"evaluate: {len(given)} max_lengths were given for {tasks} tasks.")
    return [check("evaluate: max_length", each, CountOnDevice) for each in given]


def _seeds(seed: int, problems: int, chains: int) -> list[int]:
    """One seed for each chain of each problem; more chains do not change the seeds of the first."""
    drawn = [
        np.random.SeedSequence([seed, problem]).generate_state(chains)
        for problem in range(problems)
    ]
    return np.concatenate(drawn).tolist()


def _scored(
    settings: dict[str, Any],
    tasks: tuple[Task, ...],
    judge: Judge,
    completions: list[Completion],
    chains: int,
    seconds: float,
) -> Result:
    count = len(judge.problems)
    scores, answer_scores = np.zeros((count, chains)), np.zeros((count, chains))
    answers, texts = [], []
    judge.together((index // chains, done.text) for index, done in enumerate(completions))
    for index, problem in enumerate(judge.problems):
        task = tasks[judge.task_of[index]]
        own = [done.text for done in completions[index * chains : (index + 1) * chains]]
        scores[index] = [judge(index, text) for text in own]
        answers.append(tuple(task.answer(text) for text in own))
        answer_scores[index] = [
            0.0 if answer is None else task.score_answer(problem, answer) for answer in answers[-1]
        ]
        texts.append(tuple(own))

    def of_usage(name: str, dtype: type = np.float64) -> np.ndarray:
        values = [getattr(done.usage, name) for done in completions]
        return np.asarray(values, dtype).reshape(count, chains)

    return Result(
        settings=settings,
        tasks=tuple(task.name for task in tasks),
        task_of=np.asarray(judge.task_of),
        scores=scores,
        answers=tuple(answers),
        answer_scores=answer_scores,
        prompt_tokens=of_usage("prompt_tokens", np.int64)[:, 0],
        new_tokens=of_usage("new_tokens", np.int64),
        reads=of_usage("kv_reads"),
        peak=of_usage("peak_tokens"),
        held=of_usage("peak_held_tokens"),
        live=of_usage("live_tokens"),
        cache_bytes=of_usage("peak_cache_bytes", np.int64),
        ended=np.asarray([done.finish_reason == "end" for done in completions]).reshape(
            count, chains
        ),
        completions=tuple(texts),
        seconds=seconds,
    )

"""`evaluate`: answers to the problems of a task, decoded from the real paged cache and scored."""

import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dms_jax.checks import Count, Whole, check
from dms_jax.data.tasks import Split, Task
from dms_jax.evaluation.answering import Evaluation
from dms_jax.evaluation.journal import write_files
from dms_jax.evaluation.prompting import Chat
from dms_jax.evaluation.questions import Judge, Questions
from dms_jax.evaluation.result import Result, summary_table
from dms_jax.evaluation.serving import Serving
from dms_jax.generation import Sampling
from dms_jax.generation.requests import Completion, check_call
from dms_jax.interrupts import keep_finished
from dms_jax.json_text import json_text
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy

SAMPLING = Sampling(temperature=0.7, max_new_tokens=512)  # the default


def evaluate(
    model: LanguageModel,
    task: Task | Sequence[Task],
    *,
    policy: Policy | str | None = None,
    problems: int | None = None,
    split: Split = "test",
    start: int = 0,
    chains: int = 1,
    sampling: Sampling | None = None,
    chat: Chat | None = None,
    seed: int = 0,
    serving: Serving | None = None,
    out: str | pathlib.Path | None = None,
    progress: bool = False,
) -> Result:
    """Answers problems from a cache that holds only the policy's kept tokens, and scores them.

    Chains of a problem that start together prefill its prompt once, and all problems share the
    prefill of their worked examples; see `dms_jax.generate`.

    Args:
      model: a model with a tokenizer.
      task: one task, or several whose problems alternate: problem i is number i // n of task
        i % n. A task whose file runs out of problems is skipped from then on.
      policy: the cache policy; the checkpoint's if None.
      problems: number of problems over all tasks; None for all problems of tasks on files, and 200
        of tasks that draw problems from seeds.
      split: the split; use "validation" for any tuning.
      start: the first problem of each task.
      chains: W, independent answers to each problem.
      sampling: `SAMPLING` if None: temperature 0.7, at most 512 new tokens. Its seed is ignored.
      chat: options of the model's chat template; None for plain text prompts. In a chat, thoughts
        before the answer (`<think>`, the channels of gpt-oss) are not judged.
      seed: every chain of every problem derives its own sampling seed from it.
      serving: options of the cache; `Serving()` if None.
      out: a folder. Each finished answer is appended to its `answers.jsonl`; `results.json` and
        `table.md` are written at the end. If it holds answers of the same settings, the evaluation
        resumes after them.
      progress: whether to show a progress bar with the running score on standard error.

    Raises:
      ConfigError: an argument or the policy does not fit, or a task has too few problems.
      DataError: a prompt leaves no room for an answer, or `out` cannot be written or holds answers
        of other settings.
      CapacityError: the memory does not hold a single sequence.

    An exception that interrupts it, KeyboardInterrupt too, carries the finished completions:
    `error.finished` is {i * chains + chain: Completion} of problem i.
    """
    check_model(model)
    questions = Questions.given(
        "evaluate", model, task, count=problems, split=split, start=start, chat=chat
    )
    chains = check("evaluate: chains", chains, Count)
    model = questions.shown(model)
    evaluation = Evaluation(
        model=model,
        policy=model.resolve_policy(policy),
        questions=questions,
        sampling=check_call(SAMPLING if sampling is None else sampling, None),
        serving=Serving.given("evaluate", serving),
        chains=chains,
        seed=check("evaluate: seed", seed, Whole),
    )
    judge, begin = Judge(questions, model.tokenizer), time.perf_counter()
    answers = evaluation.run(judge, out, bar="Answers" if progress else None)
    completions = [each.completion for each in answers.values()]
    seconds = time.perf_counter() - begin
    with keep_finished(lambda: dict(enumerate(completions))):
        result = _scored(evaluation.settings, questions, judge, completions, chains, seconds)
        if out is not None:
            _write(pathlib.Path(out), result)
    return result


def _write(folder: pathlib.Path, result: Result) -> None:
    """Writes the figures and their table beside the answers."""
    data = result.to_dict(problems=True)
    rows = [{"label": ", ".join(result.tasks), **data}]
    if len(result.tasks) > 1:
        rows += [{"label": name, **result.of_task(name).to_dict()} for name in result.tasks]
    contents = {"results.json": json_text(data, indent=1), "table.md": summary_table(rows)}
    write_files(folder, contents)


def _scored(
    settings: dict[str, Any],
    questions: Questions,
    judge: Judge,
    completions: list[Completion],
    chains: int,
    seconds: float,
) -> Result:
    count = len(questions.problems)
    texts = [
        tuple(done.text for done in completions[index * chains : (index + 1) * chains])
        for index in range(count)
    ]
    answers, scores, answer_scores = judge.chains(texts)

    def of_usage(name: str, dtype: type = np.float64) -> np.ndarray:
        values = [getattr(done.usage, name) for done in completions]
        return np.asarray(values, dtype).reshape(count, chains)

    return Result(
        settings=settings,
        tasks=tuple(task.name for task in questions.tasks),
        task_of=np.asarray(questions.task_of),
        scores=scores,
        answers=tuple(map(tuple, answers)),
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

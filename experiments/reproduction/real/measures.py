"""What is asked of a model under a policy: accuracy, loss, and what its cache held."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from dms_jax import LanguageModel, Sampling
from dms_jax.evaluation import (
    Chat,
    ChoiceResult,
    Result,
    Serving,
    evaluate,
    mean_over_problems,
    perplexity,
)
from dms_jax.evaluation.choosing import choose
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks import ARC, GSM8K, MATH500, PIQA, RULER, HellaSwag, HumanEval
from dms_jax.evaluation.tasks.choices import Choices
from dms_jax.evaluation.tasks.ruler import ruler_tasks
from dms_jax.policies import Policy
from experiments.reproduction.claims.jobs import answer_numbers
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import (
    CHOICES,
    FRONTIERS,
    RULER_TASKS,
    SHORT_TASKS,
    UNSEEN,
)

PAGE_SIZE = 16  # as Quest is published
TASKS_OF_CHOICES = {
    "hellaswag": (HellaSwag, "commonsense/hellaswag_sample.jsonl"),
    "arc_easy": (ARC, "arc/arc_easy.jsonl"),
    "arc_challenge": (ARC, "arc/ARC-Challenge-Test.jsonl"),
    "piqa": (PIQA, "commonsense/piqa.jsonl"),
}
LENGTHS = {  # settings
    "needle": "ruler_length",
    "ruler": "long_ruler_length",
    RULER_TASKS: "long_ruler_length",
    SHORT_TASKS: "ruler_length",
}
_TIMES = {"": 1, "twice": 2, "four-times": 4}  # behind the name of such a measure
NEEDLES = ("niah_single_1", "niah_single_2")


def measure(
    config: Config,
    model: LanguageModel,
    policy: Policy,
    name: str,
    folder: pathlib.Path,
    *,
    kv_dtype: str | None,
) -> dict[str, Any]:
    """Figures of a model under a policy: `score` with its error, `peak`, and those of the measure.

    "choices" also has `tasks`: name -> score, peak and problems of each.

    Answers go into the folder as they end; what is there is not asked again.
    """
    assert config.data is not None
    serving = Serving(lanes=config.lanes, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
    told: dict[str, Any] = dict(policy=policy, serving=serving)
    if name == CHOICES:
        return _of_choices(choose(model, _questions(config), settings={}, **told))
    if name == "text":
        path = config.data / "text" / "wikitext-2" / "test.txt"
        sizes = dict(window=config.window, max_tokens=config.text_tokens)
        found = perplexity(model, path, **sizes, **told)
        per_window = {"loss": np.round(found.window_nats, 5).tolist()}
        return {**found.to_dict(), "score": found.loss.to_list(), "per_problem": per_window}
    if length := tokens_of(config, name):
        tasks, each = [RULER(task, length=length) for task in NEEDLES], config.needle_problems
        if name.partition("-")[0] in (RULER_TASKS, SHORT_TASKS):
            tasks, each = _other_than_needles(length), config.ruler_problems
        count = len(tasks) * each
        told["sampling"] = Sampling(temperature=0)
        return _of_answers(evaluate(model, tasks, problems=count, **told)) | {"length": length}
    chat = Chat() if getattr(model.tokenizer, "chat_template", None) else None
    style: Any = "plain" if chat is None else "boxed"
    asked: dict[str, Any] = dict(chat=chat, out=folder, **told)
    if name in ("math500", "humaneval"):
        if name == "math500":
            task = MATH500(path=config.data / "math500" / "test.jsonl", style=style)
        else:
            path = config.data / "humaneval" / "HumanEval.jsonl.gz"
            task = HumanEval(
                path=path, style="plain" if chat is None else "instruct", sandbox=Sandbox()
            )
        sampling = Sampling(temperature=0, max_new_tokens=config.other_new_tokens)
        sizes = dict(problems=config.other_problems)
        return _of_answers(evaluate(model, task, sampling=sampling, **sizes, **asked))
    greedy = Sampling(temperature=0, max_new_tokens=config.max_new_tokens)
    if name == UNSEEN:
        task = GSM8K(path=config.data / "gsm8k" / "train.jsonl", style=style)
        problems = min(config.unseen, len(task.records) - config.held_out - config.questions)
        sizes = dict(start=config.questions, problems=problems)
        return _of_answers(evaluate(model, task, sampling=greedy, **sizes, **asked))
    task = GSM8K(path=config.data / "gsm8k" / "test.jsonl", style=style)
    if name in FRONTIERS:
        length = max(config.max_new_tokens // FRONTIERS[name], 1)
        sampling = Sampling(temperature=config.frontier_temperature, max_new_tokens=length)
        sizes = dict(problems=config.frontier_problems, chains=config.frontier_chains)
        found = evaluate(model, task, sampling=sampling, **sizes, **asked)
        return _of_answers(found) | _of_chains(found)
    return _of_answers(evaluate(model, task, problems=config.problems, sampling=greedy, **asked))


def tokens_of(config: Config, name: str) -> int | None:
    """Tokens of the problems of a measure that is RULER's; None of any other.

    # In: "ruler-twice"  Out: 8192
    """
    kind, _, times = name.partition("-")
    if kind not in LENGTHS:
        return None
    return getattr(config, LENGTHS[kind]) * _TIMES[times]


def _other_than_needles(length: int) -> list[RULER]:
    """RULER's tasks that need no file, but for those of `NEEDLES`."""
    return [task for task in ruler_tasks(length) if task.name not in NEEDLES]


def _of_answers(result: Result) -> dict[str, Any]:
    steps = np.maximum(result.new_tokens - 1, 1)
    found = result.to_dict(problems=True)
    del found["policy"], found["kv_dtype"]
    found["per_problem"] |= {
        "prompt_tokens": result.prompt_tokens.tolist(),
        "new_tokens": result.new_tokens[:, 0].tolist(),
    }
    return {
        **found,
        "score": result.accuracy.to_list(),
        "mean_live": float(result.reads.sum() / steps.sum()),
    }


def _of_chains(result: Result) -> dict[str, Any]:
    chains = {
        "scores": result.scores.tolist(),
        "answer_scores": result.answer_scores.tolist(),
        "answers": answer_numbers(result.answers).tolist(),
        "reads": np.round(result.reads).tolist(),
        "peak": np.round(result.peak, 1).tolist(),
        "new_tokens": result.new_tokens.tolist(),
        "ended": result.ended.tolist(),
    }
    return {"chains_of_problems": chains}


def _questions(config: Config) -> list[Choices]:
    """Questions of every task with choices, whose group is the task.

    They are asked together, since a policy's programs take longer to compile than to run.
    """
    assert config.data is not None
    found = []
    for name, (kind, file) in TASKS_OF_CHOICES.items():
        task = kind(path=config.data / file)
        numbers = range(min(config.choices, len(task.records)))
        found += [dataclasses.replace(task.choices(number), group=name) for number in numbers]
    return found


def _of_choices(result: ChoiceResult) -> dict[str, Any]:
    """Figures of all questions; `tasks` has those of each task."""
    right, groups = result.chosen_norm == result.gold, np.asarray(result.groups)
    tasks = {}
    for name in TASKS_OF_CHOICES:
        own = right[groups == name].astype(int)
        tasks[name] = {
            "score": mean_over_problems(own[:, None]).to_list(),
            "peak": float(result.peak[groups == name].mean()),
            "per_problem": {"scores": own.tolist()},
        }
    score = result.accuracy_norm.to_list()
    return {"score": score, "peak": float(result.peak.mean()), "tasks": tasks}

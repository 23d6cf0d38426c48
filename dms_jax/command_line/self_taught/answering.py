"""The model's own answers: sampled into a journal, filtered, and written as training data."""

import collections
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

import dms_jax
from dms_jax.command_line.reports import read_file, write_json, write_text
from dms_jax.command_line.self_taught.questions import Questions
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.data import Exchange
from dms_jax.evaluation import Serving
from dms_jax.evaluation.answering import answer
from dms_jax.evaluation.journal import Journal, model_mark
from dms_jax.evaluation.progress import Tick, progress_bar
from dms_jax.evaluation.traces import Answer
from dms_jax.generation import Completion, Sampling
from dms_jax.generation.requests import make_requests
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Vanilla

Place = tuple[int, int]  # index of the prompt, index of its answer


def sample(
    config: SelfTaught, model: LanguageModel, questions: Questions, folder: pathlib.Path
) -> dict[Place, Completion]:
    """Samples the answers missing in the folder's journal, with the whole cache.

    Answer k of a prompt is drawn at temperature number k // answers; a held-out prompt has one
    answer, at the first temperature. Draws do not depend on where an earlier call stopped.
    """
    settings = {
        "prompts": questions.fingerprint,
        "model": model_mark(model),
        "temperatures": list(config.temperatures),
        "max_new_tokens": config.max_new_tokens,
        "seed": config.seed,
        "beginning": config.beginning,
        "chat": None if questions.chat is None else dataclasses.asdict(questions.chat),
    }
    journal = Journal(folder, settings)
    done = {place: each.completion for place, each in journal.answers.items()}
    places = [(number, 0) for number in questions.held_out]
    per_prompt = config.answers * len(config.temperatures)
    places += [(number, k) for number in questions.training for k in range(per_prompt)]
    try:
        for index, temperature in enumerate(config.temperatures):
            due = [
                place
                for place in places
                if place not in done and place[1] // config.answers == index
            ]
            if not due:
                continue
            print(f"{len(due)} answers at temperature {temperature:g}", flush=True)
            sampling = Sampling(
                temperature=temperature,
                max_new_tokens=config.max_new_tokens,
                seed=[_seed(config.seed, place) for place in due],
            )
            prompts = [questions.tokens[number] for number, _ in due]
            requests = make_requests(model.config, prompts, sampling)

            serving = Serving(lanes=config.lanes, page_size=config.page_size)
            with progress_bar(len(due), title="answers", shown=True) as tick:

                def keep(
                    number: int, each: Answer, due: list[Place] = due, tick: Tick = tick
                ) -> None:
                    done[due[number]] = each.completion
                    journal.add(*due[number], Answer(each.completion))
                    tick()

                answer(model, Vanilla(), requests, serving, keep)
    finally:
        journal.close()
    return {place: done[place] for place in places}


def _seed(seed: int, place: Place) -> int:
    return int(np.random.SeedSequence([seed, *place]).generate_state(1)[0])


@dataclasses.dataclass(frozen=True)
class Lessons:
    """The answers to train on and to measure with.

    Attributes:
      training: (prompt, answer) of each kept answer, as token ids.
      held_out: the same for the held-out prompts, unfiltered.
      figures: counts and shares, as JSON data.
    """

    training: list[Exchange]
    held_out: list[Exchange]
    figures: dict[str, Any]


def choose(
    config: SelfTaught,
    questions: Questions,
    answers: dict[Place, Completion],
    folder: pathlib.Path,
) -> Lessons:
    """Filters the answers and writes `lessons.jsonl` and `lessons.json`, unless they exist.

    Raises:
      DataError: the filter leaves nothing.
    """
    held_out = [
        _exchange({"prompt": questions.tokens[number], "response": answers[number, 0].tokens})
        for number in questions.held_out
    ]
    if (folder / "lessons.json").exists():
        figures = json.loads(read_file("--out", folder / "lessons.json"))
        return Lessons(read_lessons(folder), held_out, figures)
    training: list[Exchange] = []
    rows: list[dict[str, Any]] = []
    counts: collections.Counter[str] = collections.Counter()
    own = [each for each in sorted(answers.items()) if each[0][0] not in questions.held_out]
    scores = questions.scores([(number, each.text) for (number, _), each in own])
    for ((number, k), completion), score in zip(own, scores, strict=True):
        ended = completion.finish_reason == "end"
        correct = score == 1
        counts["sampled"] += 1
        counts["ended"] += ended
        counts["correct"] += correct
        kept = config.keep == "all" or (ended if config.keep == "ended" else correct)
        if kept:
            told = {"prompt": questions.tokens[number], "response": completion.tokens}
            rows.append({"question": number, "answer": k, **told})
            training.append(_exchange(told))
    if not training:
        raise dms_jax.DataError(
            f"None of {counts['sampled']} answers is kept: {counts['ended']} were ended by the "
            f"model and {counts['correct']} judged correct. Use another --keep, or a higher "
            "--max-new-tokens."
        )
    lengths = [len(each.prompt) + len(each.response) for each in training]
    figures = {
        "sampled": counts["sampled"],
        "ended": counts["ended"],
        "correct": counts["correct"] if questions.task is not None else None,
        "kept": len(training),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "held_out": len(questions.held_out),
    }
    write_text(folder / "lessons.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_json(folder / "lessons.json", figures)
    return Lessons(training, held_out, figures)


def read_lessons(folder: pathlib.Path) -> list[Exchange]:
    """Returns the training examples in `lessons.jsonl`, from an earlier call."""
    lines = read_file("--out", folder / "lessons.jsonl").splitlines()
    return [_exchange(json.loads(line)) for line in lines]


def _exchange(row: dict[str, Any]) -> Exchange:
    prompt, response = (np.asarray(row[name], np.int32) for name in ("prompt", "response"))
    return Exchange(prompt, response)

"""What the models learn from: their own answers, and for some texts and retrieval too."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np

import dms_jax
from dms_jax import LanguageModel
from dms_jax.command_line.self_taught.answering import sample
from dms_jax.command_line.self_taught.questions import read_questions
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.data import Exchange
from dms_jax.data.tasks import Needle, VariableTracking
from experiments.reproduction.files import write_json, write_text
from experiments.reproduction.real.plan import Paths, shards
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.training import QWEN, Lessons

# Not wikitext-2, which is held out, and of these not the last eighth: RULER's essays are of the
# last sixteenth of the first two. Up to run 9 they were learned whole.
_LEARNED = 14 / 16
TEXTS = ("war_and_peace.txt", "moby_dick.txt", "tinyshakespeare.txt")


def self_taught(config: Config, model: str) -> SelfTaught:
    """How a model is asked: GSM8K's training questions, in its chat if it has one."""
    assert config.data is not None
    small = model != QWEN
    return SelfTaught(
        model=config.models[model],
        prompts=config.data / "gsm8k" / "train.jsonl",
        out=config.out,
        style="boxed",  # of models with a chat
        questions=max(1, config.questions // 4) if small else config.questions,
        held_out=config.held_out,
        temperatures=config.temperatures,
        max_new_tokens=config.max_new_tokens,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        lanes=config.lanes,
    )


def write_lessons(config: Config, model: LanguageModel, name: str, shard: int) -> None:
    """Samples answers to a share of the questions; the first has those held out."""
    paths, own = Paths(config), self_taught(config, name)
    whole = read_questions(own, model)
    share = _share(whole.training, shard, len(shards(config, name)))
    held_out = whole.held_out if shard == 0 else range(0)
    questions = dataclasses.replace(whole, training=share, held_out=held_out)
    place = paths.lessons(name, shard)
    answers = sample(own, model, questions, place.with_suffix(""))
    rows = []
    for (number, k), completion in sorted(answers.items()):
        rows.append(
            {
                "question": number,
                "answer": k,
                "held_out": number in held_out,
                "prompt": questions.tokens[number],
                "response": completion.tokens,
                "ended": completion.finish_reason == "end",
            }
        )
    write_text(place, "".join(json.dumps(row) + "\n" for row in rows))


def _share(numbers: tuple[int, ...], shard: int, count: int) -> tuple[int, ...]:
    """The numbers of one of so many shares.

    # (0, 1, ..., 9), 1 of 4  Out: (2, 3, 4)
    """
    ends = [len(numbers) * n // count for n in range(count + 1)]
    return numbers[ends[shard] : ends[shard + 1]]


def read_rows(config: Config, name: str) -> list[dict[str, Any]]:
    """All answers of a model."""
    places = [Paths(config).lessons(name, shard) for shard in shards(config, name)]
    return [json.loads(line) for place in places for line in place.read_text().splitlines()]


def training_documents(
    config: Config, name: str, model: LanguageModel, lessons: Lessons = "all"
) -> list[Any]:
    """What a training of a model reads.

    Args:
      config: the plan.
      name: of the model.
      model: the model itself.
      lessons: which of its answers, or texts in their place; SmolLM2's are always mixed.

    Raises:
      DataError: no answer is kept.
    """
    if lessons == "texts":
        return _texts(config, model)
    rows = [row for row in read_rows(config, name) if not row["held_out"]]
    kept = [row for row in rows if row["ended"] or config.unended]
    every = lessons in ("all", "mixed")
    if lessons == "correct":
        right = _correct(config, name, model, kept)
        kept = [row for row in kept if _place(row) in right]
    elif not every:
        wanted = _temperatures(config, lessons)
        kept = [row for row in kept if config.temperatures[row["answer"]] in wanted]
    if not kept:
        which = "" if every else f" and of those that are wanted ({lessons})"
        raise dms_jax.DataError(f"None of {len(rows)} answers of {name} is ended{which}.")
    documents: list[Any] = [_exchange(row) for row in kept]
    if name != QWEN or lessons == "mixed":
        documents += _texts(config, model) + _needles(config, model)
    return documents


def _place(row: dict[str, Any]) -> tuple[int, int]:
    """The numbers of the question and of its answer."""
    return row["question"], row["answer"]


def _temperatures(config: Config, lessons: Lessons) -> list[float]:
    """Those of the wanted answers; of each question there is one answer at each temperature.

    # Of temperatures 0.7, 1.0 and 0.0
    # In: "sampled"  Out: [0.7, 1.0]     "cooler"  [0.7]     "warmer"  [1.0]     "greedy"  [0.0]
    """
    sampled = sorted(each for each in config.temperatures if each > 0)
    wanted = {"cooler": sampled[:1], "warmer": sampled[-1:], "sampled": sampled}
    return wanted.get(lessons, [0.0])


def _correct(
    config: Config, name: str, model: LanguageModel, rows: list[dict[str, Any]]
) -> set[tuple[int, int]]:
    """The places of the answers that the task's judge finds right; a file keeps them."""
    file = Paths(config).lessons(name, "correct").with_suffix(".json")
    if not file.exists():
        questions = read_questions(self_taught(config, name), model)
        found = [
            _place(row)
            for row in rows
            if questions.score(row["question"], model.tokenizer.decode(row["response"])) == 1
        ]
        write_json(file, found)
    return {(question, answer) for question, answer in json.loads(file.read_text())}


def held_out_exchanges(config: Config, name: str) -> list[Exchange]:
    """Answers to questions that nothing is trained on, with their prompts."""
    return [_exchange(row) for row in read_rows(config, name) if row["held_out"]]


def _exchange(row: dict[str, Any]) -> Exchange:
    prompt, response = (np.asarray(row[name], np.int32) for name in ("prompt", "response"))
    return Exchange(prompt, response)


def _texts(config: Config, model: LanguageModel) -> list[np.ndarray]:
    """Windows of what is learned of the texts, as long as a training sequence."""
    assert config.data is not None
    found = []
    for name in TEXTS:
        file: pathlib.Path = config.data / "text" / name
        text = file.read_text(encoding="utf-8", errors="replace")
        text = text[: int(_LEARNED * len(text))]
        tokens = np.asarray(model.tokenizer.encode(text, add_special_tokens=False), np.int32)
        length = config.sequence_length
        found += [tokens[at : at + length] for at in range(0, len(tokens) - length, length)]
    return found


def _needles(config: Config, model: LanguageModel) -> list[np.ndarray]:
    """Problems of retrieval with their solutions, of lengths up to a training sequence."""
    random = np.random.default_rng(0)
    found: list[np.ndarray] = []
    for number in range(config.needles):
        part = random.uniform(0.2, 1) * config.sequence_length
        task = Needle(size=max(round(part / 2), 30))
        if number % 2:
            task = VariableTracking(size=max(round(part / 35), 2))
        problem = task.problem("train", number)
        tokens = model.tokenizer.encode(problem.prompt + problem.solution, add_special_tokens=False)
        found.append(np.asarray(tokens[: config.sequence_length], np.int32))
    return found

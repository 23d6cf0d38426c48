"""What is decoded and what is asked: stories or a file, and problems that are made."""

import dataclasses
import pathlib

import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.data.tasks import Arithmetic, LinearEquation, Needle, Task, VariableTracking, WordChain


@dataclasses.dataclass(frozen=True)
class Text:
    """Sequences to decode.

    Attributes:
      sequences: token ids.
      starts: the first token of each that counts; those before it are given.
      kinds: what each one is.
    """

    sequences: list[list[int]]
    starts: list[int]
    kinds: list[str]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return np.asarray([len(sequence) for sequence in self.sequences])

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return int(self.lengths.sum() - sum(self.starts))


@dataclasses.dataclass(frozen=True)
class Occasion:
    """Problems of much the same length, which share a budget.

    Attributes:
      parts: tasks by the name under which their answers are counted.
    """

    parts: dict[str, tuple[Task, ...]]

    @property
    def tasks(self) -> list[Task]:
        """All of them."""
        return [task for tasks in self.parts.values() for task in tasks]


# As large as the shipped reasoning model can do them.
TASKS: dict[str, tuple[Task, ...]] = {
    "reasoning": (
        LinearEquation(coefficient=9999, constant=999_999, solution=999),
        Arithmetic(operations=(6, 12)),
        WordChain(steps=(8, 24), distractors=(0, 12)),
    ),
    "needle": (Needle(size=450),),
    "tracking": (VariableTracking(size=30),),
}
# Questions that share a budget are of much the same length.
OCCASIONS = {"reasoning": ("reasoning",), "retrieval": ("needle", "tracking")}


def packed(
    model: dms_jax.LanguageModel, path: pathlib.Path | None, *, sequences: int, length: int
) -> Text:
    """A file, or held-out stories, end to end and cut into sequences.

    Raises:
      DataError: there is too little of it, it is no text, or the model has no tokenizer.
    """
    if model.tokenizer is None:
        raise dms_jax.DataError("the model came without a tokenizer; there is no text for it")
    try:
        documents = assets.stories("valid") if path is None else [path.read_text(encoding="utf-8")]
    except UnicodeDecodeError as error:
        raise dms_jax.DataError(f"{path} is not text in UTF-8: {error}") from error
    tokens = [token for text in documents for token in model.tokenizer.encode(text)]
    wanted = sequences * length
    if len(tokens) < wanted:
        raise dms_jax.DataError(f"the text has {len(tokens):,} tokens; {wanted:,} were asked for")
    rows = [tokens[first : first + length] for first in range(0, wanted, length)]
    return Text(rows, [1] * sequences, ["text"] * sequences)


def solved(model: dms_jax.LanguageModel, tasks: list[Task], count: int) -> Text:
    """Problems of the validation split with their solutions, of which the solutions count."""
    text = Text([], [], [])
    for index in range(count):
        task = tasks[index % len(tasks)]
        problem = task.problem("validation", index // len(tasks))
        prompt = model.tokenizer.encode(problem.prompt)
        solution = model.tokenizer.encode(problem.solution, add_special_tokens=False)
        text.sequences.append([*prompt, *solution, model.tokenizer.eos_token_id])
        text.starts.append(len(prompt))
        text.kinds.append(task.name)
    return text


def occasions(names: tuple[str, ...]) -> dict[str, Occasion]:
    """Occasions by name.

    Raises:
      ConfigError: there is none of that name.
    """
    if unknown := set(names) - OCCASIONS.keys():
        known = " and ".join(OCCASIONS)
        raise dms_jax.ConfigError(f"--tasks {', '.join(sorted(unknown))}: there are {known}.")
    return {name: Occasion({part: TASKS[part] for part in OCCASIONS[name]}) for name in names}

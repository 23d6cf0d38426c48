"""Training batches of generated tasks and plain text, made from seeds during training.

    Mixture(tokenizer, parts).batch(step)
      -> {"tokens": int32 [B, T], "segment_ids": int32 [B, T], "loss_mask": bool [B, T]}

A batch depends only on the seed and the step: nothing is stored, nothing repeats, and a run can
resume at any step. A document is a begin token, the prompt, the solution and an end token. A
sequence holds several whole documents, each a segment of its own, then prose cut to fit. Every part
of the mixture gets its share of the tokens of every batch. Prompts do not count in the loss,
because a random equation cannot be predicted; prose counts.
"""

import dataclasses
import functools
import random
import re
import signal
import sys
from typing import Any

import grain
import numpy as np
from absl import flags

from dms_jax import assets
from dms_jax.checks import Count, Options, Positive, require
from dms_jax.data.batches import Batch
from dms_jax.data.tasks import (
    Arithmetic,
    LinearEquation,
    Needle,
    Split,
    Task,
    VariableTracking,
    WordChain,
)
from dms_jax.errors import ConfigError

_LEAST_FILLING = 16  # fewest tokens of a segment of prose


@dataclasses.dataclass(frozen=True)
class Part(Options):
    """A part of a mixture: a group of tasks.

    Attributes:
      name: name of the part.
      share: share of the tokens, relative to the other parts.
      tasks: the tasks, which are drawn with equal probability.
    """

    name: str
    share: Positive
    tasks: tuple[Task, ...]

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.tasks), f"Part: part {self.name!r} needs at least one task.")


def standard_parts(slips: float = 0.0) -> tuple[Part, ...]:
    """Returns the parts that the shipped reasoning model was trained on, from easy to hard.

    Args:
      slips: probability of a wrong step in arithmetic and chains (`Reasoning.slips`).
    """
    return (
        Part(
            "linear",
            0.18,
            tuple(
                LinearEquation(coefficient=a, constant=b, solution=x)
                for a, b, x in (
                    (9, 60, 20),
                    (60, 3000, 99),
                    (99, 9999, 99),
                    (300, 30_000, 300),
                    (999, 99_999, 999),
                    (9999, 999_999, 999),
                )
            ),
        ),
        Part(
            "arithmetic",
            0.26,
            tuple(
                Arithmetic(operations=operations, numbers=numbers, largest=largest, slips=slips)
                for operations, numbers, largest in (
                    ((1, 4), 99, 999),
                    ((4, 10), 99, 999),
                    ((10, 22), 99, 999),
                    ((2, 6), 99, 9999),
                    ((4, 10), 999, 9999),
                    ((10, 18), 999, 9999),
                    ((2, 6), 999, 99_999),
                    ((6, 14), 999, 99_999),
                )
            ),
        ),
        Part(
            "words",
            0.2,
            tuple(
                WordChain(steps=steps, distractors=others, largest=largest, slips=slips)
                for steps, others, largest in (
                    ((1, 4), (0, 3), 199),
                    ((4, 10), (0, 6), 199),
                    ((8, 24), (0, 12), 199),
                    ((2, 8), (0, 6), 9999),
                    ((8, 24), (0, 12), 9999),
                    ((4, 12), (0, 6), 99_999),
                )
            ),
        ),
        Part(
            "needle",
            0.13,
            (
                *(Needle(size=n) for n in (20, 40, 80, 150, 250, 350, 450, 550, 700, 850)),
                *(Needle(size=n, needles=4) for n in (40, 100, 300)),
                *(Needle(size=n, haystack="noise") for n in (2, 10, 30)),
            ),
        ),
        Part(
            "tracking",
            0.23,
            tuple(
                VariableTracking(size=size, chains=chains, hops=hops)
                for size in (2, 6, 15, 30, 45)
                for chains, hops in ((1, 1), (1, 4), (2, 2), (3, 3), (4, 1), (6, 2), (8, 0))
            ),
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Document:
    """A document of a part: its token ids; the first `prompt` of them precede the solution."""

    part: str
    ids: list[int]
    prompt: int


@dataclasses.dataclass(frozen=True)
class Mixture(Options):
    """A mixture of tasks and prose.

    Attributes:
      tokenizer: the model's tokenizer, which needs a begin and an end token.
      parts: tasks and their shares.
      batch_size: B, sequences per batch.
      length: T, tokens per sequence.
      split: split of the tasks and of the prose.
      seed: seed of all random draws.
    """

    tokenizer: Any
    parts: tuple[Part, ...] = dataclasses.field(default_factory=standard_parts)
    batch_size: Count = 32
    length: Count = 2048
    split: Split = "train"
    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.tokenizer.bos_token_id is None or self.tokenizer.eos_token_id is None:
            raise ConfigError("Mixture: the tokenizer must have a begin and an end token.")
        require(bool(self.parts), "Mixture: there must be at least one part.")

    def document(self, part: Part, rng: random.Random) -> tuple[list[int], int]:
        """Draws a document: token ids, and the length of the prompt."""
        task = part.tasks[rng.randrange(len(part.tasks))]
        problem = task.problem(self.split, rng.getrandbits(48))
        prompt, solution = (_encode(self.tokenizer, x) for x in (problem.prompt, problem.solution))
        ids = [self.tokenizer.bos_token_id, *prompt, *solution, self.tokenizer.eos_token_id]
        return ids, 1 + len(prompt)

    def batch(self, step: int) -> Batch:
        """Returns batch `step`, the same in every run."""
        rng = random.Random(f"{self.seed} {self.split} {step}")
        shape = (self.batch_size, self.length)
        tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        counts = np.zeros(shape, bool)
        placed = {part.name: 0 for part in self.parts}
        waiting: list[_Document] = []
        for row in range(self.batch_size):
            last = row == self.batch_size - 1
            filled = segment = 0
            while document := self._next(rng, waiting, placed, self.length - filled, last=last):
                end, segment = filled + len(document.ids), segment + 1
                tokens[row, filled:end] = document.ids
                segments[row, filled:end] = segment
                counts[row, filled + document.prompt : end] = True
                placed[document.part] += len(document.ids)
                filled = end
            prose = self._prose(rng, self.length - filled)
            if len(prose):
                tokens[row, filled:] = prose
                segments[row, filled:] = segment + 1
                counts[row, filled:] = True
        return {"tokens": tokens, "segment_ids": segments, "loss_mask": counts}

    def _next(
        self,
        rng: random.Random,
        waiting: list[_Document],
        placed: dict[str, int],
        room: int,
        *,
        last: bool,
    ) -> _Document | None:
        """Returns the next document that fits; None if the sequence is nearly full.

        It belongs to the part furthest behind its share. A document that does not fit waits for the
        next sequence and counts for its part; those left at the end of the batch are dropped and do
        not count.
        """
        for index, document in enumerate(waiting):
            if len(document.ids) <= room:
                return waiting.pop(index)
        for _ in range(8 if room < self.length else 100):
            taken = dict(placed)
            for document in [] if last else waiting:
                taken[document.part] += len(document.ids)
            part = min(self.parts, key=lambda part: taken[part.name] / part.share)
            ids, prompt = self.document(part, rng)
            document = _Document(part.name, ids, prompt)
            if len(ids) <= room:
                return document
            if len(ids) > self.length or last:
                continue
            waiting.append(document)
            if len(waiting) >= 4:
                return None
        return None

    def _prose(self, rng: random.Random, room: int) -> np.ndarray:
        """Returns prose of exactly `room` tokens, or nothing if that is too few."""
        if room < _LEAST_FILLING:
            return np.zeros(0, np.int32)
        texts = _prose(self.tokenizer, self.split)
        text = texts[rng.randrange(len(texts))]
        start = rng.randrange(len(text) - room)
        return np.concatenate([[self.tokenizer.bos_token_id], text[start : start + room - 1]])

    def batches(self, *, start: int = 0, workers: int = 0) -> "MixtureBatches":
        """Returns an endless iterator of batches from step `start` on.

        Args:
          start: the first step.
          workers: worker processes that prefetch batches; 0 for none.
        """
        return MixtureBatches(self, start, workers)


class MixtureBatches:
    """The batches of a mixture in order; its state is the next step."""

    def __init__(self, mixture: Mixture, start: int, workers: int):
        self._mixture, self._workers = mixture, workers
        self._open(start)

    def _open(self, step: int) -> None:
        self._step = step
        steps = grain.MapDataset.range(step, sys.maxsize).map(self._mixture.batch)
        ahead = steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if self._workers:
            flags.FLAGS.mark_as_parsed()  # grain reads flags, which only absl's scripts parse
            how = grain.MultiprocessingOptions(self._workers, per_worker_buffer_size=4)
            ahead = ahead.mp_prefetch(how, worker_init_fn=_ignore_interrupts)
        self._batches = iter(ahead)

    def __iter__(self) -> "MixtureBatches":
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the iterator as JSON data."""
        return {"step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state that `get_state` returned."""
        self.close()
        self._open(int(state["step"]))

    def close(self) -> None:
        """Ends the worker processes."""
        self._batches.close()


def _ignore_interrupts(index: int, count: int) -> None:
    """Ignores Ctrl-C, which a terminal sends to all processes: the trainer ends its workers."""
    del index, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@functools.lru_cache(maxsize=4)
def _prose(tokenizer: Any, split: Split) -> tuple[np.ndarray, ...]:
    """Returns the books and stories of a split as long token streams."""
    end = tokenizer.eos_token_id
    stories = assets.stories("more") if split == "train" else assets.stories("valid")
    streams = []
    for text in assets.books(split):
        streams.append(_encode_lines(tokenizer, text.splitlines(keepends=True)))
    told = [tokenizer.encode(story, add_special_tokens=False) for story in stories]
    streams.append(np.asarray([token for story in told for token in (*story, end)], np.int32))
    return tuple(streams)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text.

    If the tokenizer separates digits, the pieces between digits are cached: problems repeat a few
    pieces between new digits, and this is ten times faster.
    """
    if not _digits_apart(tokenizer):
        return tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        ids += _piece(tokenizer, piece)
    return ids


# Tokenizers end a word at the end of a line, so lines can be encoded one by one.
_PIECES = re.compile(r"[0-9]|[^0-9\n]+|\n+")


@functools.lru_cache(maxsize=2**14)
def _piece(tokenizer: Any, piece: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(piece, add_special_tokens=False))


@functools.lru_cache(maxsize=4)
def _digits_apart(tokenizer: Any) -> bool:
    """Whether a tokenizer makes each digit a separate token, in any context."""
    whole = tokenizer.encode("x = 12 + 3*y\nSo 0.", add_special_tokens=False)
    pieces = _PIECES.findall("x = 12 + 3*y\nSo 0.")
    return whole == [token for piece in pieces for token in _piece(tokenizer, piece)]


def _encode_lines(tokenizer: Any, lines: list[str]) -> np.ndarray:
    ids = [token for line in lines for token in tokenizer.encode(line, add_special_tokens=False)]
    return np.asarray(ids, np.int32)

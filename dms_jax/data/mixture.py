"""A mixture of tasks and plain text as training batches, made from seeds while training runs.

    Mixture(tokenizer, parts).batch(step)
      -> {"tokens": int32 [B, T], "segment_ids": int32 [B, T], "loss_mask": bool [B, T]}

A batch is a pure function of the seed and the step: nothing is stored, nothing repeats, and a run
resumes anywhere. Documents are whole: a begin token, the prompt, the solution, an end token; they
are packed several to a sequence, each its own segment. What is left of a sequence is filled with
prose cut to fit. A part gets its share of the tokens of every batch. Prompts are outside the loss,
since nobody can predict a random equation; prose is inside.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import random
import re
import signal
from typing import Any

import numpy as np

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

_LEAST_FILLING = 16  # tokens of prose that are worth a segment


@dataclasses.dataclass(frozen=True)
class Part(Options):
    """Tasks that share a place in a mixture.

    Attributes:
      name: for the log.
      share: of the tokens, relative to the other parts.
      tasks: drawn from alike.
    """

    name: str
    share: Positive
    tasks: tuple[Task, ...]

    def __post_init__(self):
        super().__post_init__()
        require(bool(self.tasks), f"Part: part {self.name!r} needs at least one task")


def standard_parts(slips: float = 0.0) -> tuple[Part, ...]:
    """The parts that the shipped reasoning model was trained on, from easy to hard.

    Args:
      slips: probability of a slip in each step of arithmetic and of chains (`Reasoning.slips`).
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
    """A document of a part: its token ids, of which the first `prompt` are the prompt's."""

    part: str
    ids: list[int]
    prompt: int


@dataclasses.dataclass(frozen=True)
class Mixture(Options):
    """Batches of a mixture; the tokenizer has a begin and an end token.

    Attributes:
      tokenizer: of the model.
      parts: tasks and their shares.
      batch_size: B.
      length: T.
      split: of the tasks and of the prose.
      seed: of everything.
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
            raise ConfigError("a mixture needs a tokenizer with a begin and an end token")
        require(bool(self.parts), "a mixture needs parts")

    def only(self, name: str) -> "Mixture":
        """The mixture of one part alone.

        Raises:
          ConfigError: there is no such part.
        """
        parts = tuple(part for part in self.parts if part.name == name)
        if not parts:
            known = ", ".join(part.name for part in self.parts)
            raise ConfigError(f"the mixture has no part {name!r}; it has {known}")
        return dataclasses.replace(self, parts=parts)

    def document(self, part: Part, rng: random.Random) -> tuple[list[int], int]:
        """One document of a part: (token ids, how many of them come before the solution)."""
        task = part.tasks[rng.randrange(len(part.tasks))]
        problem = task.problem(self.split, rng.getrandbits(48))
        prompt, solution = (_encode(self.tokenizer, x) for x in (problem.prompt, problem.solution))
        ids = [self.tokenizer.bos_token_id, *prompt, *solution, self.tokenizer.eos_token_id]
        return ids, 1 + len(prompt)

    def batch(self, step: int) -> Batch:
        """Batch `step`, always the same one."""
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
        waiting: "list[_Document]",
        placed: dict[str, int],
        room: int,
        *,
        last: bool,
    ) -> "_Document | None":
        """The next document that fits; None once a sequence is nearly full.

        A document that does not fit waits for the next sequence. The part that is furthest behind
        its share comes next. What waits counts as its part's, but in the last sequence, where it
        is dropped: a part's share is of the tokens that are in the batch.
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
        """Plain text of exactly `room` tokens, or none where that is too short."""
        if room < _LEAST_FILLING:
            return np.zeros(0, np.int32)
        texts = _prose(self.tokenizer, self.split)
        text = texts[rng.randrange(len(texts))]
        start = rng.randrange(len(text) - room)
        return np.concatenate([[self.tokenizer.bos_token_id], text[start : start + room - 1]])

    def batches(self, *, start: int = 0, workers: int = 0) -> "MixtureBatches":
        """An endless iterator over the batches from `start` on, made ahead by worker processes.

        Args:
          start: the first step.
          workers: processes; 0 makes each batch when it is asked for.
        """
        return MixtureBatches(self, start, workers)


class MixtureBatches:
    """The batches of a mixture in order; its place is the number of the next step."""

    def __init__(self, mixture: Mixture, start: int, workers: int):
        self._mixture, self._step = mixture, start
        self._ahead: collections.deque[concurrent.futures.Future[Batch]] = collections.deque()
        self._depth = 4 * workers
        self._pool = None
        if workers:
            # Forking a process that runs jax is not safe.
            self._pool = concurrent.futures.ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_init_worker,
                initargs=(mixture,),
            )

    def __iter__(self) -> "MixtureBatches":
        return self

    def __next__(self) -> Batch:
        if self._pool is None:
            batch = self._mixture.batch(self._step)
        else:
            while len(self._ahead) < self._depth:
                self._ahead.append(self._pool.submit(_make_batch, self._step + len(self._ahead)))
            batch = self._ahead.popleft().result()
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the place as JSON data."""
        return {"step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place that `get_state` gave."""
        self._step = int(state["step"])
        while self._ahead:
            self._ahead.pop().cancel()

    def close(self) -> None:
        """Ends the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


_mixture: Mixture | None = None  # of a worker process


def _init_worker(mixture: Mixture) -> None:
    global _mixture
    _mixture = mixture
    # A terminal sends Ctrl-C to all; the process that trains ends its step, and then this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _make_batch(step: int) -> Batch:
    assert _mixture is not None
    return _mixture.batch(step)


@functools.lru_cache(maxsize=4)
def _prose(tokenizer: Any, split: Split) -> tuple[np.ndarray, ...]:
    """Books and stories of a split as long token streams."""
    end = tokenizer.eos_token_id
    stories = assets.stories("more") if split == "train" else assets.stories("valid")
    streams = []
    for text in assets.books(split):
        streams.append(_encode_lines(tokenizer, text.splitlines(keepends=True)))
    told = [tokenizer.encode(story, add_special_tokens=False) for story in stories]
    streams.append(np.asarray([token for story in told for token in (*story, end)], np.int32))
    return tuple(streams)


def _encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text; where digits stand apart, what lies between them is looked up.

    Worked problems are the same few pieces between ever new digits: this is ten times faster.
    """
    if not _digits_apart(tokenizer):
        return tokenizer.encode(text, add_special_tokens=False)
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        ids += _piece(tokenizer, piece)
    return ids


# Tokenizers end a word at a line's end, so lines can be encoded one by one.
_PIECES = re.compile(r"[0-9]|[^0-9\n]+|\n+")


@functools.lru_cache(maxsize=2**14)
def _piece(tokenizer: Any, piece: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(piece, add_special_tokens=False))


@functools.lru_cache(maxsize=4)
def _digits_apart(tokenizer: Any) -> bool:
    """Whether a tokenizer makes a token of each digit, whatever stands around it."""
    whole = tokenizer.encode("x = 12 + 3*y\nSo 0.", add_special_tokens=False)
    pieces = _PIECES.findall("x = 12 + 3*y\nSo 0.")
    return whole == [token for piece in pieces for token in _piece(tokenizer, piece)]


def _encode_lines(tokenizer: Any, lines: list[str]) -> np.ndarray:
    ids = [token for line in lines for token in tokenizer.encode(line, add_special_tokens=False)]
    return np.asarray(ids, np.int32)

"""Batches of packed sequences, for any loop; and one process's rows of a training run.

    batches(source, tokenizer, batch_size=4, length=512)
      -> {"tokens": int32 [B, T], "loss_mask": bool [B, T], "segment_ids": int32 [B, T] or absent}

Documents (`sources.py`) become token ids (`tokenization.py`) in one or several shuffled streams
(`streams.py`), streams become sequences of T tokens (`packing.py`), and sequences become batches.
A thread tokenizes and packs ahead while the device trains.

**Training steps.** A step takes B sequences, and its row r is the next sequence of stream r mod S.
S is B (or the greatest common divisor of batch sizes that differ between steps). So the data of a
step do not depend on the number of devices or processes, and a process tokenizes only the documents
of its rows. The state of all streams is saved, so a run can be resumed with another number of
processes.

    # B = S = 4, two processes of two rows   process 0: streams 0, 1   process 1: streams 2, 3
"""

import collections
import concurrent.futures
import dataclasses
import json
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np

from dms_jax import processes
from dms_jax.checks import Count, check, require, show
from dms_jax.data.sources import as_source
from dms_jax.data.tokenization import TokenizedDocuments, check_vocabulary
from dms_jax.errors import DataError
from dms_jax.model.language_model import PACKAGE, whole_numbers

Packing = Literal["concatenate", "concatenate_whole", "first_fit"]
Batch = dict[str, np.ndarray]

# Batches that are drawn ahead.
_BATCHES_AHEAD = 2
# Open sequences of first fit: in all streams together, and the minimum per stream.
_OPEN_SEQUENCES, _FEWEST_OPEN_SEQUENCES = 32, 4
_KEYS = {"tokens", "loss_mask", "segment_ids"}


class Batches:
    """An iterator over batches, drawn ahead in a thread; its state can be saved and restored.

    Args:
      draw: returns the next batch.
      get_state, set_state: the state after the batches drawn so far, as JSON data.
    """

    def __init__(
        self,
        draw: Callable[[], Batch],
        get_state: Callable[[], dict[str, Any]],
        set_state: Callable[[dict[str, Any]], None],
    ):
        self._draw, self._get, self._set = draw, get_state, set_state
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "batches")
        self._ahead: collections.deque[concurrent.futures.Future] = collections.deque()
        self._state = get_state()

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        while len(self._ahead) < _BATCHES_AHEAD:
            self._ahead.append(self._thread.submit(lambda: (self._draw(), self._get())))
        batch, self._state = self._ahead.popleft().result()
        return batch

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the iterator as JSON data."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state from `get_state` of an iterator over the same data."""
        for each in self._ahead:
            each.cancel()
        concurrent.futures.wait(self._ahead)
        self._ahead.clear()
        self._set(state)
        self._state = self._get()


def batches(
    data: Any,
    tokenizer: Any = None,
    *,
    batch_size: int,
    length: int,
    packing: Packing = "concatenate",
    vocab_size: int | None = None,
    seed: int | None = 0,
    repeat: bool = True,
    answers_only: bool = False,
) -> Batches:
    """Returns an iterator over batches.

    Args:
      data: a source, paths, texts, conversations or token ids; see `as_source`.
      tokenizer: the model's tokenizer; may be None for token ids.
      batch_size: B, sequences per batch.
      length: T, tokens per sequence.
      packing: how documents become sequences. "concatenate" cuts the stream of documents every T
        tokens; "concatenate_whole" also starts every sequence with a document; "first_fit"
        separates the documents of a sequence by segment ids.
      vocab_size: V, to check token ids against; None for no check.
      seed: seed of the order of the documents, which is new in each epoch; None keeps the data's
        order.
      repeat: whether to start over at the end; otherwise an incomplete batch is dropped.
      answers_only: whether the loss mask keeps only the answers.

    Raises:
      ConfigError: an option is malformed.
      DataError: the data cannot be used; the message names file and line if there are any.
    """
    from dms_jax.data.packing import pack
    from dms_jax.data.streams import streams

    batch_size, length = check("batch_size", batch_size, Count), check("length", length, Count)
    seed = check("seed", seed, int | None)
    check("packing", packing, Packing)
    documents = TokenizedDocuments(
        as_source(data), tokenizer, vocab_size, answers_only=answers_only
    )
    sequences = pack(
        streams(documents, 1, [0], seed=seed, repeat=repeat)[0],
        packing=packing,
        length=length,
        bins=_OPEN_SEQUENCES,
        seed=seed or 0,
    )
    drawn = iter(sequences.batch(batch_size, drop_remainder=True))
    return Batches(drawn.__next__, drawn.get_state, drawn.set_state)


@dataclasses.dataclass(frozen=True)
class RowAssignment:
    """The rows of each training step that belong to one process.

    Attributes:
      batch_sizes: B, sequences per step, for every kind of step.
      pass_size: sequences per pass; a step has one or more passes.
      rows: the rows of a pass that belong to this process.
    """

    batch_sizes: tuple[int, ...]
    pass_size: int
    rows: tuple[int, ...]

    @property
    def streams(self) -> int:
        """S, the number of streams of all processes."""
        return math.gcd(*self.batch_sizes)

    @property
    def own_streams(self) -> list[int]:
        """The streams that this process reads."""
        return [number for number in range(self.streams) if number % self.pass_size in self.rows]


class ProcessBatches(Batches):
    """An iterator over the rows of this process, one pass after the other.

    Args:
      streams: stream number -> resumable iterator over its sequences, for this process's streams.
      assignment: the rows of this process.
    """

    def __init__(self, streams: dict[int, Any], assignment: RowAssignment):
        self._streams, self._assignment = streams, assignment
        self._first = 0  # stream of the next pass's first row
        super().__init__(self._pack, self._states, self._restore)

    def _pack(self) -> Batch:
        """Returns the rows of the next pass."""
        drawn = [next(self._streams[self._first + row]) for row in self._assignment.rows]
        self._first = (self._first + self._assignment.pass_size) % self._assignment.streams
        return {name: np.stack([row[name] for row in drawn]) for name in drawn[0]}

    def _states(self) -> dict[str, Any]:
        return {str(number): stream.get_state() for number, stream in self._streams.items()}

    def _restore(self, states: dict[str, Any]) -> None:
        for number, stream in self._streams.items():
            stream.set_state(states[str(number)])
        self._first = 0

    def get_state(self) -> dict[str, Any]:
        """Returns the state of all processes' streams as JSON data; every process must call it."""
        everywhere: dict[str, Any] = {}
        for text in processes.gather(json.dumps(self._state)):
            everywhere |= json.loads(text)
        return {"lanes": everywhere}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state from the end of a step, saved by any number of processes.

        Raises:
          DataError: the state's steps have another size.
        """
        states = state["lanes"]
        if len(states) != self._assignment.streams:
            raise DataError(
                f"The data of this run were dealt to {len(states)} sequences a step, and the "
                f"recipe has {self._assignment.streams}. Give the same batch sizes to resume it."
            )
        super().set_state(states)


def process_batches(
    data: Any,
    tokenizer: Any,
    *,
    assignment: RowAssignment,
    length: int,
    packing: Packing,
    vocab_size: int,
    seed: int,
    answers_only: bool = False,
) -> ProcessBatches:
    """Returns the iterator over this process's rows of the passes of optimizer steps.

    Args:
      assignment: the rows of each step for this process.
      data, tokenizer, length, packing, vocab_size, seed, answers_only: as for `batches`.

    Raises:
      DataError: the data cannot be used.
    """
    from dms_jax.data.packing import pack
    from dms_jax.data.streams import streams

    documents = TokenizedDocuments(
        as_source(data), tokenizer, vocab_size, answers_only=answers_only
    )
    if len(documents) < assignment.streams:
        warnings.warn(
            f"A step takes {assignment.streams} sequences, each of other documents, and there are "
            f"{len(documents)}: some sequences of a step repeat others, token by token. Give more "
            "documents or a smaller batch_size.",
            skip_file_prefixes=(PACKAGE,),
        )
    own = streams(documents, assignment.streams, assignment.own_streams, seed=seed)
    options: dict[str, Any] = dict(
        packing=packing,
        length=length,
        bins=max(_FEWEST_OPEN_SEQUENCES, _OPEN_SEQUENCES // assignment.streams),
    )
    sequences = {
        number: iter(pack(stream, seed=seed + number, **options)) for number, stream in own.items()
    }
    return ProcessBatches(sequences, assignment)


def check_batch(batch: Any, *, vocab_size: int, shape: tuple[int, int] | None = None) -> Batch:
    """Returns a caller's batch as int32 tokens and segment ids and a bool loss mask.

    Checks everything, because a device raises no error for a token outside the vocabulary.

    Args:
      batch: `{"tokens": [B, T]}`, and optionally "loss_mask" and "segment_ids" of the same shape.
      vocab_size: V.
      shape: (B, T); None for any.

    Raises:
      DataError: it is not a batch of this shape and vocabulary.
    """
    if not isinstance(batch, Mapping) or "tokens" not in batch or batch.keys() - _KEYS:
        found = show(batch)
        if isinstance(batch, Mapping):
            found = ", ".join(sorted(map(str, batch))) or "nothing"
        raise DataError(
            "A batch is a dict of tokens and, optionally, loss_mask and segment_ids; got "
            f"{found}. An iterator gives batches: give texts or token ids as a list."
        )
    tokens = whole_numbers("The tokens of a batch", batch["tokens"])
    if tokens.ndim != 2 or (shape is not None and tokens.shape != shape):
        wanted = "[B, T]" if shape is None else shape
        raise DataError(f"A batch must hold tokens of shape {wanted}, got {tokens.shape}.")
    check_vocabulary(tokens, vocab_size)
    for name in _KEYS & batch.keys():
        if np.shape(batch[name]) != tokens.shape:
            raise DataError(
                f"The {name} of a batch must have the shape of its tokens, {tokens.shape}, got "
                f"{np.shape(batch[name])}."
            )
    result = {"tokens": tokens.astype(np.int32), "loss_mask": np.ones(tokens.shape, bool)}
    if "loss_mask" in batch:
        mask = np.asarray(batch["loss_mask"])
        if not np.isin(mask, (0, 1)).all():
            raise DataError(
                "The loss_mask of a batch says of each token whether it counts: 0 or 1."
            )
        result["loss_mask"] = mask.astype(bool)
    if "segment_ids" in batch:
        ids = whole_numbers("The segment_ids of a batch", batch["segment_ids"])
        if ids.size and ids.min() < 0:
            raise DataError("The segment_ids of a batch are 1, 2, ..., and 0 for padding.")
        result["segment_ids"] = ids.astype(np.int32)
    return result


def check_batch_list(what: str, batches: Any) -> None:
    """Checks that `batches` is a list, not an iterator, which may be endless.

    Raises:
      ConfigError: it is not a list of batches.
    """
    require(
        isinstance(batches, Collection) and not isinstance(batches, Mapping),
        f"{what} must be a list of batches, got {show(batches)}. An iterator may have no end: give "
        "list(itertools.islice(iterator, 16)).",
    )

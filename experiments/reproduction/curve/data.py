"""Training data that the base model writes itself, as in appendix C of the DMS paper.

Prompts of the train split of every task, completions drawn from the model, right or wrong:
the student is to go on as the teacher would. What is stored are token ids.
"""

import collections
import concurrent.futures
import multiprocessing
import os
import pathlib
import random
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

import dms_jax
from dms_jax.data.mixture import Part, standard_parts
from dms_jax.generation import Engine
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from dms_jax.model.language_model import LanguageModel
from experiments.reproduction.files import write_arrays

Prompts = list[list[int]]


class DocumentSettings(Protocol):
    """What the documents of a plan depend on, and what they are written with."""

    @property
    def documents(self) -> int: ...

    @property
    def shards(self) -> int: ...

    @property
    def processes(self) -> int: ...

    @property
    def lanes(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def document_temperature(self) -> float: ...

    @property
    def document_tokens(self) -> int: ...


_FIRST = 1 << 60  # far from the numbers that pretraining draws problems by
_AT_A_TIME = 500
_MISSES = 1000  # prompts that do not fit, until it is given up
_LEAST_ROOM = 128  # tokens for a completion
_CHARACTERS_A_TOKEN = 2.5


def make_prompts(tokenizer: Any, room: int, count: int, seed: str) -> Prompts:
    """Draws prompts of up to `room` tokens; every part of the mixture has its share of tokens.

    Raises:
      DataError: hardly any prompt is that short.
    """
    rng = random.Random(f"prompts {seed}")
    parts = standard_parts()
    spent = {part.name: 0.0 for part in parts}
    prompts: Prompts = []
    missed = 0  # in a row

    def share(part: Part) -> float:
        return spent[part.name] / part.share

    while len(prompts) < count:
        part = min(parts, key=share)
        task = part.tasks[rng.randrange(len(part.tasks))]
        problem = task.problem("train", _FIRST + rng.getrandbits(48))
        ids = tokenizer.encode(problem.prompt)
        spent[part.name] += len(ids) + len(problem.solution) / _CHARACTERS_A_TOKEN
        missed = 0 if len(ids) <= room else missed + 1
        if missed > _MISSES:
            raise dms_jax.DataError(
                f"{missed} prompts in a row are longer than the {room} tokens that the model has "
                "room for beside an answer; take a model with more positions"
            )
        if not missed:
            prompts.append(ids)
    return prompts


def _all_prompts(model: LanguageModel, count: int, *, seed: int, processes: int) -> Prompts:
    """The prompts of a shard, made in parts of which each has its own seed."""
    room = model.config.max_position_embeddings - _LEAST_ROOM
    sizes = [min(_AT_A_TIME, count - first) for first in range(0, count, _AT_A_TIME)]
    seeds = [f"{seed} {part}" for part in range(len(sizes))]
    arguments = ([model.tokenizer] * len(sizes), [room] * len(sizes), sizes, seeds)
    if processes <= 1:
        parts = map(make_prompts, *arguments)
    else:
        context = multiprocessing.get_context("spawn")  # jax runs threads, which a fork would break
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
            parts = list(pool.map(make_prompts, *arguments))
    return [prompt for part in parts for prompt in part]


def write_documents(
    model: LanguageModel, config: DocumentSettings, path: pathlib.Path, *, seed: int
) -> None:
    """Completes prompts and writes them: token ids end to end, lengths, and lengths of prompts."""
    count = -(-config.documents // config.shards)
    processes = len(os.sched_getaffinity(0)) // config.processes - 1
    prompts = sorted(_all_prompts(model, count, seed=seed, processes=processes), key=len)
    lanes = min(config.lanes, count)
    sampling = dms_jax.Sampling(
        temperature=config.document_temperature,
        max_new_tokens=config.document_tokens,
        seed=np.random.SeedSequence([seed, 1]).generate_state(count).tolist(),
    )
    requests = make_requests(model.config, prompts, sampling)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = Engine(
        model,
        dms_jax.Vanilla(),
        num_lanes=lanes,
        max_tokens=longest,
        page_size=config.page_size,
        prefill_tokens=1 << 16,
        table_width=-(-(longest + 32) // config.page_size),
    )
    documents = []
    for first in range(0, count, lanes):
        wave = requests[first : first + lanes]
        done = engine.serve(Source(wave, sampling))
        documents += [
            (request.prompt, completion.tokens)
            for request, completion in zip(wave, done, strict=True)
        ]
    ids = [np.asarray(prompt + answer, np.uint16) for prompt, answer in documents]
    write_arrays(
        path,
        tokens=np.concatenate(ids),
        lengths=np.asarray([len(document) for document in ids], np.int32),
        prompts=np.asarray([len(prompt) for prompt, _ in documents], np.int32),
    )


def read_documents(paths: list[pathlib.Path]) -> list[tuple[np.ndarray, int]]:
    """Documents of all shards: (token ids, how many of them are the prompt)."""
    documents = []
    for path in paths:
        with np.load(path) as shard:
            lengths, prompts = shard["lengths"], shard["prompts"]
            ends = np.cumsum(lengths)
            parts = np.split(shard["tokens"].astype(np.int32), ends[:-1])
            documents += list(zip(parts, prompts.tolist(), strict=True))
    return documents


class Sequences:
    """Batches of packed documents, in an order drawn from the seed, a new one each epoch.

    Whole documents fill sequences first-fit, each a segment of its own; longer ones are cut. The
    loss counts completions alone: nobody can predict the numbers of a prompt.
    """

    def __init__(
        self,
        documents: list[tuple[np.ndarray, int]],
        *,
        batch_size: int,
        length: int,
        seed: int,
    ):
        self._batch_size, self._seed, self._step = batch_size, seed, 0
        order = np.random.default_rng([seed, 2]).permutation(len(documents))
        rows = _first_fit([len(documents[i][0][:length]) for i in order], length)
        shape = (len(rows), length)
        self._tokens, self._segments = np.zeros(shape, np.uint16), np.zeros(shape, np.uint8)
        self._mask = np.zeros(shape, bool)
        for row, members in enumerate(rows):
            start = 0
            for segment, member in enumerate(members, 1):
                tokens, prompt = documents[order[member]]
                tokens = tokens[:length]
                end = start + len(tokens)
                self._tokens[row, start:end] = tokens
                self._segments[row, start:end] = segment
                self._mask[row, start + prompt : end] = True
                start = end

    @property
    def rows(self) -> int:
        """Sequences of one epoch."""
        return len(self._tokens)

    @property
    def tokens(self) -> int:
        """Tokens of documents in one epoch."""
        return int((self._segments > 0).sum())

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        taken = range(self._step * self._batch_size, (self._step + 1) * self._batch_size)
        self._step += 1
        rows = [self._order(place // self.rows)[place % self.rows] for place in taken]
        return {
            "tokens": self._tokens[rows].astype(np.int32),
            "segment_ids": self._segments[rows].astype(np.int32),
            "loss_mask": self._mask[rows],
        }

    def _order(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, 3, epoch]).permutation(self.rows)

    def get_state(self) -> dict[str, Any]:
        """The place, as JSON data."""
        return {"step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a place."""
        self._step = state["step"]


def _first_fit(lengths: list[int], room: int, *, open_rows: int = 32) -> list[list[int]]:
    """Fills rows of `room` tokens: each item goes into the first open row that has space.

    # In: [3, 2, 1], 4   Out: [[0, 2], [1]]
    """
    closed: list[list[int]] = []
    rows: collections.deque[tuple[list[int], int]] = collections.deque()
    for item, length in enumerate(lengths):
        for place, (members, left) in enumerate(rows):
            if length <= left:
                members.append(item)
                rows[place] = (members, left - length)
                break
        else:
            if len(rows) == open_rows:
                closed.append(rows.popleft()[0])
            rows.append(([item], room - length))
    return closed + [members for members, _ in rows]

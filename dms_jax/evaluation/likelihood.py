"""Log-probabilities of continuations given contexts, from the real paged cache.

The context is prefilled as a prompt, with whatever the policy evicts at its end; the continuation
is teacher-forced, one decode step per token, many steps in a program. So a policy does what it
would do if the model had generated the continuation itself. Work that several continuations share
is done once: a context is read in one lane and copied to those of its other continuations
(`generation/runner.py`), and one whose continuations have one token each (the letters of a
multiple-choice question) takes one sequence and no decode step.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dms_jax.cache.accounting import Meter
from dms_jax.errors import CapacityError, CheckpointError, DataError
from dms_jax.evaluation.serving import Serving
from dms_jax.generation.engine import Engine
from dms_jax.generation.prefill import Shape, prompt_key, tokens_in_one_pass
from dms_jax.generation.programs import bucket
from dms_jax.interrupts import keep_finished
from dms_jax.model.language_model import LanguageModel, check_tokens, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy

Tokens = tuple[int, ...]
# Steps of a program at least: continuations of many lengths run in few programs.
_FEWEST_STEPS = 8


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation.

    Attributes:
      logprob: log-probability of the whole continuation given its context, in nats.
      greedy: whether greedy decoding would generate it.
      peak_tokens: the most live entries after any token, averaged over layers and KV heads.
    """

    logprob: float
    greedy: bool
    peak_tokens: float


@dataclasses.dataclass
class _Sequence:
    """One sequence in the cache: a context and a teacher-forced continuation.

    Attributes:
      context: at least one token.
      read: the continuation without its last token.
      asked: last token of each continuation, by index of its pair; one token if any is read.
      logprobs, greedy: log-probabilities of the tokens of `read`, and whether all are greedy.
      last: the same for the last tokens, by index of the pair.
    """

    context: Tokens
    read: Tokens
    asked: dict[int, int] = dataclasses.field(default_factory=dict)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    greedy: bool = True
    last: dict[int, tuple[float, bool]] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the cache at its end."""
        return len(self.context) + len(self.read)

    @property
    def first(self) -> list[int]:
        """The tokens that may follow the context."""
        return [self.read[0]] if self.read else list(self.asked.values())

    @property
    def continuation(self) -> Tokens:
        """What is read, and the token that is asked for after it."""
        return (*self.read, next(iter(self.asked.values())))

    def record(
        self, place: int, logprobs: Float[np.ndarray, " n"], greedy: Bool[np.ndarray, " n"]
    ) -> None:
        """Adds what the tokens from a place of the continuation on were predicted with.

        Raises:
          CheckpointError: logits are not numbers.
        """
        if not np.isfinite(logprobs).all():
            raise CheckpointError(
                "The model's logits are not numbers (NaN). Check the weights, or load the model "
                "with dtype=float32 if they overflow float16."
            )
        read = min(len(self.read) - place, len(logprobs))
        self.logprobs += logprobs[:read].tolist()
        self.greedy &= bool(greedy[:read].all())
        if len(logprobs) > read:  # of one token that is asked for, or of each
            found = zip(logprobs[read:].tolist(), greedy[read:].tolist(), strict=True)
            asked, values = list(self.asked), list(found)
            self.last = dict(zip(asked, values * (len(asked) // len(values)), strict=True))


def encode_pair(model: LanguageModel, context: str, continuation: str) -> tuple[Tokens, Tokens]:
    """Token ids of a context and of its continuation.

    Both are encoded together, because a tokenizer may merge across the boundary, and split after
    as many tokens as the context has alone. Trailing spaces of the context are moved to the
    continuation, where most tokenizers put them. An empty context becomes the token that begins a
    sequence.

    Raises:
      DataError: there is no tokenizer, or the continuation has no token.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise DataError("Likelihood of text needs a tokenizer, and this model came without one.")
    bare = context.rstrip()
    if bare:
        continuation, context = context[len(bare) :] + continuation, bare
        before = encode_text(model, context)
        both = encode_text(model, context + continuation)
        after = both[len(before) :] or tokenizer.encode(continuation, add_special_tokens=False)
        before = both[: len(before)]
    else:
        before = [first_token(model)]
        after = tokenizer.encode(context + continuation, add_special_tokens=False)
        after = after[1:] if after[:1] == before and len(after) > 1 else after
    if not after:
        raise DataError(f"The continuation {continuation!r} has no token of its own.")
    return tuple(before), tuple(after)


def encode_text(model: LanguageModel, text: str) -> list[int]:
    """Token ids of a text; a leading beginning-of-sequence token, as in chats, is not repeated."""
    begin = model.tokenizer.special_tokens.get("bos_token")
    begins = begin is not None and text.startswith(begin)
    return model.tokenizer.encode(text, add_special_tokens=not begins)


def first_token(model: LanguageModel) -> int:
    """The beginning-of-sequence token, or an end-of-sequence token if there is none.

    Raises:
      DataError: the checkpoint declares neither.
    """
    ends = model.generation.eos_token_ids
    for token in (
        getattr(model.tokenizer, "bos_token_id", None),
        model.generation.bos_token_id,
        getattr(model.tokenizer, "eos_token_id", None),
        ends[0] if ends else None,
    ):
        if token is not None:
            return int(token)
    raise DataError("This checkpoint declares no token that begins or ends a sequence.")


def likelihoods(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    policy: Policy | str | None = None,
    serving: Serving | None = None,
) -> list[Likelihood]:
    """Computes the log-probabilities of continuations given their contexts.

    Args:
      model: from `load` or `retrofit`.
      pairs: token ids of a context and of a continuation, at least one each.
      policy: the checkpoint's own if None. One with a compression_ratio takes its share of each
        pair's own length.
      serving: options of the cache; `Serving()` if None.

    Raises:
      DataError: a part is empty, outside the vocabulary, or both are beyond the positions.
      CapacityError: the memory does not hold a single sequence.

    An exception that interrupts it, KeyboardInterrupt too, carries the finished part:
    `error.finished` is {index of the pair: Likelihood}.
    """
    policy, serving = model.resolve_policy(policy), Serving.given("likelihoods", serving)
    sequences: dict[tuple[Tokens, ...], _Sequence] = {}
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise DataError(f"Pair {index} has an empty context or an empty continuation.")
        try:
            check_tokens(np.asarray([*context, *continuation], np.int64), model.config)
        except DataError as error:
            raise DataError(f"Pair {index}: {error}") from None
        own = _Sequence(tuple(context), tuple(continuation[:-1]))
        key = (own.context, tuple(continuation) if own.read else ())
        sequences.setdefault(key, own).asked[index] = int(continuation[-1])
    if not sequences:
        return []
    done: dict[int, Likelihood] = {}
    # Sequences of one context follow each other, so that it is read once, and those of similar
    # lengths share a program. The longest come first, so that too little memory shows at once.
    longest_of: dict[Tokens, int] = {}
    for each in sequences.values():
        longest_of[each.context] = max(longest_of.get(each.context, 0), each.length)
    waiting = sorted(
        sequences.values(),
        key=lambda each: (-longest_of[each.context], each.context, -each.length, each.read),
    )
    longest = waiting[0].length + 1
    engine = serving.engine(model, policy, sequences=len(waiting), max_tokens=longest)
    with keep_finished(lambda: done), engine.runner.working():
        while waiting:
            batch = _batch(engine, waiting)
            del waiting[: len(batch)]
            peaks = _run(engine, batch)
            for each, peak in zip(batch, peaks, strict=True):
                total = float(np.sum(each.logprobs, dtype=np.float64))
                for index, (logprob, greedy) in each.last.items():
                    done[index] = Likelihood(total + logprob, each.greedy and greedy, peak)
    return [done[index] for index in range(len(pairs))]


def _batch(engine: Engine, waiting: Sequence[_Sequence]) -> list[_Sequence]:
    """The first sequences that fit the lanes and the pool together, at least one."""
    runner = engine.runner
    extra = np.zeros(len(runner.seen), np.int64)
    runner.reservation.raise_max_length(max(each.length for each in waiting[: len(extra)]) + 1)
    for lane, each in enumerate(waiting[: len(extra)]):
        extra[lane] = each.length
        if lane and not runner.reservation.fits(extra, prompt=True):
            return list(waiting[:lane])
    return list(waiting[: len(extra)])


def _run(engine: Engine, batch: Sequence[_Sequence]) -> list[float]:
    """Runs sequences through the cache, one per lane; returns the peak of each."""
    runner, config = engine.runner, engine.model.config
    rows = config.num_layers * config.num_kv_heads
    meters = [Meter(rows=rows) for _ in batch]
    runner.set_max_lengths({lane: each.length + 1 for lane, each in enumerate(batch)})
    width = min(
        engine.options.prefill_chunk, max(8, bucket(max(len(each.context) for each in batch)))
    )
    together = max(1, engine.options.prefill_tokens // width)
    sharers = _sharers(engine, batch)
    readers = list(sharers)
    for first in range(0, len(readers), together):
        for chunk in _prompt_parts(runner.policy, batch, readers[first : first + together], width):
            ending = {lane: sharers[lane] for lane in chunk.ends}
            _run_contexts(engine, batch, meters, chunk, width=width, ending=ending)
    copied = {lane: source for source, lanes in sharers.items() for lane in lanes[1:]}
    for lane, source in copied.items():
        meters[lane].fork(meters[source])
    if copied := {lane: source for lane, source in copied.items() if batch[lane].read}:
        runner.fork(copied)
    most = max(len(each.read) for each in batch)
    steps = min(engine.chunk, max(_FEWEST_STEPS, bucket(most)))
    for first in range(0, most, steps):
        _run_steps(engine, batch, meters, first, steps)
    runner.clear(list(range(len(batch))))
    return [meter.peak / rows for meter in meters]


def _sharers(engine: Engine, batch: Sequence[_Sequence]) -> dict[int, list[int]]:
    """The lanes that read a context, each with those that share it, itself first."""
    lanes: dict[Hashable, list[int]] = {}
    runner = engine.runner
    shard_of = runner.reservation.allocator.shard_of
    for lane, each in enumerate(batch):
        same = prompt_key(runner.policy, shard_of(lane), each.context, each.length + 1)
        lanes.setdefault(same, []).append(lane)
    return {each[0]: each for each in lanes.values()}


class _Chunk(NamedTuple):
    """The next tokens of contexts.

    Attributes:
      parts: lane -> its tokens.
      ends: the lanes whose context they complete.
      one_pass: whether they attend in one pass, not one by one.
    """

    parts: dict[int, np.ndarray]
    ends: list[int]
    one_pass: bool


def _prompt_parts(
    policy: Policy, batch: Sequence[_Sequence], lanes: Sequence[int], width: int
) -> Iterator[_Chunk]:
    """Yields the chunks of the contexts: what attends in one pass, then the rest."""
    counts = {lane: len(batch[lane].context) for lane in lanes}
    whole = {
        lane: min(
            count,
            tokens_in_one_pass(policy, seen=0, prompt=count, max_length=batch[lane].length + 1),
        )
        for lane, count in counts.items()
    }
    nothing = dict.fromkeys(lanes, 0)
    for begin, end, one_pass in ((nothing, whole, True), (whole, counts, False)):
        for done in range(0, max(end[lane] - begin[lane] for lane in lanes), width):
            parts = {
                lane: np.asarray(
                    batch[lane].context[begin[lane] + done : end[lane]][:width], np.int32
                )
                for lane in lanes
                if begin[lane] + done < end[lane]
            }
            ends = [
                lane
                for lane, part in parts.items()
                if begin[lane] + done + len(part) == counts[lane]
            ]
            yield _Chunk(parts, ends, one_pass)


def _reserve(
    engine: Engine, batch: Sequence[_Sequence], extra: np.ndarray, *, prompt: bool
) -> None:
    """Reserves the pages of the next tokens of each lane."""
    if not engine.runner.reservation.fits(extra, prompt=prompt):
        raise CapacityError(
            f"The cache cannot hold a context and its continuation of {batch[0].length} tokens. "
            "Give it more memory (memory=), a smaller page_size, or a policy that keeps less."
        )
    engine.runner.reservation.reserve(extra, prompt=prompt)


def _run_contexts(
    engine: Engine,
    batch: Sequence[_Sequence],
    meters: Sequence[Meter],
    chunk: _Chunk,
    *,
    width: int,
    ending: Mapping[int, Sequence[int]],
) -> None:
    """Runs the next tokens of contexts, and scores the tokens that follow those that are complete.

    Args:
      engine: with the cache.
      batch: the sequence of each lane.
      meters: the meter of each lane.
      chunk: their next tokens.
      width: tokens per lane in the compiled chunk.
      ending: lanes whose context is complete after these tokens, with the lanes that share it.
    """
    runner, parts = engine.runner, chunk.parts
    extra = np.zeros(len(runner.seen), np.int64)
    for lane, part in parts.items():
        extra[lane] = len(part)
    _reserve(engine, batch, extra, prompt=True)
    entries = min(bucket(len(parts)), len(runner.seen))
    shape = Shape(width, entries, places=None, one_pass=chunk.one_pass)
    extended = runner.extend(parts, shape=shape, prompt=True, ends_prompt=ending)
    runner.reservation.trim()
    for lane in parts:
        meters[lane].add(extended.live[lane], held=extended.held[lane])
    if not ending:
        return
    wanted = {
        lane: [token for sharer in sharers for token in batch[sharer].first]
        for lane, sharers in ending.items()
    }
    row_of = {lane: row for row, lane in enumerate(extended.lanes.tolist())}
    targets = np.zeros((len(extended.lanes), bucket(max(map(len, wanted.values())))), np.int32)
    for lane, tokens in wanted.items():
        targets[row_of[lane], : len(tokens)] = tokens
    with use_mesh(engine.model.mesh):
        logprobs, greedy = jax.tree.map(
            np.asarray, _score(engine.model.transformer, extended.hidden, targets)
        )
    for lane, sharers in ending.items():
        row, start = row_of[lane], 0
        for sharer in sharers:
            end = start + len(batch[sharer].first)
            batch[sharer].record(0, logprobs[row, start:end], greedy[row, start:end])
            start = end


def _run_steps(
    engine: Engine, batch: Sequence[_Sequence], meters: Sequence[Meter], first: int, steps: int
) -> None:
    """Runs up to so many tokens of continuations, and scores the tokens that follow them.

    Args:
      engine: with the cache.
      batch: the sequence of each lane.
      meters: the meter of each lane.
      first: the place of the first of these tokens in a continuation.
      steps: number of steps of the compiled chunk.
    """
    runner = engine.runner
    tokens = np.zeros((steps + 1, len(runner.seen)), np.int32)
    counts = np.zeros(len(runner.seen), np.int64)
    for lane, each in enumerate(batch):
        if (count := min(len(each.read) - first, steps)) > 0:
            counts[lane] = count
            tokens[: count + 1, lane] = each.continuation[first : first + count + 1]
    _reserve(engine, batch, counts, prompt=False)
    found = runner.teacher_forced_decode(tokens, counts)
    runner.reservation.trim()
    greedy = found.tokens == tokens[1:]
    for lane in np.flatnonzero(counts).tolist():
        ran = slice(0, counts[lane])
        meters[lane].add(found.live[ran, lane].tolist())
        batch[lane].record(first + 1, found.logprobs[ran, lane], greedy[ran, lane])


@jax.jit
def _score(
    transformer: Transformer, hidden: Float[Array, "b E"], targets: Int[Array, "b n"]
) -> Any:
    """Log-probabilities of tokens given hidden states, and whether each is the argmax."""
    logits = transformer.unembed(hidden)
    chosen = jnp.take_along_axis(logits, targets, axis=-1)
    logprobs = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return logprobs, targets == jnp.argmax(logits, axis=-1)[:, None]

"""Fake programs that compute only the values that the host reads, and an oracle of their answers.

They replace `extend`, `first_tokens`, `decode` and `redraw` of `dms_jax.generation.programs` in
tests of the host (scheduler, pages, streams, server) and in the benchmark of host time:

    write   a token goes to one slot of each row of its lane, through the page table; whether the
            row grows for it is a hash of the row and the position, as far as the policy evicts;
            another adapter writes another number
    read    each row reads one of its slots, that a hash chooses, through the page table
    state   a row's first number of the policy's state becomes a hash of all tokens so far
    draw    the next token is a hash of what was read, the position, and the request's seed, number
            among copies and filter; greedy requests have no seed

So answers depend on every lane, page, length, state, seed and filter that the host passes: swapping
two of them, freeing a page too early or copying the wrong one changes an answer. They depend on
nothing else: `answer_of` predicts them, with all usage figures, from the prompt and the sampling.

`_grows` decides which tokens stay, not the policy's real programs: Vanilla and Quest keep
everything, RandomEviction its window and `1 - rate` of the rest, DMS its window and half, TOVA and
StreamingLLM their budget; SnapKV at most its interval beside the budget. A policy that shrinks cuts
a prompt to its budget. Host values and meshes are not supported.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from dms_jax.generation import Sampling, programs
from dms_jax.generation.grammar import BITS
from dms_jax.generation.programs import Packed, Program
from dms_jax.generation.sampling import Given
from dms_jax.policies import DMS, TOVA, Policy, RandomEviction, SnapKV, StreamingLLM, Vanilla
from dms_jax.policies.values import CacheShape

# Drawn tokens: short words of the shipped tokenizer. A few may be end tokens of a model.
FIRST_WORD, WORDS = 259, 128
# At this temperature any token is drawn, mostly parts of characters.
HOT, FIRST_TOKEN, TOKENS = 20, 4, 500
# From this one on three of four tokens are quotation marks and closing brackets, which end JSON.
CLOSES, CLOSING = 40, (436, 509, 128)
ENDS = tuple(range(FIRST_WORD, FIRST_WORD + WORDS, 16))
# Of requests with one of 1,024 seeds from here on, logits after this token are NaN. They draw it,
# too.
BROKEN_TOKEN, BREAKS = 3, 2**30
GREEDY = Sampling(temperature=0, logprobs=True).filter
_HALF_OF_DMS = 0.5
_OF_ADAPTER = 97
_MANTISSA = 2**20  # a hash that float32 holds exactly


def _mix(*values: Any) -> Any:
    """Hashes numbers to one of 32 bits."""
    found: Any = jnp.uint32(0x9E3779B9)
    for value in values:
        found = (found ^ jnp.asarray(value).astype(jnp.uint32)) * jnp.uint32(0x85EBCA6B)
        found = (found ^ (found >> 15)) * jnp.uint32(0xC2B2AE35)
        found = found ^ (found >> 13)
    return found


def _mix_of(*values: int) -> int:
    """The same for Python numbers."""
    found = 0x9E3779B9
    for value in values:
        found = ((found ^ value) * 0x85EBCA6B) % 2**32
        found = ((found ^ (found >> 15)) * 0xC2B2AE35) % 2**32
        found ^= found >> 13
    return found


@functools.cache
def _chances_of(num_rows: int, position: int) -> list[tuple[int, int]]:
    """Returns the hashes that decide whether each row grows, and which slot it reads."""
    return [(_mix_of(row, position), _mix_of(row, position, 1)) for row in range(num_rows)]


def _grows(policy: Policy, length: Any, chance: Any) -> Any:
    """Whether a row of `length` slots takes another one for a token; `chance` is one of 16."""
    match policy:
        case RandomEviction():
            return (length <= policy.window) | (chance >= 16 * policy.rate)
        case DMS():
            return (length <= policy.window) | (chance >= 16 * _HALF_OF_DMS)
        case TOVA() | StreamingLLM():
            return length < policy.budget
        case SnapKV() if policy.interval is not None:
            return length < policy.budget + policy.interval
    return length >= 0


# -- the programs ------------------------------------------------------------------------------


def _reused(policy: Policy, length: Any, position: Any) -> Any:
    """The slot that a token takes in a row of `length` slots that does not grow."""
    if isinstance(policy, RandomEviction | DMS):
        return length - 1 - position % (policy.window + 1)
    return position % length


def _frozen(policy: Policy, lengths: Any) -> Any:
    """How many of each row's first slots no later token takes; None if any may be taken."""
    if isinstance(policy, RandomEviction | DMS):
        return jnp.maximum(lengths - policy.window - 1, 0)
    return None


def _entry(tokens, positions, vocabulary: int, slot):
    """The number that an adapter writes for a token, exact in float32."""
    return positions * vocabulary + (tokens + _OF_ADAPTER * slot) % vocabulary


def _append(transformer, cache, table, tokens, active, policy: Policy):
    """Writes a token of each active lane and reads a slot of each row; returns the read numbers."""
    num_layers, _, num_kv_heads = cache.lengths.shape
    page_size = cache.k_pages.shape[1]
    rows = jnp.arange(num_layers * num_kv_heads).reshape(num_layers, 1, num_kv_heads)
    positions, lengths = cache.seen[:, None], cache.lengths
    grows = _grows(policy, lengths, _mix(rows, positions) % 16)
    slots = jnp.where(grows, lengths, _reused(policy, jnp.maximum(lengths, 1), positions))
    lengths = jnp.where(active[:, None], lengths + grows, lengths)

    def page_of(slots):
        return jnp.take_along_axis(table, slots[..., None] // page_size, -1, mode="clip")[..., 0]

    pages = jnp.where(active[:, None], page_of(slots), len(cache.k_pages))
    slot = 0 if cache.adapters is None else cache.adapters.slots
    entries = _entry(tokens, cache.seen, transformer.config.vocab_size, slot)[:, None]
    entries = jnp.broadcast_to(entries, pages.shape).astype(cache.k_pages.dtype)
    k_pages = cache.k_pages.at[pages, slots % page_size, 0].set(entries, mode="drop")
    slots = (_mix(rows, positions, 1) % jnp.maximum(lengths, 1).astype(jnp.uint32)).astype(int)
    found = k_pages.at[page_of(slots), slots % page_size, 0].get(mode="clip")
    read = _mix(rows, found).sum((0, 2), dtype=jnp.uint32)
    leaves, structure = jax.tree.flatten(cache.row_state)
    if leaves:
        flat = leaves[0].reshape(*lengths.shape, -1)
        state = jnp.where(positions > 0, _mix(flat[..., 0], tokens[:, None]), _mix(tokens)[:, None])
        state = jnp.where(active[:, None], state % _MANTISSA, flat[..., 0])
        flat = flat.at[..., 0].set(state.astype(flat.dtype))
        leaves[0] = flat.reshape(leaves[0].shape)
        read += _mix(rows, state).sum((0, 2), dtype=jnp.uint32)
    cache = dataclasses.replace(
        cache,
        row_state=jax.tree.unflatten(structure, leaves),
        pool=dataclasses.replace(cache.pool, k_pages=k_pages),
        lengths=lengths,
        seen=cache.seen + active,
    )
    return cache, _mix(read, tokens) % _MANTISSA, lengths.sum((0, 2), dtype=jnp.int32)


def _draw(read, positions, seeds, rule, given, broken):
    """Draws or looks up the next tokens; returns them with their log-probabilities."""
    finite = ~(broken & _breaks(seeds[:, 0]))
    if isinstance(rule, Given):
        drawn = _draw(read, positions, seeds, GREEDY, None, broken)
        return programs.Steps(given, _logprobs(positions, given), drawn.tokens == given, finite)
    greedy = rule.switches.greedy if rule.greedy is None else rule.greedy
    asked = jnp.round(1000 * jnp.reshape(jnp.asarray(rule.temperature, jnp.float32), -1))
    asked = _mix(jnp.where(greedy, 0, asked), jnp.reshape(jnp.asarray(rule.top_k, jnp.uint32), -1))
    seed, copy = (jnp.where(greedy, 0, each) for each in jnp.moveaxis(seeds, -1, 0))
    chance = _mix(read, positions, seed, copy, asked)
    words = FIRST_WORD + (chance % WORDS).astype(jnp.int32)
    hot = jnp.reshape(jnp.asarray(rule.temperature), -1) >= HOT
    tokens = jnp.where(hot, FIRST_TOKEN + (chance % TOKENS).astype(jnp.int32), words)
    closes = (jnp.reshape(jnp.asarray(rule.temperature), -1) >= CLOSES) & (chance >> 15 & 3 > 0)
    tokens = jnp.where(closes, jnp.asarray(CLOSING)[(chance >> 8) % len(CLOSING)], tokens)
    tokens = jnp.where(_breaks(seed) & (chance % 8 == 0), BROKEN_TOKEN, tokens)
    logprobs = _logprobs(positions, tokens) if rule.logprobs else None
    return programs.Steps(tokens, logprobs, None, finite)


def _allowed(drawn, rule):
    """Replaces tokens outside a mask by the first allowed one, as if likeliest."""
    if isinstance(rule, Given) or rule.allowed is None:
        return drawn
    words = jnp.asarray(rule.allowed)
    word = jnp.take_along_axis(words, drawn.tokens[:, None] // BITS, 1)[:, 0]
    first = jnp.argmax(words != 0, 1).astype(jnp.int32)
    lowest = jnp.take_along_axis(words, first[:, None], 1)[:, 0]
    other = first * BITS + jax.lax.population_count((lowest & -lowest) - 1)
    tokens = jnp.where((word >> drawn.tokens % BITS) & 1 == 1, drawn.tokens, other)
    return drawn.replace(tokens=tokens, likeliest=tokens, highest=jnp.zeros(tokens.shape))


def _logprobs(positions, tokens):
    return -(positions % 64) - tokens / 512


def _broken(tokens):
    return tokens == BROKEN_TOKEN


def _breaks(seed):
    return seed >> 10 == BREAKS >> 10


def extend(transformer, cache, host, table, lanes, tokens, counts, ends, policy, one_pass, places):
    """Fake `programs.extend`."""
    del host, places
    # One-pass tokens are all written before anything is evicted or cut.
    rule = policy if policy.parallel == "always" or not one_pass else Vanilla()
    lengths = cache.lengths.at[:, lanes].get(mode="clip")
    lengths = jnp.where((lanes < len(cache.seen))[:, None], lengths, 0)
    some = dataclasses.replace(
        cache,
        lengths=lengths,
        seen=cache.seen.at[lanes].get(mode="clip"),
        adapters=jax.tree.map(lambda x: x.at[lanes].get(mode="clip"), cache.adapters),
        row_state=jax.tree.map(lambda x: x.at[:, lanes].get(mode="clip"), cache.row_state),
    )

    def step(carry, xs):
        some, *last = carry
        index, tokens = xs
        active = index < counts
        some, read, live = _append(transformer, some, table, tokens, active, rule)
        last = [
            jnp.where(active, *each) for each in zip((read, _broken(tokens)), last, strict=True)
        ]
        return (some, *last), live

    carry = some, jnp.zeros(counts.shape, jnp.uint32), jnp.zeros(counts.shape, bool)
    steps = jnp.arange(tokens.shape[1]), tokens.T
    (after, read, broken), live = jax.lax.scan(step, carry, steps)
    left = after.lengths
    if ends is not None:
        left = jnp.where(ends[:, None], jnp.minimum(left, policy.budget), left)
    cache = dataclasses.replace(
        cache,
        pool=after.pool,
        lengths=cache.lengths.at[:, lanes].set(left, mode="drop"),
        seen=cache.seen.at[lanes].set(after.seen, mode="drop"),
        row_state=jax.tree.map(
            lambda x, new: x.at[:, lanes].set(new, mode="drop"), cache.row_state, after.row_state
        ),
    )
    hidden = jnp.zeros((len(counts), transformer.config.hidden_size), cache.k_pages.dtype)
    hidden = hidden.at[:, 0].set(read.astype(hidden.dtype)).at[:, 1].set(broken)
    before = lengths.sum((0, 2), dtype=jnp.int32)
    frozen = _frozen(policy, cache.lengths)
    return cache, programs.Extension(hidden, before, live.T, cache.lengths, frozen), None


def first_tokens(transformer, hidden, sources, seeds, positions, rule, fresh, tokens):
    """Fake `programs.first_tokens`."""
    del transformer
    read, broken = hidden[sources, 0].astype(jnp.uint32), hidden[sources, 1] > 0
    given = rule.tokens[0] if isinstance(rule, Given) else None
    drawn = _allowed(_draw(read, positions, seeds, rule, given, broken), rule)
    return jnp.where(fresh, drawn.tokens, tokens), drawn


def decode(
    transformer,
    cache,
    host,
    table,
    tokens,
    remaining,
    seeds,
    policy,
    rule,
    num_steps,
    end_tokens,
    checks=None,
):
    """Fake `programs.decode`. The trail has all pages after each step."""
    del host
    ends = jnp.asarray(end_tokens, jnp.int32)

    def step(carry, chosen):
        cache, tokens, remaining = carry
        given, forced = chosen
        active = remaining > 0
        cache, read, live = _append(transformer, cache, table, tokens, active, policy)
        broken = _broken(tokens)
        drawn = _draw(read, cache.seen, seeds, rule, given, broken)
        trail = None
        if forced is not None:
            likely, chosen = drawn.tokens, jnp.where(forced < 0, drawn.tokens, forced)
            logprobs = None if drawn.logprobs is None else _logprobs(cache.seen, chosen)
            best = dict(likeliest=likely, highest=jnp.zeros(likely.shape))
            drawn = drawn.replace(tokens=chosen, logprobs=logprobs, **best)
        if checks is not None:
            hidden = jnp.stack([read.astype(jnp.float32), broken.astype(jnp.float32)], -1)
            trail = programs.Trail(hidden, cache.seen)
            if policy.can_undo:
                overwrites = num_steps > 1 and not policy.appends
                state = cache.lengths, cache.row_state, cache.k_pages if overwrites else None
                trail = programs.Trail(hidden, cache.seen, *state)
        new = jnp.where(active, drawn.tokens, tokens)
        remaining = jnp.where(jnp.isin(new, ends) & ~endless, 0, remaining - active)
        out = dataclasses.replace(drawn, tokens=new, ran=active, live=live, reads=2 * live + 1)
        return (cache, new, remaining), (out, trail)

    remaining, endless = remaining % programs.ENDLESS, remaining >= programs.ENDLESS
    remaining = jnp.where(jnp.isin(tokens, ends) & ~endless, 0, remaining)
    given = rule.tokens if isinstance(rule, Given) else None
    chosen = given, None if checks is None else checks.forced
    carry = cache, tokens, remaining
    (cache, newest, _), (steps, trail) = jax.lax.scan(step, carry, chosen, length=num_steps)
    frozen = _frozen(policy, cache.lengths)
    steps = Packed.of(dataclasses.replace(steps, lengths=cache.lengths, frozen=frozen))
    return cache, steps, newest, None, trail


def redraw(transformer, cache, table, trail, later, tokens, refused, masks, seeds, rule):
    """Fake `programs.redraw`."""
    del transformer, later
    lanes, steps, _ = refused

    def take(x):
        return x.at[lanes].get(mode="clip") if jnp.ndim(x) else x

    rule = dataclasses.replace(jax.tree.map(take, rule), allowed=masks)
    hidden, positions = (x.at[steps, lanes].get(mode="clip") for x in (trail.hidden, trail.seen))
    read, broken = hidden[:, 0].astype(jnp.uint32), hidden[:, 1] > 0
    drawn = _allowed(_draw(read, positions, take(seeds), rule, None, broken), rule)
    logprobs = _logprobs(positions, drawn.tokens) if rule.logprobs else None
    newest = tokens.at[lanes].set(drawn.tokens, mode="drop")
    if trail.lengths is not None:
        cache = _taken_back(cache, table, trail, lanes, steps)
    lengths = cache.lengths.at[:, lanes].get(mode="clip")
    return cache, Packed.of((drawn.tokens, logprobs, lengths)), newest


def _taken_back(cache, table, trail, lanes, steps):
    kept = jnp.full(len(cache.seen), -1).at[lanes].set(steps, mode="drop")

    def choose(after, now):
        found = now
        for step, one in enumerate(after):
            found = jnp.where((kept == step).reshape(1, -1, *[1] * (now.ndim - 2)), one, found)
        return found

    k_pages = cache.k_pages
    if table is not None:  # else nothing was overwritten
        for step, one in enumerate(trail.overwritten):
            pages = jnp.where((kept == step)[:, None, None], table, len(k_pages))
            k_pages = k_pages.at[pages].set(one.at[pages].get(mode="clip"), mode="drop")
    return dataclasses.replace(
        cache,
        pool=dataclasses.replace(cache.pool, k_pages=k_pages),
        lengths=choose(trail.lengths, cache.lengths),
        seen=choose(trail.seen[:, None], cache.seen[None])[0],
        row_state=jax.tree.map(choose, trail.row_state, cache.row_state),
    )


FAKES: dict[str, Any] = {
    "extend": Program(extend, donate_argnums=1, static_argnums=(9, 10), keep_unused=True),
    "first_tokens": Program(first_tokens, keep_unused=True),
    "decode": Program(decode, donate_argnums=1, static_argnums=(9, 10), keep_unused=True),
    "redraw": Program(redraw, donate_argnums=1, keep_unused=True),
}


@contextlib.contextmanager
def faked() -> Iterator[None]:
    """A context with the programs of this file."""
    with mock.patch.multiple(programs, **FAKES):
        yield


# -- answers -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a request, alone or in any batch.

    Attributes:
      tokens: token ids.
      logprobs: their log-probabilities.
      finish_reason: "end" or "length".
      usage: figures of `Usage` that do not depend on chunks or pages.
      live: entries after each token of prompt and answer except the last, averaged over rows.
      broken: position of the first token with NaN logits; None without any.
      text: text of the tokens, if known.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    usage: dict[str, float]
    live: list[float]
    broken: int | None = None
    text: str | None = None

    def check(self, found: Any) -> None:
        """Compares an ended request, or a completion, with the expected answer."""
        tokens = found.tokens if hasattr(found, "tokens") else found.generated
        assert (tokens, found.finish_reason) == (self.tokens, self.finish_reason)
        assert found.logprobs in (None, [], self.logprobs)
        assert self.text in (None, found.text)
        usage = dataclasses.asdict(found.usage)
        assert {name: usage[name] for name in self.usage} == self.usage


def answer_of(
    prompt: Sequence[int],
    sampling: Sampling,
    policy: Policy = Vanilla(),
    *,
    copy: int = 0,
    slot: int = 0,
    ends: Sequence[int] = (),
    num_rows: int = 20,
    vocabulary: int = 512,
    new_tokens: int | None = None,
) -> Answer:
    """Returns the answer to a prompt, computed without the engine.

    Args:
      prompt: token ids.
      sampling: of the request, with its seed.
      policy: the cache policy.
      copy: number of earlier equal prompts in the call, under the same adapter.
      slot: slot of its adapter.
      ends: end tokens of the model.
      num_rows: layers x KV heads.
      vocabulary: size of the vocabulary.
      new_tokens: the most new tokens, if different from the sampling's.
    """
    greedy, most = sampling.temperature == 0, new_tokens or sampling.max_new_tokens
    breaks = _breaks(sampling.seed)
    seed, copy = (0, 0) if greedy else (sampling.seed, copy)
    asked = _mix_of(round(1000 * sampling.temperature), sampling.top_k or 2**31 - 1)
    rows, tokens, live = [[] for _ in range(num_rows)], list(prompt), []
    reason, broken, state = "length", None, None
    has_state = bool(jax.tree.leaves(policy.init_state(CacheShape(1, 1, 1, jnp.float32)).rows))
    for position in itertools.count():
        newest, read, in_prompt = tokens[position], 0, position < len(prompt)
        rule = Vanilla() if in_prompt and policy.shrinks else policy
        chances = _chances_of(num_rows, position)
        for number, (row, (grows, reads)) in enumerate(zip(rows, chances, strict=True)):
            if _grows(rule, len(row), grows % 16):
                row.append(None)
                place = len(row) - 1
            else:
                place = _reused(rule, len(row), position)
            row[place] = _entry(newest, position, vocabulary, slot)
            read += _mix_of(number, row[reads % len(row)])
        if has_state:
            state = _mix_of(*([] if state is None else [state]), newest) % _MANTISSA
            read += sum(_mix_of(number, state) for number in range(num_rows))
        live.append(sum(map(len, rows)))
        if position + 1 < len(prompt):
            continue
        if position + 1 == len(prompt) and policy.shrinks:
            rows = [row[: policy.budget] for row in rows]
        if breaks and newest == BROKEN_TOKEN and broken is None:
            broken = position + 1
        read = _mix_of(read % 2**32, newest) % _MANTISSA
        chance = _mix_of(read, position + 1, seed, copy, asked)
        hot = sampling.temperature >= HOT
        drawn = FIRST_TOKEN + chance % TOKENS if hot else FIRST_WORD + chance % WORDS
        tokens.append(BROKEN_TOKEN if _breaks(seed) and chance % 8 == 0 else drawn)
        new = len(tokens) - len(prompt)
        ended = tokens[-1] in ends and not sampling.ignore_eos
        if ended or new == most:
            reason = "end" if ended else "length"
            break
    left, reads = sum(map(len, rows)), [2 * each + 1 for each in live[len(prompt) :]]
    usage = dict(
        prompt_tokens=len(prompt),
        new_tokens=new,
        kv_reads=sum(reads) / num_rows,
        peak_tokens=max(live) / num_rows,
        live_tokens=left / num_rows,
        compression_ratio=len(live) / (left / num_rows),
    )
    made = tokens[len(prompt) :]
    logprobs = [-(p % 64) - t / 512 for p, t in enumerate(made, len(prompt))]
    return Answer(made, logprobs, reason, usage, [each / num_rows for each in live], broken)

"""Requests that come while a call runs, each with its own sampling."""

import collections
import dataclasses
import functools

import pytest

import dms_jax
from dms_jax.generation import Engine, arrivals
from dms_jax.generation.requests import make_request, make_requests
from dms_jax.generation.sampling import LanesFilter, Sampling
from dms_jax.model.language_model import GenerationDefaults
from tests.generation.support import GREEDY, SHAPE, engine_for, model_for, prompts, squeezed
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("two_programs", "unfiltered")
ONE = dataclasses.replace(GREEDY, max_new_tokens=1)
SETTINGS = [
    GREEDY,
    dms_jax.Sampling(temperature=0.9, top_k=4, max_new_tokens=15, seed=3, logprobs=True),
    dms_jax.Sampling(temperature=1.1, top_p=0.8, min_p=0.01, max_new_tokens=9, seed=4),
]


@functools.cache
def wide_engine() -> Engine:
    """Returns an engine with lanes for four."""
    return Engine(model_for("vanilla", ends=False), max_tokens=64, **SHAPE | dict(num_lanes=4))


@pytest.mark.nightly
def test_requests_join_those_that_run_and_draw_as_they_do_alone(monkeypatch):
    monkeypatch.setattr(arrivals, "LanesFilter", LanesFilter)
    engine = engine_for("vanilla")
    config, tokens = engine.model.config, prompts()[: len(SETTINGS)]
    coming = [
        make_request(config, prompt, sampling, index=index, seed=sampling.seed)
        for index, (prompt, sampling) in enumerate(zip(tokens, SETTINGS, strict=True))
    ]
    alone = [
        engine.generate([prompt], sampling=sampling)[0]
        for prompt, sampling in zip(tokens, SETTINGS, strict=True)
    ]
    requests, waited, together, ended = list(coming), [], [], []

    def incoming(wait):
        waited.append(wait)
        together.append(len(engine.running))
        return [coming.pop(0)] if coming else None

    def on_tokens(update):
        if update.finished:
            ended.append(update.index)

    assert engine.serve([], GREEDY, on_tokens, incoming=incoming) == []
    assert sorted(ended) == [0, 1, 2]
    assert [each.generated for each in requests] == [each.tokens for each in alone]
    assert [each.finish_reason for each in requests] == [each.finish_reason for each in alone]
    assert requests[1].logprobs == pytest.approx(alone[1].logprobs, abs=1e-4)
    assert waited[:2] == [True, False]  # nothing else was to be done before the first one
    assert max(together) == 2  # and the third one came while these ran
    assert engine.runner.allocator.pages_in_use == 0
    assert not engine.running


@pytest.mark.nightly
def test_what_a_lane_asks_is_looked_at_once(monkeypatch):
    """With 256 lanes it took half a millisecond a program, for which the device waited."""
    looked, own = collections.Counter(), Sampling.filter.func

    def counted(self):
        looked[self.seed] += 1
        return own(self)

    monkeypatch.setattr(Sampling, "filter", property(counted))
    engine, given = engine_for("vanilla"), prompts()[:3]
    samplings = [dataclasses.replace(GREEDY, seed=100 + each) for each in range(3)]
    joined_while_it_decodes(engine, given, samplings)
    assert [looked[each.seed] for each in samplings] == [1, 1, 1]


@pytest.mark.nightly
@pytest.mark.parametrize("listens", [True, False], ids=["told", "untold"])
def test_a_stop_string_in_a_first_token_ends_an_answer_before_the_next_chunk(listens):
    """Whether or not anybody is told."""
    engine, given = engine_for("vanilla"), prompts((5, 13))
    alone = [engine.generate([prompt], sampling=GREEDY)[0] for prompt in given]
    stop = engine.model.tokenizer.decode(alone[1].tokens[:1]).strip()
    samplings = [GREEDY, dataclasses.replace(GREEDY, stop=stop)]
    requests, *_ = joined_while_it_decodes(engine, given, samplings, listens=listens)
    assert [each.finish_reason for each in requests] == ["length", "stop"]
    assert [each.generated for each in requests] == [alone[0].tokens, alone[1].tokens[:1]]
    assert requests[1].totals() == ([], [])  # no step ran for it


def test_requests_are_looked_for_between_chunks_of_those_that_nobody_listens_to():
    """An answer of 20 tokens takes chunks of 8, 8 and 3 steps."""
    engine, looked = engine_for("dms"), []
    coming = make_requests(engine.model.config, prompts((5,)), GREEDY)

    def incoming(wait):
        looked.append(wait)
        return [coming.pop()] if coming else None if wait else []

    engine.serve([], GREEDY, incoming=incoming)
    assert looked == [True, False, False, True]


@pytest.mark.parametrize("name", ["dmc", *further("vanilla")])
def test_what_an_answer_holds_that_its_first_token_ends_is_without_the_steps_that_run(name):
    """They were launched before the token was read, and their pages are reserved for its lane."""
    (prompt,), plain = prompts((13,)), model_for(name, ends=False)
    (first,) = engine_for(name).generate([prompt], sampling=ONE)[0].tokens
    model = dataclasses.replace(plain, generation=GenerationDefaults(eos_token_ids=(first,)))
    engine = Engine(model, max_tokens=64, **SHAPE)
    config = model.config
    (request,) = coming = [make_request(config, prompt, GREEDY)]
    engine.serve([], GREEDY, incoming=lambda wait: [coming.pop()] if coming else None)
    assert (request.generated, request.finish_reason) == ([first], "end")
    rows = config.num_layers * config.num_kv_heads
    page = rows * 2 * 16 * config.head_dim * 4  # one holds the prompt of a row
    state = engine.runner._state_bytes
    assert 0 < request.usage.live_tokens <= 13
    assert request.usage.cache_bytes == page + state
    assert page + state < request.usage.peak_cache_bytes <= 2 * page + state


@pytest.mark.nightly
@pytest.mark.parametrize("lengths", [(5, 30, 1), (5, 7, 1)], ids=["alone", "steps-run"])
def test_what_is_cancelled_while_it_waits_is_never_read(lengths):
    """A lane is free for it at the moment when it is cancelled, while steps of another may run."""
    engine, told = engine_for("vanilla"), []
    short = dataclasses.replace(GREEDY, max_new_tokens=5)
    coming = [
        make_request(engine.model.config, prompt, sampling, index=index)
        for index, (prompt, sampling) in enumerate(
            zip(prompts(lengths), (short, GREEDY, GREEDY), strict=True)
        )
    ]
    requests = list(coming)

    def incoming(wait):
        if coming:
            came = coming.copy()
            coming.clear()
            return came
        if requests[0].finish_reason is not None:
            engine.cancel([2])
        return None

    engine.serve([], GREEDY, told.append, incoming=incoming)
    assert [each.finish_reason for each in requests] == ["length", "length", "cancelled"]
    assert requests[2].generated == []
    usage = requests[2].usage
    assert (usage.prefilled_tokens, usage.live_tokens, usage.cache_bytes) == (0, 0, 0)
    assert [each.finished for each in told if each.index == 2] == [True]


def test_what_is_cancelled_while_steps_run_ends_before_the_next_chunk():
    """Half of a chunk still runs at the look at which the request is cancelled."""
    engine = engine_for("vanilla")
    alone = engine.generate(prompts((5,)), sampling=GREEDY)[0]
    request = make_request(engine.model.config, *prompts((5,)), GREEDY)
    coming, running_on = [[request]], []

    def incoming(wait):
        if coming:
            return coming.pop()
        if request.generated:
            running_on.append(bool(engine.runner.unread.any()))
            engine.cancel([0])
        return None

    engine.serve([], GREEDY, lambda update: None, incoming=incoming)
    assert running_on[0]
    assert request.finish_reason == "cancelled"
    assert request.generated == alone.tokens[: 1 + SHAPE["chunk"]]


@pytest.mark.nightly
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("listens", [False, True], ids=["incoming", "told"])
def test_what_a_cancelled_prompt_took_counts_where_steps_ran_meanwhile(listens, copies):
    """It is cancelled when its first part was launched behind steps that nobody has read."""
    engine, (short, long) = wide_engine(), prompts((5, 30))
    first, other, *copied = [
        make_request(engine.model.config, prompt, GREEDY, index=index, copy=index)
        for index, prompt in enumerate([short, *[long] * copies])
    ]
    coming = [[first], [other, *copied]]

    def cancel_other():
        if engine.runner.seen[1] and not other.generated:
            engine.cancel([other.index, *(each.index for each in copied)])

    def incoming(wait):
        if not listens:
            cancel_other()
        return coming.pop(0) if coming else None

    engine.serve([], GREEDY, lambda update: cancel_other() if listens else None, incoming=incoming)
    assert other.finish_reason == "cancelled"
    usage = other.usage
    assert usage.prefilled_tokens == usage.peak_tokens == usage.live_tokens > 0
    assert [each.usage.prefilled_tokens for each in copied] == [0] * len(copied)


def cancelled_while_it_is_read(engine, prompts, *indices, listens=True):
    """Serves prompts together; some are cancelled after their first chunk of tokens."""
    coming = [
        [
            make_request(engine.model.config, prompt, GREEDY, index=index, copy=index)
            for index, prompt in enumerate(prompts)
        ]
    ]
    requests = coming[0]

    def incoming(wait):
        if coming:
            return coming.pop()
        if engine.runner.seen.any():
            engine.cancel(indices)
        return None

    told = []
    engine.serve([], GREEDY, told.append if listens else None, incoming=incoming)
    ended = range(len(prompts)) if listens else ()
    assert sorted(each.index for each in told if each.finished) == list(ended)
    assert engine.runner.allocator.pages_in_use == 0
    return requests


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vanilla", "dms"])
def test_a_prompt_that_is_cancelled_is_not_read_to_its_end(name):
    engine, given = engine_for(name), prompts((30, 13))
    alone = engine.generate(given[1:], sampling=GREEDY)[0]
    long, other = cancelled_while_it_is_read(engine, given, 0)
    assert (long.finish_reason, long.generated) == ("cancelled", [])
    assert long.usage.prefilled_tokens == long.usage.live_tokens == SHAPE["prefill_chunk"]
    assert long.usage.compression_ratio == 1  # of what was read: the window evicts nothing yet
    assert (other.finish_reason, other.generated) == ("length", alone.tokens)
    assert engine.generate(given[1:], sampling=GREEDY)[0] == alone


@pytest.mark.nightly
def test_a_prompt_that_another_request_shares_is_read_to_its_end():
    engine, (prompt,) = engine_for("dms"), prompts((30,))
    alone = engine.generate([prompt], sampling=GREEDY)[0]
    first, second = cancelled_while_it_is_read(engine, [prompt, prompt], 0)
    assert first.finish_reason == "cancelled"
    assert first.usage.prefilled_tokens == len(prompt)
    assert (second.finish_reason, second.generated) == ("length", alone.tokens)


@pytest.mark.parametrize("listens", [True, False])
def test_a_prompt_whose_sharers_are_all_cancelled_is_not_read_to_its_end(listens):
    """As when a client that asked for several answers goes away."""
    engine, (prompt, after) = engine_for("dms"), prompts((30, 13))
    alone = engine.generate([after], sampling=GREEDY)
    for request in cancelled_while_it_is_read(engine, [prompt, prompt], 0, 1, listens=listens):
        assert (request.finish_reason, request.generated) == ("cancelled", [])
        assert request.usage.prefilled_tokens <= SHAPE["prefill_chunk"]
        assert request.usage.compression_ratio == 1  # of what was read, not of the whole prompt
    assert engine.generate([after], sampling=GREEDY) == alone


def joined_while_it_decodes(engine, given, samplings, *, after=1, listens=True):
    """Serves the first prompt, and the others from when it has `after` tokens.

    Returns the requests, what was told, and at each look for more the tokens of the first answer
    and those that the others have read.
    """
    first, *others = [
        make_request(engine.model.config, prompt, sampling, index=index, copy=index)
        for index, (prompt, sampling) in enumerate(zip(given, samplings, strict=True))
    ]
    coming, looks, told = [[first], others], [], []

    def incoming(wait):
        lanes = [lane for lane, each in engine._running.items() if each is not first]
        looks.append((len(first.generated), int(engine.runner.seen[lanes].sum())))
        if len(coming) == 2 or (coming and len(first.generated) > after):
            return coming.pop(0)
        return [] if coming else None

    engine.serve([], GREEDY, told.append if listens else None, incoming=incoming)
    ended = list(range(len(given))) if listens else []
    assert sorted(each.index for each in told if each.finished) == ended
    assert engine.runner.allocator.pages_in_use == 0
    return [first, *others], told, looks


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vanilla", "dms", "quest"])
def test_an_answer_goes_on_while_the_prompt_of_another_is_read(name):
    engine, given = engine_for(name), prompts((5, 30))
    alone = [engine.generate([prompt], sampling=GREEDY)[0] for prompt in given]
    requests, _, looks = joined_while_it_decodes(engine, given, [GREEDY] * 2)
    assert [each.generated for each in requests] == [each.tokens for each in alone]
    # A chunk of the answer after each chunk of the prompt, as long as there is one; at each look
    # half of one still runs.
    chunk, width = SHAPE["chunk"], SHAPE["prefill_chunk"]
    read = 1 + chunk // 2
    at = looks.index((read, 0))
    assert looks[at : at + 2] == [(read, 0), (read + chunk, width)]


@pytest.mark.nightly
def test_a_policy_that_cuts_prompts_reads_them_first():
    """Its steps have page tables for the rows that it has cut, and a dense prompt has more."""
    model = dataclasses.replace(
        model_for("vanilla", ends=False), policy=dms_jax.SnapKV(budget=16, window=4)
    )
    engine, given = Engine(model, max_tokens=64, **SHAPE), prompts((5, 30))
    alone = [joined_while_it_decodes(engine, [prompt], [GREEDY])[0][0] for prompt in given]
    requests, _, looks = joined_while_it_decodes(engine, given, [GREEDY] * 2)
    assert [each.generated for each in requests] == [each.generated for each in alone]
    # Half of a chunk still runs, and no other one is launched until the prompt is read.
    assert {generated for generated, read in looks if 0 < read < 30} == {1 + SHAPE["chunk"] // 2}


@pytest.mark.nightly
def test_a_request_joins_a_prompt_that_is_half_read():
    engine, (first, prompt) = wide_engine(), prompts((5, 30))
    (alone,) = engine_for("vanilla").generate([prompt], sampling=GREEDY)
    one, two, three = [
        make_request(engine.model.config, each, GREEDY, index=index, copy=index)
        for index, each in enumerate((first, prompt, prompt))
    ]
    coming = [[one], [two], [], [three]]

    def incoming(wait):
        return coming.pop(0) if coming else None

    engine.serve([], GREEDY, lambda update: None, incoming=incoming)
    assert two.generated == three.generated == alone.tokens
    assert (two.usage.prefilled_tokens, three.usage.prefilled_tokens) == (30, 0)
    assert engine.runner.allocator.pages_in_use == 0


@pytest.mark.nightly
def test_a_prompt_that_an_answer_leaves_no_room_is_read_again():
    """The answer grows while the prompt is read, and the pool does not hold both to the end."""
    engine, (first, prompt) = engine_for("vanilla"), prompts((5, 40))
    long = dataclasses.replace(GREEDY, max_new_tokens=58)
    short = dataclasses.replace(GREEDY, max_new_tokens=4)
    rows = engine.runner.lengths[:, 0].size
    alone = [engine.generate([p], sampling=s)[0] for p, s in ((first, long), (prompt, short))]
    with squeezed(engine, 6 * rows):
        (one, two), *_ = joined_while_it_decodes(engine, (first, prompt), (long, short))
    assert [one.generated, two.generated] == [each.tokens for each in alone]
    assert two.usage.prefilled_tokens > len(prompt)


@pytest.mark.nightly
@pytest.mark.parametrize("reason", ["end", "length"])
def test_an_answer_of_one_token_makes_room_before_anything_is_put_back(reason):
    """Neither it nor the younger one leaves a full pool, and is read again."""
    given, samplings = prompts((5, 30, 30)), [GREEDY] * 3
    samplings[0] = dataclasses.replace(GREEDY, max_new_tokens=50)
    alone = [
        engine_for("vanilla").generate([prompt], sampling=sampling)[0].tokens
        for prompt, sampling in zip(given, samplings, strict=True)
    ]
    first = alone[1][0]
    assert first not in alone[0] + alone[2]
    engine = wide_engine()
    if reason == "length":
        samplings[1] = ONE
    else:
        ends = GenerationDefaults(eos_token_ids=(first,))
        model = dataclasses.replace(engine.model, generation=ends)
        engine = Engine(model, max_tokens=64, **SHAPE | dict(num_lanes=4))
    # The oldest has 21 tokens in the cache when the others come, and 45 when their prompts have
    # been read. Its next chunk takes four pages then, that of the youngest three, and the prompt of
    # the one that has ended two: nine, of eight.
    with squeezed(engine, 8 * engine.runner.lengths[:, 0].size):
        requests, told, _ = joined_while_it_decodes(
            engine, given, samplings, after=2 * SHAPE["chunk"]
        )
    assert [each.generated for each in requests] == [alone[0], [first], alone[2]]
    assert [each.finish_reason for each in requests] == ["length", reason, "length"]
    assert [each.usage.prefilled_tokens for each in requests] == [5, 30, 30]
    assert requests[1].usage.live_tokens == 30
    assert next(each.index for each in told if each.finished) == 1


@pytest.mark.nightly
def test_a_prompt_is_read_on_when_another_one_is_put_back(monkeypatch):
    """Two come together, and the pool holds one of them beside the answer that grows."""
    model, given = model_for("random", ends=False), prompts((5, 70, 70))
    shape = dict(num_lanes=3, page_size=8, chunk=4, prefill_chunk=16)
    engine = Engine(model, max_tokens=96, **shape)
    first, *others = [
        make_request(
            model.config, prompt, dataclasses.replace(GREEDY, max_new_tokens=tokens), index=index
        )
        for index, (prompt, tokens) in enumerate(zip(given, (60, 4, 4), strict=True))
    ]
    coming, programs, looks, extend = [[first], others], [], [], engine.runner.extend

    def counted(*given, **more):
        programs.append(more)
        return extend(*given, **more)

    def incoming(wait):
        if not others[0].generated:
            looks.append(len(programs))
        return coming.pop(0) if coming else None

    monkeypatch.setattr(engine.runner, "extend", counted)
    with squeezed(engine, 234):
        engine.serve([], GREEDY, lambda update: None, incoming=incoming)
    assert looks == list(range(6))  # a program of prompts at each look, until the older one is read
    assert others[1].usage.prefilled_tokens > len(given[2])  # the younger one was put back

"""Answers with a grammar, beside answers without."""

import collections
import concurrent.futures
import dataclasses
import functools
import inspect
import json
import random
import re
import time
import types
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import llguidance
import numpy as np
import pytest

import dms_jax
from dms_jax.errors import ConfigError
from dms_jax.generation import Engine, Sampling, checked_steps, grammar, programs
from dms_jax.generation import runner as runner_module
from dms_jax.generation.checked_steps import CheckedSteps
from dms_jax.generation.engine import Source
from dms_jax.generation.grammar import (
    Grammar,
    Matcher,
    make_matchers,
    masks_of,
)
from dms_jax.generation.in_flight import InFlight
from dms_jax.generation.requests import NotNumbersError, make_request
from dms_jax.generation.sampling import LanesFilter, sample
from dms_jax.model.caching import init_cache
from dms_jax.model.language_model import GenerationDefaults
from dms_jax.policies.values import CacheShape
from tests.generation.schedules import serve_at_random
from tests.generation.support import (
    MECHANISMS,
    SHAPE,
    model_for,
    prompts,
    requests_of,
    serve_arrivals,
    squeezed,
    stories,
)
from tests.laws.rows import OPTIONS
from tests.support.instances import further, nightly_but

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GREEDY = Sampling(temperature=0, max_new_tokens=48)
PROMPTS = prompts((5, 9, 4, 7))


@pytest.fixture(scope="module")
def engine():
    """The shipped model with its end token, which grammars need."""
    options = dict(num_lanes=4, max_tokens=64, page_size=16, chunk=4, prefill_chunk=16)
    return Engine(stories(), dms_jax.Vanilla(), **options)


def bits(allowed):
    """Masks of rows of booleans, as `Filter.allowed` has them."""
    padded = np.zeros((len(allowed), -(-allowed.shape[1] // 32) * 32), bool)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


def is_person(text):
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 6
        and 0 <= found["age"] <= 99
        and set(found["tags"]) <= {"a", "b"}
        and len(found["tags"]) <= 2
    )


# -- the draw ------------------------------------------------------------------------------------

draw = jax.jit(sample)  # otherwise its operations would be a hundred small programs
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=3.0),
    Sampling(temperature=2.0, top_p=0.8),
    Sampling(temperature=2.0, top_k=3, min_p=0.01),
]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "lanes"])
def test_only_allowed_tokens_are_drawn(together):
    size, rows = 150, 64
    random = np.random.default_rng(0)
    logits = random.normal(size=(rows, size)).astype(np.float32) * 3
    allowed = random.random((rows, size)) < 0.05
    allowed[np.arange(rows), random.integers(0, size, rows)] = True
    allowed[0] = False
    allowed[0, -1] = True  # the last token, in a word that is not full
    likeliest = np.where(allowed, logits, -np.inf).argmax(1)
    keys = jax.vmap(jax.random.key)(np.arange(rows, dtype=np.uint32))
    for place, sampling in enumerate(SAMPLINGS):
        rule = sampling.filter
        if together:
            lanes = {lane: SAMPLINGS[(lane + place) % len(SAMPLINGS)] for lane in range(rows)}
            rule = LanesFilter(rows).of(lanes)
        rule = dataclasses.replace(rule, allowed=jnp.asarray(bits(allowed)))
        drawn = draw(jnp.asarray(logits), keys, jnp.arange(rows), rule)
        tokens, logprobs = map(np.asarray, drawn)
        assert allowed[np.arange(rows), tokens].all()
        everything = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
        want = everything[np.arange(rows), tokens]
        chex.assert_trees_all_close(logprobs.astype(np.float64), want, atol=1e-5)
        if sampling.temperature == 0 and not together:
            assert tokens.tolist() == likeliest.tolist()
        if place == 1 and not together:
            assert (tokens != likeliest).any()


def test_tokens_drawn_again_follow_the_masked_distribution():
    """A free draw that is allowed, else one under the mask: shares of 40,000 draws."""
    rows, size = 40_000, 6
    logits = np.array([2.0, 1.5, 0.5, 0.0, -0.5, -1.0])
    allowed = np.array([False, True, False, True, True, False])
    everything = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, size))
    seeds = jnp.stack([jnp.arange(rows), jnp.zeros(rows, int)], 1).astype(jnp.uint32)
    positions, rule = jnp.zeros(rows, jnp.int32), Sampling(temperature=1.0).filter
    free, _ = draw(everything, programs.request_keys(seeds), positions, rule)
    refused = np.flatnonzero(~allowed[np.asarray(free)]).astype(np.int32)
    assert 0.5 < len(refused) / rows < 0.7
    model = types.SimpleNamespace(unembed=lambda hidden: hidden)
    redraw = jax.jit(functools.partial(inspect.unwrap(programs.redraw), model))
    trail = programs.Trail(everything[None], positions[None])
    cache = init_cache(stories().config, dms_jax.Vanilla(), num_sequences=rows, num_pages=1)
    _, _, tokens = redraw(
        cache,
        None,
        trail,
        None,
        free,
        np.stack([refused, np.zeros_like(refused), np.zeros_like(refused)]),
        bits(np.broadcast_to(allowed, (len(refused), size))),
        seeds,
        rule,
    )
    found = np.bincount(np.asarray(tokens), minlength=size) / rows
    want = np.where(allowed, np.exp(logits), 0)
    want /= want.sum()
    chex.assert_trees_all_close(found, want, atol=4 * np.sqrt(0.25 / rows))


# -- the engine ----------------------------------------------------------------------------------


def test_greedy_answer_takes_likeliest_allowed_token(engine):
    """The oracle is one pass over the whole sequence, with a separate matcher."""
    sampling = dataclasses.replace(GREEDY, grammar=Grammar.json_schema(PERSON), logprobs=True)
    found = engine.generate(PROMPTS[:2], sampling=sampling)
    model = engine.model
    for prompt, each in zip(PROMPTS, found, strict=False):
        assert each.finish_reason == "end"
        assert is_person(each.text)
        sequence = prompt + each.tokens
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(sequence)] = sequence
        logits = np.asarray(model.logits(padded), np.float64)[0]
        matcher = llguidance.LLMatcher(grammar._tokens(model), sampling.grammar.source)
        for place, token in enumerate(each.tokens, len(prompt) - 1):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(mask, bitorder="little")[:512].astype(bool)
            assert token == np.where(allowed, logits[place], -np.inf).argmax()
            everything = logits[place] - np.log(np.exp(logits[place]).sum())
            assert each.logprobs[place - len(prompt) + 1] == pytest.approx(everything[token], 1e-3)
            assert matcher.consume_token(token)


def test_lanes_with_and_without_grammars_answer_as_alone(engine):
    """Each request joins while others run, with a different sampling; a chunk has four steps."""
    hot = Sampling(temperature=0.9, top_p=0.9, max_new_tokens=40, seed=3, logprobs=True)
    samplings = [
        hot,
        dataclasses.replace(GREEDY, grammar=Grammar.json_schema(PERSON)),
        dataclasses.replace(hot, grammar=Grammar.regex(r"(the|The) [a-z]{3,5}!"), seed=4),
        dataclasses.replace(GREEDY, max_new_tokens=21),
    ]
    alone = [
        engine.generate([prompt], sampling=sampling)[0]
        for prompt, sampling in zip(PROMPTS, samplings, strict=True)
    ]
    assert is_person(alone[1].text)
    assert re.fullmatch(r"(the|The) [a-z]{3,5}!", alone[2].text.strip(" "))
    for order in ([[0, 1], [2], [3]], [[1], [0, 2, 3]], [[3, 0], [2, 1]]):
        requests = requests_of(PROMPTS, samplings)
        serve_arrivals(engine, [[requests[place] for place in some] for some in order])
        for each, want in zip(requests, alone, strict=True):
            assert (each.generated, each.finish_reason) == (want.tokens, want.finish_reason)


def test_ignore_eos(engine):
    """Alone, and beside an answer with a grammar, where each step draws with masks."""
    # With this seed the end token is drawn, as the last of a chunk.
    ends = Sampling(temperature=3.0, top_p=0.9, max_new_tokens=40, seed=63, logprobs=True)
    endless = dataclasses.replace(ends, ignore_eos=True)
    (ended,), (whole,) = (
        engine.generate(PROMPTS[:1], sampling=sampling) for sampling in (ends, endless)
    )
    assert (ended.finish_reason, whole.finish_reason) == ("end", "length")
    assert whole.tokens[: len(ended.tokens)] == ended.tokens
    masked = dataclasses.replace(GREEDY, grammar=Grammar.regex("[a-z ]{20,}"))
    requests = requests_of([PROMPTS[0]] * 2, [endless, masked])
    serve_arrivals(engine, [requests])
    assert (requests[0].generated, requests[0].finish_reason) == (whole.tokens, "length")


def test_only_chunks_with_a_grammar_run_step_by_step(engine, monkeypatch):
    """Requests without a grammar use the ordinary programs."""
    chunks, runner = [], engine.runner
    decode, run = runner.decode, CheckedSteps.run
    monkeypatch.setattr(
        runner, "decode", lambda *given, **more: chunks.append("whole") or decode(*given, **more)
    )
    monkeypatch.setattr(
        CheckedSteps, "run", lambda *given, **more: chunks.append("step") or run(*given, **more)
    )
    short = dataclasses.replace(GREEDY, max_new_tokens=20, grammar=Grammar.regex("[a-z]{2}"))
    requests = requests_of(PROMPTS[:2], [dataclasses.replace(GREEDY, max_new_tokens=20), short])
    serve_arrivals(engine, [requests])
    assert len(requests[1].generated) <= 4  # two letters in one or two tokens, and the end
    assert len(requests[0].generated) == 20
    steps = chunks.count("step")
    assert steps in (1, 2)  # of four steps each, which a refused token voids
    assert chunks in [["step"] * steps + ["whole"] * whole for whole in (3, 4)]


def test_grammar_resumes_after_error(engine, monkeypatch):
    """Its matcher has consumed tokens that the error lost."""
    sampling = dataclasses.replace(GREEDY, grammar=Grammar.json_schema(PERSON))
    want = engine.generate(PROMPTS[:2], sampling=sampling)
    requests = requests_of(PROMPTS[:2], sampling)
    collect, count = InFlight.collect_steps, []

    def failing(self, some=None):
        count.append(len(self.programs))
        if len(count) > 9 and self.programs:
            raise NotNumbersError("steps that were launched", [99])
        collect(self, some)

    with monkeypatch.context() as patched:
        patched.setattr(InFlight, "collect_steps", failing)
        with pytest.raises(NotNumbersError):
            serve_arrivals(engine, [requests])
    assert 1 < len(requests[0].generated) < len(want[0].tokens)
    engine.serve(Source(requests))
    assert [each.generated for each in requests] == [each.tokens for each in want]


def host_grammars():
    """Samplings with grammars of all lengths, some limited by tokens, and without a grammar."""
    schema = Grammar.json_schema(PERSON)
    return [
        dataclasses.replace(GREEDY, grammar=schema, logprobs=True),
        Sampling(max_new_tokens=21, seed=1, logprobs=True),
        Sampling(max_new_tokens=7, seed=2, grammar=Grammar.regex(r"[a-z ]*"), logprobs=True),
        Sampling(max_new_tokens=40, seed=3, grammar=Grammar.regex("[a-z]{3,9}"), logprobs=True),
        Sampling(max_new_tokens=1, seed=4, grammar=schema, logprobs=True),
        Sampling(max_new_tokens=30, seed=5, grammar=schema, stop="na", logprobs=True),
    ]


def told(engine, looks):
    """Serves arrivals; returns the tokens and texts that were sent for each request."""
    sent = collections.defaultdict(lambda: ([], ""))

    def note(update):
        tokens, text = sent[update.index]
        sent[update.index] = (tokens + update.tokens, text + update.text)

    serve_arrivals(engine, looks, on_tokens=note)
    return sent


KEEPS, EVICTS = dms_jax.Vanilla(), dms_jax.RandomEviction(window=10, rate=0.6)


def fake_engine(num_lanes, chunk, policy=KEEPS, **options):
    """The shipped model with its end token, for the fakes."""
    options = dict(max_tokens=64, page_size=16, prefill_chunk=16) | options
    model = dataclasses.replace(stories(), policy=policy)
    return Engine(model, policy, num_lanes=num_lanes, chunk=chunk, **options)


@functools.cache
def one_by_one(policy):
    """With chunks of one step each token is consumed as soon as it is drawn."""
    return fake_engine(1, 1, policy)


@functools.cache
def alone(prompt, sampling, max_new_tokens, policy):
    """Returns the ended request that ran alone, by the fakes; nothing is ever taken back."""
    (request,) = requests_of([list(prompt)], [sampling])
    request.max_new_tokens = max_new_tokens
    with mock.patch.multiple(checked_steps, **BEFORE):
        serve_arrivals(one_by_one(policy), [[request]])
    return request


def alone_as(request, policy=KEEPS):
    """Returns the same request, ended, alone."""
    return alone(tuple(request.prompt), request.sampling, request.max_new_tokens, policy)


# When tokens are checked: before the next step, during it, and several during the next ones.
BEFORE, NEXT, TOGETHER = (
    dict(zip(("MOST_REFUSED", "FEW_REFUSED"), shares, strict=True))
    for shares in ((0, 0), (2, 0), (2, 2))
)
BY_SHARE = {name: getattr(checked_steps, name) for name in TOGETHER}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(("lanes", "chunk"), [(2, 2), (6, 8), *further((2, 32), (6, 2), (6, 32))])
def test_grammar_answers_do_not_depend_on_chunk(lanes, chunk):
    found = requests_of(prompts((5, 9, 4, 7, 3, 8)), host_grammars())
    want = [alone_as(each) for each in found]
    assert {each.finish_reason for each in want} >= {"end", "length"}
    looks = [found[:2], found[2:3], [], found[3:]]
    sent = told(fake_engine(lanes, chunk), looks)
    for one, other in zip(want, found, strict=True):
        for name in ("generated", "logprobs", "finish_reason", "text"):
            assert getattr(other, name) == getattr(one, name)
        for name in ("kv_reads", "live_tokens", "peak_tokens", "new_tokens"):
            assert getattr(other.usage, name) == getattr(one.usage, name)
        assert sent[other.index] == (other.generated, other.text)


class FailingMatcher(Matcher):
    """A matcher that cannot be followed beyond some tokens."""

    def __init__(self, matcher, most):
        super().__init__(matcher.compiled, matcher._end_tokens)
        self.most, self._count, self._failed = most, 0, False

    def restart(self, tokens):
        super().restart(tokens)
        self._count = len(tokens)

    def consume(self, token):
        super().consume(token)
        self._count += 1

    def consume_allowed(self, tokens):
        allowed = super().consume_allowed(tokens[: self.most - self._count])
        self._count += allowed
        self._failed |= self._count == self.most and allowed < len(tokens)
        return allowed

    @property
    def error(self):
        return "too complex" if self._failed else super().error


def drawn_requests(choose, samplings):
    """Returns four to twelve requests.

    Some are limited to a few tokens, and some grammars cannot be followed beyond a few.
    """
    requests = []
    for index in range(choose.randint(4, 12)):
        sampling = choose.choice(samplings)
        prompt = PROMPTS[choose.randrange(len(PROMPTS))]
        request = make_request(stories().config, prompt, sampling, index=index, seed=sampling.seed)
        request.max_new_tokens = choose.choice((1, 2, 9, sampling.max_new_tokens))
        requests.append(request)
    make_matchers(stories(), requests)
    lot = random.Random(len(requests) + requests[0].max_new_tokens)
    for request in requests:
        if isinstance(request.matcher, Matcher) and lot.random() < 0.1:
            request.matcher = FailingMatcher(request.matcher, lot.choice((1, 2, 6, 17)))
    return requests


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("checks", "chunk", "policy"),
    [
        (TOGETHER, 4, EVICTS),
        (TOGETHER, 16, KEEPS),
        (NEXT, 4, KEEPS),
        (BEFORE, 2, KEEPS),
        *further(
            (TOGETHER, 8, EVICTS),
            (TOGETHER, 1, KEEPS),
            (TOGETHER, 2, KEEPS),
            (NEXT, 4, EVICTS),
            (BEFORE, 4, EVICTS),
            (BY_SHARE, 8, EVICTS),
        ),
    ],
)
def test_random_arrivals_with_grammars(checks, chunk, policy):
    """Cancelled, failed, preempted, stopped in all states of the checks: each as alone.

    Requests join lanes that go on, also where nothing is refused.
    """
    options = dict(page_size=8, prefix_cache=3e5 if chunk in (1, 4) else None)
    engine = fake_engine(6, chunk, policy, **options)
    pairs = Grammar.regex("([ a-z]{1,6}!){200,}")
    anything = Grammar.regex(r"(.|\n)*")
    samplings = [
        *host_grammars(),
        Sampling(max_new_tokens=30, seed=6, grammar=pairs, logprobs=True),
        Sampling(max_new_tokens=40, seed=7, grammar=anything, logprobs=True),
    ]
    rows = stories().config.num_layers * stories().config.num_kv_heads
    reached = collections.Counter()
    for seed in range(16):
        choose = random.Random(seed)
        requests = drawn_requests(choose, samplings)
        squeeze = squeezed(engine, choose.choice((8, 11, 30)) * rows)
        with squeeze, mock.patch.multiple(checked_steps, **checks):
            events = serve_at_random(engine, requests, choose)
            engine.runner.prefixes.clear()
        reached += collections.Counter(each.finish_reason for each in requests)
        reached["preempted"] += len(events.preempted)
        for each in requests:
            want, count = alone_as(each, policy), len(each.generated)
            assert each.generated == want.generated[:count]
            assert each.logprobs == want.logprobs[: len(each.logprobs)]
            if each.finish_reason == "grammar":
                assert count == each.matcher.most
                assert each.failure == (
                    "The grammar of an answer cannot be followed to its end: too complex. Give a "
                    "simpler one."
                )
            if each.finish_reason in ("cancelled", "grammar"):
                continue
            assert (each.finish_reason, each.text) == (want.finish_reason, want.text)
            assert each.usage.new_tokens == want.usage.new_tokens
            if each.index not in events.preempted and not each.usage.cached_tokens:
                assert each.usage.kv_reads == want.usage.kv_reads
    kinds = (
        "end",
        "length",
        "stop",
        "grammar",
        "cancelled",
        *(["preempted"] if policy is KEEPS else []),
    )
    assert all(reached[each] for each in kinds), reached


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("tokens", [27, 40])
def test_lanes_with_void_steps_reach_their_length(tokens, monkeypatch):
    """A chunk counts all its steps until it is collected, so the next one may plan too few."""
    for name, value in TOGETHER.items():
        monkeypatch.setattr(checked_steps, name, value)
    options = dict(max_tokens=64, page_size=16, prefill_chunk=16, num_lanes=4)
    pairs = Grammar.regex("([ a-z]{1,6}!){200,}")
    samplings = [Sampling(max_new_tokens=tokens, grammar=pairs, seed=seed) for seed in range(4)]
    found = []
    for chunk in (1, 4, 8):
        requests = requests_of(PROMPTS, samplings)
        serve_arrivals(Engine(stories(), dms_jax.Vanilla(), chunk=chunk, **options), [requests])
        found.append([(each.generated, each.finish_reason) for each in requests])
        assert all(re.fullmatch("([ a-z]{1,6}!)*[ a-z]{0,6}", each.text) for each in requests)
    assert found[0] == found[1] == found[2]
    assert {len(generated) for generated, _ in found[0]} == {tokens}


# -- refusals ------------------------------------------------------------------------------------


def properties(count):
    return {"type": "object", "properties": {str(each): {} for each in range(count)}}


def multiples(*numbers):
    return {"anyOf": [{"type": "number", "multipleOf": each} for each in numbers]}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Grammar.json_schema({"type": "objekt"}), "compiled: .*Invalid type: objekt"),
        (lambda: Grammar.json_schema({"unevaluatedProperties": False}), "unevaluatedProperties"),
        (lambda: Grammar.json_schema([1]), "is an object, got"),
        (lambda: Grammar.json_schema({"enum": {1, 2}}), "no JSON"),
        (lambda: Grammar.regex("a" * 2**18), "characters, .* 262,144"),
        (lambda: Grammar.json_schema({"items": properties(5001)}), "5,001 properties, .* 5,000"),
        (lambda: Grammar.json_schema(multiples(100_003)), "is 100003 .*at most 100,000"),
        (lambda: Grammar.json_schema(multiples(991, 997)), "is 988027 "),
        (lambda: Grammar.json_schema(multiples(1234.567)), "is 1234567 "),
        (lambda: Grammar.regex("a(b"), "unclosed group"),
        (lambda: Grammar.regex(3), "is a text, got 3"),
        (lambda: Grammar.lark("start: nowhere"), "nowhere"),
    ],
)
def test_invalid_grammar_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_common_multiples_are_allowed():
    """Factors of 2 and 5 cost nothing; neither do numbers that are no multiples."""
    Grammar.json_schema(multiples(1_000_000, 0.0001, 1e-9, 3600, 7))
    Grammar.json_schema({"type": "object", "properties": {"multipleOf": {"const": 1234567}}})


def test_grammar_without_match_is_refused_before_it_runs():
    """It would fail a chunk, and the requests that run beside it would be recomputed."""
    for nothing in (Grammar.regex(r"[^\s\S]"), Grammar.json_schema({"$ref": "#"})):
        requests = requests_of(PROMPTS[:1], Sampling(grammar=nothing))
        with pytest.raises(ConfigError, match=r"cannot be compiled: no text matches it\.?$"):
            make_matchers(stories(), requests)


def test_few_long_grammars_are_kept(monkeypatch):
    """Compiled ones hold hundreds of bytes for each of their characters."""
    sources = [Grammar.regex("a" * count) for count in (20, 30, 20, 40)]
    monkeypatch.setattr(grammar, "_MOST_CHARACTERS", len(sources[2].source + sources[3].source))
    for each in sources:
        make_matchers(stories(), requests_of(PROMPTS[:1], Sampling(grammar=each)))
    assert [source for _, source in grammar._kept] == [each.source for each in sources[2:]]


def test_threads_with_one_grammar_compile_it_once(monkeypatch):
    pairs, compiled, own = Grammar.regex("(ab|cde){3}"), [], llguidance.LLMatcher

    def compile_slowly(*given, **more):
        compiled.append(given)
        time.sleep(0.1)
        return own(*given, **more)

    monkeypatch.setattr(llguidance, "LLMatcher", compile_slowly)
    requests = requests_of(PROMPTS, Sampling(grammar=pairs))
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        list(pool.map(lambda each: make_matchers(stories(), [each]), requests))
    assert len(compiled) == 1
    assert len({id(each.matcher.compiled) for each in requests}) == len(requests)


def test_schema_cannot_disable_keywords():
    """`x-guidance` is llguidance's own keyword of options."""
    schema = {"unevaluatedProperties": False, "x-guidance": {"lenient": True}}
    with pytest.raises(ConfigError, match="unevaluatedProperties"):
        Grammar.json_schema(schema)


def test_grammar_needs_end_token_and_tokenizer(engine):
    given = [(PROMPTS[0], dataclasses.replace(GREEDY, grammar=Grammar.regex("a")))]
    for change, said in (
        ({"generation": type(stories().generation)()}, "this model has none"),
        ({"tokenizer": None}, "has no tokenizer"),
    ):
        model = dataclasses.replace(stories(), **change)
        assert not grammar.is_served(model)
        requests = requests_of([given[0][0]], given[0][1])
        with pytest.raises(ConfigError, match=said):
            grammar.make_matchers(model, requests)
    assert grammar.is_served(stories())


def test_missing_llguidance_names_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'dms-jax\[grammar\]'"):
        Grammar.regex("a")
    assert not grammar.is_served(stories())


@pytest.mark.usefixtures("fakes")
def test_end_token_that_is_a_word_ends_no_unfinished_answer():
    ends = tuple(range(259, 355))  # most of the words that the fakes draw
    model = dataclasses.replace(stories(), generation=GenerationDefaults(eos_token_ids=ends))
    engine = Engine(model, num_lanes=2, max_tokens=64, page_size=16, chunk=4, prefill_chunk=16)
    sampling = Sampling(max_new_tokens=40, grammar=Grammar.regex("[ -~]{30}"), seed=(1, 2))
    for each in engine.generate(PROMPTS[:2], sampling=sampling):
        assert re.fullmatch("[ -~]{30}" if each.finish_reason == "end" else "[ -~]*", each.text)


def test_opening_forces_its_tokens():
    tokens = (33, 69, 31)
    matcher = grammar.OpeningMatcher(grammar.Opening(tokens))
    for number, token in enumerate(tokens, 1):
        assert matcher.only == token
        found = masks_of({1: matcher}, 2, 70)
        bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")
        assert bits[0].all()
        assert np.flatnonzero(bits[1]).tolist() == [token]
        assert matcher.force(1) == tokens[number : number + 1]
    assert matcher.only is None
    assert (masks_of({1: matcher}, 2, 70) == -1).all()
    matcher.restart([])
    assert matcher.force(2) == (69, 31)
    matcher.restart([33])
    assert matcher.only == 69


@pytest.mark.usefixtures("fakes")
def test_opening_joins_answers_with_grammars():
    """Programs with forced tokens have the likeliest ones, those before it have none."""
    engine = Engine(stories(), num_lanes=8, max_tokens=64, page_size=16, chunk=16)
    text = Sampling(temperature=0.7, max_new_tokens=40, grammar=Grammar.regex(r"(.|\n)*"), seed=3)
    opened = dataclasses.replace(text, grammar=grammar.Opening((301, 302, 303, 304, 305)))
    (alone,) = engine.generate(PROMPTS[:1], sampling=opened)
    samplings = [*[text] * 5, opened]
    requests = [
        make_request(engine.model.config, PROMPTS[0], sampling, index=index, seed=3)
        for index, sampling in enumerate(samplings)
    ]
    serve_arrivals(engine, [requests[:5], [], requests[5:]])
    assert requests[5].generated == alone.tokens
    assert requests[5].generated[:5] == [301, 302, 303, 304, 305]
    assert requests[5].likeliest == alone.likeliest
    assert len(requests[5].likeliest) == len(requests[5].generated)
    assert not requests[0].likeliest


# -- every policy ----------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("name", MECHANISMS)
def test_grammar_of_any_text_changes_no_answer(name):
    """Steps in two programs equal those of a chunk, under every policy."""
    engine = Engine(model_for(name), max_tokens=64, **SHAPE)
    free = Sampling(temperature=0, max_new_tokens=20, logprobs=True)
    every = dataclasses.replace(free, grammar=Grammar.regex(r"(.|\n)*"))
    lengths = prompts((5, 30, 1, 13))
    for one, other in zip(
        engine.generate(lengths, sampling=free),
        engine.generate(lengths, sampling=every),
        strict=True,
    ):
        assert one.tokens == other.tokens
        chex.assert_trees_all_close(np.array(one.logprobs), np.array(other.logprobs), atol=1e-4)
        assert one.usage.live_tokens == other.usage.live_tokens
        assert one.usage.kv_reads == other.usage.kv_reads
        assert one.usage.peak_tokens == other.usage.peak_tokens


def test_policies_with_state_by_page_take_no_step_back():
    """A step changes it, and only lengths and the state of rows are restored."""
    shape = CacheShape(1, 2, 4, jnp.float32, num_pages=2, page_size=4)
    undoable = [each for some in OPTIONS.values() for each in some if each.can_undo]
    assert {type(each) for each in undoable} == {
        dms_jax.Vanilla,
        dms_jax.DMS,
        dms_jax.StreamingLLM,
        dms_jax.RandomEviction,
        dms_jax.KVzap,
    }
    for policy in undoable:
        assert not jax.tree.leaves(policy.init_state(shape).pages), policy


UNDOABLE = {
    "vanilla": dms_jax.Vanilla(),
    "dms": MECHANISMS["dms"],
    "a long window": dms_jax.RandomEviction(window=16, rate=0.6),
    "a short window": dms_jax.RandomEviction(window=4, rate=0.6),
    "without a window": dms_jax.RandomEviction(window=0, rate=0.6),
    "streaming": dms_jax.StreamingLLM(budget=12, sinks=2),
}


@pytest.mark.parametrize("name", nightly_but(["a long window"], UNDOABLE))
def test_steps_taken_back_change_no_answer(name):
    """Refused tokens cost steps, unless the check comes before these."""
    people = dataclasses.replace(GREEDY, grammar=Grammar.json_schema(PERSON), logprobs=True)
    samplings = [people, dataclasses.replace(GREEDY, max_new_tokens=20, logprobs=True)]
    assert UNDOABLE[name].can_undo
    model = dataclasses.replace(stories(), policy=UNDOABLE[name])
    engine = Engine(model, UNDOABLE[name], max_tokens=64, **SHAPE)
    runs = []
    for checks in (BEFORE, NEXT, TOGETHER):
        with mock.patch.multiple(checked_steps, **checks):
            requests = requests_of(PROMPTS[:2], samplings)
            serve_arrivals(engine, [requests])
            runs.append(requests)
    assert is_person(runs[0][0].text)
    for one, other in [*zip(*runs[:2], strict=True), *zip(*runs[::2], strict=True)]:
        assert one.generated == other.generated
        chex.assert_trees_all_close(np.array(one.logprobs), np.array(other.logprobs), atol=1e-4)
        for what in ("live_tokens", "kv_reads", "peak_tokens", "new_tokens"):
            assert getattr(one.usage, what) == getattr(other.usage, what)


@pytest.mark.parametrize(
    ("policy", "size"),
    [
        (dms_jax.Vanilla(), 8),
        (dms_jax.RandomEviction(window=16), 8),
        (dms_jax.RandomEviction(window=4), 4),  # of 5 slots; 4 divides 16
        (dms_jax.RandomEviction(window=0), 1),
        (dms_jax.TOVA(budget=20), 1),
    ],
)
def test_checked_programs_have_as_many_steps_as_can_be_taken_back(policy, size, monkeypatch):
    runner = Engine(stories(), policy, num_lanes=2, max_tokens=64).runner
    assert runner.checked_size(16) == size
    assert runner.checked_size(1) == 1
    monkeypatch.setattr(runner_module, "TRAIL_BYTES", 1)
    assert runner.checked_size(16) == (size if policy.appends else 1)


def test_steps_taken_back_freeze_no_slots():
    """The last of three lanes took both steps of a program back, the second one of them."""
    both, lanes = np.ones((2, 3), bool), np.full(3, 2)
    rows, numbers = np.full((1, 3, 1), 9, np.int32), np.full((2, 3), 9, np.int32)
    steps = programs.Steps(
        *(numbers, None, None, both),
        ran=both,
        live=numbers,
        reads=numbers,
        lengths=rows,
        frozen=rows,
    )
    program = checked_steps._Program(
        size=2,
        result=programs.Packed.of(jax.tree.map(jnp.asarray, steps)),
        trail=None,
        tail=None,
        before=None,
        begins=~both[0],
        most=lanes,
        kept=np.array([2, 1, 0]),
    )
    checked = checked_steps.Checked(
        most=lanes, epochs=lanes, tail=None, table=None, programs=[program], ended=~both[0]
    )
    found, _ = checked.read()
    assert found.ran.sum(0).tolist() == [2, 1, 0]
    assert found.frozen[0, :, 0].tolist() == [9, 0, 0]


def test_too_complex_grammar_ends_its_answer_alone(engine):
    """The answer before it is kept, as is every other one."""
    limited = dataclasses.replace(GREEDY, grammar=Grammar.regex("[a-zA-Z ,.!\\n]+"))
    alone, requests = (requests_of(PROMPTS[:2], [limited, GREEDY]) for _ in range(2))
    serve_arrivals(engine, [alone])
    make_matchers(stories(), requests)
    requests[0].matcher = FailingMatcher(requests[0].matcher, 10)
    serve_arrivals(engine, [requests])
    assert [each.finish_reason for each in requests] == ["grammar", alone[1].finish_reason]
    assert [each.generated for each in requests] == [alone[0].generated[:10], alone[1].generated]
    assert len(alone[0].generated) > 10

"""One model under every policy, and engines of one compiled shape, for real programs and for fakes.

Tests of the host run on `host_engine`, whose programs compute nothing (fixture `fakes`), and
compare with `answer`, which predicts their answers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.generation import Engine, programs
from dms_jax.generation.engine import Source
from dms_jax.generation.prefill import Shape, Shapes
from dms_jax.generation.requests import Request, make_request
from dms_jax.generation.sampling import Sampling
from dms_jax.model import low_rank
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from dms_jax.model.low_rank import LowRank
from tests.support.fake_programs import Answer, answer_of

BY_TOKEN: Any = dict(prefill="evict_past_budget")
POLICIES = {
    "vanilla": dms_jax.Vanilla(),
    "dms": dms_jax.DMS(window=10, alpha_offset=0.0),
    "dmc": dms_jax.DMC(offset=0.0),
    "tova": dms_jax.TOVA(budget=20, **BY_TOKEN),
    "quest": dms_jax.Quest(budget=32, dense_layers=1),
}
# One policy per mechanism, for the real engine, also with preemption.
MECHANISMS = POLICIES | {
    "snapkv": dms_jax.SnapKV(budget=12, window=4, interval=4),
    "kcache": dms_jax.KCache(top=4, first_layers=1),
}
SHAPE = dict(num_lanes=2, page_size=16, chunk=8, prefill_chunk=8)
# Prompts of one to thirty tokens and answers of twenty fit four pages per row.
LENGTHS = (5, 30, 1, 13)
NEW_TOKENS = 20
GREEDY = dms_jax.Sampling(temperature=0, max_new_tokens=NEW_TOKENS, logprobs=True)


@functools.cache
def stories() -> LanguageModel:
    """The shipped model."""
    return dms_jax.load(assets.path("stories260k"), untrained=True)


@functools.cache
def model_for(name: str, *, ends: bool = True) -> LanguageModel:
    """Returns the shipped model, declared for a policy, with or without end tokens."""
    model = dataclasses.replace(stories(), policy=MECHANISMS[name])
    return model if ends else dataclasses.replace(model, generation=GenerationDefaults())


@functools.cache
def engine_for(name: str) -> Engine:
    """Returns the model without end tokens, so that answers reach their full length."""
    return Engine(model_for(name, ends=False), max_tokens=64, **SHAPE)


# Growth of the fakes' rows: all tokens, some, up to a budget, and with a cut prompt.
ROWS_OF = {
    "keeps": dms_jax.Vanilla(),
    "evicts": dms_jax.RandomEviction(window=10, rate=0.6),
    "bounded": dms_jax.TOVA(budget=20, **BY_TOKEN),
    "served": dms_jax.TOVA(budget=24, **BY_TOKEN),
    "large budget": dms_jax.TOVA(budget=28, **BY_TOKEN),
    "cuts": dms_jax.SnapKV(budget=8, window=4),
    "cuts often": dms_jax.SnapKV(budget=8, window=4, interval=4),
    # Admission assumes that this policy may evict, but it keeps every token.
    "might evict": dms_jax.RandomEviction(window=10, rate=0.0),
}
HOST_ENGINES: list[Engine] = []


@functools.cache
def host_engine(
    name: str = "keeps", lanes: int = 2, *, ends: tuple[int, ...] = (), **options
) -> Engine:
    """Returns an engine for the fakes; `ends` are the end tokens of its model."""
    model = dataclasses.replace(stories(), generation=GenerationDefaults(eos_token_ids=ends))
    shape = SHAPE | dict(num_lanes=lanes, max_tokens=64) | options
    HOST_ENGINES.append(Engine(model, ROWS_OF[name], **shape))
    return HOST_ENGINES[-1]


@functools.cache
def adapted(name: str) -> LanguageModel:
    """Returns the shipped model with low-rank updates, whose ranks depend on the name."""
    transformer, size = stories().transformer, LowRank(rank=1 + ord(name) % 2)
    factors = low_rank.initial_factors(transformer, size, jax.random.key(ord(name)))
    transformer = low_rank.add_factors(transformer, size, factors)
    return dataclasses.replace(stories(), transformer=transformer)


@functools.cache
def adapted_engine(name: str = "keeps", lanes: int = 2, **options) -> Engine:
    """Returns an engine for the fakes that has two adapters beside the model."""
    adapters = {each: adapted(each) for each in "ab"}
    shape = SHAPE | dict(num_lanes=lanes, max_tokens=64) | options
    model = dataclasses.replace(stories(), generation=GenerationDefaults())
    HOST_ENGINES.append(Engine(model, ROWS_OF[name], adapters=adapters, **shape))
    return HOST_ENGINES[-1]


def answer(prompt: Sequence[int], sampling: Sampling = GREEDY, name: str = "keeps", **given):
    """Returns the fakes' answer; see `answer_of`."""
    return _answer(tuple(prompt), sampling, name, **given)


@functools.cache
def _answer(prompt: tuple[int, ...], sampling: Sampling, name: str, **given) -> Answer:
    found = answer_of(prompt, sampling, ROWS_OF[name], **given)
    shown = found.tokens[:-1] if found.finish_reason == "end" else found.tokens
    for count in range(1, len(shown) + 1 if sampling.stop_strings else 0):
        text = text_behind([*prompt], shown[:count])
        if places := [text.find(stop) for stop in sampling.stop_strings if stop in text]:
            found = answer_of(prompt, sampling, ROWS_OF[name], **given | dict(new_tokens=count))
            return dataclasses.replace(found, finish_reason="stop", text=text[: min(places)])
    return dataclasses.replace(found, text=text_behind([*prompt], shown))


def check_requests(requests: Sequence[Request], name: str = "keeps", **given) -> None:
    """Compares ended requests with the fakes' answers to each alone."""
    for each in requests:
        answer(each.prompt, each.sampling, name, **given).check(each)


def requests_of(
    prompts: Sequence[list[int]], samplings: Sequence[Sampling] | Sampling, *, copies: bool = False
) -> list[Request]:
    """Returns requests with separate samplings, indexed by position.

    With `copies` equal prompts draw differently.
    """
    given = [samplings] * len(prompts) if isinstance(samplings, Sampling) else samplings
    return [
        make_request(stories().config, prompt, own, index=index, seed=own.seed, copy=copies * index)
        for index, (prompt, own) in enumerate(zip(prompts, given, strict=True))
    ]


def serve_arrivals(engine: Engine, looks: Sequence[list[Request]], on_tokens=None) -> None:
    """Serves requests that arrive at the first polls."""
    left = iter(looks)
    engine.serve(Source(on_tokens=on_tokens, incoming=lambda wait: next(left, None)))


@contextlib.contextmanager
def squeezed(engine: Engine, pages: int) -> Iterator[None]:
    """A context in which the idle engine's pool has fewer pages, for the same programs."""
    runner, restart = engine.runner, engine.runner.restart
    runner.recover()
    whole = runner.reservation.allocator._free[0]

    def squeeze():
        runner.reservation.allocator._free[0] = whole[len(whole) - pages :]

    def restart_squeezed():  # after an error there is a new pool
        restart()
        squeeze()

    squeeze()
    runner.restart = restart_squeezed
    try:
        yield
        assert runner.reservation.allocator.pages_in_use == 0
        assert len(runner.reservation.allocator._free[0]) == (len(whole) if runner.dirty else pages)
    finally:
        del runner.restart
        runner.reservation.allocator._free[0] = whole


def on_launch(monkeypatch, note: Callable[[programs.Program, tuple[Any, ...]], Any]) -> None:
    """Calls `note(program, arguments)` before each launch of a program."""
    call = programs.Program.__call__

    def launch(program, *arguments):
        note(program, arguments)
        return call(program, *arguments)

    monkeypatch.setattr(programs.Program, "__call__", launch)


def results_of(monkeypatch, owner: Any, name: str) -> list[Any]:
    """Returns a list to which each call of a method adds its result."""
    method, results = getattr(owner, name), []

    def noted(*arguments, **options):
        results.append(method(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(owner, name, noted)
    return results


def every_shape(shapes: Shapes) -> list[Shape]:
    """Returns the shapes of all widths, widest first."""
    return [shape for width in shapes.widths for shape in shapes.of_width(width)]


@functools.cache
def story_tokens() -> list[int]:
    """Returns tokens of real text."""
    text = " ".join(assets.stories("valid")[:4])
    return stories().tokenizer.encode(text)


def prompts(lengths=LENGTHS) -> list[list[int]]:
    """Returns prompts of these lengths from real text."""
    starts = np.cumsum([0, *lengths])
    return [
        story_tokens()[start : start + n] for start, n in zip(starts[:-1], lengths, strict=True)
    ]


def text_behind(prompt: list[int], tokens: list[int]) -> str:
    """Returns the text of tokens as it continues that of a prompt."""
    decode = stories().tokenizer.decode
    return decode([*prompt, *tokens]).removeprefix(decode(prompt))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))

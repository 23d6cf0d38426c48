"""One real model under every policy, and engines of one compiled shape."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.generation import Engine
from dms_jax.generation.sampling import Filter, LanesFilter, Sampling, Switches
from dms_jax.generation.shapes import Shape, Shapes
from dms_jax.model.language_model import GenerationDefaults, LanguageModel

POLICIES = {
    "vanilla": dms_jax.Vanilla(),
    "dms": dms_jax.DMS(window=10, alpha_offset=0.0),
    "dmc": dms_jax.DMC(offset=0.0),
    "tova": dms_jax.TOVA(budget=20),
    "quest": dms_jax.Quest(budget=16, dense_layers=1),
    "streaming": dms_jax.StreamingLLM(budget=20),
    "random": dms_jax.RandomEviction(window=10, rate=0.6),
}
SHAPE = dict(num_lanes=2, page_size=16, chunk=8, prefill_chunk=8)
# Prompts of one to thirty tokens and answers of twenty fit four pages per row.
LENGTHS = (5, 30, 1, 13)
NEW_TOKENS = 20
GREEDY = dms_jax.Sampling(temperature=0, max_new_tokens=NEW_TOKENS, logprobs=True)


@functools.cache
def stories() -> LanguageModel:
    """The shipped model."""
    return dms_jax.load(assets.path("stories260k"))


@functools.cache
def model_for(name: str, *, ends: bool = True) -> LanguageModel:
    """Returns the shipped model, declared for a policy, with or without end tokens."""
    model = dataclasses.replace(stories(), policy=POLICIES[name])
    return model if ends else dataclasses.replace(model, generation=GenerationDefaults())


@functools.cache
def engine_for(name: str) -> Engine:
    """Returns the model without end tokens, so that answers reach their full length."""
    return Engine(model_for(name, ends=False), max_tokens=64, **SHAPE)


@contextlib.contextmanager
def squeezed(engine: Engine, pages: int) -> Iterator[None]:
    """The idle engine's pool has so many pages for a while: a smaller one has other programs."""
    free = engine.runner.allocator._free
    whole = list(free)
    free[0] = whole[0][len(whole[0]) - pages :]
    try:
        yield
        assert engine.runner.allocator.pages_in_use == 0
        assert len(free[0]) == pages
    finally:
        free[:] = whole


def every_shape(shapes: Shapes) -> list[Shape]:
    """Returns the shapes of all widths, the widest first."""
    return [shape for width in shapes.widths for shape in shapes.of_width(width)]


class Unfiltered(LanesFilter):
    """The filter of lanes that are greedy or draw from all tokens: nothing is searched for."""

    def of(self, samplings: Mapping[int, Sampling]) -> Filter:
        """Returns the filter for what the lanes ask now."""
        assert not any(each.top_k or each.min_p or each.top_p < 1 for each in samplings.values())
        switches = Switches(greedy=False, top_k=False, top_p=False, min_p=False, search=False)
        return dataclasses.replace(super().of(samplings), searched=None, switches=switches)


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
    """Returns the text of tokens as it goes on behind that of a prompt."""
    decode = stories().tokenizer.decode
    return decode([*prompt, *tokens]).removeprefix(decode(prompt))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    largest = logits.max(-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))

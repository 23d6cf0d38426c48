"""Requests that come and are cancelled at random moments, in pools that are too small for them."""

import collections
import dataclasses
import functools
import random

import pytest

from dms_jax.generation import Completion, Engine, Sampling
from dms_jax.generation.requests import make_request
from dms_jax.generation.room import Room
from tests.generation.support import model_for, prompts, squeezed

pytestmark = pytest.mark.usefixtures("two_programs", "unfiltered")
SHAPE = dict(num_lanes=4, page_size=8, prefill_chunk=16)
PROMPTS = prompts((5, 30, 40))
# The second often: those that come together share it, and so do those that come while it is read.
CHOICES = (0, 1, 1, 1, 1, 1, 2)
ROUNDS = 25


# Letters that answers come to at any place; most requests stop at none.
STOPS = ((), (), ("w",), (" a", "ck"))


def settings(random_number, new_tokens, stop=()):
    """Greedy, or drawn from one of two seeds."""
    temperature = 0.0 if random_number == 0 else 1.0
    return Sampling(
        temperature=temperature, seed=random_number, max_new_tokens=new_tokens, stop=stop
    )


@functools.cache
def engine_of(name: str, chunk: int) -> Engine:
    """Returns an engine with room for all: chunks of 4 steps and of 8 have the same programs."""
    return Engine(model_for(name, ends=False), max_tokens=64, chunk=chunk, **SHAPE)


@functools.cache
def alone(name: str, prompt: int, *given) -> Completion:
    """Returns the answer of a request alone."""
    engine = engine_of(name, chunk=4)
    return engine.generate([PROMPTS[prompt]], sampling=settings(*given))[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "pages", "chunk"),
    [("vanilla", 280, 4), ("dms", 173, 4), ("vanilla", 320, 8), ("dms", 193, 8), ("dms", 640, 8)],
)
def test_whatever_comes_and_goes_each_answer_is_that_of_the_request_alone(
    name, pages, chunk, monkeypatch
):
    """Among them are requests whose first token ends them before their copy of a prompt fits.

    Of chunks of 8 steps the second half may run while lanes are given away, also those of answers
    that a stop string ended, of which the device does not know.
    """
    put_back = Room.put_back

    def checked(room, *given):
        assert not room.runner.unread.any()  # steps that may end an answer and make room
        return put_back(room, *given)

    monkeypatch.setattr(Room, "put_back", checked)
    engine, ended = engine_of(name, chunk), collections.Counter()
    config = engine.model.config
    for seed in range(ROUNDS):
        choose, stops = random.Random(seed), random.Random(-1 - seed)
        drawn = [
            (
                choose.choice(CHOICES),
                choose.choice((0, 0, 1, 2)),
                choose.choice((1, 1, 2, 4, 9, 20)),
                stops.choice(STOPS),
            )
            for _ in range(choose.randint(2, 9))
        ]
        requests = [
            make_request(config, PROMPTS[prompt], settings(*given), index=index, seed=given[0])
            for index, (prompt, *given) in enumerate(drawn)
        ]
        with squeezed(engine, pages):
            serve_at_random(engine, list(requests), choose)
        for request, key in zip(requests, drawn, strict=True):
            want = alone(name, *key)
            what = (seed, request.index)
            assert request.usage is not None, what
            if request.finish_reason == "cancelled":
                assert request.generated == want.tokens[: len(request.generated)], what
                continue
            ended[request.finish_reason] += 1
            assert (request.finish_reason, request.text) == (want.finish_reason, want.text), what
            assert request.generated == want.tokens, what
            for field in ("live_tokens", "peak_tokens", "kv_reads", "compression_ratio"):
                found, wanted = (getattr(usage, field) for usage in (request.usage, want.usage))
                assert found == pytest.approx(wanted), (what, field)
        assert not engine.runner.unread.any()
    assert min(ended["stop"], ended["length"]) > 10


def serve_at_random(engine, pending, choose):
    """Serves requests, of which some come at each look; sometimes others are cancelled."""
    indices = range(len(pending))
    share = choose.choice((0, 0, 0.05, 0.2))

    def perhaps_cancel():
        if choose.random() < share:
            engine.cancel(choose.choices(indices, k=2))

    def incoming(wait):
        perhaps_cancel()
        if not pending:
            return None
        count = choose.randint(1 if wait else 0, min(3, len(pending)))
        came, pending[:count] = pending[:count], []
        return came

    engine.serve(
        [], dataclasses.replace(settings(0, 1)), lambda _: perhaps_cancel(), incoming=incoming
    )

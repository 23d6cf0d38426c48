"""Requests that come and are cancelled at random moments, in pools that are too small for them."""

import dataclasses
import random

import pytest

from dms_jax.generation import Engine, Sampling
from dms_jax.generation.requests import make_request
from tests.generation.support import model_for, prompts

SHAPE = dict(num_lanes=4, page_size=8, prefill_chunk=16)
PROMPTS = prompts((5, 30, 40))
# The second often: those that come together share it, and so do those that come while it is read.
CHOICES = (0, 1, 1, 1, 1, 1, 2)
ROUNDS = 25


def settings(random_number, new_tokens):
    """Greedy, or drawn from one of two seeds."""
    temperature = 0.0 if random_number == 0 else 1.0
    return Sampling(temperature=temperature, seed=random_number, max_new_tokens=new_tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pages", "chunk"),
    [("vanilla", 14, 4), ("dms", 9, 4), ("vanilla", 16, 8), ("dms", 10, 8), ("dms", 40, 8)],
)
def test_whatever_comes_and_goes_each_answer_is_that_of_the_request_alone(name, pages, chunk):
    """Among them are requests whose first token ends them before their copy of a prompt fits.

    Of chunks of 8 steps the second half may run while lanes are given away.
    """
    model = model_for(name, ends=False)
    whole = Engine(model, max_tokens=64, chunk=chunk, **SHAPE)
    rows = model.config.num_layers * model.config.num_kv_heads
    memory = pages * rows * whole.runner.page_bytes
    engine = Engine(model, max_tokens=64, memory=memory, chunk=chunk, **SHAPE)
    alone = {}
    for seed in range(ROUNDS):
        choose = random.Random(seed)
        drawn = [
            (
                choose.choice(CHOICES),
                choose.choice((0, 0, 1, 2)),
                choose.choice((1, 1, 2, 4, 9, 20)),
            )
            for _ in range(choose.randint(2, 9))
        ]
        requests = [
            make_request(
                model.config, PROMPTS[prompt], settings(*given), index=index, seed=given[0]
            )
            for index, (prompt, *given) in enumerate(drawn)
        ]
        serve_at_random(engine, list(requests), choose)
        for request, key in zip(requests, drawn, strict=True):
            if key not in alone:
                prompt, *given = key
                (alone[key],) = whole.generate([PROMPTS[prompt]], sampling=settings(*given))
            want = alone[key]
            what = (seed, request.index)
            assert request.usage is not None, what
            if request.finish_reason == "cancelled":
                assert request.generated == want.tokens[: len(request.generated)], what
                continue
            assert (request.finish_reason, request.generated) == ("length", want.tokens), what
            for field in ("live_tokens", "peak_tokens", "kv_reads", "compression_ratio"):
                found, wanted = (getattr(usage, field) for usage in (request.usage, want.usage))
                assert found == pytest.approx(wanted), (what, field)
        assert engine.runner.allocator.pages_in_use == 0


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

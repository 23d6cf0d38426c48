"""Requests of two priorities that come and are cancelled at random moments, in pools too small."""

import collections
import random

import pytest

from dms_jax.generation import Sampling
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_request
from dms_jax.generation.scheduler import Scheduler
from tests.generation.support import GREEDY, answer, host_engine, prompts, squeezed
from tests.support.fake_programs import ENDS

pytestmark = pytest.mark.usefixtures("fakes")
PROMPTS = prompts((5, 30, 40))
# The second often: those that come together share it, and so do those that come while it is read.
CHOICES = (0, 0, 1, 1, 1, 1, 2)
# Letters that answers come to at any place; most requests stop at none.
STOPS = ((), (), ("e",), (" a", "ck"))
ROUNDS = 12


def settings(random_number, new_tokens, stop=()):
    """Greedy, or drawn from one of two seeds."""
    temperature = 0.0 if random_number == 0 else 1.0
    return Sampling(
        temperature=temperature, seed=random_number, max_new_tokens=new_tokens, stop=stop
    )


@pytest.mark.parametrize(
    ("name", "pages", "chunk", "ends"),
    [
        ("might evict", 200, 4, ()),
        ("evicts", 110, 4, ENDS),
        ("might evict", 200, 8, ENDS),
        ("keeps", 180, 8, ()),
        ("evicts", 640, 8, ENDS),
        ("cuts often", 130, 4, ENDS),
    ],
)
def test_whatever_comes_and_goes_each_answer_is_that_of_the_request_alone(
    name, pages, chunk, ends, monkeypatch
):
    """Among them are requests whose first token ends them before their copy of a prompt fits.

    Of chunks of 8 steps the second half may run while lanes are given away, also those of answers
    that a stop string ended, of which the device does not know.
    """
    preempt, ended = Scheduler.preempt, collections.Counter()

    def checked(scheduler):
        # Steps that may end an answer and make room.
        assert not scheduler.runner.reservation.steps_in_flight.any()
        ended["put back"] += 1
        return preempt(scheduler)

    monkeypatch.setattr(Scheduler, "preempt", checked)
    engine = host_engine(name, 4, chunk=chunk, ends=ends, page_size=8)
    config = engine.model.config
    for seed in range(ROUNDS):
        choose = random.Random(seed)
        drawn = [
            (
                choose.choice(CHOICES),
                choose.choice((0, 0, 1, 2)),
                choose.choice((1, 1, 2, 20, 24, 24)),
                choose.choice(STOPS),
                choose.choice((0, 0, 0, 1)),
            )
            for _ in range(choose.randint(4, 10))
        ]
        requests = [
            make_request(
                config,
                PROMPTS[prompt],
                settings(*given),
                index=index,
                seed=given[0],
                priority=priority,
            )
            for index, (prompt, *given, priority) in enumerate(drawn)
        ]
        with squeezed(engine, pages):
            serve_at_random(engine, list(requests), choose)
        for request in requests:
            want = answer(request.prompt, request.sampling, name, ends=ends)
            ended[request.finish_reason] += 1
            if request.finish_reason == "cancelled":
                assert request.generated == want.tokens[: len(request.generated)]
            else:
                want.check(request)
        assert not engine.runner.reservation.steps_in_flight.any()
    assert min(ended["stop"], ended["length"]) > 10
    assert ended["end"] > 5 or not ends
    # What will be cut is let in when its whole prompt fits, and grows no more.
    assert ended["put back"] or pages == 640 or name == "cuts often", ended


def serve_at_random(engine, pending, choose):
    """Serves requests, of which some come at each look; sometimes others are cancelled."""
    indices, known = range(len(pending)), list(pending)
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

    def hear(update):
        """An update has the newest tokens of its request, where a server finds their logprobs."""
        generated = known[update.index].generated
        assert generated[len(generated) - len(update.tokens) :] == update.tokens
        perhaps_cancel()

    engine.serve(Source([], GREEDY, on_tokens=hear, incoming=incoming))

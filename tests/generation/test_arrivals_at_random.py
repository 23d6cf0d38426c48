"""Random arrivals, cancellations, preemptions and failures: each request is answered as alone."""

import collections
import random

import pytest

from dms_jax.generation import Sampling
from dms_jax.generation.requests import Request, make_request
from tests.generation.schedules import MODES, check_alone, serve_at_random
from tests.generation.support import host_engine, prompts, squeezed
from tests.support.fake_programs import ENDS
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("fakes")
PROMPTS = prompts((5, 30, 40))
# The second prompt is frequent: requests share it if they arrive together or during its prefill.
CHOICES = (0, 0, 1, 1, 1, 1, 2)
# Letters that occur at any place in answers; most requests have no stop string.
STOPS = ((), (), ("e",), (" a", "ck"))
ROUNDS = 14


def drawn_sampling(choose: random.Random, ends: tuple[int, ...]) -> Sampling:
    """Returns greedy sampling, or one with either of two seeds; some ignore end tokens."""
    seed = choose.choice((0, 0, 1, 2))
    return Sampling(
        temperature=min(seed, 1.0),
        seed=seed,
        top_k=choose.choice((0, 0, 4)),
        max_new_tokens=24,
        stop=choose.choice(STOPS),
        ignore_eos=bool(ends) and choose.random() < 0.2,
        logprobs=True,
    )


def drawn_requests(config, choose: random.Random, mode: str, ends) -> list[Request]:
    """Returns four to ten requests; those of a list have one sampling."""
    requests, one = [], drawn_sampling(choose, ends)
    for index in range(choose.randint(4, 10)):
        sampling = drawn_sampling(choose, ends) if mode == "open" else one
        request = make_request(
            config,
            PROMPTS[choose.choice(CHOICES)],
            sampling,
            index=index,
            seed=sampling.seed,
            copy=choose.choice((0, 0, index)),
            priority=choose.choice((0, 0, 0, 1)),
        )
        request.max_new_tokens = choose.choice((1, 1, 2, 20, 24, 24))
        requests.append(request)
    return requests


@pytest.mark.parametrize(
    ("name", "pages", "ends", "options"),
    [
        ("evicts", 110, ENDS, dict(chunk=4)),
        ("might evict", 200, ENDS, dict(chunk=8, prefill_tokens=8)),
        ("keeps", 180, (), dict(chunk=8)),
        ("evicts", 640, ENDS, dict(chunk=8)),
        ("cuts often", 130, ENDS, dict(chunk=4)),
        *further(
            ("might evict", 200, (), dict(chunk=4)),
            ("cuts", 130, (), dict(chunk=8)),
        ),
    ],
)
def test_each_answer_is_that_of_the_request_alone(name, pages, ends, options):
    """Some first tokens end a request before its copy of a shared prompt fits.

    The second half of a chunk of 8 steps may run while lanes are reassigned, also lanes of answers
    that a stop string ended, which the device does not know.
    """
    engine, reached = host_engine(name, 4, ends=ends, page_size=8, **options), collections.Counter()
    for seed in range(ROUNDS):
        choose = random.Random(seed)
        mode = choose.choice(("open", *MODES))
        requests = drawn_requests(engine.model.config, choose, mode, ends)
        with squeezed(engine, pages):
            events = serve_at_random(engine, requests, choose, mode=mode, fails=True)
        for request in requests:
            check_alone(request, name, events, ends)
            reached[request.finish_reason] += 1
        reached["preempted"] += len(events.preempted)
        reached["released"] += events.released
        reached["failures"] += events.failures
    assert min(reached["stop"], reached["length"]) > 10, reached
    assert min(reached["cancelled"], reached["failures"]) > 0, reached
    assert reached["end"] > 5 or not ends
    assert reached["released"] or options["chunk"] == 4, reached
    # A prompt to be cut is admitted when it fits whole, and does not grow afterwards.
    assert reached["preempted"] or pages == 640 or name.startswith("cuts"), reached

"""Equal prompts of a call are prefilled once; answers equal those of separate prefills.

`tests/laws/test_shared_prompts.py` compares every policy bit for bit; `test_generate` runs chains
of each mechanism on the real engine.
"""

import dataclasses

import pytest

import dms_jax
from dms_jax.generation import Generation, programs
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import make_requests
from tests.generation.support import (
    answer,
    check_requests,
    host_engine,
    prompts,
    squeezed,
    story_tokens,
)
from tests.support.instances import further

SAMPLED = dms_jax.Sampling(temperature=1.0, max_new_tokens=9, seed=5, logprobs=True)
pytestmark = pytest.mark.usefixtures("fakes")


def prefilled_of(completions) -> list[int]:
    return [completion.usage.prefilled_tokens for completion in completions]


def check(completions, given, name, sampling=SAMPLED, **more) -> None:
    """Compares completions with the expected answers, each copy with its own draws."""
    for index, (one, prompt) in enumerate(zip(completions, given, strict=True)):
        answer(prompt, sampling, name, copy=given[:index].count(prompt), **more).check(one)


def test_chains_prefill_prompt_once(prefilled):
    """Each chain still counts its own prompt, reads and peak, as the papers do."""
    (prompt,) = prompts([50])
    out = Generation(host_engine(lanes=4).generate([prompt] * 4, sampling=SAMPLED))
    assert sum(prefilled) == 50
    assert out.usage.prefilled_tokens == 50
    assert prefilled_of(out.completions) == [50] + [0] * 3
    assert out.usage.prompt_tokens == 200
    check(out.completions, [prompt] * 4, "keeps")
    assert len({tokens[0] for tokens in out.tokens}) == 4  # each draws with a separate key


@pytest.mark.parametrize("name", ["keeps", "evicts", "cuts", *further("bounded")])
def test_equal_prompts_among_others_are_prefilled_once(name, prefilled):
    engine, (one, two, three) = host_engine(name, 4), prompts([13, 5, 30])
    given = [one, three, one, three, two, one]
    found = engine.generate(given, sampling=SAMPLED)
    check(found, given, name)
    assert prefilled_of(found) == [13, 30, 0, 0, 5, 13]  # the last one had to wait for a lane
    assert sum(prefilled) == sum(prefilled_of(found))


@pytest.mark.parametrize("lanes", [3, 6])
@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_chains_of_a_long_prompt_share_its_pages(name, lanes, prefilled):
    """Each prefills the rest of the prompt itself, and holds few pages of its own."""
    engine, (prompt,), held = host_engine(name, lanes, max_tokens=256), prompts([150]), []
    allocator = engine.runner.reservation.allocator

    def pages_of(count: int) -> int:
        held.clear()
        requests = make_requests(engine.model.config, [prompt] * count, SAMPLED)
        found = engine.serve(
            Source(requests, on_tokens=lambda _: held.append(allocator.pages_in_use))
        )
        check(found, [prompt] * count, name)
        assert prefilled_of(found) == [150] + [150 - 144] * (count - 1)
        assert sum(prefilled) == sum(prefilled_of(found))
        prefilled.clear()
        return max(held)

    rows = engine.model.config.num_layers * engine.model.config.num_kv_heads
    alone, together = pages_of(1), pages_of(6)
    assert together <= alone + (lanes - 1) * 2 * rows
    assert alone > 4 * rows


@pytest.mark.parametrize("pages", [15, 16])
def test_answers_go_on_while_a_shared_prefix_does_not_fit(pages):
    """The request that prefills it leaves its lane, and comes back when answers have ended."""
    engine = host_engine("evicts", 6, max_tokens=160, page_size=8, prefill_chunk=16)
    tokens, short, steps = story_tokens(), dataclasses.replace(SAMPLED, max_new_tokens=2), 0
    document = tokens[:100]
    given = [document[:70] + tokens[200:220], document[:65], document, tokens[500:600]]
    requests = make_requests(engine.model.config, given, short)
    rows = engine.model.config.num_layers * engine.model.config.num_kv_heads
    with squeezed(engine, pages * rows), engine.open(Source(requests)) as call:
        while call.step():
            steps += 1
            assert steps < 200
    check_requests(requests, "evicts")


def test_other_max_lengths_share_no_prompt(monkeypatch):
    """Budgets of half of different lengths differ, so that equal prompts share nothing."""
    engine, (prompt,) = host_engine(lanes=4), prompts([20])
    monkeypatch.setattr(type(engine.policy), "for_length", lambda self, tokens: dms_jax.Quest())
    requests = make_requests(engine.model.config, [prompt] * 3, SAMPLED)
    requests[1].max_length = 50
    found = engine.serve(Source(requests))
    assert prefilled_of(found) == [20, 20, 0]
    check(found, [prompt] * 3, "keeps")


def test_copies_use_few_programs():
    """One shape for all numbers of lanes and pages, and one draw for all numbers of chains."""
    engine, given = host_engine("evicts", 4), prompts([13, 30, 5, 1])
    engine.generate([given[0]] * 4, sampling=SAMPLED)
    copy_lanes, first_tokens = programs.copy_lanes.jitted, programs.first_tokens.jitted
    copies, draws = copy_lanes._cache_size(), first_tokens._cache_size()
    for count, prompt in ((2, given[1]), (4, given[2]), (3, given[3]), (2, given[0])):
        found = engine.generate([prompt] * count, sampling=SAMPLED)
        assert prefilled_of(found) == [len(prompt)] + [0] * (count - 1)
    assert copy_lanes._cache_size() == copies
    assert first_tokens._cache_size() == draws

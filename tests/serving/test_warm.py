"""A warm server compiles nothing, for any requests."""

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

import dms_jax
from dms_jax.generation.in_flight import steps_a_program
from dms_jax.generation.prefill import PrefillQueue
from dms_jax.model.caching import page_bytes
from dms_jax.serving import Service
from tests.generation.support import model_for
from tests.support.compilations import Compilations
from tests.support.instances import nightly_but

MAX_TOKENS = 192  # pages of 4 slots fill a table to its last column
SAMPLINGS: tuple[dict[str, Any], ...] = (
    dict(temperature=0),
    dict(temperature=0.7, top_p=0.9),
    dict(top_k=3, min_p=0.1),
    dict(top_p=0.3, logprobs=True),
)


class Setting(NamedTuple):
    """The serving options of a policy.

    Attributes:
      policy: the policy.
      slots: the slots of a row, averaged over rows: too few for all lanes, which causes preemption.
      page_size: with 4 tokens there are two widths of page tables, with 8 there is one.
      prefill_chunk: with 64 tokens there are two widths of prompts, with 16 there is one.
    """

    policy: dms_jax.Policy
    slots: int
    page_size: int
    prefill_chunk: int


# All widths of prompts with all widths of page tables; then policies that treat prompts and answers
# differently with each of these, with selected pages and with cuts; then prompts whose first tokens
# attend in one pass and the others one by one.
SETTINGS = {
    "vanilla": Setting(dms_jax.Vanilla(), 240, page_size=4, prefill_chunk=64),
    "Quest": Setting(dms_jax.Quest(budget=24, dense_layers=0), 240, page_size=8, prefill_chunk=64),
    "SnapKV": Setting(
        dms_jax.SnapKV(budget=16, window=4, interval=8, kernel=3),
        176,
        page_size=4,
        prefill_chunk=16,
    ),
    "TOVA": Setting(
        dms_jax.TOVA(budget=24, prefill="evict_past_budget"), 88, page_size=8, prefill_chunk=64
    ),
}


class Clients:
    """Submits requests, and waits until all of them have ended."""

    def __init__(self, service: Service):
        self._service, self._ended = service, threading.Semaphore(0)
        self._random = np.random.default_rng(0)
        self._sent: list[list[int]] = []
        self.errors: list[Exception] = []

    def _listen(self, deltas: Any) -> None:
        if isinstance(deltas, Exception):
            self.errors.append(deltas)
        if isinstance(deltas, Exception) or deltas.completion is not None:
            self._ended.release()

    def _prompt(self, length: int) -> list[int]:
        return self._random.integers(0, 512, length).tolist()

    def send(self, prompt: int, answer: int, sampling: dict[str, Any], choices: int = 1) -> None:
        asked = dms_jax.Sampling(max_new_tokens=min(answer, MAX_TOKENS - prompt), **sampling)
        self._sent.append(self._prompt(prompt))
        self._service.submit([self._sent[-1]] * choices, asked, self._listen)

    def repeat(self, count: int) -> None:
        """Sends the last prompts again, each with a little more."""
        for prompt in self._sent[-count:]:
            asked = dms_jax.Sampling(max_new_tokens=2)
            self._service.submit([[*prompt, 1][: MAX_TOKENS - 2]], asked, self._listen)
            self.wait(1)

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._ended.acquire(timeout=300)

    def traffic(self) -> None:
        """Prompts of all lengths, alone, together and equal; answers of all lengths."""
        for prompt in (1, 30, 70, 150):
            self.send(prompt, 3, SAMPLINGS[0])
            self.wait(1)
        for length in (5, 60, 120):
            self.send(length, 20, SAMPLINGS[1], choices=3)
        self.wait(9)
        # Short simultaneous prompts whose answers together outgrow the pool.
        asked = dms_jax.Sampling(max_new_tokens=150, **SAMPLINGS[2])
        self._service.submit([self._prompt(4) for _ in range(4)], asked, self._listen)
        for number, length in enumerate(self._random.integers(1, 150, 24).tolist()):
            self.send(length, int(self._random.integers(1, 40)), SAMPLINGS[number % 4])
        self.wait(28)
        self.send(150, MAX_TOKENS, SAMPLINGS[0])  # the longest there is
        self.wait(1)
        self.repeat(24)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("name", nightly_but(SETTINGS.keys() - {"Quest"}, SETTINGS))
def test_warm_server_compiles_nothing(name, monkeypatch):
    policy, slots, page_size, prefill_chunk = SETTINGS[name]
    compilations, model = Compilations(), model_for("vanilla", ends=False)
    config = model.config
    rows, pages = config.num_layers * config.num_kv_heads, slots // page_size
    service = Service(
        model,
        policy,
        num_lanes=4,
        max_tokens=MAX_TOKENS,
        memory=page_bytes(config, policy, page_size, model.dtype, None) * rows * pages,
        chunk=16,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        prefill_tokens=128,
        prefix_cache=1e6,
    )
    assert steps_a_program(service.engine.runner, 16) == 8  # a chunk is two programs
    assert len(service.engine.shapes.one_pass.widths) == (2 if prefill_chunk == 64 else 1)
    widths = service.engine.runner.reservation.table_widths()
    assert len(widths) == (2 if page_size == 4 else 1)
    assert name == "TOVA" or widths[-1] == MAX_TOKENS // page_size
    # Prompts of each width, for many and for few lanes, with each width of page tables; recomputed
    # answers, if the policy treats them differently from prompts; a few small programs.
    assert compilations.of(service.warm) <= 26
    recomputed, add = [], PrefillQueue.add

    def watched(queue, lane, item):
        if item.request.generated:
            recomputed.append(lane)
        return add(queue, lane, item)

    monkeypatch.setattr(PrefillQueue, "add", watched)
    clients = Clients(service)
    service.start()
    try:
        assert compilations.of(clients.traffic) == 0
    finally:
        assert service.drain(60.0)
    assert not clients.errors
    assert service.engine.runner.prefixes.counts.host_states
    assert recomputed or name == "SnapKV"  # its prompts are cut before anything outgrows the pool


@pytest.mark.usefixtures("fakes")
def test_warm_after_start_is_refused(idle):
    idle.service.smoke_test()
    with pytest.raises(dms_jax.BusyError):
        idle.service.warm()

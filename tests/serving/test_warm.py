"""A warm server compiles nothing, whatever comes: nobody waits for the programs of others."""

import threading
from typing import Any

import numpy as np
import pytest

import dms_jax
from dms_jax.model.caching import page_bytes
from dms_jax.serving import Service
from tests.generation.support import model_for
from tests.support.compilations import Compilations

MAX_TOKENS = 160
SAMPLINGS: tuple[dict[str, Any], ...] = (
    dict(temperature=0),
    dict(temperature=0.7, top_p=0.9),
    dict(top_k=3, min_p=0.1),
    dict(top_p=0.3, logprobs=True),
)
# The pages of a row, averaged over rows: too few for all lanes, so that answers are recomputed.
POLICIES: dict[str, tuple[dms_jax.Policy, int]] = {
    "vanilla": (dms_jax.Vanilla(), 60),
    "Quest": (dms_jax.Quest(budget=24, dense_layers=1), 60),  # tells answers from prompts
    "SnapKV": (dms_jax.SnapKV(budget=16, window=4, interval=8, kernel=3), 44),
}


class Clients:
    """Submits requests, and waits until all of them have ended."""

    def __init__(self, service: Service):
        self._service, self._ended = service, threading.Semaphore(0)
        self._random = np.random.default_rng(0)
        self.errors: list[Exception] = []

    def _listen(self, news: Any) -> None:
        if isinstance(news, Exception):
            self.errors.append(news)
        if isinstance(news, Exception) or news.completion is not None:
            self._ended.release()

    def send(self, prompt: int, answer: int, sampling: dict[str, Any], choices: int = 1) -> None:
        tokens = self._random.integers(0, 512, prompt).tolist()
        asked = dms_jax.Sampling(max_new_tokens=min(answer, MAX_TOKENS - prompt), **sampling)
        self._service.submit([tokens] * choices, asked, self._listen)

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
        for _ in range(4):  # short prompts first, whose answers outgrow the pool together
            self.send(4, 150, SAMPLINGS[2])
        for number, length in enumerate(self._random.integers(1, 150, 24).tolist()):
            self.send(length, int(self._random.integers(1, 40)), SAMPLINGS[number % 4])
        self.wait(28)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_warm_server_compiles_nothing_whatever_comes(name, monkeypatch):
    policy, pages = POLICIES[name]
    compilations, model = Compilations(), model_for("vanilla", ends=False)
    config = model.config
    rows = config.num_layers * config.num_kv_heads
    service = Service(
        model,
        policy,
        num_lanes=4,
        max_tokens=MAX_TOKENS,
        memory=page_bytes(config, policy, 4, model.dtype, None) * rows * pages,
        chunk=16,
        page_size=4,
        prefill_chunk=64,
        prefill_tokens=128,
    )
    assert service.engine._launched.steps_a_program(16) == 8  # a chunk is two programs
    # Two or three widths of prompts, each for many and for few; up to two widths of page tables;
    # answers that are recomputed, where a policy tells them from prompts; a few small programs.
    assert compilations.of(service.warm) <= 40
    recomputed, add = [], service.engine._reading.__class__.add

    def watched(reading, lane, part):
        if part.request.generated:
            recomputed.append(lane)
        return add(reading, lane, part)

    monkeypatch.setattr(service.engine._reading.__class__, "add", watched)
    clients = Clients(service)
    service.start()
    try:
        assert compilations.of(clients.traffic) == 0
    finally:
        assert service.drain(60.0)
    assert not clients.errors
    assert recomputed or name == "SnapKV"  # its prompts are cut before anything outgrows the pool


def test_a_service_is_warmed_before_it_starts():
    service = Service(model_for("vanilla", ends=False), num_lanes=1, max_tokens=16, page_size=4)
    service.start()
    try:
        service.check()
        with pytest.raises(dms_jax.BusyError):
            service.warm()
    finally:
        service.drain(10.0)

"""The model that the commands of these tests run on, and programs that compute nothing."""

import pytest


@pytest.fixture(scope="session")
def stories():
    """The small model that ships."""
    import dms_jax  # not above: tests/conftest.py sets jax up first

    return dms_jax.load(dms_jax.assets.path("stories260k"))


@pytest.fixture
def fakes():
    """Programs compute nothing; what a command shows and writes does not depend on the words."""
    from tests.support.fake_programs import faked

    with faked():
        yield


@pytest.fixture
def scored(monkeypatch):
    """`dms_jax.score` runs nothing: sequences differ a little, and what is dropped costs."""
    import numpy as np

    import dms_jax
    from dms_jax.cache.accounting import Usage

    def score(model, sequences, *, policy, max_length, **options):
        scores = []
        for number, sequence in enumerate(sequences):
            tokens = len(sequence) - 1
            live = tokens if policy.name == "Vanilla" else min(tokens, max_length)
            usage = Usage(
                prompt_tokens=0,
                new_tokens=tokens,
                kv_reads=float(tokens * live),
                peak_tokens=float(live),
                peak_held_tokens=float(live),
                live_tokens=float(live),
                compression_ratio=tokens / live,
                cache_bytes=8 * live,
                peak_cache_bytes=8 * live,
            )
            nats = 1.5 + number / 10 + (tokens - live) / 100
            scores.append(dms_jax.generation.Score(np.full(tokens, -nats, np.float32), usage))
        return scores

    monkeypatch.setattr(dms_jax, "score", score)

"""Scores by arithmetic."""

import pytest


@pytest.fixture
def scored(monkeypatch):
    """Replaces scoring by arithmetic: each evicted token costs a sixteenth of a nat a token.

    A row keeps the budget of its policy, and windows differ by an eighth of a nat.
    """
    import sys

    import numpy as np

    import dms_jax
    from dms_jax.cache.accounting import Usage

    def score_tokens(model, windows, policy, serving, on_done=lambda: None):
        scores = []
        for number, window in enumerate(windows):
            tokens = len(window) - 1
            live = min(tokens, getattr(policy, "budget", tokens))
            size = live * (4 if serving.kv_dtype is None else 1)
            usage = Usage(
                prompt_tokens=0,
                new_tokens=tokens,
                kv_reads=float(tokens * live),
                peak_tokens=float(live),
                peak_held_tokens=float(live),
                live_tokens=float(live),
                compression_ratio=tokens / live,
                cache_bytes=size,
                peak_cache_bytes=size,
            )
            nats = 1.5 + number / 8 + (tokens - live) / 16
            scores.append(dms_jax.generation.Score(np.full(tokens, -nats, np.float32), usage))
            on_done()
        return scores

    # The package exports a function with the name of the module.
    module = sys.modules["dms_jax.evaluation.perplexity"]
    monkeypatch.setattr(module, "score_tokens", score_tokens)

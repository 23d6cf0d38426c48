"""Fixtures of tests of long texts."""

import pytest


@pytest.fixture
def encoded_sizes(monkeypatch):
    """The number of characters of each text that the tokenizer gets."""
    from dms_jax.checkpoint import Tokenizer

    encode, sizes = Tokenizer.encode, []

    def watched(self, text, *options, **named):
        sizes.append(len(text))
        return encode(self, text, *options, **named)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    return sizes

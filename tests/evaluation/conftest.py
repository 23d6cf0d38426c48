"""Tests of requests, counts, resuming and reports run on fake programs."""

import pytest


@pytest.fixture
def fakes():
    # Imported here because tests/conftest.py sets up jax first.
    from tests.support.fake_programs import faked

    with faked():
        yield

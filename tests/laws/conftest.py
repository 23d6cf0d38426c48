"""The laws run in float64, where any difference beyond rounding is an error."""

import pytest


@pytest.fixture(autouse=True)
def float64():
    import jax  # after tests/conftest.py has set up jax

    with jax.enable_x64(True):
        yield

"""The laws hold in float64: differences are rounding, or they are wrong."""

import pytest


@pytest.fixture(autouse=True)
def float64():
    import jax  # not at the top: the environment of jax is set after this file is loaded

    with jax.enable_x64(True):
        yield

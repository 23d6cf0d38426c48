"""The model that these tests run on."""

import pytest


@pytest.fixture(scope="module")
def stories():
    """The small model that ships."""
    import dms_jax  # not above: tests/conftest.py sets jax up first

    return dms_jax.load(dms_jax.assets.path("stories260k"))

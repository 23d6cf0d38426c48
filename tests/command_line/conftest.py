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

"""The comparison of policies, found as when its script is run."""

import pathlib
import sys

import pytest

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture(scope="module")
def scripts():
    """The script and its parts, which find each other as when they are run."""
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        import compare_policies
        from comparison import lessons, systems, texts

        yield compare_policies, systems, lessons, texts
    finally:
        sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(scope="module")
def stories():
    """The small model that ships."""
    import dms_jax  # not above: tests/conftest.py sets jax up first

    return dms_jax.load(dms_jax.assets.path("stories260k"))

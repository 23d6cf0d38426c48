"""How chunks of steps are divided in the tests of generation, and what their lanes may ask for."""

import pytest


@pytest.fixture
def two_programs(monkeypatch) -> None:
    """Chunks of eight steps are two programs, as longer ones are."""
    from dms_jax.generation import launched  # jax is set up before it is imported

    monkeypatch.setattr(launched, "_FEWEST_STEPS", 4)


@pytest.fixture
def unfiltered(monkeypatch) -> None:
    """Requests that come are greedy or draw from all tokens, and so do the programs of lanes.

    To search for the tokens that filters keep is most of what is compiled of a small model's steps.
    """
    from dms_jax.generation import arrivals
    from tests.generation.support import Unfiltered

    monkeypatch.setattr(arrivals, "LanesFilter", Unfiltered)

"""How chunks of steps are divided in the tests of generation."""

import pytest


@pytest.fixture
def two_programs(monkeypatch) -> None:
    """Chunks of eight steps are two programs, as longer ones are."""
    from dms_jax.generation import launched  # jax is set up before it is imported

    monkeypatch.setattr(launched, "_FEWEST_STEPS", 4)

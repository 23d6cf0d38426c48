"""Training steps of one form are compiled once; most tests train one tiny model."""

import pytest


@pytest.fixture(scope="session")
def model():
    from tests.training.tiny import language_model

    return language_model()


@pytest.fixture(autouse=True)
def shared_steps(monkeypatch):
    # Imported here because tests/conftest.py sets up jax first.
    from dms_jax.training.program import StepProgram
    from tests.training.shared_steps import shared_step

    monkeypatch.setattr(StepProgram, "jit", shared_step)

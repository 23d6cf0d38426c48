import pytest


@pytest.fixture(autouse=True)
def shared_steps(monkeypatch):
    # Imported here because tests/conftest.py sets up jax first.
    from dms_jax.training.program import StepProgram
    from tests.training.shared_steps import shared_step

    monkeypatch.setattr(StepProgram, "jit", shared_step)

import pytest


@pytest.fixture(autouse=True)
def shared_steps(monkeypatch):
    # Not at the top: jax may not be imported before the suite's own conftest has set it up.
    from dms_jax.training.program import StepProgram
    from tests.training.shared_steps import shared_step

    monkeypatch.setattr(StepProgram, "jit", shared_step)

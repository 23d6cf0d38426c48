import pytest


@pytest.fixture(autouse=True)
def shared_steps(monkeypatch):
    # Not at the top: jax may not be imported before the suite's own conftest has set it up.
    from dms_jax.training.trainer import Trainer
    from tests.training.shared_steps import shared_step

    monkeypatch.setattr(Trainer, "_jitted_step", shared_step)

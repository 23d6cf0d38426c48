"""In these tests a chunk of eight steps is two programs; some tests run on fakes."""

import pytest


@pytest.fixture(autouse=True)
def two_programs(monkeypatch) -> None:
    """Makes chunks of eight steps two programs, like longer ones."""
    from dms_jax.generation import in_flight  # after tests/conftest.py has set up jax

    monkeypatch.setattr(in_flight, "_FEWEST_STEPS", 4)


@pytest.fixture
def fakes():
    """Replaces programs by fakes; afterwards no engine may have pages in use or steps in flight."""
    from tests.generation.support import HOST_ENGINES
    from tests.support.fake_programs import faked

    with faked():
        yield
    for engine in HOST_ENGINES:
        assert engine.runner.reservation.allocator.pages_in_use == 0
        assert not engine.runner.reservation.steps_in_flight.any()


@pytest.fixture
def prefilled(monkeypatch) -> list[int]:
    """The number of tokens of each prefill program, as they are launched."""
    from dms_jax.generation.runner import Runner

    counts, extend = [], Runner.extend

    def counted(runner, batch):
        counts.append(sum(map(len, batch.tokens.values())))
        return extend(runner, batch)

    monkeypatch.setattr(Runner, "extend", counted)
    return counts

"""The page table of steps stays on the device, and only its changes are sent."""

import chex
import jax
import numpy as np
import pytest

from dms_jax.cache import pages
from dms_jax.generation import programs, runner
from tests.generation.support import GREEDY, answer, host_engine, on_launch, prompts, squeezed
from tests.support.instances import further

pytestmark = pytest.mark.usefixtures("fakes")
GIVEN = prompts((5, 30, 13, 1, 40, 9, 9, 22))


@pytest.fixture
def few_cells(monkeypatch):
    """Makes changes of small tables be sent, too, four at a time."""
    monkeypatch.setattr(runner, "CELLS", 4)
    monkeypatch.setattr(pages, "_CELL_NUMBERS", 0.1)


@pytest.mark.usefixtures("few_cells")
@pytest.mark.parametrize("most", [640, 300], ids=["roomy", "full"])
@pytest.mark.parametrize("name", ["evicts", "cuts often", *further("keeps")])
def test_device_page_table_equals_host_table(name, most, monkeypatch):
    """After growth, releases, shared prefixes and copies since the last steps."""
    engine = host_engine(name, 4, page_size=8, table_width=8, prefix_cache=0)
    given, updates = [], []

    def launched(program, arguments):
        if program is programs.decode:
            table, stepping = arguments[3], arguments[5] % programs.ENDLESS > 0
            assert isinstance(table, jax.Array)
            expected = engine.runner.reservation.table(stepping=stepping)
            chex.assert_trees_all_equal(np.asarray(table), expected)
            given.append(table)
        if program is programs.update_table:
            updates.append(arguments[0])

    on_launch(monkeypatch, launched)
    asked = [*GIVEN, GIVEN[1], GIVEN[1] + GIVEN[2]]
    with squeezed(engine, most):
        for _ in range(2):
            for prompt, one in zip(asked, engine.generate(asked, sampling=GREEDY), strict=True):
                answered = answer(prompt, name=name)
                assert one.tokens == answered.tokens
                assert one.logprobs == answered.logprobs
        engine.runner.prefixes.clear()
    assert len(updates) > len(given) // 4
    assert len({id(each) for each in updates}) > 1

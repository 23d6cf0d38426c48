"""The laws run in float64, where any difference beyond rounding is an error.

Tests record their largest difference; the summary of a run of this directory lists them by test.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that have a row in common one after another, those of other files too.

    They share programs and simulations, which workers and emptied caches would otherwise make anew.
    """
    places, own = [], []
    for place, item in enumerate(items):
        row = item.callspec.params.get("row") if hasattr(item, "callspec") else None
        if row is not None and item.path.parent == HERE:
            places.append(place)
            own.append((row.name, item))
    first = {}
    for name, _ in own:
        first.setdefault(name, len(first))
    own.sort(key=lambda one: first[one[0]])
    for place, (_, item) in zip(places, own, strict=True):
        items[place] = item


@pytest.fixture(autouse=True)
def float64():
    import jax  # not at the top: the environment of jax is set after this file is loaded

    with jax.enable_x64(True):
        yield


def pytest_terminal_summary(terminalreporter):
    largest: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "largest" and report.when == "call":
                test = report.nodeid.split("[")[0]
                largest[test] = max(value, largest.get(test, 0.0))
    if largest:
        terminalreporter.section("largest differences")
        for test, value in largest.items():
            terminalreporter.line(f"{value:.1e}  {test}")

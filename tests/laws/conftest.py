"""The laws run in float64, where any difference beyond rounding is an error.

Tests record their largest difference; the summary of a run of this directory lists them by test.
"""

import pytest


@pytest.fixture(autouse=True)
def float64():
    import jax  # after tests/conftest.py has set up jax

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

"""Every entry point answers a wrong call with an error that says what, where and what to do.

Damaged checkpoint files are in `tests/checkpoint`; here is what a caller gets wrong. The calls are
made in a process of their own, see `tests/wrong_calls`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wrong_calls import __main__ as wrong_calls

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report() -> dict[str, dict]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.wrong_calls"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> list[str]:
    return list(wrong_calls.all_cases(tmp_path_factory.mktemp("scratch")))


def test_every_wrong_call_was_made(report, names):
    assert list(report) == names
    assert len(names) > 200


def test_each_raises_an_error_of_ours(report):
    wrong = [
        f"{name}: {outcome['raised']} instead of {outcome['expected']}\n{outcome['where']}"
        for name, outcome in report.items()
        if outcome["raised"] != outcome["expected"]
    ]
    assert not wrong, "\n".join(wrong)


def test_each_message_says_what_was_wrong(report):
    wrong = [
        f"{name}: {outcome['missing']} not in {outcome['message']!r}"
        for name, outcome in report.items()
        if outcome["missing"]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_message_is_a_wall_of_text(report):
    assert {name: len(o["message"]) for name, o in report.items() if len(o["message"]) > 400} == {}


def test_nothing_is_left_behind(report):
    assert {name: outcome["left"] for name, outcome in report.items() if outcome["left"]} == {}

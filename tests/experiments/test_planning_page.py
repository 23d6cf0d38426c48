"""The page of plans says what the JSON files beside it hold, which `dms-jax plan` has written."""

import json
import pathlib
import re

import pytest

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "results" / "planning"
SECTION = re.compile(r"^## (.+?)\n\n```\n(.*?)\n```\n\n(.+?)\n", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def files():
    return {
        file.name: json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(RESULTS.glob("*.json"))
    }


def test_the_page_is_that_of_its_figures(files):
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    shown = {title: (block.splitlines(), origin) for title, block, origin in SECTION.findall(text)}
    assert len(shown) == text.count("\n## ")
    found = {}
    for name, data in files.items():
        made = f"{data['date']}, jax {data['versions']['jax']}, `{data['command']}`"
        found |= {x["title"]: (x["report"], f"{made}: [{name}]({name})") for x in data["plans"]}
    assert shown == found
    machines = {plan["machine"] for data in files.values() for plan in data["plans"]}
    assert machines == {"v5p-128", "8xh200", "32xh200", "v6e-256"}


def test_figures_are_those_of_the_report(files):
    """Memory and hours of each plan, as they are printed."""
    for plan in (plan for data in files.values() for plan in data["plans"]):
        report = "\n".join(plan["report"])
        most = max(stage["bytes"] for stage in plan["stages"])
        assert re.search(rf"together +{most / 1e9:.2f}$", report, re.MULTILINE)
        low, high = (seconds / 3600 * plan["devices"] for seconds in plan["run_seconds"])
        assert f"{low:,.0f} to {high:,.0f} device-hours" in report

"""The seconds of each test file, and the distribution of tests over workers.

`tests/costs.json` holds {"tests/cache/test_pages.py": [2.1, 9.8], ...}: the seconds of the gate's
tests, and of all tests. `make nightly` measures them and `make costs` writes the file.

A file stays in one worker, so that its programs are traced once and its fixtures made once; a long
file is split by functions. The longest begin first, so that no worker ends with a long one.
"""

import collections
import functools
import json
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

COSTS = Path(__file__).resolve().parents[1] / "costs.json"
# For a file that is not measured yet.
UNKNOWN = (10.0, 30.0)
# A file beyond so many seconds is split; `make test` takes about 1,000 in each of two workers.
LONGEST = 120


@functools.cache
def known() -> dict[str, tuple[float, float]]:
    """Returns the seconds of measured files."""
    return json.loads(COSTS.read_text()) if COSTS.exists() else {}


def seconds(file: str, config: pytest.Config) -> float:
    """Returns the expected seconds of a file, in the gate or with all tests."""
    return known().get(file, UNKNOWN)["not nightly" not in config.option.markexpr]


def group(test: str, config: pytest.Config) -> str:
    """Returns the name of a test's group, which runs in one worker."""
    file = test.partition("::")[0]
    return test.partition("[")[0] if seconds(file, config) > LONGEST else file


class Groups(LoadScopeScheduling):
    """Hands groups to workers, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log=None):
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid, self.config)


def longest_first(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests by the duration of their groups."""
    files = [item.nodeid.partition("::")[0] for item in items]
    groups = [group(item.nodeid, config) for item in items]
    tests, total = collections.Counter(files), collections.Counter()
    for name, file in zip(groups, files, strict=True):
        total[name] += seconds(file, config) / tests[file]
    order = sorted(range(len(items)), key=lambda at: -total[groups[at]])
    items[:] = [items[at] for at in order]


def write(path: Path, costs: dict[str, tuple[float, float]]) -> None:
    lines = [f" {json.dumps(name)}: {json.dumps(costs[name])}" for name in sorted(costs)]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


class Recorder:
    """A plugin that adds the seconds of a run's files to a file."""

    def __init__(self, path: Path):
        self.path = path
        self.spent: dict[str, list[float]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        spent = self.spent.setdefault(report.nodeid.partition("::")[0], [0.0, 0.0])
        spent[0] += report.duration if "nightly" not in report.keywords else 0.0
        spent[1] += report.duration

    def pytest_sessionfinish(self) -> None:
        costs = json.loads(self.path.read_text()) if self.path.exists() else {}
        new = {name: [round(each, 1) for each in spent] for name, spent in self.spent.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write(self.path, costs | new)

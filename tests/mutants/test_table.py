"""Every mutant can still be planted, and names tests that are there."""

import json
import re
import subprocess
import sys

import pytest

from tests.mutants import __main__
from tests.mutants.mutant import Mutant
from tests.mutants.planting import ROOT
from tests.mutants.table import MUTANTS


def test_names_are_unique():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) > 40


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_it_can_be_planted(mutant):
    """Change the table together with the code, or drop what has no place any more."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    compile(mutant.plant(text), mutant.file, "exec")
    for test in mutant.tests:
        path, *names = test.split("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        for name in names:
            defined = rf"^ *(def|class) {name.split('[')[0]}\("
            assert re.search(defined, source, re.MULTILINE), f"{path} has no {name}"


@pytest.mark.nightly
def test_instances_that_it_names_are_collected():
    """pytest runs nothing for an instance that is not there, and the mutant seems to survive."""
    named = {test for mutant in MUTANTS for test in mutant.tests if "[" in test}
    files = sorted({test.split("::")[0] for test in named})
    collect = ["-m", "pytest", "--collect-only", "-q", "-o", "addopts=--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, *collect, *files], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert named
    assert not named - set(done.stdout.splitlines())


def test_what_cannot_be_planted_says_why():
    mutant = Mutant("a", "b.py", "x", "y", ())
    assert mutant.plant("1 x 2") == "1 y 2"
    with pytest.raises(ValueError, match=r"occurs 2 times in b\.py"):
        mutant.plant("x x")


def test_the_page_says_what_its_verdicts_cover():
    """The table grows; verdicts of all of it are taken rarely."""
    folder = ROOT / "experiments" / "results" / "mutants"
    verdicts = json.loads((folder / "mutants.json").read_text(encoding="utf-8"))["mutants"]
    page = (folder / "README.md").read_text(encoding="utf-8")
    killed = [entry for entry in verdicts.values() if entry["after"]["verdict"] == "killed"]
    earlier = [entry for entry in verdicts.values() if "before" in entry]
    assert f"**{len(verdicts)} mutants**" in page
    assert f": {len(killed)} were killed." in page
    assert f"Of {len(earlier)} it also has" in page
    assert verdicts.keys() <= {mutant.name for mutant in MUTANTS}


def test_a_later_run_adds_to_a_file_and_says_when_it_was(tmp_path):
    path, (first, second, third) = tmp_path / "mutants.json", MUTANTS[:3]
    killed = {"verdict": "killed", "seconds": 1.0, "tests": []}
    data = __main__.merged(path, {first.name: killed}, "after")
    assert data["mutants"] == {first.name: {"file": first.file, "after": killed}}
    data["after"]["date"] = "1999-12-31"
    path.write_text(json.dumps(data))
    assert first not in __main__.without_verdict(path, "after")
    assert __main__.without_verdict(path, "before") == list(MUTANTS)
    again = __main__.merged(path, {second.name: killed}, "after")
    assert again["after"]["date"] == "1999-12-31"
    assert again["mutants"][first.name]["after"] == killed
    assert again["mutants"][second.name]["after"].keys() == {*killed, "date"}
    path.write_text(json.dumps(again))
    assert __main__.without_verdict(path, "after")[0] == third

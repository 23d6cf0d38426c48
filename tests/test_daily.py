"""What `make check` runs (tests/daily.txt): files that exist, with something from every room."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
LINES = (TESTS / "daily.txt").read_text().splitlines()


def directories(folder: str, pattern: str, at_least: int) -> list[str]:
    """Returns the names of the directories in a folder with so many files of a pattern."""
    found = [path for path in sorted((ROOT / folder).iterdir()) if path.is_dir()]
    return [path.name for path in found if len(list(path.rglob(pattern))) >= at_least]


def packages(package: str) -> list[str]:
    """Returns the directories of a package that hold more than data and their `__init__`."""
    return directories(package, "*.py", 2)


@pytest.mark.parametrize("line", LINES)
def test_every_line_names_tests(line):
    path, _, function = line.partition("::")
    assert (ROOT / path).exists()
    assert not function or f"def {function}(" in (ROOT / path).read_text()


def test_no_line_stands_twice():
    assert len(set(LINES)) == len(LINES)


@pytest.mark.parametrize(
    "room",
    [
        *directories("tests", "test_*.py", 1),
        *(f"pallas_kernels/{name}" for name in directories("tests/pallas_kernels", "test_*.py", 1)),
    ],
)
def test_every_room_of_tests_is_represented(room):
    own = f"tests/{room}"
    assert any(line == own or line.startswith(f"{own}/") for line in LINES)


@pytest.mark.parametrize(
    ("package", "tests"), [("dms_jax", ""), ("pallas_kernels", "/pallas_kernels")]
)
def test_every_package_has_a_room_of_tests(package, tests):
    rooms = directories(f"tests{tests}", "test_*.py", 1)
    assert set(packages(package)) <= set(rooms)

"""Stop strings in a text that grows, against a search of the whole text."""

import numpy as np
import pytest

from dms_jax.generation.text import StopStrings


def searched(text: str, strings: list[str]) -> int | None:
    found = [text.find(each) for each in strings]
    return min((place for place in found if place >= 0), default=None)


def held(text: str, strings: list[str]) -> int:
    """Tries every length of every string."""
    return max(
        length for each in strings for length in range(len(each)) if text.endswith(each[:length])
    )


def test_stop_strings_equal_a_search():
    """Strings over two letters, which overlap with themselves and each other."""
    rng = np.random.default_rng(0)

    def word(most: int) -> str:
        return "".join(rng.choice(["a", "b"], rng.integers(1, most)))

    for _ in range(2000):
        strings = [word(12) for _ in range(rng.integers(1, 4))]
        stops, text = StopStrings(strings), ""
        for _ in range(40):
            more = word(5)
            expected = searched(text + more, strings)
            found = stops.find(more)
            assert (None if found is None else len(text) + found) == expected
            if expected is not None:
                break
            stops.add(more)
            text += more
            assert stops.held == held(text, strings)


def test_no_stop_strings():
    stops = StopStrings(())
    assert stops.find("abc") is None
    stops.add("abc")
    assert stops.held == 0


class Counted(str):
    """A string that counts the characters read from it."""

    taken = 0

    def __getitem__(self, key):
        part = super().__getitem__(key)
        self.taken += len(part)
        return part


@pytest.mark.parametrize("unit", ["a", "ab", "aab"])
@pytest.mark.parametrize("end", ["c", "b" * 50])
def test_work_does_not_grow_with_stop_string(unit, end):
    """A text that nearly matches the string again and again, one character at a time."""
    work = []
    for size in (200, 2000):
        string = Counted(unit * size + end)
        stops = StopStrings([string])
        text = (unit * (size + 1) + "b") * 3
        for each in text:
            assert stops.find(each) is None
            stops.add(each)
        work.append(string.taken / len(text))
    assert max(work) < 12

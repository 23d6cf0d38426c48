"""Stop strings in a text that grows, against a search of the whole text."""

import numpy as np

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

"""The inputs of RULER's golden files: words, an essay, documents, and deterministic draws.

RULER's generators ran on them (`tests/golden/README.md`), and the tests run ours.
"""

import random
import string

# ruff: noqa: SIM905 - lists of words are read as text

SEED = 42
ADJECTIVES = "able bold calm deep eager fair glad huge icy jolly keen late mild neat odd".split()
NOUNS = "acorn bell cedar daisy ember flute grain hazel inn jar kite lamp moss nest oak".split()
WORDS = sorted(f"{first}{second}" for first in "bcdfg" for second in NOUNS)
ESSAY = (
    "The lake lay still. Nobody had rowed on it since autumn. Why would they? The boats were old. "
    "A heron stood in the reeds. It did not move. It waited for the fish to forget it. "
    "Children passed on the dam. One of them threw a stone. The heron rose slowly. "
    "Rings ran over the water. They reached the shore. Then the lake lay still. "
)
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": f"Town {town}",
            "paragraphs": [
                {
                    "context": f"Town {town} has {town + part + 3} mills on its river.",
                    "qas": [
                        {
                            "question": f"How many mills has town {town}, part {part}?",
                            "id": f"{town}-{part}",
                            "answers": [
                                {"text": f"{town + part + 3} mills", "answer_start": 11},
                                {"text": f"{town + part + 3}", "answer_start": 11},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "question": "Who owns them?",
                            "id": f"{town}-{part}-no",
                            "answers": [],
                            "is_impossible": True,
                        },
                    ],
                }
                for part in range(4)
            ],
        }
        for town in range(5)
    ],
}
HOTPOTQA = [
    {
        "_id": f"h{number}",
        "question": f"Which river is longer than river {number}?",
        "answer": f"river {number + 1}",
        "context": [
            [f"River {number + place}", [f"It is {number + place} miles long.", " It is cold."]]
            for place in range(10)
        ],
    }
    for number in range(6)
]

# Context size, problem number and total tokens of each task's golden file. Essays: past the end, in
# the second round.
CASES = {
    "niah_single_1": (6, 0, 4096),
    "niah_single_2": (60, 0, 4096),
    "niah_single_3": (130, 0, 4096),
    "niah_multikey_1": (75, 0, 4096),
    "niah_multikey_2": (5, 0, 4096),
    "niah_multikey_3": (4, 0, 4096),
    "niah_multivalue": (20, 0, 4096),
    "niah_multiquery": (75, 0, 4096),
    "vt": (9, 0, 4096),
    "cwe": (14, 0, 2048),
    "cwe-4096": (12, 0, 4096),
    "fwe": (200, 0, 2048),
    "qa_1": (7, 6, 4096),
    "qa_1-few": (3, 6, 4096),
    "qa_1-many": (23, 6, 4096),
    "qa_2": (12, 2, 4096),
}
EXAMPLE_SIZE = 7  # repetitions of noise in the worked example of vt


class Scripted(random.Random):
    """Draws that depend only on the number of earlier draws of their kind.

    A generator gets the same draws in any order of keys and values.
    """

    def __init__(self):
        super().__init__(0)
        self._counts = {}

    def _next(self, kind) -> int:
        self._counts[kind] = self._counts.get(kind, -1) + 1
        return self._counts[kind]

    def choice(self, seq):
        return seq[self._next("choice") % len(seq)]

    def choices(self, population, weights=None, *, cum_weights=None, k=1):
        assert population in (string.ascii_uppercase, string.ascii_lowercase)
        number = (self._next(("choices", k)) + 1) * 7919 + 100  # a prime: 26^3 different texts
        return [population[number // 26**place % 26] for place in range(k)]

    def randint(self, a, b):
        return a + (self._next("randint") * 1_234_567 + 890_123) % (b - a + 1)

    def getrandbits(self, k):
        assert k == 128
        return (self._next("bits") + 1) * 0x0123456789ABCDEF_FEDCBA9876543210 % 2**128

    def sample(self, population, k, *, counts=None):
        """The middles of k equal parts, in reverse order."""
        population = list(population)
        return [population[(2 * part + 1) * len(population) // (2 * k)] for part in range(k)][::-1]

"""Invented programming problems in the published form."""

HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": (
            "from typing import List\n\n\ndef sum_of_twice(numbers: List[int], skip: int) -> int:\n"
            '    """ Sum of twice each number but those that equal skip.\n'
            '    >>> sum_of_twice([1, 2], 2)\n    2\n    """\n'
        ),
        "entry_point": "sum_of_twice",
        "canonical_solution": "    return sum(2 * each for each in numbers if each != skip)\n",
        "test": (
            "\n\nMETADATA = {}\n\n\ndef check(candidate):\n"
            "    assert candidate([1, 2], 2) == 2\n    assert candidate([], 0) == 0\n"
            "    assert candidate([3, 4], 0) == sum_of_twice([4, 3], 1) == 14\n"
        ),
    },
    {
        "task_id": "HumanEval/1",
        "prompt": (
            "def shout(text: str):\n    return text.upper()\n\n\n"
            'def whisper(text: str):\n    """Undoes shout on what was in small letters."""\n'
        ),
        "entry_point": "whisper",
        "canonical_solution": "    return text.lower()\n",
        "test": (
            "def check(candidate):\n    from random import choice\n"
            "    for _ in range(20):\n        word = ''.join(choice('abc') for _ in range(5))\n"
            "        assert candidate(shout(word)) == word\n"
        ),
    },
]

"""Answers as models write them: a right answer counts in any surrounding text.

The forms come from answers of instruction-tuned models to GSM8K, and similar ones: currencies,
emphasis, quotes, brackets, Unicode signs, units, remarks with other numbers, and sums. The expected
answer of each form was decided by reading it.
"""

import pytest

from dms_jax.evaluation.tasks import GSM8K, Mathematics
from tests.evaluation.tasks.published import lines

RIGHT = {
    "29": [
        "twenty-nine (29).",
        "$x=29$ per 30 days.",
        "29 -- see above",
        "US$29.",
        "_29_.",
        "{29}.",
        "<29>.",
        "\\[29\\]",
        "$30 - $1 = $29.",
        "about 29 minutes.",
        "equal to 29",
        "$29 \\text{ minutes}$.",
        "\u20ac29.",
        "Rs. 29.",
        "# 29",
        "\u2248 29",
        ": 29",
        "\n- 29",
        "\uff12\uff19.",
        "29\u3002",
        "<b>29</b>.",
        "**29 minutes** (0.48 hours).",
        "\\boxed{29 \\text{ minutes}}",
        "[**29**]",
        "[answer] 29.",
        "\\(29\\) minutes (or 0.48 hours).",
        "$$29$$ minutes per 2 days",
        "$\\boxed{29}$ (which is $3 \\times 10 - 1$).",
        "29.00 USD (or 27 EUR).",
        "(3 * 10) - 1 = 29.",
        "3\xd710\u22121 = **29**.",
        "58 / 2 = 29 apples per child, 2 children",
        "**29**\n\n2 more remarks",
        "+$29",
    ],
    "-5": [
        "negative 5.",
        "$ - 5 $",
    ],
    "29000": [
        "29\\,000.",
        "29k",
        "$29K per year",
    ],
    "1234567": [
        "1,234,567.",
    ],
    "50": [
        "**50%**.",
    ],
    "0.5": [
        "1/2 (0.5).",
        "$.50.",
    ],
    "58": [
        "29 \\times 2 = 58",
    ],
    "-29": [
        "\u221229\uff0e",
        "($-29)",
        "\u2014 29",
    ],
    "1000": [
        "1'000",
        "1,000.00 (30 * 33.33)",
        "10^3",
        "1e3",
    ],
}
WRONG = {
    "5": [
        "negative 5.",
        "minus 5",
    ],
    "29": [
        "*28*, 29.",
        "- 29",
        "not 29.",
        "28-29.",
        "29 + 1.",
        "29 and 30.",
        "29 to 30",
        "29 ... 30",
        "either 29 or 30",
        "between 29 and 30",
        "at least 29",
        "more than 29",
        "0x29",
        "29:30",
        "unknown (29?)",
        "29k",
    ],
}
# For tasks whose answers are expressions.
EXPRESSIONS = [
    ("3\\sqrt{2}", "3\\sqrt{2}."),
    ("3\\sqrt{2}", "$3\\sqrt{2}$ (about 4.24)."),
    ("2\\pi", "2\\pi"),
    ("2\\pi", "$2\\pi$ (about 6.28)."),
    ("x+1", "x + 1"),
    ("3(x+1)", "3 (x + 1)"),
    ("\\frac{1}{2}", "\\frac12"),
    ("\\frac{1}{2}", "0.5 (that is 1/2)."),
    ("-\\frac{1}{2}", "\u2212\\frac{1}{2}"),
    ("\\frac{5}{2}", "2 1/2"),
    ("(1,2)", "(1, 2)"),
    ("[1,2]", "[1, 2]"),
    ("\\{5,6\\}", "$5$ or $6$"),
    ("120", "5!"),
    ("\\text{yes}", '"yes".'),
    ("x=-3", "$x=\u22123$"),
    ("29", "29 (3 * 10 - 1)."),
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Whether the text after "The final answer is" answers a problem."""
    folder = tmp_path_factory.mktemp("problems")

    def judge(gold: str, said: str) -> bool:
        path = lines(folder / "test.jsonl", [{"question": "?", "answer": f"So\n#### {gold}"}])
        task = GSM8K(path)
        return bool(task.score(task.problem("test", 0), f"3 + 4.\nThe final answer is {said}"))

    return judge


def test_right_answers_in_any_form(judged):
    lost = [(gold, said) for gold, all_ in RIGHT.items() for said in all_ if not judged(gold, said)]
    assert lost == []


def test_other_answers_stay_wrong(judged):
    won = [(gold, said) for gold, all_ in WRONG.items() for said in all_ if judged(gold, said)]
    assert won == []


@pytest.mark.parametrize(
    "announced",
    [
        "**The final answer is:** 29 (3 * 10 - 1).",
        "The final answer is: **29** per day for 30 days.",
        "**Final Answer:** \\$29.",
        "Final answer: 29 minutes (or 0.48 hours).",
        "The final answer is:\n\n- 29 (3 * 10 - 1)",
        "The final answer is:\n* 29",
    ],
)
def test_announcements(tmp_path, announced):
    task = GSM8K(lines(tmp_path / "t.jsonl", [{"question": "?", "answer": "#### 29"}]))
    assert task.score(task.problem("test", 0), announced) == 1


def test_marked_answer_of_a_worked_solution(tmp_path):
    path = lines(tmp_path / "t.jsonl", [{"question": "?", "answer": "#### 29"}])
    task = GSM8K(path, style="plain")
    for said, score in (("29 (3 * 10 - 1)", 1), ("\\$29.", 1), ("\u221229", 0), ("28 or 29", 0)):
        assert task.score(task.problem("test", 0), f" 30 - 1 is it\n#### {said}\n\n") == score


def test_expressions(tmp_path):
    lost = []
    for gold, said in EXPRESSIONS:
        task = Mathematics(lines(tmp_path / "t.jsonl", [{"problem": "?", "answer": gold}]))
        if not task.score(task.problem("test", 0), f"The final answer is {said}"):
            lost.append((gold, said))
    assert lost == []


def test_expected_answers_are_normalised(tmp_path):
    path = lines(tmp_path / "t.jsonl", [{"problem": "?", "answer": "\u22125"}])
    task = Mathematics(path)
    assert task.score(task.problem("test", 0), "\\boxed{-5}") == 1
    assert task.score(task.problem("test", 0), "\\boxed{5}") == 0

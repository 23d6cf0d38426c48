"""Answers as models write them: a right answer counts in any surrounding text.

The forms come from answers of instruction-tuned models to GSM8K, and similar ones: currencies,
emphasis, quotes, brackets, Unicode signs, units, remarks with other numbers, and sums. The expected
answer of each form was decided by reading it.
"""

import time

import pytest

from dms_jax.evaluation.tasks import GSM8K, Mathematics, maths
from tests.evaluation.tasks.published import lines

RIGHT = {
    "29": [
        "twenty-nine (29).",
        "x=29 (3 * 10 - 1).",
        "29",
        "\\$29.",
        "US$29.",
        "$29.00.",
        "$$29$$.",
        "\u201c29\u201d.",
        "`29`.",
        "*29*.",
        "**29**.",
        "_29_.",
        "[29].",
        "\\(29\\).",
        "$\\boxed{29}$.",
        "**\\$29**.",
        "29 (3*10 - 1 = 29).",
        "29 minutes, or 0.48 hours.",
        "29 minutes = 1740 seconds.",
        "29%.",
        "$3 \\times 10 - 1 = 29$.",
        "30 - 1 = 29 minutes.",
        "$30 - $1 = $29.",
        "that she has 29 apples.",
        "\u20ac29.",
        "29 - hope it helps.",
        "29.\nLet me check: 3 * 10 - 1 = 29, and 2 * 15 = 30.",
        "29 \\text{ minutes}",
        "$29$ (not $28$).",
        "\\boxed{29} for 30 days.",
        "$29/day.",
        "58/2 = 29.",
        "\\frac{58}{2} = 29",
        "58/2.",
        "29**",
        "29 \\]",
    ],
    "18": ["$18$ per day for 30 days.", "18 apples out of 30.", "18, because 3 + 15 = 18."],
    "-5": ["\u22125.", "- 5.", "-$5.", "\\$-5.", "(-5).", "negative 5."],
    "29000": ["29,000.", "$29,000.", "29\xa0000.", "29{,}000", "29\\,000."],
    "50": ["50%.", "50\\%.", "50 percent."],
    "0.5": ["1/2.", "\\frac{1}{2}.", "0.5 (1/2).", ".5"],
    "58": ["29 * 2 = 58.", "29 + 29 = 58 (twice 29)."],
}
WRONG = {
    "5": ["\u2212 5", "-$5", "negative 5."],
    "29": [
        "28.",
        "28 (3 * 10 - 1 = 29).",
        "*28*, 29.",
        "290.",
        "29.5.",
        "29/2.",
        "29,000.",
        "twenty-nine.",
        "28 or 29.",
        "29-30.",
        "29 x 2.",
        "29 * 2 = 58.",
        "29 and 30.",
        "29^2",
        "0x29",
        "29:30",
        "29\xb2",
    ],
    "30": ["$18$ per day for 30 days."],
    "0.5": ["50%."],
    "28": ["$29$ (not $28$)."],
}
# For tasks whose answers are expressions.
EXPRESSIONS = [
    ("3\\sqrt{2}", "3\\sqrt{2}."),
    ("3\\sqrt{2}", "$3\\sqrt{2}$ (about 4.24)."),
    ("3(x+1)", "3 (x + 1)"),
    ("\\frac{1}{2}", "\\frac12"),
    ("-\\frac{1}{2}", "\u2212\\frac{1}{2}"),
    ("(1,2)", "(1, 2)"),
    ("120", "5!"),
    ("\\text{yes}", '"yes".'),
    ("x=-3", "$x=\u22123$"),
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


@pytest.mark.parametrize("text", ["-" + " " * 20_000, "1+1=" * 5_000, "$a " * 7_000, "9" * 20_000])
def test_long_texts_take_linear_time(tmp_path, monkeypatch, text):
    monkeypatch.setattr(maths, "find_answer", lambda text: None)
    task = GSM8K(lines(tmp_path / "t.jsonl", [{"question": "?", "answer": "#### 29"}]))
    began = time.process_time()
    assert task.answer(f"The final answer is {text}") is None
    assert time.process_time() - began < 1  # 0.02 s; seconds where it is quadratic


def test_expected_answers_are_normalised(tmp_path):
    path = lines(tmp_path / "t.jsonl", [{"problem": "?", "answer": "\u22125"}])
    task = Mathematics(path)
    assert task.score(task.problem("test", 0), "\\boxed{-5}") == 1
    assert task.score(task.problem("test", 0), "\\boxed{5}") == 0

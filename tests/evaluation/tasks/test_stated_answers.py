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
        "A: 29",
        "x=29 (3 * 10 - 1).",
        "$x=29$ per 30 days.",
        "Total: $29 for 30 days",
        "29 -- see above",
        "29 => done in 3 steps",
        "29~minutes",
        "29 (or twenty-nine)",
        "29",
        "29.",
        "\\$29.",
        "US$29.",
        "USD 29.",
        "29 USD.",
        "$29",
        "$29.",
        "$29.00.",
        "$$29$$.",
        '"29".',
        "'29'.",
        "\u201c29\u201d.",
        "\u201829\u2019.",
        "`29`.",
        "*29*.",
        "**29**.",
        "***29***.",
        "_29_.",
        "__29__.",
        "(29).",
        "[29].",
        "{29}.",
        "<29>.",
        "\\(29\\).",
        "\\[29\\]",
        "$\\boxed{29}$.",
        "\\boxed{29}.",
        "**\\$29**.",
        "**$29**.",
        "29 (3 * 10 - 1).",
        "29 (3*10 - 1 = 29).",
        "29 minutes (or 0.48 hours).",
        "29 minutes, or 0.48 hours.",
        "29 minutes, which is 1740 seconds.",
        "29 minutes = 1740 seconds.",
        "29%.",
        "3 * 10 - 1 = 29.",
        "3*10-1=29",
        "$3 \\times 10 - 1 = 29$.",
        "x = 29.",
        "$x = 29$",
        "n=29.",
        "30 - 1 = 29 minutes.",
        "30 - 1 = \\$29.",
        "\\$30 - \\$1 = \\$29.",
        "$30 - $1 = $29.",
        "approximately 29.",
        "about 29 minutes.",
        "therefore 29.",
        "equal to 29",
        "that she has 29 apples.",
        "that 3 boys have 29 apples.",
        "Janet makes $29 every day.",
        "Answer: 29",
        "29.00",
        "29.0 minutes",
        "29 \\text{ minutes}",
        "$29 \\text{ minutes}$.",
        "29\\%.",
        "\u20ac29.",
        "\xa329.",
        "29\u20ac.",
        "29 \xa2",
        "29 cents.",
        "\xa5 29",
        "Rs. 29.",
        "# 29",
        "#29.",
        "~29.",
        "\u2248 29",
        "= 29.",
        ": 29",
        "\n- 29",
        "29!",
        "29 :)",
        "29\u2728",
        "\uff12\uff19.",
        "29\u3002",
        "29;",
        "29 - hope it helps.",
        "29 \u2014 hope it helps",
        "29: 3 boxes of 10 less 1.",
        "29\n(3 * 10 - 1)",
        "29\nCheck: 3 * 10 = 30.",
        "29.\nLet me check: 3 * 10 - 1 = 29, and 2 * 15 = 30.",
        "**29** minutes.",
        "*$29*",
        "<b>29</b>.",
        "**29 minutes** (0.48 hours).",
        "\\textbf{29}.",
        "$\\mathbf{29}$.",
        "\\text{29}",
        "\\$\\boxed{29}.",
        "$\\boxed{\\$29}$.",
        "\\boxed{29 \\text{ minutes}}",
        "[$29].",
        "[\\$29]",
        "[29 minutes].",
        "[**29**]",
        "**[29]**",
        '"[29]"',
        "[answer] 29.",
        "29 (twenty-nine).",
        "29 [minutes].",
        "$29$ (not $28$).",
        "\\(29\\) minutes (or 0.48 hours).",
        "$$29$$ minutes per 2 days",
        "\\boxed{29} for 30 days.",
        "**\\boxed{29}** per day for 30 days.",
        "$\\boxed{29}$ (which is $3 \\times 10 - 1$).",
        "US $29.",
        "A$29.",
        "29.00 USD (or 27 EUR).",
        "$29/day.",
        "$29/week for 3 weeks",
        "29 km/h.",
        "29 mph for 2 hours",
        "29 m^2.",
        "29 cm\xb2",
        "29 square feet (29 ft^2).",
        "29\xb0",
        "29 \xb0C (84 F).",
        "29 * 1 = 29.",
        "(3 * 10) - 1 = 29.",
        "3 \xd7 10 \u2212 1 = 29.",
        "3\xd710\u22121 = **29**.",
        "$3 \\cdot 10 - 1 = \\$29$",
        "58 / 2 = 29 apples per child, 2 children",
        "58/2 = 29.",
        "\\frac{58}{2} = 29",
        "58/2.",
        "29 hours and 0 minutes.",
        "29 dollars and 0 cents.",
        "29 \n\nI hope this helps 30 people.",
        "**29**\n\n2 more remarks",
        "29\n\n(3*10-1)",
        "29 </s>",
        "29<|im_end|>",
        "29 \\]",
        "29\\)",
        "29$",
        "29 $.",
        '29".',
        "29**",
        "29*",
        "29`",
        "29)",
        "29]",
        "\u300c29\u300d",
        "\xab29\xbb.",
        "\u301029\u3011",
        "\uff0429",
        "+29",
        "+$29",
        "29m",
        "29km.",
        "29 m (3 * 10 - 1).",
        "29th.",
        "29 x",
        "29\\%",
    ],
    "18": [
        "$18$ per day for 30 days.",
        "$18 per day for 30 days.",
        "18 dollars per day for 30 days.",
        "18 apples out of 30.",
        "**18** apples, since 30 - 12 = 18.",
        "18, because 3 + 15 = 18 and 2 are left.",
        "18, not 19.",
        "18 for 3 people.",
        "18 per 2 weeks.",
        "18 in 2020.",
        "\\$18 every day for 7 days",
        "$18$ dollars (that is $3 \\times 6$).",
    ],
    "-5": [
        "\u22125.",
        "\u2212 5.",
        "- 5.",
        "-5.",
        "-$5.",
        "$-5.",
        "\\$-5.",
        "-\\$5.",
        "$\u22125$.",
        "\u20135.",
        "\uff0d5.",
        "(-5).",
        "negative 5.",
        "minus 5.",
        "$ - 5 $",
    ],
    "29000": [
        "29,000.",
        "$29,000.",
        "\\$29,000.00",
        "29 000.",
        "29\xa0000.",
        "29\u202f000",
        "29{,}000",
        "$29{,}000$",
        "29,000 dollars (29 * 1000).",
        "29\\,000.",
        "29k",
        "$29K per year",
    ],
    "1234567": [
        "1,234,567.",
        "\\$1,234,567.",
    ],
    "50": [
        "50%.",
        "50\\%.",
        "50 percent.",
        "$50\\%$",
        "**50%**.",
    ],
    "0.5": [
        "1/2.",
        "\\frac{1}{2}.",
        "0.5 (1/2).",
        "1/2 (0.5).",
        ".5",
        "$.50.",
    ],
    "2.5": [
        "2 1/2.",
        "2.5 hours (150 minutes).",
    ],
    "58": [
        "29 * 2 = 58.",
        "29 x 2 = 58 apples.",
        "29 \\times 2 = 58",
        "29 + 29 = 58 (twice 29).",
    ],
    "-29": [
        "\u221229\uff0e",
        "-29.00",
        "$-29$ degrees",
        "-29 degrees (or 29 below).",
        "**-29**",
        '"-29"',
        "($-29)",
        "-(29)",
        "\u2014 29",
    ],
    "1000": [
        "1'000",
        "1 000 dollars for 30 days",
        "1,000.00 (30 * 33.33)",
        "10^3",
        "1e3",
    ],
}
WRONG = {
    "5": [
        "\u2212 5",
        "\u22125.",
        "- 5",
        "-5",
        "-$5",
        "-\\$5.",
        "negative 5.",
        "minus 5",
    ],
    "29": [
        "28.",
        "\\$28 (not 29).",
        "28 (3 * 10 - 1 = 29).",
        '"28".',
        "*28*, 29.",
        "2 9.",
        "290.",
        "29.5.",
        "2.9.",
        "29/2.",
        "29,000.",
        "- 29",
        "[28].",
        "twenty-nine.",
        "not 29.",
        "28 or 29.",
        "28-29.",
        "29-30.",
        "29 x 2.",
        "29 + 1.",
        "29 * 2 = 58.",
        "29, 3 * 10 - 1.",
        "-29 degrees (or 29 below).",
        "29 and 30.",
        "29 to 30",
        "29 ... 30",
        "29, 30, and 31.",
        "either 29 or 30",
        "between 29 and 30",
        "at least 29",
        "more than 29",
        "29^2",
        "1.29",
        "29e3",
        "0x29",
        "29:30",
        "2929",
        "9",
        "unknown (29?)",
        "2*9",
        "29\xb2",
        "29:30 pm",
        "29k",
    ],
    "30": [
        "$18$ per day for 30 days.",
        "18 dollars per day for 30 days.",
    ],
    "29000": [
        "29.000 dollars",
    ],
    "0.5": [
        "50%.",
    ],
    "2": [
        "2 1/2.",
        "29",
    ],
    "28": [
        "$29$ (not $28$).",
    ],
    "1000": [
        "1 thousand",
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

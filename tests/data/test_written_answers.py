"""Normalising written answers, and finding where an answer ends and a remark begins."""

import time

import pytest

from dms_jax.data.written_answers import expression, is_open, readable, stated


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("It is \\$29, not \u22125.", "It is 29, not -5."),
        ("**29** minutes", "29 minutes"),
        ("``29``, \u201c29\u201d, '29'", "29, 29, 29"),
        ("29\u00a0000 and 29{,}000", "29 000 and 29,000"),
        ("Janet's f'(x) = 3", "Janet's f'(x) = 3"),
        ("3*10*2 = 3 * 10 * 2", "3*10*2 = 3 * 10 * 2"),
        ("x_1 + y_2 and a_{1}_b", "x_1 + y_2 and a_{1}_b"),
        ("28\u201329 and \u201329", "28\u201329 and -29"),
        ("$x$ -$5$", "$x$ -$5$"),
        ("-$5 is -\\$5", "-5 is -5"),
        ("m\u00b2 and 10\u00b9\u00b2", "m^{2} and 10^{12}"),
        ("\\textbf{29} \\text{ minutes}", "29 \\text{ minutes}"),
    ],
)
def test_readable_answers(written, plain):
    assert readable(written) == plain
    assert readable(plain) == plain


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("29 (3 * 10 - 1).", "$29$"),
        ("- 5", "$-5$"),
        ("30 - 1 = 29 minutes.", "$29$"),
        ("30 apples - 1 apple = 29 apples, 2 each.", "$29$"),
        ("29 minutes = 1740 seconds", "$29$"),
        ("$18$ per day for 30 days.", "$18$"),
        ("2 1/2", "$\\frac{5}{2}$"),
        ("x = 29", None),
        ("28 or 29", None),
        ("3\\sqrt{2}", None),
        ("3 (x + 1)", None),
        ("$5$ or $6$", None),
        ("", None),
    ],
)
def test_stated_answers(text, answer):
    assert stated(text) == answer


def test_ambiguous_answers_are_open():
    several = ["28 or 29", "28-29", "28 to 29", "not 29", "between 28 and 29", "at least 29"]
    assert all(map(is_open, several))
    assert not any(map(is_open, ["29", "29 (or 30 with tips)", "29 minutes, or 0.48 hours"]))


@pytest.mark.parametrize(
    "text",
    [
        "-" + " " * 20_000,
        "29" + " \n" * 9_000,
        "(" * 20_000,
        "1 " * 10_000,
        "1+1=" * 5_000,
        "*a " * 7_000,
        "'a " * 7_000,
        "$a " * 7_000,
        "1,234" * 4_000,
        "1 ab cd ef gh" * 2_000,
        "\\text{1" * 3_000,
        "\\text {" + " " * 20_000,
    ],
)
def test_long_texts_take_linear_time(text):
    began = time.process_time()
    plain = readable(text)
    assert not any(read(plain) is NotImplemented for read in (stated, is_open, expression))
    assert time.process_time() - began < 1  # 0.02 s; seconds where it is quadratic

r"""Normalise written answers for Math-Verify.

Math-Verify reads LaTeX and plain numbers. Written answers also have currencies, emphasis, quotes,
Unicode signs, and remarks with other numbers:

    \$29.        "29".     *29*.     −5        29 (3 * 10 - 1).       $18$ per day for 30 days.

`readable` rewrites notation, in any text. `stated` takes the answer at the beginning of a text, up
to where a remark begins. Both are conservative: they leave unknown notation unchanged, and
"28 or 29" states no number.
"""

import re

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\uff0d\ufe63\u2010\u2011\u2012", "-"),  # minus signs and hyphens
        **dict.fromkeys("\u00a0\u202f\u2009\u2007\u2008\u200a", " "),  # spaces within numbers
        **dict.fromkeys("\u200b\u200e\u200f\u2060\ufeff", ""),  # zero-width characters
        **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb\u300c\u300d\u3010\u3011\uff02`", '"'),
        **dict.fromkeys("\u2018\u2019\u201a", "'"),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "\uff0c": ",",
        "\uff0e": ".",
        "\u3002": ". ",
        "\uff05": "%",
        "\uff04": "$",
        "\uff1a": ":",
        "\uff08": "(",
        "\uff09": ")",
        "\uff1d": "=",
    }
)
_NUMBER = r"(?:\d{1,3}(?:[,' ]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_MONEY = r"(?:US\$|[$€£¥₹]|USD|EUR|GBP|Rs\.?)"
_WRAPPED = r"\\(?:text|textbf|textit|emph|mathbf|mathrm|underline|mbox) ?"
_POWER = re.compile("(?<=[^\\W_])[⁰¹²³⁴-⁹]+")
_REWRITTEN = [
    (re.compile(r"<br\s*/?>"), "\n"),
    (re.compile(r"</?(?:b|i|u|em|strong|code|mark|span|p)>"), ""),
    (re.compile(r"\\\$"), ""),
    (re.compile(r"\b(?:US|AU|CA|NZ|A|C)(?=\$)"), ""),
    # \textbf{29} \text{$29$}
    (re.compile(_WRAPPED + r"\{(?=[^\d{}]*\d)([-+$%., \d]++)\}"), r"\1"),
    # 29{,}000  29\,000
    (re.compile(r"(?<=\d)(?:\{,\}|\\[,;! ])(?=\d{3}(?!\d))"), ","),
    # –5, but not 28–29
    (re.compile(r"(?<![\d)\]}%$.])(?<![\d)\]}%$.] )[\u2013\u2014] ?(?=[$\d.])"), "-"),
    # *29* **29** _29_, but neither 3 * 10 * 2, 3*10*2 nor x_1_2
    (re.compile(r"(?<![\w)\]}*])(\*{1,3})(?=[^\s*])([^*\n]*[^\s*])\1(?![\w*])"), r"\2"),
    (re.compile(r"(?<![\w)\]}\\])(_{1,3})(?=[^\s_{])([^_\n]*[^\s_])\1(?!\w)"), r"\2"),
    (re.compile(r'"'), ""),
    (re.compile(r"(?<![\w)'])'([^'\n]+)'(?!\w)"), r"\1"),
    # -$5, but not $x$ -$5$
    (re.compile(r"(?<![\w$)])-\s?\$(?=[\d.][\d,.]*(?![\d,.]*\s*[$\\^]))"), "-"),
]
_LEAD = re.compile(
    r"(?:\s|[*_:=~#≈]|\[answer\]|\\(?:approx|sim)\b|(?:therefore|thus|simply|just|exactly|about|around"
    r"|approximately|roughly|only|equal to|equals|given by|a total of)\b)*+",
    re.IGNORECASE,
)
# Before a number: "x =", "Total:", and "twenty-nine" of "twenty-nine (29)"
_LABEL = re.compile(
    r"\$?[A-Za-z][A-Za-z ]{0,30}[=:]\s?(?=[-$\d(])|[A-Za-z]+(?:[- ][A-Za-z]+){0,5} (?=\([-$\d])"
)
_BULLET = re.compile(r"\s*[-+•*]\s+")
_MATH = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$\n]*[^$\s])\$(?!\d)|\$\s([^$\n]+)\s\$(?!\d)"
    r"|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]",
    re.DOTALL,
)
_SIGNED = (
    rf"(?P<sign>(?:negative\s|minus\s|[-+])?)\s*{_MONEY}?\s*(?P<inner>[-+]?)\s*"
    rf"(?P<number>{_NUMBER})"
)
_STATED = re.compile(_SIGNED, re.IGNORECASE)
_SCIENTIFIC = re.compile(r"[eE]([-+]?\d{1,3})(?![\w.])")
_THOUSANDS = re.compile(r"[kK]\b")
_OVER = re.compile(r"(?:\s(?P<more>\d+))?\s?/\s?(?P<below>\d+)(?!\d|[.,]\d)")
_PERCENT = re.compile(r"\s?(?:\\?%|percent\b|per cent\b)")
_BRACKETED = re.compile(
    rf"(?P<sign>-?)[(\[{{<]\s*(?P<inside>[-+]?\s*{_MONEY}?\s*[-+]?{_NUMBER}\s?%?)"
    r"(?:\s+[A-Za-z]{2,}){0,3}\s*[)\]}>](?=[.,;:!?*]*(?:\s|$))"
)
_TERM = re.compile(
    rf"[\s(]*[-+]?\s*{_MONEY}?\s*{_NUMBER}(?:\s*\\?%|(?:\s+(?!x\b)[A-Za-z]{{2,}}+){{0,3}}+)[\s)]*",
    re.IGNORECASE,
)
_OPERATOR = r"(?:[-+*/\u00d7x\u00b7\u00f7]|\\(?:times|cdot|div)\b)"
_JOINED = re.compile(rf"\s*(?P<by>{_OPERATOR}|=)\s*")
_OTHER = re.compile(
    r"\s*(?:or|and|to|-)\s+(?=[-$\d.])|:\d|\s*\.\.|\s*-\s*(?=[$\d])|\s*,\s*(?=[-$\d])",
    re.IGNORECASE,
)
# Continuations that make an expression: 29_x, 29^2, 3\sqrt{2}, 29 + 1
_GOES_ON = rf"[_{{\[(\d]|\s*\^|\s*{_OPERATOR}\s*[-(\d$.\\]|\s*\\(?!\]|\))\w"
# Further ones, unless answers are plain numbers: 29x, 29!, 2 pi, 5 i, 3 (x + 1)
_FORMULA = re.compile(
    rf"{_GOES_ON}|\w|\s*!|\s+[b-zB-Z](?!\w)|\s*\([^()]*(?<![A-Za-z])[a-zA-Z](?![A-Za-z])"
    r"|\s+(?:sqrt|pi|sin|cos|tan|log|ln|exp|mod|choose|over|times|plus|minus|divided)\b"
)
_SUM = re.compile(rf"{_GOES_ON}|\s+(?:times|plus|minus|divided)\b")
_NOT = re.compile(r"(?:not|neither|either|between|(?:less|more) than|at (?:least|most))\b", re.I)
_CLAUSE = re.compile(r"(?:[^.\n;]|\.(?=\d))*")
_NAMED = re.compile(r"\\(?:text|textbf|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2,}")
_SPACES = re.compile(r"\s+")
_LONGEST = 2000  # characters of a text to search for an answer


def readable(text: str) -> str:
    r"""Returns a text with numbers written as Math-Verify reads them.

    # In: "It is \$29, not −5."  Out: "It is 29, not -5."
    # In: "**29** minutes"       Out: "29 minutes"
    """
    text = text.translate(_SIGNS)
    text = _POWER.sub(lambda power: f"^{{{power[0].translate(_POWERS)}}}", text)
    for pattern, by in _REWRITTEN:
        text = pattern.sub(by, text)
    return text


def stated(text: str, *, bulleted: bool = False, numeric: bool = False) -> str | None:
    r"""Returns the answer that a readable text begins with; None if it has to be looked for.

    Args:
      text: the text after "the final answer is", made `readable`.
      bulleted: whether it is on a separate line, where a leading dash is a bullet.
      numeric: whether answers are plain numbers, so that 29m and 29! are 29.

    Returns:
      A number or an expression, between dollars.

    # In: "29 (3 * 10 - 1)."           Out: "$29$"
    # In: "- 5"                        Out: "$-5$"
    # In: "30 - 1 = 29 minutes."       Out: "$29$"
    # In: "$18$ per day for 30 days."  Out: "$18$"
    # In: "x = 29", "28 or 29"         Out: None
    """
    if bulleted:
        text = _BULLET.sub("", text, count=1) if _BULLET.match(text) else text
    text = _without_lead(text)
    if numeric and (label := _LABEL.match(text)):
        text = text[label.end() :]
    if math := _MATH.match(text):
        inside = next(group for group in math.groups() if group is not None)
        rest = text[math.end() :]
        return None if _OTHER.match(rest) or _FORMULA.match(rest) else f"${inside}$"
    if inside := _BRACKETED.match(text):
        return _number(inside["sign"] + inside["inside"], numeric)
    return _number(text[_after_sum(text) :], numeric)


def is_open(text: str) -> bool:
    """Whether a readable text has several numbers, or only bounds or excludes one.

    # "28 or 29", "28-29", "not 29", "at least 29"
    """
    text = _without_lead(text)
    found = _STATED.match(text)
    return bool(_NOT.match(text) or (found and _OTHER.match(text, found.end())))


def expression(text: str) -> str | None:
    r"""The readable text up to the end of its sentence, if it is an expression.

    # In: "3\sqrt{2}."       Out: "$\boxed{3\sqrt{2}}$"
    # In: "(1, 2)"           Out: "$\boxed{(1, 2)}$"
    # In: "the sum of both"  Out: None
    """
    clause = _clause(text)
    if not clause or "$" in clause or clause.count("{") != clause.count("}"):
        return None
    return None if _WORD.search(_NAMED.sub(" ", clause)) else f"$\\boxed{{{clause}}}$"


def word(text: str) -> str | None:
    r"""The readable text up to the end of its sentence, if it is a word.

    # In: "yes."  Out: "$\boxed{yes}$"
    """
    clause = _clause(text)
    return f"$\\boxed{{{clause}}}$" if re.fullmatch("[A-Za-z]+", clause) else None


def _clause(text: str) -> str:
    found = _CLAUSE.match(_without_lead(text))
    return "" if found is None else found[0].strip()


def _without_lead(text: str) -> str:
    """Strips the words and marks that introduce an answer."""
    text = _SPACES.sub(lambda spaces: "\n" if "\n" in spaces[0] else " ", text[:_LONGEST])
    lead = _LEAD.match(text)
    return text if lead is None else text[lead.end() :]


def _after_sum(text: str) -> int:
    """The start of the value if a text begins with a sum ("30 - 1 = 29"); 0 otherwise.

    # "30 - 1 = 29 minutes", "30 apples - 1 apple = 29 apples", but not "29 minutes = 1740 seconds"
    """
    place, value, operators = 0, 0, 0
    while (term := _TERM.match(text, place)) and (joined := _JOINED.match(text, term.end())):
        place = joined.end()
        if joined["by"] != "=":
            operators += 1
        elif operators == 0 and value == 0:
            break
        else:
            value, operators = place, 0
    return value


def _number(text: str, numeric: bool) -> str | None:
    """The number at the start of a text, unless an expression or further numbers follow."""
    found = _STATED.match(text)
    if found is None:
        return None
    number, end = re.sub("[,' ]", "", found["number"]), found.end()
    if power := _SCIENTIFIC.match(text, end):
        number, end = f"{number}\\cdot 10^{{{int(power[1])}}}", power.end()
    elif numeric and _THOUSANDS.match(text, end):
        number, end = f"{number}\\cdot 1000", end + 1
    over = _OVER.match(text, end)
    if over is not None:
        end = over.end()
        if over["more"] is not None and number.isdecimal():  # 2 1/2
            whole = int(number) * int(over["below"]) + int(over["more"])
            number = f"\\frac{{{whole}}}{{{over['below']}}}"
        else:
            number = f"\\frac{{{number}}}{{{over['below']}}}"
    if percent := _PERCENT.match(text, end):  # Math-Verify lets 50% be 50
        end = percent.end()
    goes_on = _SUM if numeric else _FORMULA
    if _OTHER.match(text, end) or goes_on.match(text, end):
        return None
    negative = (found["sign"].strip().lower() not in ("", "+")) != (found["inner"] == "-")
    return f"${'-' if negative else ''}{number}$"

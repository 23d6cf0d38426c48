"""Hostile chat templates reach nothing outside, and every failure is a short DataError."""

import pytest

from dms_jax.checkpoint import chat
from dms_jax.checkpoint.chat import render_chat
from dms_jax.errors import DataError

MESSAGES = [{"role": "user", "content": "x"}]
REFUSED = {
    # What it reaches for.
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe|access to attribute"),
    "class by filter": ("{{ (''|attr('__class__')).x }}", "access to attribute"),
    "change messages": ("{{ messages.append(1) }}", "access to attribute"),
    "set on messages": ("{% set messages.x = 1 %}", "cannot assign"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "undefined function": ("{{ nothing() }}", "undefined"),
    "unclosed": ("{% if %}", "Expected an expression"),
    # What Python raises.
    "division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "index": ("{{ [1][5] + 1 }}", "no element 5"),
    "bytes that are no text": ("{{ 'é'.encode().decode('ascii') }}", "UnicodeDecodeError"),
    "break outside a loop": ("{% break %}", "SyntaxError"),
    "tojson of a function": ("{{ raise_exception|tojson }}", "not JSON serializable"),
    "long number": ("{{ 10**5000 }}", "4300 digits"),
    # What has no end.
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "block": ("{% block b %}{{ self.b() }}{% endblock %}", "RecursionError"),
    "parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    # What it says.
    "says no": ("{{ raise_exception('no') }}", "it says: no$"),
    "says a number": ("{{ raise_exception(3) }}", "it says: 3$"),
    "says a lot": ("{{ raise_exception('x' * 10**7) }}", "it says: xxx"),
    "writes to the terminal": ("{{ raise_exception('\x1b[31m\x07') }}", r"\\x1b\[31m\\x07"),
    "says half a character": (r"{{ raise_exception('\ud800') }}", r"\\ud800"),
}
RENDERED = {
    "plain": ("{{ messages[0].content }}", "x"),
    "nothing": ("{{ nothing }}", ""),
    "half a character": ("a\ud800{{ 1 }}", "a\ud8001"),
    "class by format": ("{{ '{0.__class__}'.format(1) }}", ""),
    "loop controls": (
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}a{% endfor %}",
        "a",
    ),
    "generation": ("{% generation %}b{% endgeneration %}", "b"),
}


def render(template: str) -> str:
    return render_chat(template, messages=MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_template_is_refused(name):
    template, says = REFUSED[name]
    with pytest.raises(DataError, match=says) as refusal:
        render(template)
    message = str(refusal.value)
    assert len(message) < 1200
    assert message.isprintable()
    assert message.startswith("the chat template failed on the conversation: ")
    assert MESSAGES == [{"role": "user", "content": "x"}]


def test_length_of_output_is_limited(monkeypatch):
    monkeypatch.setattr(chat, "MAX_TEXT", 1000)
    with pytest.raises(DataError, match="writes more than 1000 characters"):
        render("{% for i in range(99999) %}{% for i in range(99999) %}x{% endfor %}{% endfor %}")


@pytest.mark.parametrize("name", RENDERED)
def test_harmless_template_is_rendered(name):
    template, text = RENDERED[name]
    assert render(template) == text

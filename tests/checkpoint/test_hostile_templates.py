"""Hostile chat templates reach nothing outside, and every failure is a short DataError."""

import pytest

from dms_jax.checkpoint.chat import render_chat
from dms_jax.errors import DataError

MESSAGES = [{"role": "user", "content": "x"}]
REFUSED = {
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe|access to attribute"),
    "change messages": ("{{ messages.append(1) }}", "access to attribute"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "undefined function": ("{{ nothing() }}", "undefined"),
    "unclosed": ("{% if %}", "Expected an expression"),
    "division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    "macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "says no": ("{{ raise_exception('no') }}", "it says: no$"),
    "writes to the terminal": ("{{ raise_exception('\x1b[31m\x07') }}", r"\\x1b\[31m\\x07"),
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


@pytest.mark.parametrize("name", RENDERED)
def test_harmless_template_is_rendered(name):
    template, text = RENDERED[name]
    assert render(template) == text

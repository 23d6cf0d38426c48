"""Chat templates that a stranger wrote: each ends in an error of ours, within time and memory."""

import os
import signal
import sys
import threading
import types

import pytest

from dms_jax.checkpoint import chat
from dms_jax.checkpoint.chat import render_chat
from dms_jax.errors import DataError
from dms_jax.helper_process import Running
from tests.support.instances import nightly_but

MESSAGES = [{"role": "user", "content": "x"}]


def nested(left: str, right: str, times: int) -> str:
    return "{{ " + left * times + "1" + right * times + " }}"


def grow(step: str, times: int = 60) -> str:
    return (
        "{% set ns = namespace(x='x') %}{% for i in range("
        + str(times)
        + ") %}{% set ns.x = "
        + step
        + " %}{% endfor %}"
    )


_FOR = "{% for i in range(99999) %}"
_END = "{% endfor %}"

REFUSED = {
    # What it reaches for.
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe|access to attribute"),
    "class by filter": ("{{ (''|attr('__class__')).x }}", "access to attribute"),
    "change messages": ("{{ messages.append(1) }}", "access to attribute"),
    "set on messages": ("{% set messages.x = 1 %}", "cannot assign"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "extends": ("{% extends 'x' %}", "no loader"),
    "undefined function": ("{{ nothing() }}", "undefined"),
    "unknown filter": ("{{ 1|nothing }}", "No filter"),
    "unknown tag": ("{% nothing %}", "unknown tag"),
    "unclosed": ("{% if %}", "Expected an expression"),
    "lambda": ("{{ (lambda: 1)() }}", "expected token"),
    # What raises of itself.
    "division by zero": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "remainder by zero": ("{{ 1 % 0 }}", "ZeroDivisionError"),
    "slice of zero": ("{{ [1]|slice(0)|list }}", "ZeroDivisionError"),
    "index": ("{{ [1][5] + 1 }}", "no element 5"),
    "cycler of nothing": ("{{ cycler() }}", "RuntimeError"),
    "unknown encoding": ("{{ 'x'.encode('nothing') }}", "LookupError"),
    "bytes that are no text": ("{{ 'é'.encode().decode('ascii') }}", "UnicodeDecodeError"),
    "break outside a loop": ("{% break %}", "SyntaxError"),
    "infinity as a literal": ("{{ 1e999|int }}", "NameError"),
    "key that is none": ("{{ {[1]: 2} }}", "unhashable"),
    "mixed sort": ("{{ [1, 'a']|sort }}", "TypeError"),
    "not a loop": ("{% for a in 3 %}{% endfor %}", "not iterable"),
    "tojson of a function": ("{{ raise_exception|tojson }}", "not JSON serializable"),
    "time of a number": ("{{ strftime_now(3) }}", "TypeError"),
    "time of half a character": (r"{{ strftime_now('\ud800') }}", "UnicodeEncodeError"),
    "format": ("{{ '{'.format(1) }}", "Single"),
    "long number": ("{{ 10**5000 }}", "4300 digits"),
    "long literal": ("{{ " + "9" * 100_000 + " }}", "4300 digits"),
    "too large for a float": ("{{ (10**400)|float }}", "OverflowError"),
    "range": ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
    # What nests without end.
    "macro": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    "loop": ("{% for x in [[1]] recursive %}{{ loop([x]) }}{% endfor %}", "RecursionError"),
    "block": ("{% block b %}{{ self.b() }}{% endblock %}", "RecursionError"),
    "parentheses": (nested("(", ")", 5000), "RecursionError"),
    "lists": (nested("[", "]", 5000), "RecursionError"),
    "not": (nested("not ", "", 5000), "RecursionError"),
    "minus": (nested("-", "", 20_000), "RecursionError"),
    "filters": (nested("", "|string", 5000), "RecursionError"),
    "sum": (nested("", "+1", 20_000), "RecursionError"),
    "attributes": (nested("", ".b", 20_000), "RecursionError"),
    "ifs": ("{% if 1 %}" * 500 + "{% endif %}" * 500, "RecursionError"),
    "fors": ("{% for i in [1] %}" * 100 + _END * 100, "IndentationError"),
    "deep list as text": (grow("[ns.x]", 90_000) + "{{ ns.x }}", "RecursionError"),
    "deep list as JSON": (grow("[ns.x]", 90_000) + "{{ ns.x|tojson }}", "RecursionError"),
    # What it says.
    "says no": ("{{ raise_exception('no') }}", "it says: no$"),
    "says a number": ("{{ raise_exception(3) }}", "it says: 3$"),
    "says a lot": ("{{ raise_exception('x' * 10**7) }}", "it says: xxx"),
    "writes to the terminal": ("{{ raise_exception('\x1b[31m\x07') }}", r"\\x1b\[31m\\x07"),
    "says half a character": (r"{{ raise_exception('\ud800') }}", r"\\ud800"),
    "names half a character": ("{{ \ud800 }}", "unexpected char"),
    "long name": ("{{ " + "a" * 900_000 + " + 1 }}", "it says: 'aaa"),
}
LARGE = {
    "text": "{{ 'x' * 10**10 }}",
    "list": "{{ [0] * 10**10 }}",
    "product of two": "{{ ('x' * 10**5) * 10**6 }}",
    "center": "{{ 'x'|center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "zfill": "{{ 'x'.zfill(10**10) }}",
    "indent": "{{ 'x\ny'|indent(10**10) }}",
    "width": "{{ '%10000000000d'|format(1) }}",
    "width of format": "{{ '{:10000000000}'.format(1) }}",
    "indent of JSON": "{{ [1]|tojson(indent=10**10) }}",
    "batch": "{{ [1]|batch(10**10, 'x')|list }}",
    "bytes": "{{ (1).to_bytes(10**10, 'big') }}",
    "replace": "{{ ('x' * 10**6)|replace('', 'y' * 10**6) }}",
    "join": "{{ range(99999)|join('x' * 10**7) }}",
    "doubling": grow("ns.x + ns.x") + "{{ ns.x }}",
    "a long text": "{{ 'x' * (64 * 2**20 + 1) }}",
}
ENDLESS = {
    "loops": _FOR * 3 + _END * 3,
    "loops that write": _FOR * 2 + "x" * 10 + _END * 2,
    "power": "{{ 10**(10**9) }}",
    "power of variables": "{% set n = 10**9 %}{{ (10**n) % 7 }}",
    "rounding": "{{ 1.5|round(10**9, 'ceil') }}",
    "slices": "{{ [1]|slice(10**9)|list }}",
    "blind text": "{{ lipsum(n=10**9) }}",
    "wrapping": "{{ ('x ' * 10**7)|wordwrap(1) }}",
    "a long chain": "{{ " + "~".join(["1"] * 1_000_000) + " }}",
}
RENDERED = {
    "plain": ("{{ messages[0].content }}", "x"),
    "nothing": ("{{ nothing }}", ""),
    "null character": ("a\0b{{ 1 }}", "a\0b1"),
    "half a character": ("a\ud800{{ 1 }}", "a\ud8001"),
    "class by format": ("{{ '{0.__class__}'.format(1) }}", ""),
    "empty batch": ("{{ [1]|batch(0)|list }}", "[[], [1]]"),
    "loop controls": (
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}a{% endfor %}",
        "a",
    ),
    "generation": ("{% generation %}b{% endgeneration %}", "b"),
    "a macro": ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{{ m('é') }}", "<1><é>"),
}


@pytest.fixture(autouse=True, scope="module")
def no_process_stays():
    yield
    chat._worker.close()


@pytest.fixture
def impatient(monkeypatch):
    chat._worker.close()
    monkeypatch.setattr(chat._worker, "seconds", 0.7)
    yield
    chat._worker.close()


def render(template: str) -> str:
    return render_chat(template, messages=MESSAGES, add_generation_prompt=True)


def assert_can_be_shown(message: str) -> None:
    assert len(message) < 1200
    assert message.isprintable()
    assert message.startswith("the chat template failed on the conversation: ")


def test_the_table_is_long_enough():
    assert len(REFUSED) + len(LARGE) + len(ENDLESS) >= 75


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name):
    template, says = REFUSED[name]
    with pytest.raises(DataError, match=says) as refusal:
        render(template)
    assert_can_be_shown(str(refusal.value))


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is bounded on Linux")
def test_it_asks_for_too_much_memory(name):
    with pytest.raises(DataError, match=r"too much memory|writes 67108865 characters"):
        render(LARGE[name])
    assert render("{{ 1 + 1 }}") == "2"


@pytest.mark.parametrize("name", nightly_but(["loops", "power", "slices"], ENDLESS))
def test_it_takes_too_much_time(impatient, name):
    with pytest.raises(DataError, match=r"runs for more than 0\.7 seconds") as refusal:
        render(ENDLESS[name])
    assert_can_be_shown(str(refusal.value))


@pytest.mark.parametrize("name", RENDERED)
def test_it_is_harmless(name):
    template, text = RENDERED[name]
    assert render(template) == text


def test_messages_are_json_data():
    message = {"role": "user", "content": "x"}
    frozen = types.MappingProxyType(message | {"extra": ("a", 1.5, None, True)})
    text = render_chat("{{ messages[0].extra|tojson }}", messages=(frozen,))
    assert text == '["a", 1.5, null, true]'
    endless: list = []
    endless.append(endless)
    for wrong in (object(), {1, 2}, endless, {(1, 2): 3}, 10**5000):
        with pytest.raises(DataError, match="must be texts, numbers, lists and dicts"):
            render_chat("", messages=[message | {"extra": wrong}])


def test_a_process_that_dies_at_a_request_is_replaced(monkeypatch):
    assert render("{{ 1 }}") == "1"
    assert chat._worker.running is not None
    monkeypatch.setattr(Running, "ended", False)
    os.kill(chat._worker.running.process.pid, signal.SIGKILL)
    with pytest.raises(DataError, match="it ends the process that it runs in"):
        render("{{ 2 }}")
    assert render("{{ 3 }}") == "3"


def test_what_was_ended_between_two_answers_is_no_fault_of_the_next():
    """By the system when memory is short, say."""
    assert render("{{ 1 }}") == "1"
    running = chat._worker.running
    assert running is not None
    running.process.kill()
    running.process.wait()
    assert render("{{ 2 }}") == "2"
    assert chat._worker.running is not running


def test_an_interrupted_answer_is_not_the_next_ones(monkeypatch):
    def interrupt(self, request, seconds):
        self.process.stdin.write(request)
        self.process.stdin.flush()
        raise KeyboardInterrupt

    assert render("{{ 1 }}") == "1"
    with monkeypatch.context() as patches:
        patches.setattr(Running, "_exchange", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render("{{ 2 }}")
    assert render("{{ 3 }}") == "3"


def test_threads_get_their_own_answers():
    answers = {}

    def ask(number: int) -> None:
        answers[number] = [
            render_chat(f"{{{{ {number} * n }}}}", messages=(), n=n) for n in range(20)
        ]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [str(number * n) for n in range(20)] for number in range(8)}


def test_a_fork_asks_a_process_of_its_own():
    assert render("{{ 1 }}") == "1"
    before = chat._worker.running
    chat._worker.forget()  # what a fork calls in the child
    assert render("{{ 2 }}") == "2"
    assert chat._worker.running is not before
    chat._worker.close()
    chat._worker.running = before
    assert render("{{ 3 }}") == "3"


def test_where_no_process_can_be_started(monkeypatch):
    chat._worker.close()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(DataError, match="cannot be started"):
        render("{{ 1 }}")


def test_what_a_process_says_of_its_own(monkeypatch, tmp_path):
    chat._worker.close()
    (tmp_path / "silent.py").write_text("")
    monkeypatch.setattr(chat._worker, "program", tmp_path / "silent.py")
    with pytest.raises(DataError, match=r"did not start silent\.py"):
        render("{{ 1 }}")

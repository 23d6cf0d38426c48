"""Streamed text: whole words on a terminal, unchanged elsewhere."""

import io
import itertools
import random

import pytest
from rich.console import Console

from dms_jax.command_line.writing import AnswerWriter, Writer
from dms_jax.generation.answers import PLAIN, AnswerForm
from tests.support.forced_answers import ANSWERS, SAID, THOUGHT

STORY = (
    "Once upon a time, there was a little girl who loved to play outside in the sunshine.\n\n"
    "  She had a friend, Antidisestablishmentarianism, and a dog.\nThe end"
)


def written(text: str, width: int | None, *, terminal: bool = False, seed: int = 0) -> str:
    """Passes the text through a writer, in pieces of any length."""
    out, rng = io.StringIO(), random.Random(seed)
    console = Console(file=out, width=20, force_terminal=terminal, color_system=None)
    writer, rest = Writer(console, width), text
    while rest:
        size = rng.randint(1, 9)
        piece, rest = rest[:size], rest[size:]
        writer.write(piece, last=not rest)
    return out.getvalue()


@pytest.mark.parametrize("seed", range(4))
def test_lines_break_between_words(seed):
    for text in (written(STORY, 40, seed=seed), written(STORY, None, terminal=True, seed=seed)):
        assert text.split() == STORY.split()
    lines = written(STORY, 40, seed=seed).splitlines()
    assert lines == [
        "Once upon a time, there was a little",
        "girl who loved to play outside in the",
        "sunshine.",
        "",
        "  She had a friend,",
        "Antidisestablishmentarianism, and a dog.",
        "The end",
    ]


def test_lines_are_filled_at_every_width():
    """At every width, also with lines that fill the last column."""
    text = STORY.replace("\n", " ").replace("  ", " ")
    for width in range(30, 70):
        lines = written(text, width, seed=width).splitlines()
        assert max(map(len, lines)) <= width
        assert " ".join(lines).split() == text.split()
        for line, below in itertools.pairwise(lines):
            assert len(line) + 1 + len(below.split()[0]) > width


def test_a_file_gets_the_text_unchanged():
    assert written(STORY, None) == STORY + "\n"
    odd = "all:\n\tcc -o :dog: main.c\r\n[bold]x[/bold]\f" + 30 * " wide"
    for seed in range(4):
        assert written(odd, None, seed=seed) == odd + "\n"


def test_text_without_spaces_is_written_at_once():
    out = io.StringIO()
    writer = Writer(Console(file=out, width=20), 20)
    for _ in range(10):
        writer.write("今天天气很好")
    assert len(out.getvalue()) >= 30


def test_last_piece_flushes_held_back_text():
    out = io.StringIO()
    writer = Writer(Console(file=out), 20)
    writer.write("One two")
    assert out.getvalue() == "One"
    writer.write("", last=True)
    writer.write("three", last=True)
    assert out.getvalue() == "One two\nthree\n"


FORMS = {
    "channels": AnswerForm("channels", calls="harmony", parallel=False),
    "thinks": AnswerForm("perhaps"),
}
SEVERAL = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>"
    "Hm.<|end|><|start|>assistant<|channel|>final<|message|>So."
)


def answered(form: AnswerForm, text: str, *, terminal: bool, seed: int) -> str:
    out, rng = io.StringIO(), random.Random(seed)
    console = Console(file=out, width=40, force_terminal=terminal, color_system=None)
    writer = AnswerWriter(console, form)
    while text:
        size = rng.randint(1, 12)
        writer.write(text[:size])
        text = text[size:]
    writer.write("", last=True)
    return out.getvalue()


@pytest.mark.parametrize("seed", range(4))
def test_reasoning_has_separate_lines_on_a_terminal(seed):
    for name, form in FORMS.items():
        for terminal, want in ((True, f"{THOUGHT}\n{SAID}\n"), (False, f"{SAID}\n")):
            assert answered(form, ANSWERS[name], terminal=terminal, seed=seed) == want
    for terminal, want in ((True, "I look.\nHm.\nSo.\n"), (False, "I look.\nSo.\n")):
        assert answered(FORMS["channels"], SEVERAL, terminal=terminal, seed=seed) == want
    cut_off = ANSWERS["thinks"][:15]
    for terminal, want in ((True, "Is 4 a\n"), (False, "\n")):
        assert answered(FORMS["thinks"], cut_off, terminal=terminal, seed=seed) == want
    for name in FORMS:
        text = ANSWERS[name]
        assert answered(PLAIN, text, terminal=False, seed=seed) == f"{text}\n"

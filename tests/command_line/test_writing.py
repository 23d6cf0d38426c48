"""Streamed answers: unchanged; thoughts have lines of their own on a terminal."""

import io
import random

import pytest
from rich.console import Console

from dms_jax.command_line.writing import AnswerWriter
from dms_jax.generation.answer_readers import PLAIN, AnswerForm
from tests.support.forced_answers import ANSWERS, SAID, THOUGHT

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
    for terminal, want in ((True, "Is 4 a \n"), (False, "\n")):
        assert answered(FORMS["thinks"], cut_off, terminal=terminal, seed=seed) == want
    for name in FORMS:
        text = ANSWERS[name]
        assert answered(PLAIN, text, terminal=False, seed=seed) == f"{text}\n"
    odd = "all:\n\tcc -o :dog: main.c\r\n[bold]x[/bold]\f" + 30 * " wide"
    assert answered(PLAIN, odd, terminal=False, seed=seed) == odd + "\n"

"""`dms-jax chat`: turns continue cached prefixes, text is streamed, interrupts lose nothing."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import pytest

import dms_jax
from dms_jax import command_line
from dms_jax.command_line import chat
from dms_jax.errors import TooLongError
from dms_jax.generation import Engine
from tests.support.forced_answers import ANSWERS, SAID, THOUGHT, saying, thinking_model

QUICK = chat.Config(temperature=0.0, max_new_tokens=8, page_size=16, chunk=8)


class Talk(Engine):
    """An engine that says given texts, and keeps what it was asked."""

    texts, asked = (), []

    def generate(self, prompts, *, sampling, on_tokens):
        (prompt,), model = prompts, self.model
        self.asked.append((prompt, sampling.seed))
        text = self.texts[(len(self.asked) - 1) % len(self.texts)]
        if text is KeyboardInterrupt:
            raise KeyboardInterrupt
        sampling = saying(model, text, sampling)
        return super().generate(prompts, sampling=sampling, on_tokens=on_tokens)


@pytest.fixture
def talk(monkeypatch):
    """Returns a function that chats with a thinking model, and what its engine was asked."""

    def chats(form: str, texts: Sequence[Any], lines: list[str], **options) -> Any:
        asked = []
        monkeypatch.setattr(chat.Config, "load", lambda self: thinking_model(form))
        monkeypatch.setattr(chat, "Engine", type("Said", (Talk,), dict(texts=texts, asked=asked)))
        return chat.main(dataclasses.replace(QUICK, **options), lines), asked

    return chats


@pytest.mark.usefixtures("fakes")
def test_turns_continue_cached_prefixes_and_are_streamed(stories, monkeypatch, capsys):
    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    config = dataclasses.replace(
        QUICK, policy="RandomEviction", options=("window=8",), max_new_tokens=30
    )
    first, second = chat.main(config, ["Once upon a time", " One day", "", "never said"])
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == first.usage.prompt_tokens + len(first.tokens) - 1
    engine = Engine(stories, dms_jax.RandomEviction(window=8), page_size=16, chunk=8)
    tokens = [*stories.tokenizer.encode("Once upon a time"), *first.tokens]
    tokens += stories.tokenizer.encode(" One day", add_special_tokens=False)
    sampling = dms_jax.Sampling(temperature=0.0, max_new_tokens=30)
    (alone,) = engine.generate([tokens], sampling=sampling)
    assert second.tokens == alone.tokens
    shown = " ".join(capsys.readouterr().out.split())
    assert "stories260k with RandomEviction(window=8). An empty line or Ctrl-D ends" in shown
    for turn in (first, second):
        assert " ".join(turn.text.split()) in shown
        assert f"{turn.usage.live_tokens:,.0f} live tokens" in shown


@pytest.mark.usefixtures("fakes")
def test_a_full_conversation_ends(talk):
    with pytest.raises(TooLongError, match="is full after 2 answers; start a new one"):
        talk("plain", ["Hi"], ["Hello", "Again", "word " * 600, "never said"])
    with pytest.raises(TooLongError, match=r"^Prompt 0: "):
        talk("plain", ["Hi"], ["word " * 600])


@pytest.mark.usefixtures("fakes")
def test_template_formats_messages(talk):
    _, asked = talk("plain", ["Hi"], ["Hello", "Again"], system="Be brief.", seed=5)
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    second = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Again"}]
    assert asked == [(first, 5), (first + second, 6)]


@pytest.mark.usefixtures("fakes")
def test_lines_are_read_until_the_input_ends(stories, monkeypatch):
    lines = iter(["Once", "upon"])

    def typed(*args):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    assert len(chat.main(QUICK)) == 2


def test_a_system_prompt_needs_a_template(stories, monkeypatch):
    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    with pytest.raises(dms_jax.ConfigError, match="--system: the checkpoint has no chat template"):
        chat.main(dataclasses.replace(QUICK, system="Be brief."), [])


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"max_tokens": 0}, {"stop": ("",)}])
def test_wrong_settings_are_refused_before_a_line_is_read(wrong, stories, monkeypatch):
    def asked():
        raise AssertionError("a line was asked for")
        yield

    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    with pytest.raises(dms_jax.ConfigError, match=r"must be|may be empty"):
        chat.main(dataclasses.replace(QUICK, **wrong), asked())


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("form", ["channels", "thinks"])
def test_reasoning_is_shown_then_dropped(form, talk, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    texts = [ANSWERS[form], ANSWERS[form].replace("4", "6"), "No."]
    turns, asked = talk(form, texts, ["One?", "Two?", "Three?"], system="Be brief.")
    assert len(turns) == 3
    shown = capsys.readouterr().out
    dim, end = "\x1b[2m", "\x1b[0m"
    plain = re.sub(r"\x1b\[\d+m", "", shown)
    for number in ("4", "6"):
        thought, said = THOUGHT.replace("4", number), SAID.replace("4", number)
        assert f"\n{thought}\n{said}\n" in plain
    assert f"{dim}Is{end}" in shown
    assert f"{dim}Yes.{end}" not in shown
    assert "channel" not in shown
    assert "think" not in shown

    # The model reads the conversation in its template, without thoughts.
    model, (last, _) = thinking_model(form), asked[-1]
    assert [each["content"] for each in last] == [
        *("Be brief.", "One?", SAID, "Two?", SAID.replace("4", "6"), "Three?")
    ]
    assert THOUGHT[-5:] not in model.tokenizer.apply_chat_template(last)


@pytest.mark.usefixtures("fakes")
def test_an_interrupted_turn_is_forgotten(talk):
    texts = [ANSWERS["channels"], KeyboardInterrupt, ANSWERS["channels"]]
    turns, asked = talk("channels", texts, ["One?", "Two?", "Three?"])
    assert len(turns) == 2
    said = [[message["content"] for message in prompt] for prompt, _ in asked]
    assert said == [["One?"], ["One?", SAID, "Two?"], ["One?", SAID, "Three?"]]


def test_missing_model_is_told_before_devices_are_looked_for(monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: pytest.fail("a backend would start"))
    assert command_line.main(["chat", "--model", "/nope"]) == 2
    assert capsys.readouterr().err == "CheckpointError: there is no directory or file /nope\n"

"""`dms-jax chat`: turns share a cache, text is streamed, errors and interrupts lose nothing."""

import dataclasses
import re

import jax
import pytest

import dms_jax
from dms_jax import command_line
from dms_jax.cache.accounting import Usage
from dms_jax.command_line import chat
from dms_jax.generation import Completion
from tests.support.forced_answers import ANSWERS, SAID, THOUGHT, saying, thinking_model

QUICK = chat.Config(temperature=0.0, max_new_tokens=8, page_size=16, chunk=8)


@pytest.mark.usefixtures("fakes")
def test_turns_share_one_cache_and_are_streamed(stories, monkeypatch, capsys):
    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    config = dataclasses.replace(QUICK, policy="TOVA", options=("budget=12",))
    first, second = chat.main(config, ["Once upon a time", " One day", "", "never said"])
    talk = dms_jax.Conversation(stories, dms_jax.TOVA(budget=12), page_size=16, chunk=8)
    sampling = dms_jax.Sampling(temperature=0.0, max_new_tokens=8)
    assert first.text == talk.say("Once upon a time", sampling=sampling).text
    assert second.text == talk.say(" One day", sampling=sampling).text
    shown = " ".join(capsys.readouterr().out.split())
    assert "stories260k with TOVA(budget=12). An empty line or Ctrl-D ends" in shown
    for turn in (first, second):
        assert " ".join(turn.text.split()) in shown
        assert f"{turn.usage.live_tokens:,.0f} live tokens" in shown


def test_template_formats_messages(monkeypatch):
    said = []
    nothing = Usage(**{field.name: field.type(0) for field in dataclasses.fields(Usage)})

    class Talk(dms_jax.Conversation):
        turns = ()

        def __init__(self, *args, **more):
            self.turns = []

        def say(self, prompt, *, sampling, on_tokens):
            said.append((prompt, sampling.seed))
            self.turns.append(Completion("Hi", [], None, "end", nothing))
            return self.turns[-1]

    monkeypatch.setattr(chat.Config, "load", lambda self: thinking_model("plain"))
    monkeypatch.setattr(dms_jax, "Conversation", Talk)
    chat.main(dataclasses.replace(QUICK, system="Be brief.", seed=5), ["Hello", "Again"])
    user = [{"role": "user", "content": text} for text in ("Hello", "Again")]
    assert said == [([{"role": "system", "content": "Be brief."}, user[0]], 5), ([user[1]], 6)]


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
def test_reasoning_is_shown_then_dropped(form, monkeypatch, capsys):
    model = thinking_model(form)
    read, texts = [], iter([ANSWERS[form], ANSWERS[form].replace("4", "6"), "No."])

    class Talk(dms_jax.Conversation):
        def say(self, prompt, *, sampling, on_tokens):
            sampling = saying(model, next(texts), sampling)
            completion = super().say(prompt, sampling=sampling, on_tokens=on_tokens)
            seen = [token for turn in self._history.past for token in turn.tokens]
            read.append(model.tokenizer.decode(seen, skip_special_tokens=False))
            return completion

    monkeypatch.setattr(chat.Config, "load", lambda self: model)
    monkeypatch.setattr(dms_jax, "Conversation", Talk)
    monkeypatch.setenv("FORCE_COLOR", "1")
    config = dataclasses.replace(QUICK, system="Be brief.")
    assert len(chat.main(config, ["One?", "Two?", "Three?"])) == 3
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

    # The model reads the conversation in its template, then the answer.
    messages = [{"role": "system", "content": "Be brief."}]
    for line, number, answer in zip(("One?", "Two?", "Three?"), "46 ", read, strict=True):
        messages.append({"role": "user", "content": line})
        written = model.tokenizer.apply_chat_template(messages)
        assert answer.startswith(written)
        assert written.count(THOUGHT[-5:]) == 0
        messages.append({"role": "assistant", "content": SAID.replace("4", number)})


@pytest.mark.usefixtures("fakes")
def test_an_interrupted_turn_is_forgotten(monkeypatch):
    model, said = thinking_model("channels"), []

    class Talk(dms_jax.Conversation):
        def say(self, prompt, *, sampling, on_tokens):
            said.append([message["content"] for message in prompt])
            if prompt[-1]["content"] == "Two?":
                raise KeyboardInterrupt
            sampling = saying(model, ANSWERS["channels"], sampling)
            return super().say(prompt, sampling=sampling, on_tokens=on_tokens)

    monkeypatch.setattr(chat.Config, "load", lambda self: model)
    monkeypatch.setattr(dms_jax, "Conversation", Talk)
    assert len(chat.main(QUICK, ["One?", "Two?", "Three?"])) == 2
    assert said == [["One?"], ["One?", SAID, "Two?"], ["One?", SAID, "Three?"]]


def test_missing_model_is_told_before_devices_are_looked_for(monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: pytest.fail("a backend would start"))
    assert command_line.main(["chat", "--model", "/nope"]) == 2
    assert capsys.readouterr().err == "CheckpointError: there is no directory or file /nope\n"

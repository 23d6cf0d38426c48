"""Talking: turns share a cache, text is streamed, mistakes and interrupts lose nothing."""

import dataclasses

import pytest

import dms_jax
from dms_jax.cache.accounting import Usage
from dms_jax.command_line import chat
from dms_jax.generation import Completion

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
    for turn in (first, second):
        assert " ".join(turn.text.split()) in shown
        assert f"{turn.usage.live_tokens:,.0f} live tokens" in shown


def test_messages_go_through_the_template(stories, monkeypatch):
    said = []
    nothing = Usage(**{field.name: field.type(0) for field in dataclasses.fields(Usage)})

    class Talk(dms_jax.Conversation):
        turns = ()

        def __init__(self, *args, **more):
            self.turns = []

        def say(self, prompt, *, sampling, on_tokens):
            said.append((prompt, sampling.seed))
            self.turns.append(Completion("", [], None, "cancelled", nothing))
            raise KeyboardInterrupt

    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer = dataclasses.replace(stories, tokenizer=type("T", (), {"chat_template": template}))
    monkeypatch.setattr(chat.Config, "load", lambda self: tokenizer)
    monkeypatch.setattr(dms_jax, "Conversation", Talk)
    chat.main(dataclasses.replace(QUICK, system="Be brief.", seed=5), ["Hello", "Again"])
    user = [{"role": "user", "content": text} for text in ("Hello", "Again")]
    assert said == [([{"role": "system", "content": "Be brief."}, user[0]], 5), ([user[1]], 6)]


@pytest.mark.usefixtures("fakes")
def test_the_first_line_names_model_policy_and_the_way_out(stories, monkeypatch, capsys):
    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    chat.main(dataclasses.replace(QUICK, policy="TOVA", options=("budget=64",)), [])
    shown = " ".join(capsys.readouterr().out.split())
    assert "stories260k with TOVA(budget=64). An empty line or Ctrl-D ends" in shown


@pytest.mark.usefixtures("fakes")
def test_what_is_typed_is_read_until_the_input_ends(stories, monkeypatch):
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
def test_nobody_is_asked_for_a_line_that_is_not_answered(wrong, stories, monkeypatch):
    def asked():
        raise AssertionError("a line was asked for")
        yield

    monkeypatch.setattr(chat.Config, "load", lambda self: stories)
    with pytest.raises(dms_jax.ConfigError, match=r"must be|may be empty"):
        chat.main(dataclasses.replace(QUICK, **wrong), asked())

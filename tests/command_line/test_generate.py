"""`dms-jax generate`: output and errors."""

import dataclasses
import functools
import io
import re
import types
from unittest import mock

import pytest
from rich.console import Console

import dms_jax
from dms_jax.command_line import chat, generate, serve
from dms_jax.command_line.options import on_checkpoint, read_policy
from dms_jax.command_line.running import run
from dms_jax.generation import Update
from dms_jax.generation.answer_readers import PLAIN
from tests.support.forced_answers import ANSWERS, SAID, THOUGHT, saying, thinking_model

QUICK = ["--max-new-tokens", "12", "--temperature", "0", "--page-size", "16", "--chunk", "8"]


def call(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    return run(generate.main, generate.Config, description=generate.__doc__, arguments=arguments)


def test_one_answer_and_its_usage(capsys):
    """With real programs: the words are the model's."""
    assert call(["Once upon a time", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Once upon a time, there was a")
    assert "tokens a second" not in shown  # of a time that is compilation's
    assert "held" not in shown  # where it is what the peak is
    assert "Vanilla" in shown
    assert "length" in shown


@pytest.mark.usefixtures("fakes")
def test_file_gets_unwrapped_text(monkeypatch, capsys):
    """Wrapping would add line breaks that the model did not write."""
    monkeypatch.setenv("COLUMNS", "20")
    prompt = "Once upon a time, there was a girl and a boy and"
    quick = dict(max_new_tokens=12, temperature=0.0, page_size=16, chunk=8)
    for prompts in ((prompt,), (prompt, "One day")):
        texts = generate.main(generate.Config(prompts=prompts, **quick)).texts
        shown = capsys.readouterr().out
        assert len(texts[0]) > 20
        assert all(
            f"{prompt}{text}\n" in shown for prompt, text in zip(prompts, texts, strict=True)
        )


def test_more_shards_than_devices_are_refused(capsys):
    assert call(["Once", "--data-shards", "5", "--model-shards", "2"]) == 2
    assert "--data-shards 5 x --model-shards 2 needs 10 devices; there are 8." in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("terminal", [False, True])
def test_prompt_is_shown_unchanged(terminal, continues):
    out, prompt = io.StringIO(), "a :dog: in [bold]"
    console = Console(file=out, force_terminal=terminal, color_system=None)
    screen = generate.Screen(console, [prompt], [PLAIN], continues=continues)
    assert out.getvalue() == ""  # refused before there is an answer
    screen(Update(0, [1], " and", finished=False))
    screen(Update(0, [2], " so", finished=True))
    between = "" if continues else "\n"
    assert out.getvalue() == f"{prompt}{between} and so\n"


def test_answer_continues_last_line_of_prompt():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=12)
    screen = generate.Screen(console, ["Once upon"], [PLAIN], continues=True)
    screen(Update(0, [1], " a time", finished=True))
    assert out.getvalue() == "Once upon a time\n"


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("form", ["channels", "thinks"])
@pytest.mark.parametrize("prompts", [("Why?",), ("Why?", "How?")], ids=len)
def test_reasoning_is_dimmed_on_terminal_and_absent_from_files(form, prompts, monkeypatch, capsys):
    model, answer = thinking_model(form), dms_jax.generate

    def forced(model, prompts, *, sampling, **options):
        return answer(model, prompts, sampling=saying(model, text, sampling), **options)

    monkeypatch.setattr(generate.Config, "load", lambda self: model)
    monkeypatch.setattr(dms_jax, "generate", forced)
    config = generate.Config(prompts=prompts, chat=True, page_size=16, chunk=8)
    text = ANSWERS[form]
    generate.main(config)
    shown = capsys.readouterr().out
    assert all(f"{prompt}\n{SAID}\n" in shown for prompt in prompts)
    assert THOUGHT not in shown

    with monkeypatch.context() as terminal:
        terminal.setenv("FORCE_COLOR", "1")
        generate.main(config)
    shown = capsys.readouterr().out
    assert shown.count("\x1b[2mIs") == len(prompts)
    written = re.sub(r"\x1b\[\d+m", "", shown)
    assert all(f"{prompt}\n{THOUGHT}\n{SAID}\n" in written for prompt in prompts)

    text = "Plain.\n"  # an answer without reasoning is unchanged
    generate.main(config)
    assert f"{prompts[0]}\nPlain.\n\n" in capsys.readouterr().out

    text = ANSWERS[form]  # without a template, markers are ordinary text
    generate.main(dataclasses.replace(config, chat=False, plain=True))
    assert THOUGHT in capsys.readouterr().out


def test_prompt_is_a_message_if_there_is_a_template(capsys):
    def read(**given):
        config = generate.Config(prompts=("Hi",), **given)
        return generate.as_prompts(config, ["Hi"], model)

    tokenizer = types.SimpleNamespace(chat_template="{{ messages }}")
    model = mock.Mock(spec=dms_jax.LanguageModel, tokenizer=tokenizer)
    message = [[{"role": "user", "content": "Hi"}]]
    assert read() == message
    assert "user's message in the chat template (--plain" in capsys.readouterr().err
    assert read(chat=True) == message
    assert read(plain=True) == ["Hi"]
    assert capsys.readouterr().err == ""
    model.tokenizer = None
    assert read() == ["Hi"]


def test_policy_options_default_to_the_checkpoints():
    given = ("window=16", "source=adapter", "alpha_offset=2.5")
    assert read_policy("DMS", given) == dms_jax.DMS(16, "adapter", alpha_offset=2.5)
    assert read_policy("DMS", ['{"window": 16, "shift": 0}']) == dms_jax.DMS(window=16, shift=0)
    own = dms_jax.DMS(window=16, source="adapter", shift=0)
    assert on_checkpoint(dms_jax.DMS(), {}, own) == own
    with pytest.warns(UserWarning, match=r"window=32: the model was trained for window=16, "):
        wider = on_checkpoint(dms_jax.DMS(window=32), {"window": 32}, own)
    assert wider == dms_jax.DMS(window=32, source="adapter", shift=0)
    assert on_checkpoint(dms_jax.TOVA(), {}, own) == dms_jax.TOVA()
    assert on_checkpoint(None, {}, own) is None


@pytest.mark.usefixtures("fakes")
def test_several_answers_under_another_policy(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Lily and Tom\n\nOne [bold]day\n")
    arguments = ["Once", "--file", str(file), "--policy", "TOVA", "--options", "budget=8"]
    assert call([*arguments, "--samples", "2", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "TOVA" in shown
    assert shown.count("Lily and Tom") == 2
    assert "One [bold]day" in shown
    assert "all" in shown
    assert "held" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "--model", "not/a/path/at/all"], "it is not a hub id"),
        (["a", "--policy", "DMS"], "dms-jax retrofit"),
        (
            ["a", "--memory-gb", "0.000001"],
            "Give it more memory (--memory-gb), a smaller --page-size",
        ),
        (["Once " * 600], "601 tokens do not fit"),
        (["a", "--chat"], "no chat template"),
        (["a", "--template", "x=1"], "This model has no chat template"),
        ([""], "empty string"),
    ],
)
def test_model_errors_are_one_line(arguments, says, capsys):
    assert call(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    error = " ".join(shown.err.split())
    assert says in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", [generate, chat, serve], ids=lambda command: command.__name__)
@pytest.mark.parametrize(
    "wrong", [{"chunk": 0}, {"page_size": 0}, {"memory_gb": -1.0}, {"kv_dtype": "int5"}], ids=str
)
def test_options_are_refused_before_a_model_is_loaded(command, wrong, monkeypatch):
    def load(self):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(command.Config, "load", load)
    main = command.main
    if command is serve:
        main = functools.partial(serve.make_service, console=Console())
    given = {"prompts": ("Once",)} if command is generate else {}
    with pytest.raises(dms_jax.ConfigError, match="must be"):
        main(command.Config(**given, **wrong))


@pytest.mark.parametrize(
    ("policy", "options", "says"),
    [
        ("SnapKV", ["compression_ratio=2"], "SnapKV dropped nothing: rows are cut after the prompt "
         "and every 512 tokens of an answer"),
        ("Vanilla", [], None),
        ("TOVA", ["budget=500"], "TOVA dropped nothing: no row came to hold more"),
        ("TOVA", ["budget=8"], None),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("fakes")
def test_policy_without_eviction_prints_a_note(policy, options, says, capsys):
    given = ["--options", *options] if options else []
    assert call(["Once upon a time", "--policy", policy, *given, *QUICK]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("dropped nothing" in shown) == (says is not None)
    assert says is None or says in shown
    assert shown.count("Attention in decoding: xla (no kernel is for cpu).") == 1


@pytest.mark.usefixtures("fakes")
def test_warnings_are_one_line_without_code(capsys):
    """Answers that exceed the model's positions."""
    assert call(["Once", *QUICK, "--max-new-tokens", "600"]) == 0
    said = capsys.readouterr().err
    assert said.startswith("Warning: max_new_tokens=600 is more than the model's 512 positions")
    assert ".py" not in said


@pytest.mark.usefixtures("fakes")
def test_printed_kernel_serves_the_page_dtype(monkeypatch, capsys):
    """On a GPU without float8 the kernel of bfloat16 pages serves nothing."""
    asked, answer = [], dms_jax.generate

    def plain(model, prompts, *, kv_dtype, **options):
        return answer(model, prompts, **options)

    def said(**shape):
        asked.append(str(shape["pages_dtype"]))
        return ("decoding: of the pages", "")

    monkeypatch.setattr(dms_jax, "generate", plain)
    monkeypatch.setattr(generate, "serving", said)
    assert call(["Once", *QUICK, "--kv-dtype", "float8_e4m3"]) == 0
    assert asked == ["float8_e4m3fn"]
    assert "Attention in decoding: of the pages." in capsys.readouterr().out

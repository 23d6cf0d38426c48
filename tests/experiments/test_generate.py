"""The command line of `experiments/generate.py`: what it shows, and what it says to mistakes."""

import pytest

from experiments import generate

QUICK = ["--max-new-tokens", "12", "--temperature", "0", "--page-size", "16", "--chunk", "8"]


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as ended:
        generate.main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in generate.Config.__dataclass_fields__:
        if field != "prompts":
            assert f"--{field.replace('_', '-')}" in text
    assert "one that the checkpoint declares" in text


def test_one_answer_and_its_usage(capsys):
    assert generate.main(["Once upon a time", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Once upon a time\n, there was a")
    assert "Vanilla" in shown
    assert "length" in shown


def test_several_answers_under_another_policy(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Lily and Tom\n\nOne [bold]day\n")
    arguments = ["Once", "--file", str(file), "--policy", "TOVA", "--options", "budget=8"]
    assert generate.main([*arguments, "--samples", "2", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "TOVA" in shown
    assert shown.count("Lily and Tom") == 2
    assert "One [bold]day" in shown
    assert "all" in shown


def test_options_of_a_policy():
    def read(*options: str):
        return generate.read_policy("DMS", options)

    assert read() == generate.dms_jax.DMS()
    assert read("window=16", "source=adapter", "alpha_offset=2.5") == generate.dms_jax.DMS(
        window=16, source="adapter", alpha_offset=2.5
    )
    assert read('{"window": 16, "shift": 0}') == generate.dms_jax.DMS(window=16, shift=0)
    assert generate.read_policy(None, ()) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "There is no prompt"),
        (["a", "--model", "not/a/path/at/all"], "it is not a hub id"),
        (["a", "--policy", "DSM"], "Unknown cache policy 'DSM'"),
        (["a", "--policy", "TOVA", "--options", "budget"], "name=value or a JSON object"),
        (["a", "--policy", "TOVA", "--options", "bugdet=8"], "no option bugdet"),
        (["a", "--policy", "TOVA", "--options", "{budget: 8}"], "not a JSON object"),
        (["a", "--policy", "TOVA", "--options", "budget=0"], "whole number of at least 1"),
        (["a", "--options", "budget=8"], "name it with --policy"),
        (["a", "--policy", "DMS", "--options", "source=adapter"], "adapter"),
        (["a", "--file", "absent.txt"], "absent.txt cannot be read"),
        (["a", "--temperature", "-1"], "temperature must be"),
        (["a", "--samples", "0"], "--samples must be at least 1"),
        (["a", "--memory-gb", "0.000001"], "Give it more memory"),
        (["a", "--page-size", "0"], "page_size must be"),
        (["a", "--chat"], "no chat template"),
        ([""], "empty string"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, says, capsys):
    assert generate.main(arguments) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert says in error
    assert "Traceback" not in error


def test_an_interrupt_is_no_traceback(monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.dms_jax, "generate", interrupt)
    assert generate.main(["Once", *QUICK]) == 130
    assert "interrupted" in capsys.readouterr().err

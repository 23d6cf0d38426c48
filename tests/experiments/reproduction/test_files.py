"""Files of run directories and pages: whole or not there; lines of a page that fit."""

import math
import shlex

import numpy as np
import pytest

from dms_jax.evaluation import Measured
from experiments.reproduction.claims import cells
from experiments.reproduction.evictions import page as evictions
from experiments.reproduction.files import command, error_text, wrap, write_arrays


def test_arrays_that_were_cut_off_while_they_were_written_are_not_there(tmp_path, monkeypatch):
    path = tmp_path / "data" / "0.npz"
    write_arrays(path, a=np.arange(3))
    with np.load(path) as stored:
        assert stored["a"].tolist() == [0, 1, 2]

    def stop(file, **arrays):
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", stop)
    with pytest.raises(KeyboardInterrupt):
        write_arrays(tmp_path / "data" / "1.npz", a=np.arange(3))
    assert [each.name for each in (tmp_path / "data").glob("*.npz")] == ["0.npz"]


def test_text_of_a_page_is_wrapped_and_nothing_else():
    words = " ".join(["word"] * 30)
    kept = [f"| {words} |", f"# {words}", f"![{words}](picture.png)", f"    {words}", "", "short"]
    assert wrap("\n".join(kept)) == "\n".join(kept)
    lines = wrap(f"{words}\nlast\n- {words}\n  last\n- short\n  item").split("\n")
    assert max(map(len, lines)) <= 100
    assert [line[:6] for line in lines] == [
        *("word w", "word w", "- word", "  word"),
        *("- shor", "  item"),  # as it was
    ]
    assert lines[1].endswith("word last")
    link = "[" + "x" * 120 + "](there)"
    assert wrap(f"see {link}") == f"see\n{link}"


def test_an_error_that_is_unknown_is_said_to_be():
    assert error_text(0.0213, ".2f") == "± 0.02"
    assert error_text(math.nan, ".2f") == error_text(None, ".2f") == "± unknown"
    # Where pages are made of it: read from JSON, of one problem.
    assert evictions._percent({"accuracy": 0.5, "error": None}) == "50.0 ± unknown"
    assert evictions._nats({"difference": 0.25, "error": math.nan}) == "+0.2500 ± unknown"
    assert cells.percent(Measured(0.5, math.nan)) == "50.0 ± unknown"


def test_a_command_takes_as_many_lines_as_it_needs():
    options = [f"--option-{index} {'x' * 30}" for index in range(5)]
    block = command("python -m somewhere", options)
    lines = block.split("\n")
    assert max(map(len, lines)) <= 100
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert [line[:9] for line in lines] == ["    pytho", *["        -"] * (len(lines) - 1)]
    # As a shell reads it, and with each option on a line with its value.
    assert shlex.split(block.replace("\\\n", "")) == shlex.split(
        " ".join(["python -m somewhere", *options])
    )
    assert all(line.count("--option") == line.count("x" * 30) for line in lines)
    assert command("python -m somewhere", ["--short 1"]) == "    python -m somewhere --short 1"
    assert wrap(block) == block

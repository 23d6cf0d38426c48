"""The output of a run before, during and after its steps."""

import dataclasses
import json
import re
import sys
import types

import jax
import pytest

from dms_jax import terminal
from dms_jax.policies import KVzap, Vanilla
from dms_jax.sharding import make_mesh
from dms_jax.training import display as displays
from dms_jax.training import recipes, retrofit
from dms_jax.training.display import Display, opening_line
from dms_jax.training.tensorboard import TensorBoard
from dms_jax.training.trainer import Trainer
from tests.training.tiny import ADAPTER, EAGER, documents, language_model, recipe


def record(step=10, **changes):
    return {
        "step": step,
        "loss": 0.5,
        "compression_loss": 0.125,
        "evicted": 0.6,
        "compression_ratio": 2.5,
        "target_ratio": 3.97,
        "grad_norm": 0.4125,
        "tokens": 4096,
        "tokens_per_second": 12_345.6,
        "model_flops_utilisation": 0.314,
        "skipped_steps": 0,
    } | changes


def display(**changes):
    options = dict(total=10, done=2, main="distillation", target=4.0, enabled=True)
    return Display(**(options | changes))


def test_step_figures(monkeypatch):
    monkeypatch.setattr(displays, "peak_memory", lambda: 61_234_000_000)
    assert display().figures(record()) == (
        "KL 0.375 + CR 0.125 | ratio 2.50 of 3.97 | gradient 0.41 | 12,346 tok/s | 31% of peak | "
        "61.2 GB"
    )
    monkeypatch.setattr(displays, "peak_memory", lambda: None)
    plain = display(target=None, main="language modeling")
    skipped = record(model_flops_utilisation=None, compression_loss=0.0, skipped_steps=2)
    assert plain.figures(skipped) == "LM 0.500 | gradient 0.41 | 12,346 tok/s | 2 skipped"
    uneven = plain.figures(skipped | {"busiest_expert": 1.8125})
    assert uneven == "LM 0.500 | gradient 0.41 | busiest expert 1.8x | 12,346 tok/s | 2 skipped"


def test_a_file_gets_lines(monkeypatch, capsys):
    """A run without a terminal, as under Slurm, said nothing for hours."""
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(displays, "peak_memory", lambda: None)
    for enabled in (True, False):
        display(enabled=enabled).update(record(step=3))
    told = "KL 0.375 + CR 0.125 | ratio 2.50 of 3.97 | gradient 0.41 | 12,346 tok/s | 31% of peak"
    assert capsys.readouterr() == ("", f"step 3 of 10 | {told}\n")


def test_a_finished_run_shows_no_bar(capsys):
    with display(total=45, done=45, opening="45 steps of distillation"):
        pass
    shown = capsys.readouterr()
    assert shown.out + shown.err == "All 45 steps of this run are done already.\n"


def ramp(*steps):
    """Records of a ramp that reaches its target at every step."""
    targets = {step: 1 + 3 * (step - 1) / 60 for step in steps}
    return [record(step, target_ratio=x, evicted=1 - 1 / x) for step, x in targets.items()]


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "records", "line", "short"),
    [
        # The mean share of kept tokens is 0.45.
        (
            {},
            [record(step, evicted=0.5 + 0.1 * (step % 2)) for step in range(3, 11)],
            r"Reached ratio 2\.22 of 4\.00 in 8 more steps \(10 in all\), 32,768 tokens and ",
            True,
        ),
        (
            {},
            [record(evicted=0.749)],
            r"Reached ratio 3\.98 of 4\.00 .* Tokens within the window do",
            False,
        ),
        # Steps far below the end of a ramp do not count: 3.85, 3.90 and 3.95 do.
        ({"total": 60}, ramp(*range(3, 61)), r"Reached ratio 3\.90 of 4\.00", False),
        # Skipped steps have no figures.
        (
            {},
            [
                *(record(step, evicted=0.75, target_ratio=4.0, skipped=False) for step in (8, 9)),
                record(10, loss=NAN, evicted=NAN, target_ratio=4.0, skipped=True),
            ],
            r"Reached ratio 4\.00 of 4\.00 in 8 more steps \(10 in all\), 12,288 tokens .*0\.375\.",
            False,
        ),
        (
            {"target": None, "main": "language modeling"},
            [record(compression_loss=0.0)],
            r"Trained for 8 more steps \(10 in all\), 4,096 tokens and .* seconds, LM 0\.5\.",
            False,
        ),
    ],
    ids=["short", "reached", "ramp", "skipped", "no target"],
)
def test_closing_line(capsys, options, records, line, short):
    with display(**options) as shown:
        for each in records:
            shown.update(each)
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(line, out)
    assert ("Short of the target: train on at this ratio" in out) == short


def test_exports_of_runs_short_of_their_target(tmp_path):
    def logged(*records):
        lines = [json.dumps(each | {"skipped": False}) + "\n" for each in records]
        (tmp_path / "log.jsonl").write_text("".join(lines))
        return displays.short_of_target(tmp_path / "model")

    assert displays.short_of_target(tmp_path / "model") is None  # of no run
    ramp, last = record(1, target_ratio=2.0, evicted=0.4), record(2, target_ratio=4.0, evicted=0.5)
    assert logged(ramp, last) == (2.0, 4.0)
    assert displays.short_of_target(tmp_path) is None
    assert logged(ramp, last | {"evicted": 0.75}) is None
    assert logged(record(target_ratio=1.0)) is None
    (tmp_path / "log.jsonl").write_text("{")
    assert displays.short_of_target(tmp_path / "model") is None


def test_an_interrupted_run_has_no_closing_line(capsys):
    def stopped():
        with display() as shown:
            shown.update(record())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    with display() as shown:
        shown.update(record(5))
    with display(enabled=False, opening="Training") as shown:
        shown.update(record())
        shown.say("Stopping")
    out = capsys.readouterr().out
    assert "Reached" not in out
    assert "Training" not in out


def test_opening_line():
    mesh = make_mesh(2, 1)
    with jax.set_mesh(mesh):
        trainer = Trainer(language_model(), ADAPTER, recipe(batch_size=2), 0, mesh)
    paper = recipes.dms_paper(4, model="qwen-r1-32b")
    line = opening_line(paper, ADAPTER, trainer.state.parameters, 7)
    count = sum(x.size for x in trainer.state.parameters.values())
    assert f"Training all weights, {count / 1e3:.3g}K parameters, for DMS(window=3" in line
    assert "on 2 cpu: 12,000 steps to ratio 4 of 256 x 8,192 tokens, 25.2B tokens in all" in line
    assert line.endswith("(dms_paper qwen-r1-32b), from step 7 on")
    answers = dataclasses.replace(paper, answers_only=True)
    line = opening_line(answers, ADAPTER, trainer.state.parameters, 0)
    assert "25.2B tokens in all, of which answers alone are learned (dms_paper" in line
    plain = opening_line(recipes.pretraining(3), Vanilla(), trainer.state.parameters, 0)
    assert ": 3 steps of 64 x 2,048 tokens" in plain


def test_a_scorer_has_no_target_ratio(capsys):
    """KVzap's ratio comes from the threshold, which is set afterwards."""
    learning = recipes.kvzap(tokens=96, sequence_length=12, batch_size=4)
    policy = KVzap(window=2, hidden=4)
    retrofit(language_model(), policy, recipe=learning, data=documents())
    out = " ".join(capsys.readouterr().out.split())
    assert "on 1 cpu: 2 steps of 4 x 12 tokens" in out
    assert re.search(r"Trained for 2 steps, 96 tokens and .* seconds, LM ", out)
    assert "ratio" not in out


def test_a_run_shows_both_lines_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    retrofit(language_model(), EAGER, recipe=recipe(), data=documents())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    out = " ".join(out.split())
    assert "on 1 cpu: 6 steps to ratio 4 of 4 x 12 tokens, 288 tokens in all (tiny)" in out
    assert "6/6" in out
    assert "tok/s" in out
    assert re.search(r"Reached ratio \d\.\d\d of \d\.\d\d in 6 steps, 288 tokens", out)


def test_tensorboard_gets_every_number(monkeypatch):
    scalars = {}

    class Writer:
        def __init__(self, folder):
            assert folder == "board"

        def add_scalar(self, name, value, step):
            scalars[name, step] = value

        def close(self):
            scalars["closed"] = True

    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    board = TensorBoard("board")
    board({"step": 3, "stage": "ramp", "loss": 0.5, "evaluation": {"loss": 3.5}})
    board({"step": 4, "skipped": True, "model_flops_utilisation": None})
    board.close()
    assert scalars == {
        ("training/loss", 3): 0.5,
        ("evaluation/loss", 3): 3.5,
        ("training/skipped", 4): 1.0,
        "closed": True,
    }


@pytest.mark.usefixtures("bare_notebook")
def test_a_notebook_without_widgets_gets_lines(capsys):
    with display(opening="Training a model") as shown:
        shown.update(record(10, target_ratio=4.0))
    printed = capsys.readouterr().out
    assert printed.startswith("Training a model\n")
    assert "Reached ratio 2.50 of 4.00" in printed
    assert "\x1b" not in printed

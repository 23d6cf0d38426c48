"""`dms-jax evaluate --policies`: which policies run, paired differences, and the report."""

import dataclasses
import io
import json

import jax
import numpy as np
import pytest
from rich.console import Console

import dms_jax
from dms_jax import terminal
from dms_jax.command_line import evaluate
from dms_jax.command_line.candidates import NOTE, gave_up, read_candidates, table

TEXT = ("max_tokens=24", "window=8")  # three windows


def candidates(*texts, model="stories260k", adapter=None):
    return read_candidates(texts, model=model, adapter=adapter)


def test_shipped_adapter_as_model_refuses_another_adapter():
    rows = candidates("Vanilla", "DMS,model=reasoner-11m-dms", model="reasoner-11m", adapter="mine")
    assert [row.adapter for row in rows] == ["mine", None]


def test_candidates_are_parsed():
    plain, tova, few, named = candidates(
        "Vanilla",
        "TOVA,budget=64",
        "Vanilla,kv_dtype=float8_e4m3",
        "DMS,adapter=a/b,model=m,name=mine",
    )
    assert (plain.name, plain.model, plain.adapter) == ("Vanilla", "stories260k", None)
    assert (tova.name, tova.policy) == ("TOVA,budget=64", dms_jax.TOVA(budget=64))
    assert (few.name, few.kv_dtype) == ("Vanilla,float8_e4m3", "float8_e4m3")
    assert (named.name, named.model, named.adapter) == ("mine", "m", "a/b")
    for wrong in (("TOVA", "TOVA"), ("TOVA,name=a/b",), ("TOVA,name=..",)):
        with pytest.raises(dms_jax.ConfigError, match="cannot be the name of a row"):
            candidates(*wrong)


def test_a_bare_name_is_the_checkpoints_own_policy(stories):
    own = dataclasses.replace(stories, policy=dms_jax.StreamingLLM(budget=16))
    bare, given, other = candidates("StreamingLLM", "StreamingLLM,budget=32", "TOVA")
    assert bare.policy_for(own) == dms_jax.StreamingLLM(budget=16)
    assert given.policy_for(own) == dms_jax.StreamingLLM(budget=32)
    assert other.policy_for(own) == dms_jax.TOVA()
    assert bare.policy_for(stories) == dms_jax.StreamingLLM()


@pytest.mark.usefixtures("scored")
def test_policies_predict_the_same_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    config = evaluate.Config(
        model="stories260k",
        task="text",
        task_options=TEXT,
        policies=("Vanilla", "TOVA,budget=4", "Vanilla,kv_dtype=float8_e4m3"),
        out=tmp_path / "text.json",
    )
    results = evaluate.main(config)
    assert [each.peak for each in results.values()] == [8, 4, 8]
    rows = json.loads(config.out.read_text())["systems"]
    assert [row["name"] for row in rows] == ["Vanilla", "TOVA,budget=4", "Vanilla,float8_e4m3"]
    assert rows[0]["loss"][0] == pytest.approx(1.625)
    assert rows[0]["change"] == [0, 0]
    # Four of eight tokens are evicted in every window: losses differ by window, paired differences
    # do not.
    assert rows[1]["change"] == [pytest.approx(0.25), pytest.approx(0, abs=1e-6)]
    assert rows[1]["loss"][1] > 0.01
    assert rows[2]["cache_bytes"] == rows[0]["cache_bytes"] / 4
    shown, told = capsys.readouterr()
    assert told.count("Windows: 3 of 3\n") == len(rows)
    assert "+0.2500 ±0.0000" in shown
    assert max(map(len, NOTE.splitlines())) <= 80
    assert "reads/token" in shown


@pytest.mark.usefixtures("scored")
def test_error_of_a_single_window_is_null_in_json(tmp_path, capsys):
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    config = evaluate.Config(
        model="stories260k",
        task="text",
        task_options=("max_tokens=8", "window=8"),
        policies=("Vanilla", "TOVA,budget=4"),
        out=tmp_path / "text.json",
    )
    evaluate.main(config)
    rows = json.loads(config.out.read_text(), parse_constant=refuse)["systems"]
    assert rows[1]["change"] == [pytest.approx(0.25), None]
    shown = capsys.readouterr().out
    assert "+0.2500 ±?" in shown
    assert "nan" not in shown


@pytest.mark.usefixtures("fakes")
def test_policies_answer_the_same_problems(tmp_path, capsys):
    config = evaluate.Config(
        model="stories260k",
        task="reasoning",
        policies=("Vanilla", "StreamingLLM,budget=20"),
        problems=3,
        chains=2,
        max_new_tokens=6,
        page_size=16,
        answers=tmp_path / "answers",
        out=tmp_path / "results.json",
    )
    vanilla, streaming = evaluate.main(config).values()
    assert streaming.peak_per_problem == 40 < vanilla.peak_per_problem
    assert {path.name for path in config.answers.iterdir()} == set(config.policies)
    rows = json.loads(config.out.read_text())["systems"]
    assert rows[1]["policy"] == dms_jax.StreamingLLM(budget=20).to_dict()
    assert len(rows[1]["per_problem"]["scores"]) == 3
    shown = capsys.readouterr().out
    titles = [line.strip() for line in shown.splitlines()]
    assert [each for each in titles if each in ("reasoning", "linear", "arithmetic", "words")] == [
        *("reasoning", "linear", "arithmetic", "words")
    ]
    assert "vote, %" in shown


def failing(monkeypatch, errors):
    """Runs Vanilla, H2O and Knorm with these errors; returns the settings and who ran."""
    ran = []

    def perplexity(model, path, *, policy, **options):
        name = policy.name
        ran.append(name)
        if name in errors:
            raise errors[name]
        return _perplexity([1.0, 2.0])

    monkeypatch.setattr(evaluate, "perplexity", perplexity)
    policies = ("Vanilla", "H2O", "Knorm")
    return evaluate.Config(model="stories260k", task="text", policies=policies), ran


def test_failed_policy_is_named_and_others_run(tmp_path, capsys, monkeypatch):
    error = NotImplementedError("the kernel does not serve this")
    config, _ = failing(monkeypatch, {"H2O": error})
    out = tmp_path / "text.json"
    assert list(evaluate.main(dataclasses.replace(config, out=out))) == ["Vanilla", "Knorm"]
    assert f"H2O could not run: {error}" in capsys.readouterr().out
    rows = json.loads(out.read_text())["systems"]
    assert rows[-1] == {"name": "H2O", "failed": str(error)}


def test_failed_policy_names_its_option(capsys, monkeypatch):
    error = dms_jax.ConfigError("This model was never trained for it: give an `adapter`.")
    config, _ = failing(monkeypatch, {"H2O": error})
    evaluate.main(config)
    assert "H2O could not run: This model was never trained for it: give an --adapter." in (
        capsys.readouterr().out
    )


def test_lost_device_or_failed_baseline_ends_the_run(monkeypatch):
    lost = jax.errors.JaxRuntimeError("INTERNAL: CUDA error: misaligned address")
    assert gave_up(lost)
    assert not gave_up(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    config, ran = failing(monkeypatch, {"H2O": lost})
    with pytest.raises(jax.errors.JaxRuntimeError):
        evaluate.main(config)
    assert ran == ["Vanilla", "H2O"]
    config, ran = failing(monkeypatch, {"Vanilla": dms_jax.CapacityError("no room")})
    with pytest.raises(dms_jax.CapacityError):
        evaluate.main(config)
    assert ran == ["Vanilla"]


def _perplexity(nats):
    return dms_jax.evaluation.Perplexity(
        settings={"path": "a.txt", "policy": dms_jax.Vanilla().to_dict(), "window": 8},
        tokens=8 * len(nats),
        window_nats=np.asarray(nats),
        nats=8 * sum(nats),
        reads=4.5,
        peak=8.0,
        cache_bytes=128.0,
    )


def test_table_fits_80_columns(monkeypatch):
    cells = {"right, %": "100.0 ±10.0", "change": "-100.0 ±10.0", "peak": "12,345.6"}
    cells |= {"reads": "1,234,567", "ratio": "12.34", "kB": "1,234,567"}
    monkeypatch.setattr("dms_jax.command_line.candidates._cells", lambda result, first: cells)
    console = Console(file=io.StringIO(), width=80)
    console.print(table({"StreamingLLM,compression_ratio=4": None}, "gsm8k"))
    assert all(cell in console.file.getvalue() for cell in cells.values())


def test_names_wrap_between_options(monkeypatch):
    cells = {"nats/token": "1.3563 ±0.1404", "change": "+0.0392 ±0.1028", "peak": "77"}
    cells |= {"reads/token": "83.6", "kB": "161"}
    monkeypatch.setattr("dms_jax.command_line.candidates._cells", lambda result, first: cells)
    console = Console(file=io.StringIO(), width=80)
    console.print(table({"DMS, 4x": None, "StreamingLLM,compression_ratio=4": None}, "text"))
    lines = [line.split("  ")[0].strip() for line in console.file.getvalue().splitlines()]
    assert lines[-4:-1] == ["DMS, 4x", "StreamingLLM,", "compression_ratio=4"]

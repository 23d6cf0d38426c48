"""The comparison of policies: who takes part, what is measured, what is written."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.command_line import compare
from dms_jax.command_line.comparison import lessons, show, systems, texts
from dms_jax.command_line.comparison.measure import Measured, Occasion
from dms_jax.data import Documents
from dms_jax.data.tasks import LinearEquation, Needle
from dms_jax.policies import POLICIES


@pytest.mark.nightly
def test_rows_are_measured_written_and_shown(tmp_path, capsys):
    config = compare.Config(
        ratios=(4.0,),
        sequences=2,
        length=40,
        learn=(),
        only=("StreamingLLM", "KCache", "float8", "int4"),
        out=tmp_path,
    )
    rows = {row.label: row for row in compare.main(config)}
    assert set(rows) == {"dense", "float8", "int4", "StreamingLLM", "KCache"}
    dense, streaming = rows["dense"], rows["StreamingLLM"]
    assert (dense.increase, dense.peak, dense.reads) == (0, 39, 39 * 40 / 2)
    assert streaming.peak == streaming.live == 10
    assert streaming.reads == 55 + 29 * 10
    assert streaming.nats == pytest.approx(dense.nats + streaming.increase)
    assert rows["float8"].bytes < dense.bytes / 2
    assert rows["int4"].bytes < rows["float8"].bytes
    assert rows["int4"].kv_dtype == "int4"
    # Two of five layers keep their values on the device; the others' are half of their bytes.
    assert rows["KCache"].bytes + rows["KCache"].host_bytes == dense.bytes
    assert rows["KCache"].host_bytes == dense.bytes * 3 // 10
    data = json.loads((tmp_path / "quality.json").read_text())
    assert {row["label"] for row in data["rows"]} == set(rows)
    assert data["tokens"] == 2 * 39
    assert data["config"]["length"] == "40"
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    said = capsys.readouterr().out
    assert "StreamingLLM at 4" in said
    assert f"The tables are in {tmp_path / 'tables.md'}" in said
    again = dataclasses.replace(config, only=("TOVA",), merge=True)
    merged = compare.main(again)
    assert [row.label for row in merged] == [*rows, "TOVA"]
    assert len(json.loads((tmp_path / "quality.json").read_text())["rows"]) == 6
    # What earlier rows were measured with is not lost, and other text is not mixed with theirs.
    runs = json.loads((tmp_path / "quality.json").read_text())["runs"]
    assert [run["config"]["only"] for run in runs] == [str(config.only), "('TOVA',)"]
    for other in (dict(sequences=1), dict(page_size=8), dict(tasks=("retrieval",), length=39)):
        with pytest.raises(dms_jax.ConfigError, match="was measured with --"):
            compare.main(dataclasses.replace(again, **other))
    report = json.loads((tmp_path / "quality.json").read_text())
    assert len(report["rows"]) == 6
    # Nor what is called the same and is not.
    report["rows"][0]["nats"] += 0.01
    (tmp_path / "quality.json").write_text(json.dumps(report))
    with pytest.raises(dms_jax.ConfigError, match="has dense at"):
        compare.main(again)
    (tmp_path / "quality.json").write_text(json.dumps(report | {"rows": report["rows"][1:]}))
    with pytest.raises(dms_jax.ConfigError, match="does not hold a comparison"):
        compare.main(again)


@pytest.mark.usefixtures("scored")
def test_runs_that_shared_the_work_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "picture", lambda *_, **__: None)
    config = compare.Config(ratios=(4.0,), sequences=2, length=40, learn=(), out=tmp_path / "whole")
    parts = {name: tmp_path / name for name in ("StreamingLLM", "Knorm")}
    for name, out in parts.items():
        compare.main(dataclasses.replace(config, only=(name,), out=out))
    rows = compare.main(dataclasses.replace(config, join=tuple(parts.values())))
    assert [row.label for row in rows] == ["dense", "StreamingLLM", "Knorm"]
    report = json.loads((tmp_path / "whole" / "quality.json").read_text())
    assert [run["config"]["only"] for run in report["runs"]] == ["('StreamingLLM',)", "('Knorm',)"]
    assert report["config"] == report["runs"][0]["config"]
    assert "| Knorm at 4 |" in (tmp_path / "whole" / "tables.md").read_text()
    other = dataclasses.replace(config, only=("Knorm",), sequences=1, out=tmp_path / "other")
    compare.main(other)
    with pytest.raises(dms_jax.ConfigError, match="--sequences 1, not 2"):
        compare.main(dataclasses.replace(config, join=(parts["Knorm"], tmp_path / "other")))
    with pytest.raises(dms_jax.ConfigError, match=r"nowhere.*cannot be read"):
        compare.main(dataclasses.replace(config, join=(tmp_path / "nowhere",)))
    # A table of joined runs goes on being joined, and says what all of them were.
    again = dataclasses.replace(config, join=(tmp_path / "whole", parts["Knorm"]))
    compare.main(dataclasses.replace(again, out=tmp_path / "again"))
    report = json.loads((tmp_path / "again" / "quality.json").read_text())
    wanted = ["('StreamingLLM',)", "('Knorm',)", "('Knorm',)"]
    assert [run["config"]["only"] for run in report["runs"]] == wanted
    report["rows"][0]["nats"] += 0.01
    (parts["Knorm"] / "quality.json").write_text(json.dumps(report))
    with pytest.raises(dms_jax.ConfigError, match="has dense at"):
        compare.main(again)


@pytest.mark.usefixtures("scored")
def test_nothing_runs_on_a_device_that_gave_up(tmp_path, monkeypatch):
    score = dms_jax.score
    monkeypatch.setattr(compare, "picture", lambda *_, **__: None)

    def fails(model, sequences, *, policy, **options):
        if policy.name == "H2O":
            raise NotImplementedError("the kernel does not serve this")
        if policy.name == "TOVA":
            raise jax.errors.JaxRuntimeError("INTERNAL: CUDA error: misaligned address")
        return score(model, sequences, policy=policy, **options)

    monkeypatch.setattr(dms_jax, "score", fails)
    config = compare.Config(
        ratios=(4.0,), sequences=2, length=40, learn=(), only=("TOVA", "Knorm"), out=tmp_path
    )
    # One that is not served is a row, and others go on.
    unserved = dataclasses.replace(config, only=("H2O", "Knorm"), out=tmp_path / "unserved")
    assert {row.label: row.failed for row in compare.main(unserved)} == {
        "dense": None,
        "H2O": "the kernel does not serve this",
        "Knorm": None,
    }
    dense, tova = compare.main(config)
    assert (dense.label, tova.label) == ("dense", "TOVA")
    assert "misaligned" in tova.failed
    # The next run's row takes its place, and does not lose its own to a failure.
    monkeypatch.setattr(dms_jax, "score", score)
    again = dataclasses.replace(config, only=("TOVA",), merge=True)
    assert [row.failed for row in compare.main(again)] == [None, None]
    monkeypatch.setattr(dms_jax, "score", fails)
    assert [row.failed for row in compare.main(again)] == [None, None]


@pytest.mark.usefixtures("scored")
def test_errors_that_one_sequence_leaves_unknown_are_null_and_said_to_be_unknown(tmp_path, capsys):
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    config = compare.Config(
        ratios=(4.0,), sequences=1, length=24, learn=(), only=("StreamingLLM",), out=tmp_path
    )
    compare.main(config)
    path = tmp_path / "quality.json"
    report = json.loads(path.read_text(), parse_constant=refuse)
    assert [(row["error"], row["increase_error"]) for row in report["rows"]] == [(None, None)] * 2
    streaming = report["rows"][1]
    wanted = f"{streaming['nats']:.4f} ±unknown", f"{streaming['increase']:+.4f} ±unknown"
    for text in (capsys.readouterr().out, (tmp_path / "tables.md").read_text()):
        assert all(each in text for each in wanted)
        assert "nan" not in text
    # Rows that were read again are shown as those that were measured.
    compare.main(dataclasses.replace(config, only=("TOVA",), merge=True))
    text = capsys.readouterr().out
    assert all(each in text for each in wanted)
    again = json.loads(path.read_text(), parse_constant=refuse)["rows"]
    assert again[1] == streaming
    assert [row["label"] for row in again] == ["dense", "StreamingLLM", "TOVA"]


def test_answers_to_one_problem_keep_an_unknown_error():
    part = dict(accuracy=1.0, error=None, change=0.0, change_error=None, peak=8.0, reads=2.0)
    data = dataclasses.asdict(Measured("dense", 1.0, {}, None, nats=1.5, reads=1.0))
    row = Measured.from_dict({**data, "answers": {"needle": {**part, "policy": {"top": None}}}})
    other = dataclasses.replace(row, label="TOVA")
    assert math.isnan(row.answers["needle"]["error"])
    assert row.answers["needle"]["policy"] == {"top": None}
    assert (row.kv_dtype, row.failed) == (None, None)
    assert show.answer_cells(other, row)["needle, %"] == "100.0 ±unknown"
    assert show.answer_cells(other, row)["change (needle)"] == "+0.0 ±unknown"
    known = dataclasses.replace(row, error=0.25)
    assert show.text_cells(known, row)["nats/token"] == "1.5000 ±0.2500"


def test_every_system_takes_part_with_the_same_share(stories):
    lengths = np.array([100, 500, 600, 848])  # a mean of 512
    share = systems.Share.of(lengths, 4.0)
    assert np.minimum(lengths, share.limit).mean() == pytest.approx(128, abs=0.5)
    labels = [one.label for one in systems.training_free(stories, 4.0)]
    assert len(labels) == len(set(labels))  # none runs twice
    free = {
        one.label: one.policy(share).for_length(share.limit)
        for one in systems.training_free(stories, 4.0)
    }
    # A subclass may say by a property whether it is learned, so instances are asked.
    learned = {
        name for name in ("DMS", "DMC", "KVzap", "KVpop") if POLICIES[name]().retrofit.needed
    }
    assert {*free, *learned, "Vanilla"} == set(POLICIES)
    assert learned.isdisjoint(free)  # a row that needs a training would be one that fails
    for name, policy in free.items():
        own = getattr(policy, "scorer", policy)
        budget = getattr(own, "budget", getattr(own, "top", share.limit))
        assert budget == share.limit, name
    # What draws at random keeps no more of sequences of unlike lengths than the others do.
    for ratio in (2.0, 4.0, 8.0):
        share = systems.Share.of(lengths, ratio)
        drawn = {one.label: one for one in systems.training_free(stories, ratio)}["RandomEviction"]
        random = drawn.policy(share)
        old = np.maximum(lengths - random.window, 0)
        assert np.mean(lengths - random.rate * old) == pytest.approx(512 / ratio, rel=0.01)
    dms = systems.learned("DMS", 4.0, dataclasses.replace(stories, policy=dms_jax.DMS(window=8)))
    more = {one.label: one for one in systems.combined(dms)}
    assert more["DMS + Quest"].policy(share).over == dms_jax.DMS(window=8)
    assert more["DMS + KCache"].policy(share).top == share.limit // 2
    assert more["DMS + float8"].kv_dtype == "float8_e4m3"
    assert more["DMS + int4"].kv_dtype == "int4"


def test_solutions_count_and_prompts_do_not():
    model = dms_jax.load(assets.path("reasoner-11m"))
    tasks = [task for each in texts.occasions(("retrieval",)).values() for task in each.tasks]
    text = texts.solved(model, tasks, 4)
    assert text.kinds == ["needle", "tracking"] * 2
    assert text.sequences[0] != text.sequences[2]
    problem = tasks[0].problem("validation", 0)
    first, start = text.sequences[0], text.starts[0]
    assert model.tokenizer.decode(first[start:-1]) == problem.solution
    assert first[-1] == model.tokenizer.eos_token_id
    assert text.tokens == sum(len(s) - n for s, n in zip(text.sequences, text.starts, strict=True))
    with pytest.raises(dms_jax.ConfigError, match="reasoning and retrieval"):
        texts.occasions(("chess",))


@pytest.mark.nightly
@pytest.mark.usefixtures("optimized")
def test_answers_are_scored_with_each_budget_of_its_own(tmp_path, monkeypatch):
    """Two tasks of other lengths: budgets follow, also where they come with the sequences."""
    short = {
        "reasoning": Occasion({"linear": (LinearEquation(9, 60, 20),)}),
        "retrieval": Occasion({"needle": (Needle(size=40),)}),
    }
    monkeypatch.setattr(compare, "occasions", lambda names: {name: short[name] for name in names})
    config = compare.Config(
        model="reasoner-11m",
        ratios=(2.0,),
        sequences=2,
        learn=(),
        only=("TOVA", "StreamingLLM"),
        tasks=("reasoning", "retrieval"),
        problems=2,
        temperature=0.0,
        max_new_tokens=40,
        out=tmp_path,
    )
    rows = {row.label: row for row in compare.main(config)}
    dense = rows["dense"].answers
    assert dense["needle"]["accuracy"] == 1
    assert dense["needle"]["peak"] > 1.5 * dense["linear"]["peak"]
    for label, beside in (("TOVA", 1), ("StreamingLLM", 0)):
        for name, part in rows[label].answers.items():
            assert rows[label].failed is None
            half = dense[name]["peak"] / 2
            assert part["policy"]["budget"] == pytest.approx(half, abs=2)
            assert part["peak"] == pytest.approx(part["policy"]["budget"] + beside, abs=1)
            assert part["change"] == pytest.approx(part["accuracy"] - dense[name]["accuracy"])
    assert "needle, %" in (tmp_path / "tables.md").read_text()


@pytest.mark.nightly
def test_learned_systems_come_out_of_the_same_tokens(stories, tmp_path):
    given = lessons.Lessons(
        Documents(assets.stories("train")[:40]),
        steps=8,
        batch_size=2,
        sequence_length=32,
        save=tmp_path,
    )
    told = []
    dense = systems.learned("dense", 1.0, stories)
    policy = dms_jax.DMS(window=4, source="adapter")
    ones = list(lessons.sparsified(dense, policy, (4.0, 2.0), given, told.append))
    assert [(one.ratio, one.policy(None)) for one in ones] == [(4.0, policy), (2.0, policy)]
    (half,) = lessons.grouped(dense, 2.0, given, told.append)
    assert half.model.config.num_kv_heads == stories.config.num_kv_heads // 2
    assert list(lessons.grouped(dense, 3.0, given, told.append)) == []
    # On top of it the ratios go on from its own.
    (both,) = lessons.sparsified(half, policy, (4.0, 2.0), given, told.append)
    merged, as_it_is = lessons.merged(half, 4.0, given, told.append)
    assert list(lessons.merged(half, 2.0, given, told.append)) == []
    assert [(one.label, one.ratio) for one in (both, merged, as_it_is)] == [
        ("GQA + DMS", 4.0),
        ("GQA + DMC", 4.0),
        ("GQA + DMC, nothing merged", 4.0),
    ]
    assert merged.policy(None).name == "DMC"
    assert "GQA at 3 is left out" in told.pop(2)
    assert len(told) == 4
    assert all(f"{8 * 2 * 32:,}" in line for line in told)
    # Uptraining moved the weights.
    before = dms_jax.to_grouped_query(stories, stories.config.num_kv_heads // 2)
    kernels = [m.transformer.layers.attention.qkv_proj.kernel[...] for m in (before, half.model)]
    assert np.abs(np.asarray(kernels[0]) - np.asarray(kernels[1])).max() > 1e-5
    # What was learned is on disk.
    names = {"DMS@4", "DMS@2", "GQA@2", "GQA+DMS@4", "GQA+DMC@4"}
    assert {path.name for path in tmp_path.iterdir()} == names
    again = dms_jax.load(tmp_path / "GQA+DMS@4")
    assert (again.policy, again.config) == (policy, both.model.config)

"""The campaign in its smallest setting: pieces, resuming, and the record for the claims."""

import dataclasses
import json

import pytest

import dms_jax
from dms_jax.policies import KVpop
from experiments.reproduction import campaign, claims, records

PROBLEMS = [
    {"question": f"What is {n} and {n + 1}?", "answer": f"It is {n}. #### {2 * n + 1}"}
    for n in range(12)
]


@pytest.fixture
def config(tmp_path):
    """A model without a chat template, and problems that it cannot solve."""
    for name, rows in (("gsm8k/train", PROBLEMS[:8]), ("gsm8k/test", PROBLEMS[8:])):
        path = tmp_path / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return campaign.Config(
        model="stories260k",
        data=tmp_path / "data",
        out=tmp_path / "run",
        dtype="float32",
        keep="all",
        held_out=2,
        seeds=(0,),
        tokens=6 * 2 * 64,
        sequence_length=64,
        batch_size=2,
        new_tokens=12,
        long_new_tokens=12,
        chains=(1, 3),
        temperatures=(0.7,),
        lanes=8,
    )


def call(config, only, **changes):
    return campaign.main(dataclasses.replace(config, only=tuple(only.split()), **changes))


def recorded(config, monkeypatch):
    """The record in the form of the claims."""
    path = config.out / "record.json"
    assert call(config, "record") == 0
    records.record.cache_clear()
    monkeypatch.setitem(records.RECORDS, "tiny", str(path))
    return json.loads(path.read_text())


def test_pieces_leave_results_and_the_record_has_every_score(config, queues, monkeypatch, capsys):
    from tests.support.fake_programs import faked

    with faked():
        for only in ("ask-gsm8k-plain", "frontier-gsm8k-plain-*", "frontier-gsm8k-quest-*"):
            assert call(config, only) == 0
        assert call(config, "ask-gsm8k-quest+share") == 0
        assert call(config, "ask-held-out-plain") == 0
    done = {path.stem for path in (config.out / "done").iterdir()}
    assert done == {
        *("ask-gsm8k-plain", "ask-gsm8k-quest+share", "ask-held-out-plain"),
        *(f"frontier-gsm8k-{name}-{t}" for name in ("plain", "quest") for t in ("0", "0.7")),
    }
    record = recorded(config, monkeypatch)
    assert {(row["system"], row["measure"]): len(row["scores"]) for row in record["rows"]} == {
        ("plain", "held-out"): 2,
        ("plain", "gsm8k"): 4,
        ("quest/share", "gsm8k"): 4,
    }
    plain = [row for row in record["votes"] if row["system"] == "plain"]
    assert [(row["length"], row["temperature"], row["chains"]) for row in plain] == [
        *((6, 0.0, 1), (12, 0.0, 1), (6, 0.7, 3), (12, 0.7, 3))
    ]
    assert all(len(own) == 4 for row in record["votes"] for own in row["scores"].values())
    assert claims.computed("gap tiny quest/share plain gsm8k") == "+0.0 ± 0.0"
    assert claims.computed("gain tiny quest plain peak") == "+0.0 ± 0.0"
    assert claims.computed("votes tiny plain 3@0.7 gsm8k") == "0.0"
    assert claims.computed("votes-gap tiny quest 3 plain 0") == "+0.0 ± 0.0"
    claims.PICTURES["real_models/gsm8k.png"](config.out / "drawn.png", name="tiny")
    assert (config.out / "drawn.png").stat().st_size > 0
    points = records.points("tiny", ("plain",))
    assert points.has_greedy("plain")
    assert len(points.points) == 6
    capsys.readouterr()
    assert call(config, "list") == 0
    listed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("done") for line in listed) == len(done)


def test_eight_worked_examples_come_before_a_problem(config):
    task = campaign.TASKS["gsm8k-8shot"](config.data / "gsm8k" / "test.jsonl")
    questions = [question for question, _ in task.problem("test", 1).examples]
    assert len(questions) == 8
    for row, text in zip(PROBLEMS, questions, strict=False):
        assert row["question"] in text
    assert campaign.longest(config, "gsm8k-8shot") == {"max_new_tokens": config.new_tokens}


def test_answers_of_data_files_become_text(config):
    """Answers as numbers, and within solutions; problems without an answer are left out."""
    rows = [
        {"question": "1 + 1?", "answer": 2.0},
        {"problem": "Half?", "solution": r"First \boxed{3}, then \boxed{\frac{1}{2}}."},
        {"problem": "Lost?", "solution": "Nobody knows."},
        {"problem": "Open?", "solution": r"\boxed{4"},
        {"problem": "Five?", "answer": "5"},
    ]
    path = config.data / "amc23" / "test.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = campaign.Campaign(config).file("amc23/test.jsonl")
    task = campaign.TASKS["amc23"](file)
    assert [record.fields["answer"] for record in task.records] == ["2", r"\frac{1}{2}", "5"]
    problem = task.problem("test", 1)
    assert task.score(problem, r"It is $\boxed{\frac{1}{2}}$.") == 1


def test_impossible_pieces_say_why(config, capsys):
    assert call(config, "ask-math500-plain") == 1
    assert "left out: there is no " in capsys.readouterr().out
    assert call(config, "ask-gsm8k-dms-3.3-0") == 0
    assert "waits for train-dms-3.3-0" in capsys.readouterr().out
    assert call(config, "ask-gsm8k-snapkv-64+peak") == 0
    assert "waits for ask-gsm8k-dms-3.3-0, ask-gsm8k-plain" in capsys.readouterr().out
    assert call(config, "ask-gsm8k-plain", minutes=1e-9) == 0
    assert "The time is over" in capsys.readouterr().out
    for changes, said in (
        (dict(only=("aks-*",)), "no such piece"),
        (dict(only=("record",)), "is done yet"),
        (dict(model=""), "give --model"),
    ):
        with pytest.raises(dms_jax.ConfigError, match=said):
            campaign.main(dataclasses.replace(config, **changes))


def test_names_are_unique_and_needs_come_first(config):
    config = dataclasses.replace(config, seeds=(0, 1, 2))
    plan = list(campaign.pieces(campaign.Campaign(config)))
    names = [piece.name for piece in plan]
    assert len(set(names)) == len(names)
    assert not set("/:") & set("".join(names))
    for place, piece in enumerate(plan):
        assert set(piece.needs) <= set(names[:place]), piece.name
    assert sum(name.startswith("train-") for name in names) == (
        3 * 3 + len(campaign.TRAININGS) - len(campaign.SEVERAL)
    )


def test_rivals_get_the_measured_peak_of_the_retrofit(config):
    """At its peak, just before a cut; by the papers' rule, a share of the longest answer."""
    own = campaign.Campaign(config)
    own.results.folder.mkdir(parents=True)
    for name, peak in (("dms-3.3-0", 400.4), ("plain", 1500.0)):
        result = {"peak": peak, "new_tokens": 150.2}
        own.results.path(f"ask-gsm8k-{name}").write_text(json.dumps(result))
    own.centres = lambda: "centres.safetensors"
    budgets = {}
    for name in campaign.RIVALS:
        policy = own.policy(f"{name}/peak", "gsm8k")
        inner = getattr(policy, "scorer", policy)
        budgets[name] = inner.budget
        share = own.policy(f"{name}/share", "gsm8k")
        assert getattr(share, "scorer", share).compression_ratio == campaign.SHARE
    one_cut, steps = 400 - 150, 400 - campaign.INTERVAL
    assert budgets == {
        **dict.fromkeys(("snapkv-32", "snapkv-64", "expected"), one_cut),
        **dict.fromkeys(("h2o", "tova", "streamingllm"), 399),
        **dict(quest=400, rkv=steps, triattention=steps),
    }
    assert own.policy("float8", "gsm8k") == dms_jax.Vanilla()
    assert own.policy("kvpop:0", "gsm8k") == KVpop(budget=400, window=16)
    assert own.policy("dms-3.3:0", "gsm8k") is None


@pytest.mark.nightly
def test_training_resumes_and_adapter_answers(config, queues, monkeypatch):
    """With real programs: a stopped training resumes, and the adapter answers."""
    assert call(config, "lessons-gsm8k") == 0
    assert call(config, "train-dms-3.3-0", minutes=1e-4) == 0  # not even a step
    assert not (config.out / "done" / "train-dms-3.3-0.json").exists()
    for only in ("train-dms-3.3-0", "train-control-0", "train-kvpop-0"):
        assert call(config, only) == 0
        assert (config.out / "done" / f"{only}.json").exists(), only
    for only in ("ask-gsm8k-plain", "ask-gsm8k-dms-3.3-0", "ask-gsm8k-dms-3.3@2-0"):
        assert call(config, only) == 0
    for only in ("ask-gsm8k-control-0", "ask-gsm8k-kvpop-0", "frontier-gsm8k-dms-3.3-0-0"):
        assert call(config, only) == 0
    for name in ("triattention+peak", "rkv+peak", "expected+peak", "float8"):
        assert call(config, f"ask-gsm8k-{name}") == 0
    record = recorded(config, monkeypatch)
    asked = {(row["system"], row["run"]): row["policy"]["name"] for row in record["rows"]}
    assert asked == {
        ("plain", 0): "Vanilla",
        ("dms-3.3", 0): "DMS",
        ("dms-3.3@2", 0): "DMS",
        ("control", 0): "Vanilla",
        ("kvpop", 0): "KVpop",
        ("triattention/peak", 0): "TriAttention",
        ("rkv/peak", 0): "RKV",
        ("expected/peak", 0): "AdaKV",
        ("float8", 0): "Vanilla",
    }
    quantized = {row["system"]: row["kv_dtype"] for row in record["rows"] if row["kv_dtype"]}
    assert quantized == {"float8": "float8_e4m3"}
    assert claims.computed("gap tiny dms-3.3:* plain gsm8k") == "+0.0 ± 0.0"
    assert len(record["trainings"]) == 4

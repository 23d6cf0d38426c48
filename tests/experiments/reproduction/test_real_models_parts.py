"""Parts of the measurement of real models: their names, order, and what they wait for."""

import dataclasses
import json
import pathlib

import pytest

import dms_jax
from experiments.reproduction import real_models
from experiments.reproduction.files import write_json
from experiments.reproduction.real import jobs as real_jobs
from experiments.reproduction.real import plan, systems
from experiments.reproduction.real.budgets import calibrated, fitted
from experiments.reproduction.real.jobs import Worker, check_settings
from experiments.reproduction.real.measures import tokens_of
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import FREE, RIVAL, TRAININGS
from experiments.reproduction.runs import write_plan

GIVEN = Config(qwen="reasoner-11m", smollm2="reasoner-11m", data=pathlib.Path("data"))


def test_parts_are_named_done_in_their_order_and_may_be_a_joining_gpus_own(tmp_path, capsys):
    config = dataclasses.replace(GIVEN, out=tmp_path, judged=RIVAL)
    chosen = ("training-qwen-control", f"asking-qwen-{RIVAL}-at3.3-*", "training-qwen-*-to-4")
    parts = dataclasses.replace(config, parts=chosen)
    names = [job.name for job in plan.jobs(parts)]
    assert names[0] == "training-qwen-control"
    measures = [name.rpartition("at3.3-")[2] for name in names[1:-4]]
    assert measures[:4] == ["gsm8k", "frontier", "frontier-half", "unseen"]  # nothing is elected
    assert set(measures[4:]) == set(systems.OTHERS["qwen"])
    assert names[-4:] == [
        f"training-qwen-{each}-to-4" for each in ("low-rank", "adapter", "all", "floor")
    ]
    with pytest.raises(dms_jax.ConfigError, match=r"--parts lessons: no job .* --only list"):
        plan.jobs(dataclasses.replace(config, parts=("lessons",)))
    check_settings(parts)
    write_plan(parts)
    check_settings(dataclasses.replace(config, parts=("speed-*",)))  # goes on with others
    worked = []

    class Worked(Worker):
        def work(self):
            worked.append([job.name for job in self.wanted()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_jobs, "Worker", Worked)
        real_jobs.worker(str(tmp_path), 0)
        real_jobs.worker(str(tmp_path), 0, parts=("speed-*",))
    assert worked == [names, ["speed-qwen-speed"]]
    write_json(Paths(config).summary("control"), {})
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / f"{names[1]}.txt").write_text("x")
    assert real_models.main(dataclasses.replace(parts, only="list")) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown] == names
    assert [line.split()[0] for line in shown[:3]] == ["done", "failed", "waits"]


def test_a_gpu_that_joins_may_have_parts_of_its_own(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(
        real_models, "run_workers", lambda *given, **own: called.append((given[:3], own))
    )
    joins = Config(out=tmp_path, join=True, parts=("speed-*",))
    assert real_models.main(joins) == 0
    assert real_models.main(dataclasses.replace(joins, parts=())) == 0
    where = (real_models.JOBS, tmp_path, 1)
    assert called == [(where, {"parts": ("speed-*",)}), (where, {})]


def test_needles_are_also_looked_for_among_more_tokens():
    lengths = [tokens_of(GIVEN, name) for name in ("ruler", "ruler-twice", "ruler-four-times")]
    assert lengths == [4096, 8192, 16384]
    assert [tokens_of(GIVEN, name) for name in ("needle", "needle-four-times")] == [2048, 8192]
    short = systems.SHORT_TASKS
    assert [tokens_of(GIVEN, name) for name in (short, f"{short}-twice")] == [2048, 4096]
    assert tokens_of(GIVEN, "math500") is None
    decided = dataclasses.replace(GIVEN, judged="warm-up-w16-kept")
    for name in (systems.TO_4, "kvzap", "kvpop", "control"):  # whatever the verdicts are about
        for config in (GIVEN, decided):
            own = {job.measure for job in plan.jobs(config) if job.system == name}
            assert own > set(systems.OTHERS["qwen"])
    asked = {job.measure for job in plan.jobs(GIVEN)}
    assert {*systems.OTHERS["qwen"], *systems.OTHERS["smollm2"]} < asked


@pytest.mark.parametrize("judged", ["", "warm-up-w16-kept"])
def test_no_job_waits_for_what_no_job_makes(judged, tmp_path):
    """Whatever is judged; and each has files of its own."""
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path, judged=judged))
    left = plan.jobs(paths.config)
    assert len({job.name for job in left}) == len(left)
    while ready := [job for job in left if paths.ready(job)]:
        for job in ready:
            left.remove(job)
            if job.kind == "lessons":
                write_json(paths.lessons(job.model, job.system), {})
            elif job.kind == "training":
                for ratio in TRAININGS[job.system].settings:
                    paths.model(job.system, f"{ratio:g}").mkdir(parents=True, exist_ok=True)
            else:
                assert not paths.result(job).exists()
                write_json(paths.result(job), {})
    assert [job.name for job in left] == []


@pytest.mark.parametrize("judged", ["kvzap", "control", systems.SHIPPED])
def test_what_learns_no_ratio_of_qwen_is_not_judged(judged):
    """The methods without training would wait for it for ever, and it for itself."""
    with pytest.raises(dms_jax.ConfigError, match=f"--judged {judged}: .* learns its ratio"):
        plan.jobs(dataclasses.replace(GIVEN, judged=judged))


def test_what_holds_as_much_as_another_ratio_waits_for_that_retrofit(tmp_path):
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path))
    asked = [job for job in plan.jobs(paths.config) if job.system in ("kvpop", "tova")]
    gsm8k = [job for job in asked if job.measure == "gsm8k"]
    assert {job.setting for job in gsm8k} == {"", "3.3", "2", "4", "8"}
    write_json(paths.result(free("qwen", "vanilla")), {"peak": 384.0})
    write_json(paths.reference("qwen", "gsm8k"), {"peak": 120.0})
    tova = free("qwen", "tova", setting="2")
    assert not paths.ready(tova)
    low_rank = Job("asking", "qwen", "low-rank-to-4", "2", "gsm8k")
    write_json(paths.result(low_rank), {"peak": 190.0})
    assert paths.ready(tova)
    assert calibrated(paths, tova, FREE["tova"]).budget == 190
    kvpop = Job("asking", "qwen", "kvpop", "2", "gsm8k")
    assert fitted(paths, kvpop, None, TRAININGS["kvpop"].policy, []).budget == 189
    assert paths.result(kvpop) != paths.result(dataclasses.replace(kvpop, setting="3.3"))
    assert paths.model("kvpop", "2") == paths.model("kvpop", "3.3")


def test_a_training_that_was_left_behind_is_done_again_if_there_is_more_to_ask(tmp_path):
    """Figures came from another machine, and the weights did not."""
    asked = ("training-qwen-all-to-8", "asking-qwen-all-to-8-at8-gsm8k")
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path, parts=asked))
    training, question = plan.jobs(paths.config)
    assert not paths.done(training)
    write_json(paths.summary("all-to-8"), {})
    assert not paths.done(training)
    write_json(paths.result(question), {})
    assert paths.done(training)
    paths.result(question).unlink()
    paths.model("all-to-8", "8").mkdir(parents=True)
    assert paths.done(training)


def test_a_policy_of_another_training_asks_its_model(tmp_path):
    """KVzap with the window of its paper, which an answer to GSM8K does not exceed."""
    asked = ("training-qwen-kvzap", "*-kvzap-w128-*")
    paths = Paths(dataclasses.replace(GIVEN, out=tmp_path, parts=asked))
    training, *questions = plan.jobs(paths.config)
    assert training.name == "training-qwen-kvzap"
    assert [job.measure for job in questions] == ["ruler", systems.RULER_TASKS]
    own = TRAININGS["kvzap-w128"]
    assert paths.model(own.name, "3.3") == paths.model("kvzap", "3.3")
    assert own.policy.window == 128
    write_json(paths.summary("kvzap"), {})
    assert not paths.done(training)  # its model is elsewhere, and has more to answer
    for job in questions:
        write_json(paths.result(job), {})
    assert paths.done(training)


def test_records_name_policies_and_recipes_in_words():
    made = {name: each.to_dict(GIVEN) for name, each in TRAININGS.items()}
    assert "0x" not in json.dumps(made)
    assert made[RIVAL]["make"] == "dms_warm_up"
    assert [made[name]["make"] for name in ("kvpop", "smollm2-dmc")] == ["kvpop", "dmc"]
    assert made["control"]["policy"] is None
    for name, each in TRAININGS.items():
        if each.policy is not None:
            assert dms_jax.policies.from_dict(made[name]["policy"]) == each.policy

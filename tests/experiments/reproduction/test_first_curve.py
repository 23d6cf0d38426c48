"""The first curve: its plan, its data, its queue; and a whole tiny run."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from experiments.reproduction import first_curve, processes
from experiments.reproduction.curve import jobs as curve_jobs
from experiments.reproduction.curve import plan
from experiments.reproduction.curve.analysis import Results
from experiments.reproduction.curve.data import Sequences, _first_fit, make_prompts, read_documents
from experiments.reproduction.curve.jobs import (
    Worker,
    check_settings,
    limit_for,
    policy_at,
)
from experiments.reproduction.curve.plan import Config, Job, Paths
from experiments.reproduction.files import write_json
from experiments.reproduction.runs import read_plan, write_plan

MODEL = str(assets.path("stories260k"))


# -- the plan -------------------------------------------------------------------------------------


def test_what_cannot_be_done_without_comes_first():
    config = Config()
    names = [job.name for job in plan.jobs(config)]
    assert len(set(names)) == len(names)
    assert names[:9] == [*(f"data-{shard}" for shard in range(8)), "vanilla-0"]
    assert names[9:14] == [*(f"{variant.name}-0" for variant in plan.MAIN), "further-0"]
    assert config.ladder[int(names[14].rsplit("-", 1)[1])] == 4  # TOVA at ratio 4
    last = names.index("dms-adapter-shift0-w16-2")
    assert names.index("StreamingLLM-0") < names.index("further-1") < last
    assert last < names.index("dms-neuron-shift1-w64-0") < names.index("RandomEviction-0")
    only = plan.jobs(dataclasses.replace(config, variants=("dms-neuron-shift1-w64",)))
    assert [job.name for job in only if job.kind == "retrofit"] == ["dms-neuron-shift1-w64-0"]


def test_budgets_give_the_peak_they_are_asked_for():
    lengths = np.array([10, 20, 30])
    # (10 + 17 + 17) / 3 = 14.67, (10 + 18 + 18) / 3 = 15.33
    assert limit_for(lengths, 14.9) == 17
    assert limit_for(lengths, 15.2) == 18
    assert policy_at("TOVA", lengths, 15.2) == dms_jax.TOVA(budget=17)
    assert policy_at("StreamingLLM", lengths, 15.2) == dms_jax.StreamingLLM(budget=18)
    # 17 stay whatever happens; of the other 20 - 17 + ... the mean of 40 is 100 - 17 = 83
    policy = policy_at("RandomEviction", np.array([80.0, 120.0]), 58.5)
    assert policy.rate == pytest.approx(0.5)
    assert policy_at("RandomEviction", np.array([80.0]), 5.0).rate == 1


def test_a_plan_survives_being_written(tmp_path):
    config = Config(out=tmp_path, pages=tmp_path / "pages", ratios=(2.0, 4.0))
    write_plan(config)
    assert read_plan(type(config), tmp_path) == config


def test_a_run_does_not_go_on_with_other_settings(tmp_path):
    config = small(tmp_path)
    check_settings(config)  # nothing is there yet
    write_plan(config)
    check_settings(dataclasses.replace(config, learning_rate=1.0))  # nothing was made
    write_json(Paths(config).data(0), {})
    check_settings(dataclasses.replace(config, learning_rate=1.0))  # the documents know of none
    with pytest.raises(dms_jax.ConfigError, match=r"documents=60000, not 8; .*another --out"):
        check_settings(dataclasses.replace(config, documents=8, document_tokens=3))
    write_json(Paths(config).result("vanilla", "1", 0, "needle"), {})
    check_settings(dataclasses.replace(config, seeds=3, processes=4, deadline_minutes=1.0))
    with pytest.raises(dms_jax.ConfigError, match=r"learning_rate=3e-05, not 1\.0"):
        check_settings(dataclasses.replace(config, learning_rate=1.0))


# -- data -----------------------------------------------------------------------------------------


def test_prompts_are_those_of_a_seed_and_fit():
    tokenizer = dms_jax.load(MODEL).tokenizer
    prompts = make_prompts(tokenizer, 150, 8, "0 0")
    assert prompts == make_prompts(tokenizer, 150, 8, "0 0")
    assert prompts != make_prompts(tokenizer, 150, 8, "0 1")
    assert len(prompts) == 8
    assert max(map(len, prompts)) <= 150
    assert all(ids[0] == tokenizer.bos_token_id for ids in prompts)


@pytest.mark.nightly
def test_prompts_that_never_fit_are_not_drawn_for_ever():
    tokenizer = dms_jax.load(MODEL).tokenizer
    with pytest.raises(dms_jax.DataError, match="longer than the 3 tokens"):
        make_prompts(tokenizer, 3, 1, "0 0")


def test_first_fit():
    assert _first_fit([3, 2, 1, 2], 4) == [[0, 2], [1, 3]]
    assert _first_fit([3, 3, 3, 1], 4, open_rows=2) == [[0], [1, 3], [2]]
    assert _first_fit([], 4) == []


def test_sequences_hold_every_document_once_and_count_completions():
    documents = [
        (np.arange(10 * number, 10 * number + size, dtype=np.int32), prompt)
        for number, (size, prompt) in enumerate([(3, 1), (2, 1), (5, 2), (9, 3)], 1)
    ]
    make = lambda seed: Sequences(documents, batch_size=2, length=6, seed=seed)  # noqa: E731
    sequences = make(0)
    assert sequences.rows == 3  # 3 + 2, 5, and 9 cut to 6
    assert sequences.tokens == 3 + 2 + 5 + 6
    batches = [next(sequences) for _ in range(3)]  # two epochs
    found = {}
    for batch in batches:
        chex.assert_shape(batch["tokens"], (2, 6))
        for tokens, segments, mask in zip(*batch.values(), strict=True):
            for segment in range(1, segments.max() + 1):
                own = segments == segment
                number = tokens[own][0] // 10
                expected, prompt = documents[number - 1]
                chex.assert_trees_all_equal(tokens[own], expected[:6])
                chex.assert_trees_all_equal(
                    mask[own], np.array([i >= prompt for i in range(own.sum())])
                )
                found[number] = found.get(number, 0) + 1
            assert not mask[segments == 0].any()
    assert found == {1: 2, 2: 2, 3: 2, 4: 2}
    again = make(0)
    again.set_state({"step": 2})
    chex.assert_trees_all_equal(next(again)["tokens"], batches[2]["tokens"])
    other = make(1)
    orders = [[next(it)["tokens"].tolist() for _ in range(3)] for it in (make(0), other)]
    assert orders[0] != orders[1]


# -- the queue ------------------------------------------------------------------------------------


class Recorder(Worker):
    """A worker whose jobs write empty files."""

    def __init__(self, config: Config, deadline: float):
        super().__init__(config, deadline)
        self.did: list[str] = []

    def _do(self, job: Job) -> None:
        self.did.append(job.name)
        for path in self.paths.products(job):
            write_json(path, {})
        self.paths.lock(job).unlink()


def small(out: pathlib.Path, **changes) -> Config:
    return Config(
        out=out,
        model=MODEL,
        shards=2,
        seeds=1,
        asked=("needle",),
        ratios=(4.0,),
        ladder=(2.0,),
        variants=("dms-neuron-shift1-w16",),
        **changes,
    )


def test_a_worker_does_what_is_left_and_never_what_is_taken(tmp_path):
    config = small(tmp_path)
    names = [job.name for job in plan.jobs(config)]
    first = Recorder(config, deadline=np.inf)
    taken = Job("further", "further", 0)
    assert first._take(taken)
    assert not Recorder(config, deadline=np.inf)._take(taken)
    first.work()
    assert first.did == [name for name in names if name != "further-0"]
    Paths(config).lock(taken).unlink()
    second = Recorder(config, deadline=np.inf)
    second.work()
    assert second.did == ["further-0"]
    third = Recorder(config, deadline=np.inf)
    third.work()
    assert third.did == []


def test_data_alone_are_written_where_nothing_else_is_wanted(tmp_path):
    worker = Recorder(small(tmp_path, only="data"), deadline=np.inf)
    worker.work()
    assert worker.did == ["data-0", "data-1"]


def test_workers_take_turns_on_the_gpus(monkeypatch):
    four = ["0", "1", "2", "3"]
    own = [processes.gpu_of(index, 6, four) for index in range(6)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in own] == ["0", "1", "2", "3", "0", "1"]
    assert own[0]["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.45"
    assert processes.gpu_of(1, 2, four) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert processes.gpu_of(1, 2, []) == {}  # no GPU
    assert processes.gpu_of(0, 1, four) == {}  # a single process is left as it is
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")  # the others are somebody else's
    assert processes.visible_gpus() == ["2", "3"]
    assert processes.gpu_of(1, 2, processes.visible_gpus()) == {"CUDA_VISIBLE_DEVICES": "3"}


def test_nothing_begins_after_the_deadline(tmp_path):
    worker = Recorder(small(tmp_path), deadline=0)
    worker.work()
    assert worker.did == []


def test_a_job_that_is_stopped_is_the_last(tmp_path):
    class Stopped(Worker):
        def _data(self, job: Job) -> None:
            raise KeyboardInterrupt

    config = small(tmp_path)
    worker = Stopped(config, deadline=np.inf)
    worker.work()
    logs = [path.stem for path in (tmp_path / "jobs").glob("*.json")]
    assert logs == ["data-0"]
    assert json.loads(Paths(config).log(Job("data", "data", 0)).read_text())["outcome"] == "stopped"
    assert not list((tmp_path / "locks").iterdir())


def test_a_worker_writes_who_it_is_into_its_lock(tmp_path):
    """So that the job of a process that died is known."""
    assert Worker(small(tmp_path), deadline=np.inf)._take(Job("vanilla", "vanilla", 0))
    assert (tmp_path / "locks" / "vanilla-0").read_text() == str(os.getpid())


def test_no_worker_is_left_behind():
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    processes.stop([running])
    assert running.returncode == -signal.SIGTERM


def test_results_alone_make_data_needless(tmp_path):
    config = small(tmp_path)
    Recorder(config, deadline=np.inf).work()
    for shard in range(2):
        Paths(config).data(shard).unlink()
    (Paths(config).result("vanilla", "1", 0, "needle")).unlink()
    worker = Recorder(config, deadline=np.inf)
    worker.work()
    assert worker.did == ["vanilla-0"]


def test_a_retrofit_also_answers_the_problems_that_a_variant_is_chosen_by(tmp_path, monkeypatch):
    """Of the validation split, and none that settings were chosen on."""
    config = small(tmp_path, split="validation")
    job = Job("retrofit", "dms-neuron-shift1-w16", 0)
    names = [path.name for path in Paths(config).products(job)]
    assert names == ["4-0-needle.json", "4-0-choice_needle.json"]
    assert not any("choice" in str(path) for path in Paths(config).products(Job("vanilla", "v", 0)))
    calls = []

    class Asked:
        seconds = 0.0

        def to_dict(self, **_):
            return {"accuracy": [0.5, 0.1], "peak": 1.0}

    def evaluate(model, task, **settings):
        calls.append((task, settings))
        return Asked()

    def train(self, job, recipe, policy, *, on_snapshot):
        for ratio in (2.0, 4.0, 8.0):
            on_snapshot(ratio, self.base)

    monkeypatch.setattr(curve_jobs, "evaluate", evaluate)
    monkeypatch.setattr(Worker, "train", train)
    Worker(dataclasses.replace(config, ratios=(2.0, 4.0, 8.0)), deadline=np.inf)._retrofit(job)
    choosing = [settings for _, settings in calls if settings["start"]]
    assert len(calls) == 4
    assert len(choosing) == 1
    assert choosing[0]["split"] == "validation"
    assert choosing[0]["start"] > config.problems + config.retrieval_problems
    assert {task for task, _ in calls} == {config.tasks()["needle"]}
    assert Paths(config).done(job)


# -- the whole ------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_whole_run_and_a_second_one_that_has_nothing_to_do(tmp_path, capsys):
    config = small(
        tmp_path / "run",
        pages=tmp_path / "pages",
        pack=tmp_path / "pack",
        documents=8,
        document_tokens=8,
        sequence_length=128,
        batch_size=2,
        decay_steps=1,
        steps_per_ratio=1,
        retrieval_problems=2,
        needle_size=10,
        lanes=8,
        page_size=16,
    )
    assert first_curve.main(config) == 0
    printed = capsys.readouterr().out
    assert "0 jobs are left" in printed
    results = Results(config)
    assert {system for system, _, _ in results.points} == {
        "vanilla",
        "further",
        "dms-neuron-shift1-w16",
        "TOVA",
        "StreamingLLM",
        "RandomEviction",
    }
    vanilla = results.get("vanilla", 1.0, "needle")
    for system in ("TOVA", "StreamingLLM"):
        half = results.get(system, 2.0, "needle")
        assert half.peak == pytest.approx(vanilla.peak / 2, rel=0.02)
    assert results.best == "dms-neuron-shift1-w16"
    assert len(results.get(results.best, 4.0, config.choice).scores[0]) == 2
    documents = read_documents([Paths(config).data(shard) for shard in range(2)])
    assert len(documents) == 8
    assert all(prompt < len(tokens) <= prompt + 8 for tokens, prompt in documents)
    assert (tmp_path / "pages" / "README.md").exists()
    assert (tmp_path / "pack" / "results.tar.gz").exists()
    parts = sorted((tmp_path / "pack").glob("dms-neuron-shift1-w16-0-4.tar.*"))
    assert [part.name[-2:] for part in parts] == [".0"]
    logs = sorted((config.out / "jobs").glob("*.json"))
    before = [log.read_text() for log in logs]
    assert first_curve.main(config) == 0
    assert [log.read_text() for log in logs] == before

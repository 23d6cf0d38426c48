"""The first curve: budgets, data, which variant is chosen, verdicts; and a whole tiny run."""

import dataclasses
import pathlib

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from experiments.reproduction import first_curve
from experiments.reproduction.curve import jobs as curve_jobs
from experiments.reproduction.curve import page, plan
from experiments.reproduction.curve.analysis import Results
from experiments.reproduction.curve.data import Sequences, read_documents
from experiments.reproduction.curve.jobs import Worker, limit_for, policy_at
from experiments.reproduction.curve.plan import Config, Job, Paths
from experiments.reproduction.files import write_json

MODEL = str(assets.path("stories260k"))


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


def test_budgets_give_the_peak_they_are_asked_for():
    lengths = np.array([10, 20, 30])
    # (10 + 17 + 17) / 3 = 14.67, (10 + 18 + 18) / 3 = 15.33
    assert limit_for(lengths, 14.9) == 17
    assert limit_for(lengths, 15.2) == 18
    tova = dms_jax.TOVA(budget=17, prefill="evict_past_budget")
    assert policy_at("TOVA", lengths, 15.2) == tova
    assert policy_at("StreamingLLM", lengths, 15.2) == dms_jax.StreamingLLM(budget=18)
    # 17 stay whatever happens; of the other 20 - 17 + ... the mean of 40 is 100 - 17 = 83
    policy = policy_at("RandomEviction", np.array([80.0, 120.0]), 58.5)
    assert policy.rate == pytest.approx(0.5)
    assert policy_at("RandomEviction", np.array([80.0]), 5.0).rate == 1


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
            on_snapshot(ratio, dataclasses.replace(self.base, untrained=True))

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


@pytest.mark.release
def test_a_whole_run_and_a_second_one_that_has_nothing_to_do(tmp_path):
    config = small(
        tmp_path / "run",
        pages=tmp_path / "pages",
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
    logs = sorted((config.out / "jobs").glob("*.json"))
    before = [log.read_text() for log in logs]
    assert first_curve.main(config) == 0
    assert [log.read_text() for log in logs] == before


def write_results(
    config: Config,
    levels: dict[tuple[str, float], tuple[float, float]],
    choice: dict[str, float] | None = None,
) -> None:
    """Results in which a system's first problems are right: {(system, setting): (share, peak)}.

    On the problems that a variant is chosen by, the shares of `choice`; none where it is absent.
    """
    tasks = {key: dict.fromkeys(plan.TASKS, level) for key, level in levels.items()}
    for system, share in (choice or {}).items():
        tasks[system, 4][config.choice] = (share, 25)
    for (system, setting), of_task in tasks.items():
        for task, (share, peak) in of_task.items():
            for seed in range(2):
                right = (np.arange(100) < 100 * share).astype(float).tolist()
                data = {
                    "system": system,
                    "setting": f"{setting:g}",
                    "seed": seed,
                    "chains": 1,
                    "peak": peak,
                    "reads": 10 * peak,
                    "voted": [share, 0.0],
                    "compression_ratio": 100 / peak,
                    "new_tokens": 5.0,
                    "ended": 1.0,
                    "per_problem": {"scores": right},
                }
                write_json(Paths(config).result(system, f"{setting:g}", seed, task), data)


def test_verdicts_are_tests_on_the_numbers(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    write_results(
        config,
        {
            ("vanilla", 1): (0.90, 100),
            ("further", 1): (0.80, 100),
            ("dms-neuron-shift1-w16", 4): (0.80, 25),
            ("dms-neuron-shift1-w16", 8): (0.60, 12.5),
            ("dms-adapter-shift1-w16", 4): (0.50, 25),
            ("TOVA", 4): (0.60, 25),
            ("TOVA", 8): (0.60, 12.5),
            ("StreamingLLM", 2): (0.40, 50),
            ("StreamingLLM", 8): (0.20, 12.5),
        },
        {"dms-neuron-shift1-w16": 0.70, "dms-adapter-shift1-w16": 0.60},
    )
    results = Results(config)
    assert results.best == "dms-neuron-shift1-w16"
    # StreamingLLM halfway in the logarithm between 0.2 at 12.5 and 0.4 at 50: 0.3 at 25.
    gain = results.against("dms-neuron-shift1-w16", 4.0, "StreamingLLM", "needle", "peak")
    assert gain.value == pytest.approx(0.5)
    found = page.summary(config, results)
    control, vanilla = found["against_control"], found["against_vanilla"]
    best, adapter = "dms-neuron-shift1-w16", "dms-adapter-shift1-w16"
    assert [control[best][at]["needle"][0] for at in ("4", "8")] == [0, -0.2]
    assert control[adapter]["4"]["needle"][0] == -0.3
    assert vanilla[adapter]["4"]["needle"][0] == -0.4
    verdicts = page._verdicts(found)
    assert (
        "DMS at ratio 4 within 2 points of further on reasoning: **holds** (+0.0 ± 0.0)" in verdicts
    )
    assert "within 2 points of vanilla on needle: **does not hold** (-10.0 ± 3.0)" in verdicts
    claims = [line for line in verdicts.splitlines() if "at equal live tokens by more" in line]
    assert ["**holds**" in claim for claim in claims] == [True, True, False, True]


def test_the_variant_is_chosen_on_other_problems_than_it_is_judged_on(tmp_path):
    """The best of several on the test problems is one that was lucky on them."""
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    levels = {("vanilla", 1): (0.9, 100), ("dms-neuron-shift1-w16", 4): (0.6, 25)}
    write_results(
        config,
        {**levels, ("dms-adapter-shift0-w16", 4): (0.8, 25)},
        {"dms-neuron-shift1-w16": 0.7, "dms-adapter-shift0-w16": 0.65},
    )
    assert Results(config).best == "dms-neuron-shift1-w16"
    without = dataclasses.replace(config, out=tmp_path / "without")
    write_results(without, levels)  # nothing is chosen where only those of the page were answered
    assert Results(without).best is None


def test_the_best_variant_is_one_of_those_with_the_most_seeds(tmp_path):
    config = dataclasses.replace(Config(), out=tmp_path, seeds=2)
    shares = {
        "dms-neuron-shift1-w16": 0.6,
        "dms-adapter-shift0-w16": 0.7,
        "dms-neuron-shift0-w64": 0.9,
    }
    write_results(config, {(name, 4): (0.5, 25) for name in shares}, shares)
    for task in (*plan.TASKS, config.choice):  # one seed alone
        Paths(config).result("dms-neuron-shift0-w64", "4", 1, task).unlink()
    assert Results(config).best == "dms-adapter-shift0-w16"


def test_a_rival_that_was_not_measured_is_neither_beaten_nor_unbeaten():
    won, lost, unknown = [0.5, 0.01], [-0.5, 0.01], None
    for pairs, verdict in (
        ((won, won, unknown), "**holds**"),
        ((won, lost, unknown), "**not measured on enough tasks**"),
        ((won, unknown, unknown), "**not measured on enough tasks**"),
        ((unknown, unknown, unknown), "**not measured on enough tasks**"),
        ((lost, lost, unknown), "**does not hold**"),
        ((won, lost, lost), "**does not hold**"),
    ):
        text = page._above("8", "TOVA", dict(zip(plan.TASKS, pairs, strict=True)))
        assert verdict in text


def test_the_margin_of_two_points():
    for pair, verdict in (
        ([-0.005, 0.005], "**holds**"),
        ([-0.015, 0.005], "**holds on the mean"),
        ([-0.025, 0.005], "**does not hold on the mean"),
        ([-0.08, 0.005], "**does not hold**"),
        (None, "**not measured**"),
        ([0.5, None], "**not to be told from a single problem** (+50.0 ± unknown)"),
    ):
        assert verdict in page._within("needle", pair, "further")

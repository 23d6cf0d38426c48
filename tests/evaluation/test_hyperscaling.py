"""L-W-CR configurations against single evaluations, interrupts and files."""

import dataclasses
import functools
import io
import itertools
import json
import random

import chex
import numpy as np
import pytest
from rich.console import Console

import dms_jax
from dms_jax.data.tasks import Problem
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation import (
    Hyperscaling,
    Point,
    Serving,
    System,
    evaluate,
    hyperscale,
    hyperscaling_result,
)
from dms_jax.evaluation import journal as journal_module
from dms_jax.evaluation.hyperscaling import Plan
from tests.evaluation.test_evaluating import BEGINNINGS, Continue
from tests.generation.support import stories
from tests.support.fake_programs import faked

pytestmark = pytest.mark.usefixtures("fakes")

SAMPLING = dms_jax.Sampling(temperature=0.7)
SERVING = Serving(lanes=4, page_size=64, chunk=4)  # one page for any length: programs are shared
TOVA = dms_jax.TOVA(budget=10)
SHARE = dms_jax.TOVA(compression_ratio=2)
SYSTEMS = (System("vanilla", dms_jax.Vanilla()), System("TOVA", TOVA))


@dataclasses.dataclass(frozen=True)
class Thirds(Continue):
    """The answer is the number of letters modulo three; that of "abc" is right."""

    name = "thirds"

    def draw(self, rng: random.Random) -> Problem:
        text = f"{rng.choice(BEGINNINGS)} {rng.choice('abcdefghijklmnopqrstuvwxyz')}"
        return Problem(text, "", (str(rng.randrange(3)),), f"{text} {rng.random()}")

    def answer(self, completion: str) -> str | None:
        return str(len(completion) % 3) if len(completion) % 7 else None

    def score(self, problem: Problem, completion: str) -> float:
        return float(self.answer(completion) in problem.answers)

    def score_answer(self, problem: Problem, answer: str) -> float:
        return float(answer in problem.answers)


def run(systems=SYSTEMS, **changes):
    options = dict(
        lengths=(5, 12), chains=(1, 3), problems=4, seeds=(0, 1), sampling=SAMPLING, serving=SERVING
    )
    return hyperscale(stories(), Thirds(), systems, **(options | changes))


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """The error of a gain does not matter here, and a thousand resamples take most of the time."""
    few = functools.partial(hyperscaling_result.measured_average_gain, resamples=9)
    monkeypatch.setattr(hyperscaling_result, "measured_average_gain", few)


@pytest.fixture(scope="module")
def whole():
    with faked():
        return run()


def find(result, system, length, chains, temperature=0.7) -> Point:
    (point,) = (
        each
        for each in result.points
        if (each.system, each.length, each.chains, each.temperature)
        == (system, length, chains, temperature)
    )
    return point


def single(policy, *, length, chains, seed, **changes):
    """Runs one configuration at a time with `evaluate`."""
    how = dataclasses.replace(SAMPLING, max_new_tokens=length)
    options = dict(problems=4, chains=chains, seed=seed, sampling=how, serving=SERVING)
    return evaluate(stories(), Thirds(), policy=policy, **(options | changes))


@pytest.mark.parametrize(("name", "policy"), [("vanilla", dms_jax.Vanilla()), ("TOVA", TOVA)])
def test_points_equal_single_evaluations(whole, name, policy):
    for length, index in itertools.product((5, 12), (0, 1)):
        alone = single(policy, length=length, chains=3, seed=index)
        for chains in (1, 3):  # three groups of one, one of three
            point, groups = find(whole, name, length, chains), 3 // chains
            chex.assert_trees_all_close(point.reads[index], alone.reads.sum(1) / groups)
            chex.assert_trees_all_close(point.peak[index], alone.peak.sum(1) / groups)
            chex.assert_trees_all_close(point.scores["single"][index], alone.scores.mean(1))
        # pass@1 of three chains is their mean.
        one = find(whole, name, length, 1)
        chex.assert_trees_all_close(one.scores["pass"][index], alone.scores.mean(1), rtol=1e-12)
        assert find(whole, name, length, 3).scores["vote"][index].mean() == alone.voted.value
        own = np.where(np.not_equal(alone.answers, None), alone.answer_scores, 0)
        chex.assert_trees_all_close(one.scores["vote"][index], own.mean(1), rtol=1e-12)
        point = find(whole, name, length, 3)
        chex.assert_trees_all_close(point.scores["pass"][index], alone.scores.max(1))
        assert point.policy == policy.to_dict()
        assert point.accuracy("single").value == point.scores["single"].mean()


def test_one_run_serves_all_lengths_and_chains(queues, whole):
    result = run(SYSTEMS[:1])
    # One greedy chain per problem, and two seeds with the longest answers and the most chains.
    assert queues == [4, 12, 12]
    assert result.table() == "\n".join(whole.table().splitlines()[:8])


def test_every_system_has_greedy_points(whole):
    greedy = dataclasses.replace(SAMPLING, temperature=0)
    for name, policy in (("vanilla", dms_jax.Vanilla()), ("TOVA", TOVA)):
        assert whole.has_greedy(name)
        for length in (5, 12):
            point = find(whole, name, length, 1, temperature=0)
            how = dataclasses.replace(greedy, max_new_tokens=length)
            alone = single(policy, length=length, chains=1, seed=0, sampling=how)
            for index in (0, 1):  # seeds make no difference
                chex.assert_trees_all_close(point.scores["vote"][index], alone.scores[:, 0])
                chex.assert_trees_all_close(point.reads[index], alone.reads[:, 0], rtol=1e-12)
    several = run(
        SYSTEMS[:1], lengths=(5,), chains=(1, 3), seeds=(0,), temperatures=(0, 1.0, 0.7), problems=2
    )
    assert [point.label for point in several.points] == [
        *("5-1-1@0", "5-1-1@0.7", "5-3-1@0.7", "5-1-1@1", "5-3-1@1")
    ]


def test_compression_ratio_runs_each_length(queues):
    result = run([System("share", SHARE)], seeds=(0,), chains=(1,), problems=2)
    assert queues == [2, 2, 2, 2]
    assert [point.label for point in result.points] == [
        *("5-1-2@0", "12-1-2@0", "5-1-2@0.7", "12-1-2@0.7")
    ]
    for length in (5, 12):
        alone = single(SHARE, length=length, chains=1, seed=0, problems=2)
        chex.assert_trees_all_close(find(result, "share", length, 1).peak[0], alone.peak[:, 0])


def test_systems_of_one_name_share_a_frontier():
    """Another checkpoint or ratio of a system is a further point."""
    fewer = dms_jax.TOVA(budget=6, prefill="evict_past_budget")
    systems = [
        System("TOVA", TOVA, compression_ratio=2),
        System("TOVA", fewer, model=stories(), compression_ratio=4),
    ]
    result = run(systems, lengths=(5,), chains=(1,), seeds=(0,))
    assert result.systems == ("TOVA",)
    assert [point.label for point in result.points] == [
        *("5-1-2@0", "5-1-2@0.7", "5-1-4@0", "5-1-4@0.7")
    ]
    assert result.points[3].peak.max() == 6
    with pytest.raises(ConfigError, match=r"'TOVA' appears twice with compression_ratio=None"):
        run([System("TOVA", TOVA), System("TOVA", dms_jax.TOVA(budget=6))])


# -- interrupts -----------------------------------------------------------------------------------


def test_interrupt_keeps_points_and_resumes(tmp_path, monkeypatch, queues, whole):
    """Ctrl-C in the middle of the second system."""
    add, added = journal_module.Journal.add, []

    def interrupted(self, *arguments):
        add(self, *arguments)
        added.append(arguments)
        if len(added) == 4 + 24 + 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.Journal, "add", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            run(out=tmp_path)
    partial = caught.value.finished
    assert isinstance(partial, Hyperscaling)
    assert [(p.system, p.label) for p in partial.points] == [
        *(("vanilla", "5-1-1@0"), ("vanilla", "12-1-1@0")),
        *(("vanilla", f"{x}-{chains}-1@0.7") for x in (5, 12) for chains in (1, 3)),
        *(("TOVA", "5-1@0"), ("TOVA", "12-1@0")),
    ]
    assert json.loads((tmp_path / "results.json").read_text())["points"] == [
        point.to_dict() for point in partial.points
    ]
    queues.clear()
    again = run(out=tmp_path)
    assert sum(queues) == 24 - 1
    assert again.table() == whole.table()
    assert again.to_dict() == whole.to_dict()
    queues.clear()
    assert run(out=tmp_path).to_dict() == again.to_dict()
    assert queues == []
    assert again.table() in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(
        json.dumps(again.to_dict())
    )


def test_unwritable_folder_loses_no_points(tmp_path, monkeypatch, whole):
    """The error carries points that took hours, and an interrupt stays an interrupt."""
    (tmp_path / "results.json").mkdir()
    with pytest.raises(DataError, match="cannot be written: Is a directory") as caught:
        run(SYSTEMS[:1], out=tmp_path)
    assert caught.value.finished.table() == Hyperscaling({}, whole.of("vanilla")).table()

    def interrupt(self, system):
        yield from whole.of("vanilla")
        raise KeyboardInterrupt

    monkeypatch.setattr(Plan, "points", interrupt)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run(SYSTEMS[:1], out=tmp_path)
    assert interrupted.value.finished.points == whole.of("vanilla")


def test_names_are_escaped(whole):
    """Square brackets are terminal markup, and bars are Markdown columns."""
    point = dataclasses.replace(whole.points[0], system="a|b [bold] [/x]")
    result, shown = Hyperscaling({}, (point,)), io.StringIO()
    Console(file=shown, width=300).print(result)
    assert point.system in shown.getvalue()
    assert len({line.replace(r"\|", "").count("|") for line in result.table().splitlines()}) == 1
    run([System(point.system)], lengths=(2,), chains=(1,), seeds=(0,), problems=1, progress=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"chains": (0,)}, "chains must be a sequence, each a whole number of at least 1"),
        ({"seeds": (-1,)}, "seeds must be"),
        ({"temperatures": ()}, "temperatures is empty"),
        ({"temperatures": (-0.1,)}, "temperatures must be"),
        ({"systems": []}, r"systems of dms_jax\.evaluation\.System"),
        ({"problems": 0}, "hyperscale: problems"),
    ],
)
def test_bad_grids_are_rejected(changes, message):
    with pytest.raises(ConfigError, match=message):
        run(**changes)


def test_lengths_beyond_the_positions_are_refused(tmp_path):
    """Answers cut off at the last position would count as answers of that length."""
    with pytest.raises(ConfigError, match=r"512 positions.*lengths of at most (\d+)") as refused:
        run(lengths=(5, 600), out=tmp_path)
    assert not list(tmp_path.iterdir())
    most = int(str(refused.value).rstrip(".").split()[-1])
    serving = Serving(lanes=4, page_size=16, chunk=64)
    small = dict(chains=(1,), problems=4, seeds=(0,), systems=SYSTEMS[:1], serving=serving)
    with pytest.raises(ConfigError, match=f"lengths of at most {most}"):
        run(lengths=(most + 1,), **small)
    assert 480 < most < 512
    assert len(run(lengths=(most,), **small).points) == 2

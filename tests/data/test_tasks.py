"""Synthetic tasks: solutions that follow from the problem, exact wording, disjoint splits."""

import dataclasses
import functools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dms_jax.data import tasks
from dms_jax.errors import ConfigError
from tests.support.instances import nightly_but

REASONING = [
    tasks.LinearEquation(),
    tasks.LinearEquation(coefficient=3, constant=5, solution=2),
    tasks.Arithmetic(operations=(1, 22)),
    tasks.WordChain(steps=(1, 20), distractors=(0, 8)),
    tasks.WordChain(steps=(2, 5), largest=9999),
    tasks.Arithmetic(operations=(2, 6), numbers=999, largest=99999),
]
# One task of each kind that is quick to draw and judge.
QUICK = [*REASONING[:2], REASONING[4]]


@pytest.mark.parametrize("task", REASONING, ids=lambda task: task.name)
def test_problem_depends_only_on_its_index(task):
    first = task.problems("train", 20)
    assert first == [task.problem("train", index) for index in range(20)]
    assert len({problem.prompt for problem in first}) > 10
    assert first != dataclasses.replace(task, seed=1).problems("train", 20)


@pytest.mark.parametrize("task", nightly_but(QUICK, REASONING), ids=lambda task: task.name)
def test_splits_are_disjoint(task):
    count = 40 if task in QUICK else 15  # the others rarely draw a problem twice
    drawn = {
        split: {problem.identity for problem in task.problems(split, count)}
        for split in tasks.SPLITS
    }
    assert not drawn["train"] & drawn["test"]
    assert not drawn["train"] & drawn["validation"]
    assert not drawn["validation"] & drawn["test"]


@pytest.mark.parametrize("task", nightly_but(QUICK, REASONING), ids=lambda task: task.name)
def test_solution_scores_one_and_others_less(task):
    for problem in task.problems("validation", 20):
        assert task.score(problem, problem.solution) == 1
        assert task.score(problem, "") == 0
        assert task.answer(problem.solution) is not None
    first, second = task.problems("validation", 2)
    assert task.score(first, second.solution) < 1


def test_answers_solve_linear_equations():
    task = tasks.LinearEquation()
    for problem in task.problems("train", 200):
        left, right, x = re.fullmatch(
            r"Problem: Solve (.*) = (.*) for (\w)\.\nSolution:\n", problem.prompt
        ).groups()
        value = {x: int(problem.answers[0])}
        assert eval(left, value) == eval(right, value)


def test_every_line_of_a_solution_is_correct():
    checked = 0
    for task in (tasks.LinearEquation(), tasks.Arithmetic(operations=(3, 15))):
        for problem in task.problems("train", 100):
            for line in problem.solution.splitlines():
                sides = line.split(":")[0].split(" = ")
                if len(sides) > 1 and not re.search("[a-z]", line.split(":")[0]):
                    assert len({eval(side) for side in sides}) == 1, line
                    checked += 1
    assert checked > 1000


@pytest.mark.nightly
def test_arithmetic_answers_and_bounds():
    task = tasks.Arithmetic(operations=(1, 22), largest=999)
    for problem in task.problems("train", 200):
        assert eval(problem.prompt.split("Compute ")[1].split(".\n")[0]) == int(problem.answers[0])
        assert max(abs(int(number)) for number in re.findall(r"\d+", problem.solution)) <= 999


def test_word_chain_answers_follow_from_the_statements():
    task = tasks.WordChain(steps=(2, 12), distractors=(0, 6), largest=999)
    for problem in task.problems("train", 100):
        statements = re.findall(r"(\w+) has ([^.]*)\.", problem.prompt)
        known: dict[str, int] = {}
        while len(known) < len(statements):
            for person, said in statements:
                known |= _learn(person, said, known)
        asked = re.search(r"does (\w+) have", problem.prompt).group(1)
        assert known[asked] == int(problem.answers[0])


def _learn(person, said, known):
    other = said.split()[-1]
    if (number := re.fullmatch(r"(\d+) \w+", said)) and "than" not in said:
        return {person: int(number.group(1))}
    if other not in known:
        return {}
    if number := re.match(r"(\d+) (more|fewer) than", said):
        by = int(number.group(1)) * (1 if number.group(2) == "more" else -1)
        return {person: known[other] + by}
    if number := re.match(r"(\d+) times as many as", said):
        return {person: known[other] * int(number.group(1))}
    assert said.startswith("half as many as")
    return {person: known[other] // 2}


@pytest.mark.parametrize(
    "task", [tasks.Arithmetic(operations=(6, 9)), tasks.WordChain(steps=(6, 9))], ids=str
)
def test_frequency_and_size_of_wrong_steps(task):
    careless = dataclasses.replace(task, slips=0.2)
    results, wrong, failed = 0, 0, 0
    for problem in careless.problems("train", 100):
        for line in problem.solution.splitlines():
            if not (found := re.match(r"(?:\w+: )?([^=:]*[-+*/][^=:]*) = (-?\d+)", line)):
                continue
            true, said = int(eval(found[1].replace("/", "//"))), int(found[2])
            results += 1
            if true != said:
                wrong += 1
                assert re.fullmatch("10*", str(abs(true - said))), line
        failed += task.score(problem, problem.solution) == 0
    assert results > 600
    assert 0.15 < wrong / results < 0.25
    assert 50 < failed < 95  # 1 - 0.8^7.5 is 0.81, minus slips that cancel


def test_last_final_answer_counts():
    task = tasks.LinearEquation()
    assert task.answer("The final answer is 3\nthe final answer is -07 or so") == "-7"
    assert task.answer("The answer is 3") is None


BEFORE = ("", "The final answer is ", "the final answer is -", " ", "ABCDE ")
NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "1e999999999",
    "0x1F",
    "1_000",
    "-",
    "--3",
    "\u0663\u0664",
    "\u00b2",
)
HOSTILE = st.one_of(
    st.text(st.characters(exclude_categories=())),  # control characters and lone surrogates too
    st.sampled_from(NUMBERS),
    st.integers(1, 20_000).map(lambda count: "9" * count),
    st.text("0123456789\u0663\uff14-", max_size=9),
)


@functools.cache
def judged() -> list:
    """Returns tasks with a problem of each; generating takes longer than judging."""
    chosen = REASONING[0], REASONING[2], REASONING[3]
    return [(task, task.problem("test", 0)) for task in chosen]


@pytest.mark.nightly
@settings(max_examples=200, deadline=None)
@example(before="The final answer is ", text="7" * 4301)
@example(before="The final answer is -", text="0" * 10**6)
@example(before="", text="\ud800\x00\x1b[31m")
@given(before=st.sampled_from(BEFORE), text=HOSTILE)
def test_judging_never_raises(before, text):
    completion = before + text
    for task, problem in judged():
        answer = task.answer(completion)
        assert answer is None or isinstance(answer, str)
        assert 0 <= task.score(problem, completion) <= 1
        if answer is not None:
            assert task.score_answer(problem, answer) == task.score(problem, completion)


@given(st.integers(-(10**30), 10**30), st.integers(0, 3), st.sampled_from("0\u0660\uff10"))
def test_answer_is_normalised(number, zeros, zero):
    """The digits of any script, as `int` reads them."""
    digits = "".join(chr(ord(zero) + int(digit)) for digit in str(abs(number)))
    text = f"{'-' if number < 0 else ''}{zero * zeros}{digits}"
    answer = tasks.LinearEquation().answer(f"The final answer is {text}")
    assert answer == str(int(text)) == str(number)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tasks.LinearEquation(constant=0), "constant must be a whole number of at least 1"),
        (lambda: tasks.Arithmetic(operations=(5, 2)), r"operations must be \(low, high\)"),
        (lambda: tasks.WordChain(steps=(1, 90)), "people are too many"),
        (lambda: tasks.LinearEquation(slips=0.1), "have no slips"),
    ],
)
def test_impossible_task_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()

"""HumanEval: form, prompts, extraction of answers, and passing."""

import dataclasses
import json
import threading

import pytest

from dms_jax.data.tasks import LinearEquation
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.questions import Judge, Questions
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks import HumanEval
from tests.evaluation.tasks.published import lines
from tests.evaluation.tasks.published_code import HUMANEVAL
from tests.support.containment import needs_containment

pytestmark = needs_containment
SANDBOX = Sandbox(seconds=3, wall_seconds=30, megabytes=512)


@pytest.fixture
def make(tmp_path):
    def make(task, records, *, sandbox=SANDBOX, **options):
        return task(lines(tmp_path / f"{task.name}-a.jsonl", records), sandbox=sandbox, **options)

    return make


def block(code):
    return f"I think it is this.\n```python\n{code}\n```\nThat is all."


def test_code_needs_a_sandbox(tmp_path):
    with pytest.raises(ConfigError, match=r"a model wrote.*sandbox=Sandbox\(\)"):
        HumanEval(lines(tmp_path / "a.jsonl", HUMANEVAL))


@pytest.mark.parametrize("style", ["plain", "instruct"])
def test_humaneval_solutions_pass(make, style):
    task = make(HumanEval, HUMANEVAL, style=style)
    problems = task.problems("test", 2)
    assert [task.score(each, each.solution) for each in problems] == [1, 1]
    assert problems[0].identity.endswith("a.jsonl, line 1")
    settings = json.loads(json.dumps(task.to_dict()))
    assert settings["sandbox"]["seconds"] == SANDBOX.seconds


def test_humaneval_prompts(make):
    plain = make(HumanEval, HUMANEVAL, style="plain").problem("test", 0)
    assert plain.prompt == HUMANEVAL[0]["prompt"]
    assert make(HumanEval, HUMANEVAL).problem("test", 0).prompt == (
        "Write a solution to the following problem and make sure that it passes the tests. Answer "
        "with the completed function in a block of code.\n```python\n"
        f"{HUMANEVAL[0]['prompt'].strip()}\n```"
    )


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("    return 2 * (sum(numbers) - skip * numbers.count(skip))", 1),
        # The completion continues with other text, which does not count.
        ("    return 2 * sum(n for n in numbers if n != skip)\n\nprint(undefined)\n", 1),
        ("    return 2 * sum(n for n in numbers if n != skip)\n\ndef check(c):\n    1 / 0", 1),
        ("    return 2 * sum(numbers)", 0),
        ("    return 2 * sum(numbers", 0),
        ("    pass", 0),
        ("", 0),
        ("\ndef f():\n    pass", 0),
        ("    # \ud800 \x00", 0),
        ("    return " + "(" * 100_000, 0),
        ("    return " + "-" * 200_000 + "1", 0),
        ("    import sys; sys.setrecursionlimit(10**9)\n    sum_of_twice(numbers, skip)", 0),
    ],
)
def test_completions_of_humaneval(make, completion, score):
    task = make(HumanEval, HUMANEVAL, style="plain")
    assert task.score(task.problem("test", 0), completion) == score


WHOLE = "def sum_of_twice(numbers: List[int], skip):\n    return help(numbers, skip)\n"
HELP = "def help(numbers, skip):\n    return sum(2 * n for n in numbers if n != skip)\n"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        (block(HELP + WHOLE), 1),  # the import comes from the prompt
        (block("def wrong(): 0") + block(WHOLE + HELP), 1),  # the last block counts
        (block(HELP + WHOLE) + block("sum_of_twice = None"), 0),
        (block("    return sum(2 * n for n in numbers if n != skip)"), 1),  # the body alone
        ("<think>\n```\nno\n```\n</think>\n" + block(WHOLE + HELP).replace("python", ""), 1),
        (block(HELP + WHOLE + "if __name__ == '__main__':\n    1 / 0"), 1),
        (WHOLE + HELP, 0),
        ("```python\n" + HELP + WHOLE, 0),  # it does not end
        (block(""), 0),
        (block(WHOLE), 0),
        ("```" * 1000, 0),
    ],
)
def test_chat_answers_to_humaneval(make, completion, score):
    task = make(HumanEval, HUMANEVAL)
    problem = task.problem("test", 0)
    assert task.score(problem, completion) == score
    answer = task.answer(completion)
    assert (0 if answer is None else task.score_answer(problem, answer)) == score


PRETENCES = {
    "exit": "import os; os._exit(0)",
    "exit politely": "import sys; sys.exit(0)",
    "the checker": (
        "def check(candidate): pass\nimport sys\n"
        "for m in list(sys.modules.values()): setattr(m, '_check', lambda *a: {})"
    ),
    "marks of success": "print('{}\\npassed\\nOK\\n')\nimport sys\nsys.exit('passed')",
    "swallowing": (
        "import atexit, os, sys\natexit.register(lambda: os._exit(0))\nsys.excepthook = print"
    ),
    "never answering": "def sum_of_twice(*a):\n    while True: pass",
}


@pytest.mark.parametrize("name", PRETENCES)
def test_pretended_success_fails(make, name):
    seconds = 1 if name == "never answering" else SANDBOX.seconds
    task = make(HumanEval, HUMANEVAL, sandbox=dataclasses.replace(SANDBOX, seconds=seconds))
    problem = task.problem("test", 0)
    assert task.score(problem, block(PRETENCES[name])) == 0
    assert task.score(problem, block(f"def sum_of_twice(n, k): pass\n{PRETENCES[name]}")) == 0


def test_malformed_humaneval_is_named(make):
    for change, message in (
        ({"entry_point": "a b"}, '"entry_point" must be a name'),
        ({"test": " "}, '"test" must be a text'),
        ({"prompt": None}, 'no "prompt"'),
    ):
        task = make(HumanEval, [HUMANEVAL[0], {**HUMANEVAL[1], **change}])
        with pytest.raises(DataError, match=rf"a\.jsonl, line 2: .*{message}"):
            task.problem("test", 1)


# -- judging --------------------------------------------------------------------------------------


def test_many_answers_are_judged_side_by_side(make, monkeypatch):
    task = make(HumanEval, HUMANEVAL)
    right, wrong = (task.problem("test", 0) for _ in range(2))
    names, judged = set(), []
    passes = HumanEval.passes

    def watched(self, tests, answer):
        names.add(threading.current_thread().name)
        judged.append(answer)
        return passes(self, tests, answer)

    monkeypatch.setattr(HumanEval, "passes", watched)
    monkeypatch.setattr("dms_jax.evaluation.sandbox.cores", lambda: 2)
    good, bad = block(HELP + WHOLE), block(WHOLE)
    pairs = [(right, good), (wrong, bad), (right, "no block"), (right, good)]
    assert task.scores(pairs) == [1, 0, 0, 1]
    assert len(judged) == 2, "an answer is judged once"
    assert threading.main_thread().name not in names
    assert task.score(right, good) == 1
    assert len(judged) == 2


def test_judge_scores_several_tasks_together(make, monkeypatch):
    plain, other = make(HumanEval, HUMANEVAL, style="plain"), LinearEquation()
    problems = plain.problem("test", 0), other.problem("test", 0), plain.problem("test", 1)
    judge = Judge(Questions("evaluate", (plain, other), "test", 0, None, (0, 1, 0), problems), None)
    solved = (1, problems[1].solution)
    given = {(0, "    pass"): 0, solved: 1, (2, "    return text.lower()"): 1, (1, ""): 0}
    judge.together([*given, *given])
    monkeypatch.setattr(HumanEval, "score", None)  # the scores are known from here on
    monkeypatch.setattr(LinearEquation, "score", None)
    judge.together(given)
    assert {each: judge(*each) for each in given} == given

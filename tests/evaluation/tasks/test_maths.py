"""Mathematical tasks on files: the prompts of appendix G, and answers in any notation."""

import sys
import threading
import time

import pytest

from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation import mathematics, mathematics_worker
from dms_jax.evaluation.questions import Judge, Questions
from dms_jax.evaluation.statistics import majority
from dms_jax.evaluation.tasks import AIME, GPQA, GSM8K, MATH500, Mathematics
from dms_jax.helper_process import Helpers
from tests.evaluation.tasks import published
from tests.evaluation.tasks.published import lines, text


@pytest.fixture
def gsm8k(tmp_path):
    return lines(tmp_path / "test.jsonl", published.GSM8K)


def test_gsm8k_prompt(gsm8k):
    problem = GSM8K(gsm8k).problem("test", 0)
    assert problem.prompt == (
        "Given the following problem, reason and give a final answer to the problem.\n"
        "Problem: Ann has 3 boxes of 4 pears and eats 2. How many pears are left?\n"
        'Your response should end with "The final answer is [answer]" where [answer] is the '
        "response to the problem."
    )
    assert problem.answers == ("10",)
    assert problem.solution == (
        "There are 3*4=12 pears.\nShe has 12-2=10 left.\nThe final answer is 10"
    )
    assert problem.identity == f"{gsm8k}, line 1"


@pytest.mark.parametrize(
    ("number", "completion", "score"),
    [
        (0, "3*4 is 12, less 2.\nThe final answer is 10", 1),
        (0, "The final answer is 12. No: the final answer is [10].", 1),
        (0, "The final answer is **$10.00**", 1),
        (0, "The final answer is 10.\n\nI can draw the 3 boxes, too.", 1),
        (0, "The final answer is:\n\n10\n\nI can draw the 3 boxes, too.", 1),
        (0, "The final answer is below.\n\n\\boxed{10}", 1),
        (0, "The final answer is 12", 0),
        (0, "12 - 2 = 10 and so on. The final answer is 2", 0),
        (0, "", 0),
        (0, "I do not know.", 0),
        (0, "The final answer is ", 0),
        (0, "\\frac{{{{ \\boxed{ \ud800 \x00", 0),
        (0, "The final answer is 9**9**9**9**9**9", 0),
        (0, f"The final answer is {'9' * 6000}.50", 0),
        (0, f"The final answer is 10.{'0' * 6000}", 1),
        (0, f"The final answer is {'0' * 6000}10.50", 0),
        # A comma separates thousands, also in the prompt's brackets.
        (1, "The final answer is [1,100].", 1),
        (1, "The final answer is [$1,100]", 1),
        (1, "The final answer is 1,100", 1),
        (1, "The final answer is [1,101]", 0),
        (1, "The final answer is [1, 100]", 0),
        (1, "The final answer is [1,100,50]", 0),
    ],
)
def test_gsm8k_answers(gsm8k, number, completion, score):
    task = GSM8K(gsm8k)
    problem = task.problem("test", number)
    assert problem.answers == (("10", "1100")[number],)
    assert task.score(problem, completion) == score


def test_long_decimal_is_read_once():
    """Chains repeat themselves; a backtracking search over the zeros took 4 s."""
    number = f"0.{'0' * 19_000}1"
    began = time.process_time()
    assert mathematics_worker.find(f"The final answer is {number}", seconds=5) == number
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("one", "other"),
    [("18", "18.00"), ("$1,000", "1,000.00 dollars"), ("2.5", "2.50"), ("0.50", "0.5")],
)
def test_trailing_zeros_do_not_split_votes(gsm8k, one, other):
    task = GSM8K(gsm8k)
    answers = [task.answer(f"The final answer is {each}") for each in (one, other)]
    assert answers[0] is not None
    assert answers[0] == answers[1]


def test_rounded_decimal_equals_its_fraction(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"question": "1 / 3?", "answer": "\\frac{1}{3}"}])
    task = Mathematics(path)
    problem = task.problem("test", 0)
    for completion, score in (("0.333333", 1), ("0.3333330", 1), ("0.333", 0)):
        assert task.score(problem, f"The final answer is {completion}") == score


def test_gsm8k_boxed(gsm8k):
    task = GSM8K(gsm8k, style="boxed")
    problem = task.problem("test", 0)
    assert problem.prompt == (
        "Ann has 3 boxes of 4 pears and eats 2. How many pears are left?\n"
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    assert problem.solution.endswith("left.\n\\boxed{10}")
    for completion, score in (
        ("12 less 2 are $\\boxed{10}$ pears.", 1),
        ("\\boxed{12}. No: \\boxed{10}", 1),
        ("\\boxed{12}", 0),
        (problem.solution, 1),
    ):
        assert task.score(problem, completion) == score


def test_gsm8k_plain_with_examples(tmp_path, gsm8k):
    shots = lines(tmp_path / "train.jsonl", published.GSM8K[1:])
    task = GSM8K(gsm8k, style="plain", few_shot=1, examples=shots)
    problem = task.problem("test", 0)
    assert problem.prompt == (
        "Question: Ann has 3 boxes of 4 pears and eats 2. How many pears are left?\nAnswer:"
    )
    assert problem.examples == (
        (
            "Question: A tram carries 1,150 people, and 50 get off. How many stay?\nAnswer:",
            " 1150-50=<<1150-50=1100>>1,100 people.\n#### 1,100",
        ),
    )
    assert task.problem("test", 1).answers == ("1100",)
    # A base model continues with another question.
    assert task.score(problem, " 12 - 2 = 10\n#### 10\n\nQuestion: And 5?\nAnswer: #### 5") == 1
    assert task.score(problem, " 12\n#### 12\n#### 9") == 0


def test_math500_prompt(tmp_path):
    task = MATH500(lines(tmp_path / "test.jsonl", published.MATH500))
    problem = task.problem("test", 0)
    assert problem.prompt == (
        "Solve the following math problem efficiently and clearly. The last line of your response "
        "should be of the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I "
        "hope it is correct' (without quotes) where ANSWER is just the final number or expression "
        "that solves the problem. Think step by step before answering.\n\n"
        "Write the point $(0,2)$ in polar coordinates."
    )
    assert task.score(problem, problem.solution) == 1
    assert task.score(problem, "So it is $\\boxed{(2, \\pi/2)}$.") == 1
    assert task.score(problem, "So it is $\\boxed{(\\pi/2, 2)}$.") == 0
    half = task.problem("test", 1)
    for written in ("0.5", "\\frac12", "\\dfrac{2}{4}"):
        assert task.score(half, f"Therefore, the final answer is: $\\boxed{{{written}}}$.") == 1


EQUAL = [
    ["\\frac{\\pi}{2}", "\\pi/2", "0.5\\pi", "\\tfrac12\\pi"],
    ["\\sqrt{8}", "2\\sqrt2"],
    ["(2,\\pi/2)", "\\left(2, \\frac{\\pi}{2}\\right)"],
    ["(\\pi/2,2)"],
    ["x^2+2x+1", "1+2x+x^2", "(x+1)^2"],
    ["\\{1,2\\}", "\\{2,1\\}"],
    ["[0,1)", "[0,\\frac{2}{2})"],
    ["[0,1]"],
    ["\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"],
    ["\\begin{pmatrix}2\\\\1\\end{pmatrix}"],
    # Numbers are compared exactly: a rounded one is not equal to the nearby fraction.
    ["0.5", "\\frac12", "3/6", "0.50"],
    ["-0.5", "-\\frac{1}{2}"],
    ["\\frac13"],
    ["0.333333"],
    ["5"],
    ["5\\%"],
    # Parsed as products of letters, or as equations, these would be equal.
    ["Evelyn"],
    ["Evenly"],
    ["x\\in(0,1)"],
    ["x\\in(0,2)"],
]


@pytest.mark.parametrize("backwards", [False, True])
def test_equal_expressions_are_one_vote(tmp_path, backwards):
    task = MATH500(lines(tmp_path / "test.jsonl", published.MATH500))
    judge = Judge(Questions("", (task,), "test", 0, None, (0,), (task.problem("test", 0),)), None)
    written = [(number, each) for number, group in enumerate(EQUAL) for each in group]
    given = [(number, f"$\\boxed{{{each}}}$") for number, each in written]
    groups: dict = {}
    for number, boxed in reversed(given) if backwards else given:
        groups.setdefault(judge.answer(0, boxed), []).append(number)
    assert sorted(map(set, groups.values()), key=min) == [{number} for number in range(len(EQUAL))]
    answers = [judge.answer(0, f"$\\boxed{{{each}}}$") for each in ("7", "8", "8", *EQUAL[0])]
    assert majority(answers) == 3


@pytest.fixture
def hurried(monkeypatch):
    """Answers have one second each."""
    worker = Helpers(mathematics._workers.program, "1", seconds=30.0, count=1)
    monkeypatch.setattr(mathematics, "_workers", worker)
    yield worker
    worker.close()
    for each in (mathematics.find_answer, mathematics.is_same, mathematics.vote_of):
        each.cache_clear()


def test_timeout_in_a_thread(gsm8k, hurried, caplog):
    """Math-Verify's own time limit works in the main thread alone."""
    task, scores = GSM8K(gsm8k), []
    problem = task.problem("test", 0)

    def judge():
        endless = "\\sum_{k=1}^{10000000} k^{k}"
        scores.extend(task.score_answer(problem, each) for each in (endless, "10"))

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(60)
    assert scores == [0, 1]
    assert "it takes more than" in caplog.text
    assert "\\sum_{k=1}" in caplog.text
    assert mathematics.vote_of("7^{10^{9}}") == "7^{10^{9}}"


def test_answer_that_hangs_the_judge_is_wrong(hurried, caplog):
    hurried.seconds = 0.0  # as if no signal reached it
    assert not mathematics.is_same("1", "2")
    assert "it runs for more than 0 seconds" in caplog.text
    hurried.seconds = 30.0
    assert mathematics.is_same("1", "1.0")


def test_judging_together_caches_scores(gsm8k, monkeypatch):
    """Scores equal those of single judgements, and votes start no further judgement."""
    task = GSM8K(gsm8k, style="boxed")
    texts = [f"Then \\boxed{{{each}}}." for each in ("10", "10.0", "11", "\\frac{20}{2}")] + ["no"]
    problem = task.problem("test", 0)
    one_by_one = [task.score(problem, each) for each in texts]
    for each in (mathematics.find_answer, mathematics.is_same, mathematics.vote_of):
        each.cache_clear()
    judge = Judge(Questions("evaluate", (task,), "test", 0, None, (0,), (problem,)), None)
    judge.together((0, each) for each in texts)
    monkeypatch.setattr(mathematics, "_ask", None)
    assert [judge(0, each) for each in texts] == one_by_one == [1, 1, 0, 1, 0]
    answers = [judge.answer(0, each) for each in texts]
    assert answers[0] == answers[1]
    assert [judge.answer_score(0, each) for each in answers] == one_by_one


def test_aime(tmp_path):
    task = AIME(lines(tmp_path / "a.jsonl", published.AIME))
    problem = task.problem("test", 0)
    assert problem.answers == ("33",)
    assert task.score(problem, "It is $\\boxed{033}$.") == 1
    wrong = lines(tmp_path / "b.jsonl", [{**published.AIME[0], "answer": "1000"}])
    with pytest.raises(DataError, match=r"b\.jsonl, line 1: .*from 0 to 999, got '1000'"):
        AIME(wrong).problem("test", 0)


def test_maths_reads_any_file(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"question": "Solve 2*x = 8 for x.", "answer": "4"}])
    task = Mathematics(path)
    problem = task.problem("train", 0)
    assert "\nProblem: Solve 2*x = 8 for x.\n" in problem.prompt
    assert problem.solution == "4\nThe final answer is 4"
    assert task.score(problem, "x = 4. The final answer is 4") == 1


def test_gsm8k_without_answer_mark_is_named(tmp_path):
    path = lines(tmp_path / "a.jsonl", [published.GSM8K[0], {"question": "?", "answer": "10"}])
    with pytest.raises(DataError, match=r'a\.jsonl, line 2: "answer" must end in "####'):
        GSM8K(path).problem("test", 1)


def test_missing_math_verify_names_the_extra(gsm8k, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(
        ConfigError, match=r"answers of GSM8K needs Math-Verify.*pip install 'dms-jax\[eval\]'"
    ):
        GSM8K(gsm8k)


# -- GPQA, which needs no extra -------------------------------------------------------------------


@pytest.fixture
def gpqa(tmp_path):
    return text(tmp_path / "gpqa.csv", published.GPQA_CSV)


def test_gpqa_shuffles_its_options_from_a_seed(gpqa):
    prompts = set()
    for seed in range(40):
        task = GPQA(gpqa, seed=seed)
        problem = task.problem("test", 0)
        (letter,) = problem.answers
        assert f"\n{letter}) an electron" in problem.prompt
        for option in ("a proton", "a neutron", "a muon"):
            assert problem.prompt.count(f") {option}") == 1
        assert problem == GPQA(gpqa, seed=seed).problem("test", 0)
        prompts.add(problem.prompt)
    assert len(prompts) > 12  # of 24 orders
    assert problem.prompt.startswith(
        "Answer the following multiple choice question. The last line of your response should be "
        "of the following format: 'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. "
        "Think step by step before answering.\n\nWhich of these,\nat rest, is lightest?\n\nA) "
    )


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Answer: C", "C"),
        ("Answer: A is wrong.\n**Answer:** $B$", "B"),
        ("answer: \\boxed{d}", "D"),
        ("Answer: (A)", "A"),
        ("**Answer**: C", "C"),
        ("*Answer*: **C**", "C"),
        ("__Answer__: C", "C"),
        ("Answer: \\(C\\)", "C"),
        ("Answer: \\( \\boxed{C} \\)", "C"),
        ("Answer: `C`", "C"),
        ("Answer: \\mathbf{C}", "C"),
        ("Answer: All of them", None),
        ("C", None),
        ("", None),
    ],
)
def test_gpqa_answers(gpqa, completion, answer):
    assert GPQA(gpqa).answer(completion) == answer


def test_gpqa_scores_the_letter(gpqa):
    task = GPQA(gpqa)
    problem = task.problem("test", 1)
    (letter,) = problem.answers
    assert task.score(problem, f"... \nAnswer: {letter}") == 1
    assert [task.score_answer(problem, each) for each in "ABCD"].count(1.0) == 1

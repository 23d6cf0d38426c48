"""Evaluation of the shipped model on tasks whose answers depend only on its text."""

import dataclasses
import json
import random
import re

import chex
import numpy as np
import pytest

import dms_jax
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.data.tasks import Problem, Task
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation import Serving, System, evaluate, hyperscale, summary_table
from dms_jax.evaluation.prompting import Chat, encode_problem
from dms_jax.evaluation.result import Result
from dms_jax.evaluation.tasks import GPQA
from tests.evaluation.tasks import published
from tests.evaluation.tasks.published import text
from tests.generation.support import stories
from tests.support.forced_answers import ANSWERS, THOUGHT, saying, thinking_model

SAMPLING = dms_jax.Sampling(temperature=0.7, max_new_tokens=24)
SERVING = Serving(lanes=18, page_size=16, chunk=8)
BEGINNINGS = ("Once upon a time", "One day, Lily", "The little dog", "Tom had a", "There was a big")


@dataclasses.dataclass(frozen=True)
class Continue(Task):
    """A completion with an even number of characters is right."""

    name = "continue"

    def draw(self, rng: random.Random) -> Problem:
        text = f"{rng.choice(BEGINNINGS)} {rng.choice('abcdefghijklmnopqrstuvwxyz')}"
        return Problem(text, "", ("even",), f"{text} {rng.random()}")

    def answer(self, completion: str) -> str | None:
        return None if not completion else "even" if len(completion) % 2 == 0 else "odd"

    def score(self, problem: Problem, completion: str) -> float:
        return float(self.answer(completion) in problem.answers)


@dataclasses.dataclass(frozen=True)
class Other(Continue):
    name = "other"


def run(**changes):
    options = dict(problems=6, chains=3, sampling=SAMPLING, serving=SERVING)
    return evaluate(stories(), Continue(), **(options | changes))


@pytest.fixture(scope="module")
def vanilla():
    return run()


def test_scores_and_usage_are_those_of_generation(vanilla):
    problems = Continue().problems("test", 6)
    for index, chain in ((0, 0), (4, 2)):
        state = np.random.SeedSequence([0, index]).generate_state(3)
        alone = dms_jax.generate(
            stories(),
            [problems[index].prompt],
            sampling=dataclasses.replace(SAMPLING, seed=int(state[chain])),
            page_size=16,
            chunk=8,
        ).completions[0]
        assert vanilla.completions[index][chain] == alone.text
        assert vanilla.scores[index, chain] == Continue().score(problems[index], alone.text)
        assert vanilla.reads[index, chain] == alone.usage.kv_reads
        assert vanilla.peak[index, chain] == alone.usage.peak_tokens
        assert vanilla.held[index, chain] == alone.usage.peak_held_tokens
        assert vanilla.new_tokens[index, chain] == alone.usage.new_tokens


def test_vanilla_usage_follows_from_lengths(vanilla):
    """n prompt and m new tokens: the steps that feed the first m - 1 read n + 1 ... n + m - 1."""
    prompt, new = vanilla.prompt_tokens[:, None], vanilla.new_tokens
    reads = (new - 1) * prompt + (new - 1) * new / 2
    chex.assert_trees_all_close(vanilla.reads, reads, rtol=1e-7)
    chex.assert_trees_all_close(vanilla.peak, prompt + new - 1, rtol=1e-7)
    assert vanilla.reads_per_problem == pytest.approx(reads.sum() / 6)
    assert vanilla.peak_per_problem == pytest.approx((prompt + new - 1).sum() / 6)
    assert vanilla.compression_ratio == pytest.approx(1)
    assert len({text for texts in vanilla.completions for text in texts}) == 18


@pytest.mark.usefixtures("fakes")
def test_answers_do_not_depend_on_lanes_or_chains():
    many, few = run(), run(serving=dataclasses.replace(SERVING, lanes=4))
    assert few.completions == many.completions
    chex.assert_trees_all_equal(few.reads, many.reads)
    one = run(chains=1)
    assert [texts[0] for texts in many.completions] == [texts[0] for texts in one.completions]
    assert run(chains=1, seed=1).completions != one.completions


ASKED: list[tuple[str, int]] = []


@dataclasses.dataclass(frozen=True)
class Asked(Continue):
    """Records the requested problems."""

    name: str = "asked"

    def problem(self, split, index):
        assert split == "validation"
        ASKED.append((self.name, index))
        return super().problem(split, index)


@pytest.mark.usefixtures("fakes")
def test_several_tasks_alternate_without_skipping():
    """Tasks alternate from the start; no problem is skipped or repeated."""
    ASKED.clear()
    tasks = [Asked("a"), Asked("b"), Asked("c")]
    options = dict(sampling=SAMPLING, serving=SERVING, split="validation")
    result = evaluate(stories(), tasks, problems=7, start=10, **options)
    assert [*((x, 10) for x in "abc"), *((x, 11) for x in "abc"), ("a", 12)] == ASKED
    assert result.tasks == ("a", "b", "c")
    assert result.task_of.tolist() == [0, 1, 2, 0, 1, 2, 0]
    alone = evaluate(stories(), Asked("a"), problems=3, start=10, **options)
    own = result.of_task("a")
    chex.assert_trees_all_equal(own.prompt_tokens, alone.prompt_tokens)
    data = result.to_dict()
    assert set(data["tasks"]) == {"a", "b", "c"}
    assert data["tasks"]["a"]["accuracy"][0] == own.accuracy.value


def made_up() -> Result:
    """Two problems of three chains, by hand."""
    ones = np.ones((2, 3))
    return Result(
        settings={"seed": 0},
        tasks=("t",),
        task_of=np.zeros(2, np.int64),
        scores=np.array([[0.0, 1, 1], [1, 0, 0]]),
        answers=(("3", "5", "5"), ("2", None, "4")),
        answer_scores=np.array([[0.0, 1, 1], [1, 0, 0]]),
        prompt_tokens=np.array([10, 20]),
        new_tokens=np.array([[5, 5, 5], [9, 9, 9]]),
        reads=100 * ones,
        peak=np.array([[1.0, 2, 3], [4, 5, 6]]),
        held=np.array([[2.0, 2, 3], [5, 5, 6]]),
        live=np.array([[7.0, 7, 7], [14, 14, 14]]),
        cache_bytes=np.full((2, 3), 8),
        ended=np.array([[True, True, False], [True, True, True]]),
        completions=(("a", "b", "c"), ("d", "e", "f")),
        seconds=1.0,
    )


@pytest.mark.usefixtures("fakes")
def test_vote_scores_the_winning_answer():
    """A score of completions may accept more than the answer that is voted for."""

    @dataclasses.dataclass(frozen=True)
    class Two(Continue):
        name = "two"

        def answer(self, completion: str) -> str | None:
            return "wrong"

        def score(self, problem: Problem, completion: str) -> float:
            return 1.0 if completion != "wrong" else 0.0

    result = evaluate(stories(), Two(), problems=2, chains=2, sampling=SAMPLING, serving=SERVING)
    assert result.accuracy.value == 1
    assert result.voted.value == 0
    data = result.to_dict()
    assert (data["accuracy"][0], data["voted"][0]) == (1, 0)


def test_figures_by_hand():
    result = made_up()
    assert result.accuracy.value == pytest.approx(0.5)
    assert result.accuracy.error == pytest.approx((2 / 3 - 1 / 3) / 2)
    # Most chains say 5, which is right; 2 and 4 tie, and the first one seen is right.
    assert result.voted.value == 1
    assert result.best.value == 1
    assert result.reads_per_problem == 300
    assert result.peak_per_problem == (6 + 15) / 2
    assert result.compression_ratio == pytest.approx((14 * 3 + 28 * 3) / 63)
    data = json.loads(json.dumps(result.to_dict(problems=True, samples=1)))
    assert data["ended"] == pytest.approx(5 / 6)
    assert data["per_problem"]["scores"] == [0.666667, 0.333333]
    assert data["per_problem"]["peak"] == [6, 15]
    assert data["samples"] == [{"completion": "a", "answer": "3", "score": 0.0}]
    table = summary_table([{"label": "made up", **data}])
    assert table.splitlines()[2] == (
        "| made up | 50.0 ± 16.7 | 100.0 ± 0.0 | 100.0 ± 0.0 | 10 | 300 | 2.00 | 7 | 83% |"
    )
    heads, _, alone = summary_table([{"label": "alone", **data, "chains": 1}]).splitlines()
    assert heads == "|  | one chain | peak | reads | ratio | new | ended |"
    assert alone == "| alone | 50.0 ± 16.7 | 10 | 300 | 2.00 | 7 | 83% |"


def test_bad_arguments_are_rejected():
    with pytest.raises(ConfigError, match="task"):
        evaluate(stories(), [])
    with pytest.raises(ConfigError, match="by their names"):
        evaluate(stories(), [Continue(), Continue(seed=1)])
    for name, value in (("chains", 0), ("seed", -1), ("start", -1)):
        with pytest.raises(ConfigError, match=f"evaluate: {name} must be a whole number"):
            run(**{name: value})
    with pytest.raises(ConfigError, match="1 problems are too few for 2 tasks"):
        evaluate(stories(), [Continue(), Other()], problems=1)


# -- tasks on files, and chats --------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
)


def chatting():
    """The shipped model with a chat template."""
    tokenizer = Tokenizer(stories().tokenizer.backend, chat_template=TEMPLATE)
    return dataclasses.replace(stories(), tokenizer=tokenizer)


@pytest.fixture
def gpqa(tmp_path):
    examples = text(tmp_path / "examples.csv", published.GPQA_CSV.replace("lightest", "heaviest"))
    return GPQA(text(tmp_path / "gpqa.csv", published.GPQA_CSV), few_shot=1, examples=examples)


def test_plain_text_prompt_with_examples(gpqa):
    problem = gpqa.problem("test", 1)
    ((question, answer),) = problem.examples
    assert "heaviest" in question
    assert answer.startswith("Answer: ")
    tokens = encode_problem(stories(), problem, None, name="gpqa")
    assert tokens == stories().tokenizer.encode(f"{question}{answer}\n\n{problem.prompt}")


def test_chat_prompt_with_examples(gpqa):
    """System prompt, worked examples as turns, and the template's own variables."""
    problem = gpqa.problem("test", 1)
    ((question, answer),) = problem.examples
    chat = Chat(system="Be brief.", variables={"enable_thinking": False})
    tokens = encode_problem(chatting(), problem, chat, name="gpqa")
    want = (
        f"<system>Be brief.<user>{question}<assistant>{answer}<user>{problem.prompt}"
        "<assistant><quiet>"
    )
    assert tokens == stories().tokenizer.encode(want, add_special_tokens=False)
    plain = encode_problem(chatting(), Continue().problem("test", 0), Chat(), name="continue")
    assert stories().tokenizer.decode(plain).startswith("<user>")


def test_missing_chat_template_is_named(gpqa):
    with pytest.raises(DataError, match=r"gpqa: chat prompts were requested.* no chat template"):
        evaluate(stories(), gpqa, chat=Chat())
    with pytest.raises(ConfigError, match="Chat: messages cannot be given"):
        Chat(variables={"messages": []})


@dataclasses.dataclass(frozen=True)
class Five(Continue):
    """Answers that say 5 are right."""

    name = "five"

    def answer(self, completion: str) -> str | None:
        return max(re.findall(r"\d", completion), default=None)

    def score(self, problem: Problem, completion: str) -> float:
        return float("5" in completion)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("form", ["channels", "thinks"])
def test_reasoning_is_not_judged(form, tmp_path):
    """A wrong answer with right reasoning, a right one, and one cut off during the reasoning."""
    model, written = thinking_model(form), ANSWERS[form]
    thought = written[: written.index(THOUGHT) + len(THOUGHT)]

    def answered(whole, **options):
        sampling = saying(model, whole, SAMPLING)
        options |= dict(problems=1, chains=2, sampling=sampling, serving=SERVING)
        return evaluate(model, Five(), **options)

    for whole, score, vote in ((written, 0, "4"), (f"{written} 5", 1, "5"), (thought, 0, None)):
        result = answered(whole, chat=Chat())
        assert result.scores.tolist() == [[score] * 2]
        assert result.answers == ((vote,) * 2,)
        assert THOUGHT in result.completions[0][0]  # with the reasoning, to be read
    assert answered(written).scores.tolist() == [[1, 1]]  # plain text has no marks of reasoning

    for _ in range(2):  # asked, and read from the folder
        result = answered(written, chat=Chat(), out=tmp_path)
        assert result.scores.tolist() == [[0, 0]]


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("form", ["channels", "thinks"])
def test_reasoning_is_not_judged_at_any_length(form):
    """Each system parses its model's form of answers."""
    model = thinking_model(form)
    sampling = saying(model, f"{ANSWERS[form]} 5", SAMPLING)
    length = sampling.max_new_tokens
    systems = [System("plain", model=thinking_model("plain")), System("thinking", model=model)]
    result = hyperscale(
        model, Five(), systems, lengths=[length - 4, length], chains=[1], problems=1,
        sampling=sampling, chat=Chat(), serving=SERVING,
    )  # fmt: skip
    scores = {(each.system, each.length): each.scores["single"].mean() for each in result.points}
    assert scores == {
        ("plain", length - 4): 1, ("plain", length): 1,
        ("thinking", length - 4): 0, ("thinking", length): 1,
    }  # fmt: skip


@pytest.mark.usefixtures("fakes")
def test_files_alternate_until_exhausted(gpqa, tmp_path):
    short = dms_jax.Sampling(max_new_tokens=1)

    @dataclasses.dataclass(frozen=True)
    class Few(GPQA):
        name = "few"

    one = "\n".join(published.GPQA_CSV.splitlines()[:3]) + "\n"
    few = Few(text(tmp_path / "few.csv", one))
    bare = dataclasses.replace(gpqa, few_shot=0)
    run = dict(sampling=short, serving=dataclasses.replace(SERVING, prefill_chunk=64))
    result = evaluate(stories(), [bare, few], **run)
    assert result.task_of.tolist() == [0, 1, 0]
    assert result.settings["task"][0]["path"] == str(bare.path)
    json.dumps(result.to_dict())
    with pytest.raises(
        DataError, match="4 problems were requested from number 0 on, and there are 3"
    ):
        evaluate(stories(), [bare, few], problems=4, **run)
    with pytest.raises(DataError, match="from number 2 on, and there are 0"):
        evaluate(stories(), bare, start=2, **run)

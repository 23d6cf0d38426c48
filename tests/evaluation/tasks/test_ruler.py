"""RULER's tasks: texts equal to its generators' byte for byte, lengths, depths and scores.

`tests/golden/ruler` has the output of RULER's code (`tests/golden/README.md`).
"""

import collections
import dataclasses
import json
import pathlib
import re

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation import Chat, evaluate
from dms_jax.evaluation.prompting import encode_problem, fit_task
from dms_jax.evaluation.tasks import RULER, ruler_tasks
from dms_jax.evaluation.tasks.ruler import RULER_TASKS
from dms_jax.evaluation.tasks.ruler.counting import CommonWords, FrequentWords
from dms_jax.evaluation.tasks.ruler.filling import (
    Words,
    read_essay,
    read_words,
    sentences,
    split_words,
)
from dms_jax.evaluation.tasks.ruler.formats import NEEDLE_TASKS
from dms_jax.evaluation.tasks.ruler.needles import Needles
from dms_jax.evaluation.tasks.ruler.questions import read_hotpotqa, read_squad
from dms_jax.evaluation.tasks.ruler.task import Bounds, largest_size
from dms_jax.evaluation.tasks.ruler.tracking import Tracking
from tests.support import ruler
from tests.support.instances import further

GOLDEN = pathlib.Path(__file__).parents[2] / "golden/ruler"
ANSWERS = json.loads((GOLDEN / "answers.json").read_text())
ESSAY = split_words(ruler.ESSAY)


@pytest.fixture
def files(tmp_path):
    """Question data in the published form."""
    (tmp_path / "squad.json").write_text(json.dumps(ruler.SQUAD))
    (tmp_path / "hotpotqa.json").write_text(json.dumps(ruler.HOTPOTQA))
    return {"squad": tmp_path / "squad.json", "hotpotqa": tmp_path / "hotpotqa.json"}


def characters(problem) -> int:
    """A length for which no tokenizer is needed: four characters a token."""
    return -(-len(problem.prompt + problem.answer_prefix) // 4)


def family(case, files):
    task, length = case.partition("-")[0], ruler.CASES[case][2]
    words = Words(tuple(ruler.ADJECTIVES), tuple(ruler.NOUNS), tuple(ruler.WORDS))
    if task in NEEDLE_TASKS:
        return Needles(NEEDLE_TASKS[task], words, ESSAY, ruler.SEED, None)
    return {
        "vt": lambda: Tracking(1, 4, ruler.SEED, lambda: ruler.EXAMPLE_SIZE),
        "cwe": lambda: CommonWords(words.counted, length, ruler.SEED),
        "fwe": lambda: FrequentWords.of_length(length, ruler.SEED),
        "qa_1": lambda: read_squad(files["squad"], ruler.SEED),
        "qa_2": lambda: read_hotpotqa(files["hotpotqa"], ruler.SEED),
    }[task]()


def test_golden_files_cover_all_13_tasks():
    assert len(RULER_TASKS) == 13
    assert {case.partition("-")[0] for case in ANSWERS} == set(RULER_TASKS)


@pytest.mark.parametrize("case", ruler.CASES)
def test_texts_equal_golden_files(case, files):
    size, number, _ = ruler.CASES[case]
    filled = family(case, files).fill(ruler.Scripted(), size, number)
    assert (filled.prompt + filled.answer_prefix).encode() == (GOLDEN / f"{case}.txt").read_bytes()
    assert filled.answer_prefix == ANSWERS[case]["answer_prefix"]
    assert list(filled.answers) == ANSWERS[case]["answers"]


def tasks(length, files):
    return [task.fitted(characters) for task in ruler_tasks(length, **files)]


@pytest.mark.parametrize("length", [2500, *further(20_000)])
def test_prompts_fill_the_length(files, length):
    for task in tasks(length, files):
        for index in range(3):
            problem = task.problem("test", index)
            tokens = characters(problem) + problem.answer_tokens
            unit = 50 if task.task not in ("cwe", "fwe") else 100  # a line, a document, a word
            assert length - length // 200 - unit <= tokens <= length, (task, tokens)


@pytest.mark.nightly
def test_problems_depend_on_seed_split_and_index(files):
    for task, again in zip(tasks(2500, files), tasks(2500, files), strict=True):
        first = task.problem("test", 1)
        again.problem("test", 3)  # independent of earlier problems
        assert again.problem("test", 1) == first
        assert task.problem("test", 2).prompt != first.prompt
        assert dataclasses.replace(task, seed=7).problem("test", 1).prompt != first.prompt
        other = task.problem("validation", 1)
        assert (other.answers == first.answers) == task.task.startswith("qa")


def test_context_has_each_answer_once(files):
    """No other needle has the requested key."""
    for task in tasks(2500, files):
        if task.task not in NEEDLE_TASKS:
            continue
        problem = task.problem("test", 0)
        needles = re.findall(r"magic \w+ for (\S+) is: (\S+)\.", problem.prompt)
        keys = collections.Counter(key for key, _ in needles)
        asked = problem.prompt.rpartition("\n")[2]
        found = tuple(value for key, value in needles if key in asked)
        assert sorted(found) == sorted(problem.answers)
        values = NEEDLE_TASKS[task.task].values
        assert set(keys.values()) == {values}


@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_2"])
def test_depth_option(name):
    for depth, low, high in ((0, 0, 0.02), (50, 0.44, 0.56), (100, 0.95, 1)):
        problem = RULER(name, 2500, depth=depth).fitted(characters).problem("test", 0)
        context = problem.prompt.partition("\n")[2].rpartition("\n")[0]
        place = context.index(f"is: {problem.answers[0]}.") - 60
        assert low <= max(0, place) / len(context) <= high


@pytest.mark.parametrize(
    ("task", "answers", "completion", "score"),
    [
        ("niah_multivalue", ("11", "22", "33", "44"), " 11, 22 and\x0044", 0.75),
        ("vt", ("ABCDE", "FGHIJ"), "abcde", 0.5),
        ("cwe", ("apple", "plum"), "1. APPLE 2. plums", 1),
        ("fwe", ("abcdef",), "", 0),
        ("qa_1", ("4 mills", "4"), "There are 4.", 1),
        ("qa_1", ("four mills", "five"), "six", 0),
        ("niah_single_3", ("a-b",), "A-\nB", 0),
    ],
)
def test_scores_are_string_matches(task, answers, completion, score, files):
    """string_match_all is the share of references found, string_match_part any of them."""
    own = RULER(task, questions=files["squad"] if task == "qa_1" else None)
    problem = dataclasses.replace(
        RULER("vt", 2500).fitted(characters).problem("test", 0), answers=answers
    )
    assert own.score(problem, completion) == score


def test_solutions_score_1(files):
    for task in tasks(2500, files):
        problem = task.problem("test", 0)
        assert task.score(problem, problem.solution) == 1
        answer = task.answer(problem.solution)
        assert answer is not None
        assert task.score_answer(problem, answer) == 1
        assert task.score(problem, "I do not know") == 0
        assert task.answer("") is None
    assert RULER("niah_single_1").answer("1234567. Or 7654321.") == "1234567"  # no second chance
    assert RULER("vt").answer("ZZZZZ YYYYY ZZZZZ") == "YYYYY ZZZZZ"


def test_vt_of_the_dms_paper():
    """40 chains without hops and without a worked example, which would not fit 500 tokens."""
    task = RULER("vt", 5000, chains=40, hops=0, worked_example=False).fitted(characters)
    problem = task.problem("test", 0)
    assert len(re.findall(r"\nVAR [A-Z]{5} = \d{5}\n", problem.prompt.replace("\n", "\n\n"))) == 40
    assert problem.prompt.count("Memorize and track") == 1
    assert ", 1 variables are assigned the value" in problem.answer_prefix
    with pytest.raises(ConfigError, match=r"500 tokens, which do not hold 120 chains of 0 hops"):
        dataclasses.replace(task, chains=120, worked_example=True).problem("test", 0)


# -- filling --------------------------------------------------------------------------------------


def test_essays_and_words_from_files(tmp_path):
    (tmp_path / "essays.json").write_text(json.dumps({"text": "One two.\n\n  Three four."}))
    (tmp_path / "essay.txt").write_text("One two.\n\n  Three four.")
    for name in ("essays.json", "essay.txt"):
        assert read_essay(tmp_path / name) == ("One", "two.", "Three", "four.")
    (tmp_path / "words.txt").write_text("\n".join(ruler.WORDS) + "\n\n")
    own = read_words(tmp_path / "words.txt")
    assert own.first == own.second == own.counted == tuple(ruler.WORDS)
    folder = tmp_path / "assets"
    folder.mkdir()
    for name, lines in (
        ("adjectivelist.txt", ruler.ADJECTIVES),
        ("nounlist.txt", ruler.WORDS),
        ("verblist.txt", ["run"]),
    ):
        (folder / name).write_text("\n".join(lines))
    listed = read_words(folder)
    assert (listed.first, listed.second) == (tuple(ruler.ADJECTIVES), tuple(ruler.WORDS))
    assert listed.counted == tuple(sorted({*ruler.ADJECTIVES, *ruler.WORDS, "run"}))
    task = RULER("niah_single_2", 600, essays=tmp_path / "essay.txt", words=folder)
    prompt = task.fitted(characters).problem("test", 0).prompt
    assert "Three four. One two. Three four." in prompt
    assert re.search(rf"for ({'|'.join(ruler.ADJECTIVES)})-({'|'.join(ruler.WORDS)}) is", prompt)


def test_sentences():
    text = 'He said: "No." Then Mr. Bell left! (Why?) A 3.5 mile walk. Mrs. Oak stayed. so it is.'
    parts = sentences(text)
    assert " ".join(parts) == text
    assert parts == [
        'He said: "No."',
        "Then Mr. Bell left!",
        "(Why?)",
        "A 3.5 mile walk.",
        "Mrs. Oak stayed. so it is.",
    ]


def squad(question):
    """A file of one question."""
    paragraph = {"context": "A text.", "qas": [question]}
    return json.dumps({"data": [{"paragraphs": [paragraph]}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("[1]", "not of the form in which SQuAD"),
        ("{", "is not JSON"),
        ('{"data": []}', "holds no questions"),
        (squad("q"), "not of the form in which SQuAD"),
        (squad({"question": None, "answers": [{"text": "a"}]}), "None is not a text"),
        (squad({"question": "q", "answers": [{"text": 5}]}), "5 is not a text"),
        (squad({"question": "q", "answers": [{"text": ""}]}), "questions without an answer"),
    ],
)
def test_malformed_squad_is_rejected(tmp_path, content, message):
    path = tmp_path / "dev.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=rf"dev\.json.*{message}"):
        RULER("qa_1", questions=path).fitted(characters).problem("test", 0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "answer": "a", "context": []}, "holds no questions"),
        ({"question": "q", "answer": 7, "context": [["t", ["x"]]]}, "7 is not a text"),
        ({"question": "q", "answer": "a", "context": [["t", [1]]]}, "not of the form"),
    ],
)
def test_malformed_hotpotqa_is_rejected(tmp_path, record, message):
    path = tmp_path / "dev.json"
    path.write_text(json.dumps([record]))
    with pytest.raises(DataError, match=rf"dev\.json.*{message}"):
        RULER("qa_2", questions=path).fitted(characters).problem("test", 0)


@pytest.mark.parametrize("adjectives", ["\n", "red"])
def test_too_few_keys_are_rejected(tmp_path, adjectives):
    """Keys must differ, and too few words leave no further key."""
    for name, lines in (
        ("adjectivelist.txt", adjectives),
        ("nounlist.txt", "cat\ndog"),
        ("verblist.txt", "\n".join(ruler.WORDS)),
    ):
        (tmp_path / name).write_text(lines)
    with pytest.raises(DataError, match=rf"makes {2 * len(adjectives) // 3} different keys"):
        RULER("niah_multikey_1", 600, words=tmp_path).fitted(characters).problem("test", 0)


def test_wrong_options_are_named(files, tmp_path):
    with pytest.raises(ConfigError, match=r"qa_1 reads .* questions=SQuAD's dev-v2\.0\.json"):
        RULER("qa_1")
    with pytest.raises(ConfigError, match=r"qa_2 reads .* hotpot_dev_distractor_v1\.json"):
        RULER("qa_2")
    with pytest.raises(ConfigError, match="questions is a file of qa_1 or qa_2, not of vt"):
        RULER("vt", questions="squad.json")
    with pytest.raises(ConfigError, match="chains, hops and worked_example are of vt"):
        RULER("cwe", hops=2)
    with pytest.raises(ConfigError, match="depth is that of a single needle"):
        RULER("niah_multivalue", depth=50)
    with pytest.raises(ConfigError, match=r"vt is in tokens of a model.*fit_task"):
        RULER("vt").problem("test", 0)
    with pytest.raises(ConfigError, match="does not fit 150 tokens of this model"):
        RULER("niah_single_2", 150).fitted(characters).problem("test", 0)
    with pytest.raises(ConfigError, match="smallest problem takes 215 tokens: give a"):
        RULER("niah_single_2", 150).fitted(characters).problem("test", 0)
    with pytest.raises(ConfigError, match=r"at least that, or one below 4096, where its lists"):
        RULER("cwe", 4096).fitted(lambda problem: 3 * characters(problem)).problem("test", 0)
    with pytest.raises(ConfigError, match="fwe needs a length of at least 250 tokens, got 100"):
        RULER("fwe", 100).fitted(characters).problem("test", 0)
    questions = RULER("qa_1", 800, questions=files["squad"]).fitted(characters)
    with pytest.raises(DataError, match="20 questions, and number 20 was requested"):
        questions.problem("test", 20)
    (tmp_path / "words.txt").write_text("a\nb\n")
    with pytest.raises(DataError, match=r"words\.txt holds 2 different words"):
        RULER("cwe", words=tmp_path / "words.txt").fitted(characters).problem("test", 0)
    assert [task.task for task in ruler_tasks(100)] == list(RULER_TASKS[:11])


@pytest.mark.parametrize("unit", [1, 7, 40])
@pytest.mark.parametrize("start", [1, 90, 5000])
def test_largest_size_is_found_in_few_counts(unit, start):
    for length in (400, 4096, 131_072):
        counted = []

        def count(size, unit=unit, counted=counted):
            counted.append(size)
            return 300 + size * unit + size % 3  # not quite a line

        size = largest_size(count, Bounds(length, 1), start)
        assert count(size) <= length
        assert count(size + 1) > length or length - count(size) <= length // 200
        assert len(counted) <= 14
        assert largest_size(count, Bounds(length, 1, most=2), start) == 2
    assert largest_size(count, Bounds(300, 1), start) is None


# -- with a model ---------------------------------------------------------------------------------


def stories():
    return dms_jax.load(assets.path("stories260k"))


def test_the_answer_prefix_begins_the_answer():
    """In plain text it follows the prompt; in a chat it follows the template."""
    model = stories()
    task = fit_task(model, RULER("niah_single_1", 500))
    problem = task.problem("test", 0)
    plain = encode_problem(model, problem, None, name="niah")
    assert plain == model.tokenizer.encode(problem.prompt + problem.answer_prefix)
    assert problem.answer_prefix.startswith(" The special magic number for ")
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokenizer = Tokenizer(model.tokenizer.backend, chat_template=template)
    chatting = dataclasses.replace(model, tokenizer=tokenizer)
    chat = Chat(system="Be brief. " * 4)
    problem = fit_task(chatting, RULER("niah_single_1", 500), chat).problem("test", 0)
    tokens = encode_problem(chatting, problem, chat, name="niah")
    text = f"<system>{chat.system}<user>{problem.prompt}<assistant>{problem.answer_prefix}"
    assert tokens == tokenizer.encode(text, add_special_tokens=False)
    assert 440 <= len(tokens) + 128 <= 500  # the template counts; a line of noise has 50 tokens


@pytest.mark.usefixtures("fakes")
def test_evaluate_fits_lengths_and_answers():
    model = stories()
    given = [RULER("niah_single_1", 500), RULER("vt", 500, hops=1, worked_example=False)]
    result = evaluate(
        model,
        given,
        problems=4,
        sampling=dms_jax.Sampling(temperature=0, max_new_tokens=40),
        serving=dms_jax.evaluation.Serving(lanes=4, page_size=16, prefill_chunk=128),
    )
    needle, tracking = (result.of_task(name) for name in ("niah_single_1", "vt"))
    assert (needle.prompt_tokens <= 500 - 128).all()
    assert (needle.prompt_tokens > 500 - 128 - 60).all()
    assert (tracking.prompt_tokens <= 500 - 30).all()
    assert needle.new_tokens.max() == 40
    assert tracking.new_tokens.max() == 30
    assert result.settings["task"][0] == RULER("niah_single_1", 500).to_dict()
    json.dumps(result.to_dict())

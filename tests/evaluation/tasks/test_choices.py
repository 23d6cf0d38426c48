"""Questions in published forms: exact contexts, continuations and the right one."""

import pytest

from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.tasks import ARC, MMLU, PIQA, BoolQ, HellaSwag, WinoGrande
from tests.evaluation.tasks import published
from tests.evaluation.tasks.published import lines, text

MELTS = "Question: Which one melts at the lowest temperature?\nAnswer:"


@pytest.mark.parametrize(
    ("task", "records", "context", "continuations", "gold"),
    [
        (ARC, published.ARC, MELTS, ("ice", "iron", "gold"), 0),
        (ARC, published.ARC_PARQUET, MELTS, ("ice", "iron"), 0),
        (
            ARC,
            published.SHARED,
            "Question: Which one melts first?\nAnswer:",
            ("iron", "ice"),
            1,
        ),
        (
            HellaSwag,
            published.HELLASWAG,
            "Baking bread: A man mixes flour with water. He",
            ("kneads the dough. Rest it.", "flies away."),
            0,
        ),
        (HellaSwag, published.HELLASWAG_SHARED, "Baking: A man. He", ("kneads.", "flies."), 0),
        (
            PIQA,
            published.PIQA,
            "Question: Open a jar\nAnswer:",
            ("turn the lid", "paint the lid"),
            0,
        ),
        (
            BoolQ,
            published.BOOLQ,
            "The sea is salty water.\nQuestion: is the sea salty?\nAnswer:",
            ("no", "yes"),
            1,
        ),
    ],
)
def test_published_forms(tmp_path, task, records, context, continuations, gold):
    choices = task(lines(tmp_path / "a.jsonl", records)).choices(0)
    assert choices.contexts == (context,) * len(continuations)
    assert choices.continuations == continuations
    assert choices.gold == gold
    assert choices.solved == f"{context} {continuations[gold]}"


@pytest.mark.parametrize("records", [published.WINOGRANDE, published.WINOGRANDE_SHARED])
def test_winogrande_scores_text_after_the_name(tmp_path, records):
    choices = WinoGrande(lines(tmp_path / "a.jsonl", records)).choices(0)
    assert choices.contexts == ("Bob fed the cat because Bob", "Bob fed the cat because the cat")
    assert choices.continuations == ("was hungry.",) * 2
    assert choices.gold == 1


def test_mmlu_examples_are_of_the_same_subject(tmp_path):
    test, dev = tmp_path / "test", tmp_path / "dev"
    test.mkdir()
    dev.mkdir()
    text(test / "anatomy_test.csv", published.MMLU_TEST_CSV)
    text(dev / "anatomy_dev.csv", published.MMLU_DEV_CSV)
    text(dev / "moral_disputes_dev.csv", "Other?,a,b,c,d,D\n")
    question = MMLU(test, few_shot=1, examples=dev).choices(1)
    assert (
        question.contexts
        == (
            "The following are multiple choice questions (with answers) about anatomy.\n\n"
            "Which bone is in the leg?\nA. the ulna\nB. the femur\nC. the radius\nD. the skull\n"
            "Answer: B\n\n"
            "How many chambers has it?\nA. two\nB. three\nC. four\nD. five\nAnswer:",
        )
        * 4
    )
    assert (question.continuations, question.gold) == (tuple("ABCD"), 2)
    with pytest.raises(
        DataError, match=r"few_shot=2, and .*dev holds 1 examples for .*anatomy_test"
    ):
        MMLU(test, few_shot=2, examples=dev).choices(0)


def test_mmlu_as_json_lines(tmp_path):
    question = MMLU(lines(tmp_path / "a.jsonl", published.MMLU_PARQUET)).choices(0)
    assert question.gold == 0
    assert "about anatomy.\n" in question.contexts[0]
    assert question.contexts[0].endswith("A. the heart\nB. the liver\nC. a lung\nD. skin\nAnswer:")


@pytest.mark.parametrize(
    ("task", "record", "message"),
    [
        (ARC, {**published.ARC[0], "answerKey": "9"}, '"answerKey" must be one of 1, 2, 3'),
        (ARC, {"question": {"stem": "Which?"}, "answerKey": "A"}, "lack 'choices'"),
        (HellaSwag, {**published.HELLASWAG[0], "label": 2}, '"label" must be a number from 0 to 1'),
        (PIQA, {"goal": "Open a jar", "sol1": "turn", "label": 0}, 'no "sol2"'),
        (WinoGrande, {**published.WINOGRANDE[0], "sentence": "No gap."}, 'must hold "_"'),
        (BoolQ, {**published.BOOLQ[0], "answer": "maybe"}, '"answer" must be a number'),
        (MMLU, {**published.MMLU_PARQUET[0], "answer": 4}, "from 0 to 3"),
    ],
)
def test_malformed_questions_are_named(tmp_path, task, record, message):
    with pytest.raises(DataError, match=rf"a\.jsonl, line 1: .*{message}"):
        task(lines(tmp_path / "a.jsonl", [record])).choices(0)


def test_bad_calls_are_rejected(tmp_path):
    path = lines(tmp_path / "a.jsonl", published.PIQA)
    with pytest.raises(DataError, match=r"piqa: .*a\.jsonl holds 1 problems, and number 1"):
        PIQA(path).choices(1)
    with pytest.raises(ConfigError, match="2 worked examples need a file"):
        PIQA(path, few_shot=2)

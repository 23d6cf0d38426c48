"""Lessons of retrieval: their answers are in their texts, and they can be trained on."""

import random
import re

import pytest

from dms_jax import assets
from dms_jax.data import Documents
from dms_jax.data.tokenization import TokenizedDocuments
from experiments.reproduction import retrieval_lessons
from tests.generation.support import stories

LENGTH = 1024


@pytest.fixture(scope="module")
def words():
    return " ".join(assets.books("train")).split()


@pytest.mark.parametrize("seed", range(5))
def test_lockers_lists_every_code_of_the_owners(words, seed):
    text, question, answer = retrieval_lessons.lockers(random.Random(seed), words, 400)
    for line in answer.split("; "):
        owner, codes = line.split(": ")
        assert owner in question
        found = re.findall(rf"(\d+) opens the locker of {owner}\.", text)
        assert sorted(found) == sorted(codes.split(", "))


@pytest.mark.parametrize("seed", range(5))
def test_parcels_follow_one_another_in_the_order_of_the_text(words, seed):
    text, question, answer = retrieval_lessons.parcels(random.Random(seed), words, 400)
    for line in answer.split("; "):
        town, names = line.split(": ")
        assert town in question
        goes = [re.search(rf"Parcel {name} [^.]*\.", text) for name in names.split(", ")]
        found = [each for each in goes if each is not None]
        assert len(found) == len(goes)
        places = [each.start() for each in found]
        assert places == sorted(places)
        assert found[0].group().endswith(f"is sent to {town}.")
        for old, new in zip(names.split(", "), found[1:], strict=False):
            assert new.group().endswith(f"follows parcel {old}.")


@pytest.mark.parametrize("seed", range(5))
def test_orders_names_the_most_frequent_goods(seed):
    text, _, answer = retrieval_lessons.orders(random.Random(seed), [], 400)
    often = answer.split(", ")
    listed = re.findall(r"\w+", text.partition(":")[2])
    others = set(listed) - set(often)
    least = min(listed.count(name) for name in often)
    assert least > max(listed.count(name) for name in others)


def test_lessons_are_equal_in_every_call_and_can_be_trained_on():
    tokenizer = stories().tokenizer
    found, again = (
        retrieval_lessons.lessons(tokenizer, LENGTH, problems=6, windows=2) for _ in range(2)
    )
    documents, others = (
        TokenizedDocuments(Documents(each), tokenizer, 512, answers_only=True)
        for each in (found, again)
    )
    for number in range(8):
        one = documents[number]
        assert 64 < len(one["tokens"]) <= LENGTH
        assert one["loss_mask"].any()
        assert one["tokens"].tolist() == others[number]["tokens"].tolist()

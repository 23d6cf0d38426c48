"""Answers told apart from prompts, through every packing and into the loss."""

import chex
import numpy as np
import pytest

from dms_jax.data import AnswersOnly, Documents, Exchange, batches, encode_answers, encode_document
from dms_jax.errors import DataError
from dms_jax.training import train
from tests.training.tiny import LENGTH, language_model, recipe


class Plain:
    """Digits as tokens, with an end token and no chat template."""

    bos_token_id = None
    eos_token_id = 9

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return [int(character) for character in text]


class Begin(Plain):
    bos_token_id = 0


class Chat(Plain):
    """Users' turns begin with 7 and the assistant's with 8; every turn ends with 9."""

    chat_template = "given"

    def apply_chat_template(self, messages, add_generation_prompt=True):
        marks = {"user": "7", "assistant": "8"}
        text = "".join(f"{marks[turn['role']]}{turn['content']}9" for turn in messages)
        return text + ("8" if add_generation_prompt else "")


class Forgetful(Chat):
    """Drops what it said before, as templates of reasoning models do."""

    def apply_chat_template(self, messages, add_generation_prompt=True):
        last = len(messages) - 1
        turns = [
            turn if turn["role"] == "user" or place == last else turn | {"content": ""}
            for place, turn in enumerate(messages)
        ]
        return super().apply_chat_template(turns, add_generation_prompt)


def turns(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("document", "tokenizer", "tokens", "answers"),
    [
        (Exchange("12", "34"), Plain(), "12349", "00111"),
        (Exchange("12", "34"), Begin(), "012349", "000111"),
        (Exchange("12", "34"), Chat(), "7129834" + "9", "0000011" + "1"),
        (Exchange(turns("1", "2", "3"), "4"), Chat(), "719829739849", "000000000011"),
        (Exchange([1, 2], np.array([3])), None, "123", "001"),
        (turns("1", "2", "3", "4"), Chat(), "719829739849", "000011000011"),
        (turns("1", "2", "3"), Chat(), "719829739", "000011000"),
    ],
)
def test_answers_are_told_apart(document, tokenizer, tokens, answers):
    found, counts = encode_answers(document, tokenizer)
    assert "".join(map(str, found)) == tokens
    assert "".join(map(str, counts.astype(int))) == answers
    chex.assert_trees_all_equal(encode_document(document, tokenizer), found)


@pytest.mark.parametrize(
    ("document", "tokenizer", "message"),
    [
        ("12", Plain(), "no answers that could be told apart"),
        ([1, 2], None, "no answers that could be told apart"),
        (turns("1"), Chat(), "no turn of the assistant"),
        (turns("1", "2", "3", "4"), Forgetful(), "writes turn 1 in another way"),
        (turns("1", "2"), None, "has no tokenizer"),
        (Exchange("1", "2"), None, "has no tokenizer"),
        (Exchange([1, 2], "3"), Chat(), "token ids go with token ids"),
        (Exchange(np.array([1, 2]), "3"), Chat(), "token ids go with token ids"),
        (Exchange("1", [2]), Chat(), "token ids go with token ids"),
        (Exchange(turns("1"), [2]), Chat(), "token ids go with token ids"),
        ([*turns("1"), "2"], Chat(), "turn 1: a chat message is a dict"),
        (Exchange([0.5], [1]), None, "expected a text"),
    ],
)
def test_what_has_no_answers_is_told(document, tokenizer, message):
    with pytest.raises(DataError, match=message):
        encode_answers(document, tokenizer)


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_every_packing_carries_the_mask(packing):
    """Answers are the numbers from 50 on."""
    random = np.random.default_rng(0)
    documents = [
        Exchange(random.integers(1, 50, 3).tolist(), random.integers(50, 99, size).tolist())
        for size in random.integers(1, 6, 30)
    ]
    options = dict(batch_size=2, length=8, packing=packing)
    told, all_of_them = (
        iter(batches(data, **options))
        for data in (AnswersOnly(Documents(documents)), Documents(documents))
    )
    for _ in range(5):
        batch, whole = next(told), next(all_of_them)
        chex.assert_trees_all_equal(batch["tokens"], whole["tokens"])
        chex.assert_trees_all_equal(batch["loss_mask"], batch["tokens"] >= 50)
        chex.assert_trees_all_equal(whole["loss_mask"], whole["tokens"] > 0)


@pytest.mark.nightly
def test_the_loss_is_of_answers_alone():
    """A prompt that cannot be foreseen costs nothing, and an answer always does."""
    random = np.random.default_rng(1)
    documents = [Exchange(random.integers(0, 15, 6).tolist(), [20] * 6) for _ in range(32)]
    losses = {}
    for only in (False, True):
        records = []
        options = recipe(loss="language_modeling", packing="first_fit", answers_only=only)
        model = language_model()
        train(model, recipe=options, data=documents, on_step=records.append, progress=False)
        losses[only] = records[0]["lm_loss"]
    tokens = np.array([[*each.prompt, *each.response] for each in documents])[:, :LENGTH]
    logits = np.asarray(language_model().logits(tokens), np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    costs = -np.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    # The first step takes 4 of the 32 documents, which differ in their prompts alone.
    answers = costs[:, 5:].mean(1)
    assert answers.min() <= losses[True] <= answers.max()
    assert abs(losses[True] - losses[False]) > 1e-3

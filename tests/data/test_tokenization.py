"""Documents to token ids: answers, and documents that cannot be encoded."""

import itertools
import json

import chex
import numpy as np
import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import (
    Documents,
    Exchange,
    Fields,
    as_source,
    batches,
    encode_answers,
    encode_document,
)
from dms_jax.data.tokenization import TokenizedDocuments
from dms_jax.errors import ConfigError, DataError

TEMPLATE = """{% for turn in messages %}
{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{{ turn.role }}: {{ turn.content }}{% endfor %}"""


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
    """Drops earlier answers, as templates of reasoning models do."""

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


def test_text_begins_with_the_begin_token():
    tokenizer = Tokenizer.from_directory(assets.path("stories260k"))
    story = assets.stories("valid")[0]
    ids = encode_document(story, tokenizer)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == story
    (batch,) = itertools.islice(
        batches([story, story], tokenizer, batch_size=1, length=2 * len(ids)), 1
    )
    chex.assert_trees_all_equal(batch["tokens"], np.array([[*ids, *ids]]))


def test_text_ends_with_the_end_token_without_a_begin_token():
    chex.assert_trees_all_equal(encode_document("12", Plain()), np.array([1, 2, 9]))


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
def test_encode_answers(document, tokenizer, tokens, answers):
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
def test_document_without_answers_is_refused(document, tokenizer, message):
    with pytest.raises(DataError, match=message):
        encode_answers(document, tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    own = Tokenizer.from_directory(assets.path("stories260k"))
    return Tokenizer(own.backend, chat_template=TEMPLATE)


def chat(*roles):
    return [{"role": role, "content": "Once upon a time"} for role in roles]


def test_conversations_that_the_template_refuses_count_as_malformed(tmp_path, tokenizer):
    good, bad = chat("user", "assistant"), chat("assistant", "user")
    lines = [json.dumps({"messages": each}) for each in (good, bad, good, bad)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([lines[0], "{oops", *lines[1:]]))
    with pytest.warns(UserWarning, match="1 of 5 lines are malformed and left out"):
        source = as_source(path, Fields(malformed=0.6))
    documents = TokenizedDocuments(source, tokenizer, 512)
    with pytest.warns(UserWarning, match=r"left out.*a\.jsonl, line 3: .*roles must alternate"):
        sizes = [len(documents[index]["tokens"]) for index in range(4)]
    assert [size > 0 for size in sizes] == [True, False, True, False]
    assert not len(documents[1]["tokens"])  # it counts once
    with pytest.warns(UserWarning, match="malformed and left out"):
        source = as_source(path, Fields(malformed=0.59))
    documents = TokenizedDocuments(source, tokenizer, 512)
    with pytest.warns(UserWarning, match="left out"):
        documents[1]
    told = r"3 of 5 documents .* more than a share of 0\.59.*line 5: .*must alternate"
    with pytest.raises(DataError, match=told):
        documents[3]


def test_nothing_is_left_out_without_a_share(tokenizer):
    source = Documents([chat("assistant")])
    with pytest.raises(DataError, match=r"^document 0: .*roles must alternate"):
        TokenizedDocuments(source, tokenizer, 512)[0]
    with pytest.raises(ConfigError, match="malformed must be"):
        Documents([], malformed=2.0)


@pytest.mark.filterwarnings("ignore:A document cannot be encoded")
def test_batches_have_the_documents_that_are_left(tokenizer):
    rows = [[1, 2], [1, 9], np.array([3]), Exchange([4], [-1]), Exchange([4], [5])]
    options = dict(batch_size=1, length=5, seed=None, repeat=False)
    (batch,) = batches(Documents(rows, malformed=0.5), vocab_size=9, **options)
    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5]]
    with pytest.raises(DataError, match="contain no tokens"):
        next(batches(Documents(rows[1:2], malformed=1.0), vocab_size=9, batch_size=1, length=4))
    turns = [chat("user", "assistant"), chat("user"), "no answer at all"]
    source = Documents(turns, malformed=0.7)
    answers = TokenizedDocuments(source, tokenizer, 512, answers_only=True)
    found = [len(answers[index]["tokens"]) for index in range(3)]
    assert [size > 0 for size in found] == [True, False, False]

"""Documents that cannot be encoded: counted, named and left out, alike in every process and run."""

import json

import chex
import jax
import numpy as np
import pytest

import dms_jax
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import AnswersOnly, Documents, Exchange, Fields, as_source, batches
from dms_jax.data.encodable import encodable
from dms_jax.data.lanes import Deal, lane_batches
from dms_jax.errors import ConfigError, DataError
from dms_jax.training import train
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from tests.support.models import VOCABULARY
from tests.training.tiny import LENGTH, documents, language_model, recipe

TEMPLATE = """{% for turn in messages %}
{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}
{{ turn.role }}: {{ turn.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def tokenizer():
    backend = dms_jax.load(dms_jax.assets.path("stories260k")).tokenizer.backend
    return Tokenizer(backend, chat_template=TEMPLATE)


def chat(*roles):
    return [{"role": role, "content": "Once upon a time"} for role in roles]


def everything(source):
    return [source[index] for index in range(len(source))]


def test_what_the_template_refuses_is_counted_with_what_is_malformed(tmp_path, tokenizer):
    good, bad = chat("user", "assistant"), chat("assistant", "user")
    lines = [json.dumps({"messages": each}) for each in (good, bad, good, bad)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([lines[0], "{oops", *lines[1:]]))
    with pytest.warns(UserWarning, match="1 of 5 lines are malformed and left out"):
        source = as_source(path, Fields(malformed=0.6))
    told = (
        r"2 of 5 documents cannot be encoded, beside 1 that are malformed\. They are left out\. "
        r"The first: .*a\.jsonl, line 3: .*roles must alternate"
    )
    with pytest.warns(UserWarning, match=told):
        left = encodable(source, tokenizer, 512)
    assert everything(left) == [good, good]
    assert [left.where(index) for index in (0, 1)] == [f"{path}, line 1", f"{path}, line 4"]
    with pytest.warns(UserWarning, match="malformed and left out"):
        source = as_source(path, Fields(malformed=0.59))
    with pytest.raises(DataError, match=r"more than a share of 0\.59.*line 3: .*must alternate"):
        encodable(source, tokenizer, 512)
    assert source.refused == 1


def test_without_a_share_nothing_is_read_beforehand(tokenizer):
    source = Documents([chat("assistant")])
    assert encodable(source, tokenizer, 512) is source
    with pytest.raises(DataError, match=r"document 0: .*roles must alternate"):
        next(batches(source, tokenizer, batch_size=1, length=4))
    with pytest.raises(ConfigError, match="malformed must be"):
        Documents([], malformed=2.0)


def test_tokens_outside_the_vocabulary_are_left_out(tokenizer):
    rows = [[1, 2], [1, 9], np.array([3]), Exchange([4], [-1]), Exchange([4], [5])]
    told = r"2 of 5 documents cannot be encoded\. .*document 1: token ids must lie in 0 \.\.\. 8"
    with pytest.warns(UserWarning, match=told):
        left = encodable(as_source(rows, Fields(malformed=0.5)), None, 9)
    assert everything(left) == [rows[0], rows[2], rows[4]]
    with pytest.raises(DataError, match="more than a share"):
        encodable(Documents(rows, malformed=0.3), None, 9)
    with pytest.raises(DataError, match="and none is left"):
        encodable(Documents(rows[1:2], malformed=1.0), None, 9)
    # Of a tokenizer that has more tokens than the model.
    texts = ["a", "Once upon a time"]
    most = max(max(tokenizer.encode(texts[0])), 10)
    with pytest.warns(UserWarning, match=r"1 of 2 documents.*document 1: token ids"):
        left = encodable(Documents(texts, malformed=0.5), tokenizer, most + 1)
    assert everything(left) == texts[:1]


def test_texts_are_tokenized_only_where_that_could_say_something(tokenizer, monkeypatch):
    def refused(*_, **__):
        raise AssertionError("a text was tokenized")

    monkeypatch.setattr(Tokenizer, "encode", refused)
    rows = ["a text", chat("user"), Exchange("Once", "upon")]
    source = Documents(rows, malformed=0.5)
    assert encodable(source, tokenizer, tokenizer.vocab_size) is source


def test_of_answers_those_without_one_are_left_out_too(tokenizer):
    rows = [chat("user", "assistant"), chat("user"), "no answer at all"]
    with pytest.warns(UserWarning, match=r"2 of 3 .*document 1: .*no turn of the assistant"):
        left = encodable(AnswersOnly(Documents(rows, malformed=0.7)), tokenizer, 512)
    assert isinstance(left, AnswersOnly)
    assert everything(left) == rows[:1]


def spoilt(rows):
    """The rows with one outside the vocabulary after every fifth."""
    return [
        each
        for place, row in enumerate(rows)
        for each in ([row, [VOCABULARY]] if place % 5 == 0 else [row])
    ]


@pytest.mark.filterwarnings("ignore:.*cannot be encoded")
def test_every_process_leaves_out_the_same():
    """The rows of two processes are those of one, and those of the documents that are left."""

    def drawn(rows, data):
        source = encodable(data, None, VOCABULARY)
        lanes = lane_batches(
            source,
            None,
            deal=Deal((4,), 4, rows),
            length=LENGTH,
            packing="concatenate",
            vocab_size=VOCABULARY,
            seed=3,
        )
        return np.stack([next(lanes)["tokens"] for _ in range(12)])

    clean = documents()
    bad = Documents(spoilt(clean), malformed=0.5)
    whole = drawn((0, 1, 2, 3), Documents(clean))
    parts = [drawn(rows, bad) for rows in ((0, 1), (2, 3))]
    chex.assert_trees_all_equal(drawn((0, 1, 2, 3), bad), whole)
    chex.assert_trees_all_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*cannot be encoded")
def test_a_run_goes_on_in_the_same_order(tmp_path):
    model = language_model()
    options = dict(recipe=recipe(Stage("train", 4, 1e-2), loss="language_modeling"), progress=False)
    bad = Documents(spoilt(documents()), malformed=0.5)
    expected = train(model, data=documents(), **options)
    with pytest.raises(KeyboardInterrupt):
        train(model, data=bad, out=tmp_path, stop_after=1e-6, **options)
    result = train(model, data=bad, out=tmp_path, **options)
    chex.assert_trees_all_equal(
        *(jax.device_get(parameters(each.transformer)) for each in (result, expected))
    )
    # With none left out these would be other data, in another order.
    with pytest.raises(ConfigError, match="a run with another data"):
        train(model, data=Documents(spoilt(documents())), out=tmp_path, **options)

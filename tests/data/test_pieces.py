"""Long texts in pieces: the tokens of the whole, in time and memory of the pieces."""

import itertools
import json
import pathlib
import sys

import chex
import numpy as np
import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import Exchange, batches, encode_answers, encode_document, pieces
from dms_jax.data.pieces import piece

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers"
LENGTH, BATCH = 32, 2


def tokenizer(name):
    return Tokenizer.from_directory(
        assets.path("stories260k") if name == "stories260k" else GOLDEN / name
    )


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 200)


def in_pieces(text, tokenizer):
    tokens, ends = [], [0]
    while ends[-1] < len(text):
        part, end = piece(text, ends[-1], tokenizer)
        assert end > ends[-1]
        tokens += part
        ends.append(end)
    return tokens, ends


@pytest.mark.parametrize("name", ["stories260k", "gpt2", "mistral", "qwen2", "unigram"])
@pytest.mark.parametrize("breaks", ["lines", "words"])
def test_pieces_are_the_whole(short_pieces, name, breaks):
    text = "\n\n".join(assets.stories("valid")[:6]) + " 1 234  567\n\n  def f(x):\n\treturn x\n"
    if breaks == "words":
        text = " ".join(text.split())
    own = tokenizer(name)
    tokens, ends = in_pieces(text, own)
    assert tokens == own.encode(text, add_special_tokens=False)
    sizes = np.diff(ends)
    assert len(sizes) > len(text) / 400
    assert max(sizes) <= 600


@pytest.mark.parametrize("name", ["gpt2", "mistral", "qwen2"])
def test_long_turns_and_responses_are_tokenized_in_pieces_too(short_pieces, name, encoded_sizes):
    """A reasoning trace of megabytes is an answer, and took as long as a text of them."""
    own, end = tokenizer(name), {"gpt2": "<|endoftext|>", "mistral": "</s>", "qwen2": "<|im_end|>"}
    own.chat_template = (
        "{% for turn in messages %}{{ turn.role }}\n{{ turn.content }}" + end[name] + "\n"
        "{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    long = "\n\n".join(assets.stories("valid")[:4])
    chat = [{"role": "user", "content": long}, {"role": "assistant", "content": f"Yes.\n{long}"}]
    whole = own.encode(own.apply_chat_template(chat, False), add_special_tokens=False)
    encoded_sizes.clear()
    assert encode_document(chat, own).tolist() == whole
    answers, counts = encode_answers(Exchange(long, chat[1]["content"]), own)
    assert max(encoded_sizes) < 700 < len(long)
    assert own.decode(answers[counts]) == own.decode(own.encode(f"Yes.\n{long}{end[name]}", False))


def test_a_text_without_a_place_to_cut_stays_whole(short_pieces):
    own = tokenizer("stories260k")
    tokens, ends = in_pieces("x" * 1000, own)
    assert tokens == own.encode("x" * 1000, add_special_tokens=False)
    assert len(ends) == 2


@pytest.mark.parametrize("packing", ["concatenate", "concatenate_whole", "first_fit"])
def test_long_documents_are_packed_as_others_are_and_resumed(short_pieces, packing, monkeypatch):
    own = tokenizer("stories260k")
    documents = assets.stories("valid")[:5]
    options = dict(batch_size=BATCH, length=LENGTH, packing=packing, seed=1)
    tokens = [encode_document(text, own).tolist() for text in documents]
    expected = list(itertools.islice(batches(tokens, **options), 12))
    iterator = batches(documents, own, **options)
    for consumed in range(12):
        state = json.loads(json.dumps(iterator.get_state()))
        chex.assert_trees_all_equal(next(iterator), expected[consumed])
        if consumed % 5 == 3:
            resumed = batches(documents, own, **options)
            resumed.set_state(state)
            chex.assert_trees_all_equal(next(resumed), expected[consumed])


def test_a_document_of_megabytes_is_neither_tokenized_at_once_nor_in_the_state(
    tmp_path, encoded_sizes
):
    """Ten megabytes took minutes, gigabytes of memory and a state of 17 MB."""
    story = "\n".join(assets.stories("valid")[:100])
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": story * (10_000_000 // len(story))}))
    own = tokenizer("stories260k")
    iterator = batches(path, own, batch_size=1, length=512)
    drawn = [next(iterator)["tokens"][0] for _ in range(3)]
    assert max(encoded_sizes) <= pieces.PIECE
    assert sum(encoded_sizes) < 5_000_000  # a batch waits for no more than a part
    start = own.encode(story[:8000], add_special_tokens=False)
    assert np.concatenate(drawn).tolist() == [own.bos_token_id, *start][: 3 * 512]
    assert len(json.dumps(iterator.get_state())) < 1000


@pytest.mark.parametrize("workers", [1, 5])
def test_the_number_of_workers_changes_nothing(workers, monkeypatch):
    documents = [[i] * (i % 7 + 1) for i in range(30)]

    def drawn():
        iterator = batches(documents, batch_size=2, length=8, seed=2)
        return [batch["tokens"].tolist() for batch in itertools.islice(iterator, 9)]

    before = drawn()
    monkeypatch.setattr(sys.modules["dms_jax.data.batches"], "WORKERS", workers)
    assert drawn() == before

"""Small files that unpack to gigabytes are refused, and long runs of letters are cut."""

import gzip
import itertools
import re

import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import as_source, batches, pieces, unpacking
from dms_jax.data.pieces import piece
from dms_jax.errors import DataError
from dms_jax.evaluation.records import read_records


def refused(path):
    return pytest.raises(
        DataError,
        match=re.escape(f"{path} unpacks to more than 1,000,000 bytes, which is more than 100 "),
    )


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(unpacking, "MOST_UNPACKED", 1_000_000)
    monkeypatch.setattr(unpacking, "_PART", 1000)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_gzip_file_of_one_letter_is_refused_before_it_is_unpacked(tmp_path, small_limits, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"a" * 1_000_001))
    with refused(path):
        as_source(path)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 71_428))  # as much as may be
    assert len(as_source(path)) == (1 if ".txt" in name else 71_428)


def test_several_members_of_a_gzip_file_count_together(tmp_path, small_limits):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 400_000) * 3)
    with refused(path):
        as_source(path)


def test_problems_are_unpacked_up_to_the_same_limit(tmp_path, small_limits):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "a"}' + b" " * 1_000_000))
    with refused(path):
        list(read_records(path))


def test_a_parquet_file_of_one_text_is_refused_too(tmp_path, small_limits):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 1000] * 1100}), path)
    assert path.stat().st_size < 10_000
    with refused(path):
        as_source(path)


def test_what_packs_a_hundred_times_is_unpacked_whatever_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MOST_UNPACKED", 10)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"Once upon a time there was a cat.\n" * 20))
    assert str(as_source(path)[0]).count("cat") == 20


@pytest.mark.parametrize("name", ["stories260k", "gpt2", "qwen2", "mistral"])
def test_a_run_of_letters_is_cut_where_its_tokens_stay_the_same(name, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 100)
    own = Tokenizer.from_directory(
        assets.path("stories260k") if name == "stories260k" else f"tests/golden/tokenizers/{name}"
    )
    assert own is not None
    text = "Tom said: " + "".join(map("{:x}".format, range(2000)))
    tokens, ends = [], [0]
    while ends[-1] < len(text):
        part, end = piece(text, ends[-1], own)
        tokens += part
        ends.append(end)
    assert max(b - a for a, b in itertools.pairwise(ends)) <= 9 * 100
    assert tokens == own.encode(text, add_special_tokens=False)


def test_a_run_that_no_place_is_right_for_is_cut_all_the_same(monkeypatch):
    """Tokens of seven letters, and 48 letters on either side: no cut leaves them as they are."""
    import tokenizers

    monkeypatch.setattr(pieces, "PIECE", 100)
    vocabulary = {"a" * length: length for length in (1, 2, 3, 7)} | {"<unk>": 0, "\n": 4}
    model = tokenizers.models.WordPiece(
        vocabulary, unk_token="<unk>", max_input_chars_per_word=10**6
    )
    own = Tokenizer(tokenizers.Tokenizer(model))
    text, end, tokens = "a" * 5000, 0, 0
    while end < len(text):
        start = end
        part, end = piece(text, start, own)
        tokens += len(part)
        assert 0 < end - start <= 900
    assert tokens < 5000


def test_a_letter_a_million_times_is_tokenized_in_pieces(encoded_sizes):
    """A megabyte of one letter was tokenized whole, for every lane, in minutes."""
    own = Tokenizer.from_directory(assets.path("stories260k"))
    iterator = batches(["a" * 4_000_000], own, batch_size=1, length=64)
    assert next(iterator)["tokens"].shape == (1, 64)
    assert max(encoded_sizes) <= 8 * pieces.PIECE
    assert sum(encoded_sizes) < 2_000_000  # a batch waits for no more than a part

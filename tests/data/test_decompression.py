"""Small files that decompress to gigabytes are refused."""

import gzip
import re

import pytest

from dms_jax.data import as_source, decompression
from dms_jax.errors import DataError
from dms_jax.evaluation.records import read_records


def refused(path):
    return pytest.raises(
        DataError,
        match=re.escape(f"{path} unpacks to more than 1,000,000 bytes, which is more than 100 "),
    )


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(decompression, "ALWAYS_ALLOWED", 1_000_000)
    monkeypatch.setattr(decompression, "_PART", 1000)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_gzip_bomb_is_refused(tmp_path, small_limits, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"a" * 1_000_001))
    with refused(path):
        as_source(path)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 71_428))  # as much as may be
    assert len(as_source(path)) == (1 if ".txt" in name else 71_428)


def test_gzip_members_are_counted_together(tmp_path, small_limits):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a" * 400_000) * 3)
    with refused(path):
        as_source(path)


def test_gzip_bomb_of_problems_is_refused(tmp_path, small_limits):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"question": "a"}' + b" " * 1_000_000))
    with refused(path):
        read_records(path)


@pytest.mark.parametrize("read", [as_source, read_records])
def test_parquet_bomb_is_refused(tmp_path, small_limits, read):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 1000] * 1100}), path)
    assert path.stat().st_size < 10_000
    with refused(path):
        read(path)


def test_large_file_may_unpack_to_a_hundred_times_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(decompression, "ALWAYS_ALLOWED", 10)
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"Once upon a time there was a cat.\n" * 20))
    assert str(as_source(path)[0]).count("cat") == 20

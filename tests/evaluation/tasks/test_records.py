"""Files of records: every form, and every malformed line by file and line."""

import gzip
import json
import sys

import pytest

from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation.records import read_records
from tests.evaluation.tasks.published import lines, text


def test_the_same_records_from_every_form(tmp_path):
    want = [{"question": 'one, "two"', "answer": "3"}, {"question": "a\nb", "answer": "4"}]
    files = [
        lines(tmp_path / "a.jsonl", want),
        text(tmp_path / "b.json", json.dumps(want)),
        text(tmp_path / "c.csv", 'question,answer\n"one, ""two""",3\n"a\nb",4\n'),
    ]
    packed = tmp_path / "e.jsonl.gz"
    packed.write_bytes(gzip.compress(files[0].read_bytes()))
    for path in (*files, packed):
        assert [dict(record.fields) for record in read_records(path)] == want
    assert read_records(packed)[1].where == f"{packed}, line 2"
    assert [record.where for record in read_records(files[2])] == [
        f"{files[2]}, line 2",
        f"{files[2]}, line 4",
    ]


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the extra `data`")
    parquet = pytest.importorskip("pyarrow.parquet")

    want = [{"question": "one", "choices": ["a", "b"]}, {"question": "two", "choices": ["c", "d"]}]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(want), path)
    records = read_records(path)
    assert [dict(record.fields) for record in records] == want
    assert records[1].where == f"{path}, row 1"
    with pytest.raises(DataError, match=r"b\.parquet cannot be read"):
        read_records(text(tmp_path / "b.parquet", "no"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"a\.parquet needs pyarrow.*pip install 'dms-jax\[data"):
        read_records(text(tmp_path / "a.parquet", "PAR1"))


def test_a_folder_is_its_files_in_order(tmp_path):
    lines(tmp_path / "b.jsonl", [{"n": 2}])
    lines(tmp_path / "a.jsonl", [{"n": 1}])
    text(tmp_path / "README.md", "words")
    text(tmp_path / "c.parquet.gz", "tables are not unpacked")
    records = read_records(tmp_path)
    assert [record.fields["n"] for record in records] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"a": 1}\n\n{"a": 2\n', "line 3: this is not JSON"),
        ("a.jsonl", '{"a": 1}\n[2]\n', "line 2: expected a JSON object"),
        ("a.jsonl", "\n", "contains no records"),
        ("a.json", '[{"a": 1}, 2]', "item 2: expected a JSON object"),
        ("a.json", "[1", "this is not JSON"),
        (
            "a.csv",
            'a,b\n1,"2\n3"\n4,5,6\n',
            "line 4: there are more or fewer fields than a, b",
        ),
        ("a.csv", "a,b\n1\n", "line 2: there are more or fewer fields than a, b"),
        ("a.csv", 'a,b\n1,"2"3\n', "line 2: this is not CSV"),
        ("a.txt", "words", "ends in none of"),
    ],
)
def test_malformed_lines_are_named(tmp_path, name, content, message):
    with pytest.raises(DataError, match=rf"{name}.*{message}"):
        read_records(text(tmp_path / name, content))


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read: No such file"):
        read_records(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no file that ends in"):
        read_records(tmp_path)
    for content in (b"", b"words", gzip.compress(b"{}" * 99)[:-9]):
        (tmp_path / "z.jsonl.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"z\.jsonl\.gz is (not a complete gzip file|empty)"):
            read_records(tmp_path / "z.jsonl.gz")
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl is not UTF-8"):
        read_records(tmp_path / "a.jsonl")


def test_wrong_fields_are_named(tmp_path):
    (record,) = read_records(lines(tmp_path / "a.jsonl", [{"q": 3, "b": " "}]))
    assert record.text("none", "q") == "3"
    for call, message in (
        (lambda: record.text("x", "y"), 'no "x" or "y"; fields: b, q'),
        (lambda: record.text("b"), '"b" must be a text'),
    ):
        with pytest.raises(DataError, match=rf"a\.jsonl, line 1: .*{message}"):
            call()

"""Records to documents: forms, OpenR1 rows, templates, tables, records that are left out."""

import gzip
import json

import pytest

from dms_jax.data import Exchange, Fields, JsonLines, TextFiles, as_source
from dms_jax.errors import ConfigError, DataError

pyarrow = pytest.importorskip("pyarrow")

ROWS = [
    {
        "problem": "1 + 1?",
        "solution": "It is two.",
        "answer": "2",
        "generations": ["\\boxed{2}", "wrong", "so \\boxed{2}"],
        "correctness_math_verify": [True, False, True],
        "messages": [{"role": "user", "content": "1 + 1?"}],
    },
    {
        "problem": "2 + 2?",
        "solution": "4",
        "answer": "4",
        "generations": ["5"],
        "correctness_math_verify": [False],
    },
    {
        "problem": "3 + 3?",
        "solution": "6",
        "answer": "6",
        "generations": ["\\boxed{6}", "7"],
        "correctness_math_verify": [True, False],
    },
]


def everything(source):
    return [source[index] for index in range(len(source))]


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_open_r1_rows_give_the_last_correct_generation(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    with pytest.warns(UserWarning, match="1 of 3 records are left out"):
        source = JsonLines(path)
    assert everything(source) == [
        Exchange("1 + 1?", "so \\boxed{2}"),
        Exchange("3 + 3?", "\\boxed{6}"),
    ]
    assert source.where(1) == f"{path}, line 3"
    assert JsonLines(path, Fields("solution"))[1] == "4"
    plain = [{"problem": "1 + 1?", "solution": "2"}]
    assert JsonLines(write_lines(tmp_path / "b.jsonl", plain))[0] == Exchange("1 + 1?", "2")


def test_templates_write_prompts_and_responses_from_fields(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    fields = Fields(prompt="Solve {problem} {}", response="{solution} ({answer})")
    assert as_source(path, fields)[1] == Exchange("Solve 2 + 2? {}", "4 (4)")
    wrong = Fields(prompt="{question}", response="{answer}")
    with pytest.raises(DataError, match=r"line 1: a template asks for \{question\}.*problem"):
        as_source(path, wrong)
    with pytest.raises(ConfigError, match="needs one of the response"):
        Fields(prompt="{problem}")
    with pytest.raises(ConfigError, match="not both"):
        Fields("text", prompt="{problem}", response="{answer}")


@pytest.mark.filterwarnings("ignore:.*left out")
def test_long_documents_are_left_out(tmp_path):
    turns = [{"role": "user", "content": "123"}, {"role": "assistant", "content": "45"}]
    rows = [{"text": "12345"}, {"text": "123456"}, {"messages": turns}]
    rows.append({"prompt": "123", "response": "456"})
    source = as_source(write_lines(tmp_path / "a.jsonl", rows), Fields(longest=5))
    assert everything(source) == ["12345", turns]
    text = tmp_path / "a.txt"
    text.write_text("12345<|endoftext|>123456")
    assert everything(TextFiles(text, Fields(longest=5))) == ["12345"]


def write_tables(folder, rows):
    """The same rows in each kind of table."""
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=2)
    saved = folder / "saved"
    saved.mkdir()
    half = len(rows) // 2
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pyarrow.ipc.new_stream(str(saved / name), table.schema) as writer:
            writer.write_table(part)
    entries = [{"filename": name} for name in names]
    (saved / "state.json").write_text(json.dumps({"_data_files": entries}))
    return folder / "rows.parquet", saved


def test_tables_equal_json_lines(tmp_path):
    rows = [{"prompt": f"{n} + 1?", "response": str(n + 1)} for n in range(7)]
    expected = [Exchange(row["prompt"], row["response"]) for row in rows]
    parquet, saved = write_tables(tmp_path, rows)
    assert everything(as_source(parquet)) == expected
    assert everything(as_source([saved])) == expected
    assert everything(as_source([parquet, saved])) == expected * 2
    assert as_source(saved).where(4) == f"{saved / 'data-00001-of-00002.arrow'}, row 1"
    assert not list(tmp_path.glob("*.arrow"))


def test_every_source_leaves_out_malformed_records_up_to_a_share(tmp_path):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": None}]
    lines = tmp_path / "a.jsonl.gz"
    lines.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    text = tmp_path / "a.txt"
    text.write_bytes(b"fine<|endoftext|>\xff")
    for path in (lines, *write_tables(tmp_path, rows), text):
        with pytest.warns(UserWarning, match=r"1 of 2 lines are malformed and left out"):
            assert len(as_source(path, Fields(malformed=0.5))) == 1
        with pytest.raises(
            DataError, match=r"1 of 2 lines are malformed, more than a share of 0\.4"
        ):
            as_source(path, Fields(malformed=0.4))
        assert len(as_source(path)) == 2


def test_byte_order_mark_is_skipped(tmp_path):
    """UTF-8 as Excel, PowerShell and some editors write it."""
    lines, text = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text('{"text": "one"}\r\n{"text": "two \ufeff"}\r\n', encoding="utf-8-sig")
    text.write_text("one<|endoftext|>two", encoding="utf-8-sig")
    assert list(as_source(lines)) == ["one", "two \ufeff"]
    assert as_source(lines).where(1).endswith("a.jsonl, line 2")
    assert list(as_source(text)) == ["one", "two"]
    text.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(DataError, match="contains no documents"):
        as_source(text)


def test_gzip_files_are_read(tmp_path):
    lines = tmp_path / "a.jsonl.gz"
    lines.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    source = as_source(str(lines))
    assert everything(source) == ["one", "two"]
    assert source.where(1) == f"{lines}, line 2"
    text = tmp_path / "a.txt.gz"
    text.write_bytes(gzip.compress(b"one<|endoftext|>two"))
    assert everything(as_source(text)) == ["one", "two"]
    text.write_bytes(gzip.compress(b"one<|endoftext|>two")[:-9])
    with pytest.raises(DataError, match="not a complete gzip file"):
        as_source(text)
    text.write_bytes(b"plain")
    with pytest.raises(DataError, match="not a complete gzip file"):
        as_source(text)


def test_malformed_table_is_refused(tmp_path):
    folder = tmp_path / "none"
    folder.mkdir()
    with pytest.raises(DataError, match="folder without a dataset"):
        as_source(folder)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"several splits \(train, test\). Give the folder of one"):
        as_source(folder)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read"):
        as_source(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="cannot be mixed"):
        as_source([tmp_path / "bad.parquet", tmp_path / "a.jsonl"])


def test_missing_fields_are_reported_at_once(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"body": "x"}] * 3)
    message = r"line 1: there is no field 'text'; fields: body. Accepted are text, messages, .*Open"
    with pytest.raises(DataError, match=message):
        as_source(path)
    with pytest.raises(DataError, match=r"line 1: there is no field 'boddy'; fields: body\.$"):
        as_source(path, Fields("boddy"))

"""Documents from files and from memory; errors name file and line."""

import json
import os
import pathlib

import chex
import numpy as np
import pytest

from dms_jax.data import Documents, Exchange, Fields, JsonLines, TextFiles, as_source
from dms_jax.data.sources import fingerprint
from dms_jax.errors import DataError


def write(path: pathlib.Path, content: str | bytes) -> pathlib.Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_text_is_split_at_separators(tmp_path):
    one = write(tmp_path / "a.txt", "first\nstory\n<|endoftext|>\n  \n<|endoftext|>\nsecond ü \n")
    two = write(tmp_path / "b.txt", "third")
    source = TextFiles([one, two])
    assert [source[i] for i in range(len(source))] == ["first\nstory", "second ü", "third"]
    assert source.where(1) == f"{one}, line 6"
    assert source.where(2) == f"{two}, line 1"


def test_json_lines_give_texts_and_conversations(tmp_path):
    turns = [{"role": "user", "content": "hi"}]
    lines = [json.dumps({"text": "plain"}), "", json.dumps({"text": "x", "messages": turns})]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    source = as_source(path)
    assert isinstance(source, JsonLines)
    assert [source[0], source[1]] == ["plain", turns]
    assert JsonLines(path, Fields("text"))[1] == "x"


def test_json_lines_give_prompts_with_responses(tmp_path):
    turns = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": "a", "response": "b", "text": "d"},
        {"prompt": turns, "response": "b", "text": "c"},
        {"prompt": "a", "response": "b", "messages": turns},
        {"prompt": "a", "text": "c"},
        {"prompt": 3, "response": "b"},
    ]
    source = JsonLines(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert [source[i] for i in range(4)] == [Exchange("a", "b"), Exchange(turns, "b"), turns, "c"]
    with pytest.raises(DataError, match=r"line 5: 'prompt' must be a text or a list of messages"):
        source[4]
    assert JsonLines(tmp_path / "a.jsonl", Fields("text"))[1] == "c"


def test_malformed_lines_are_left_out_up_to_a_share(tmp_path):
    lines = ['{"text": "a"}', "{oops", "", '{"text": "b"}', '{"text": 3}', '{"text": "c"}']
    one = write(tmp_path / "a.jsonl", "\n".join(lines))
    bad = write(tmp_path / "bad.jsonl", "oops")
    two = write(tmp_path / "b.jsonl", '{"text": "d"}')
    message = r"3 of 7 lines are malformed and left out\. The first: .*a\.jsonl, line 2: .*not JSON"
    with pytest.warns(UserWarning, match=message):
        source = JsonLines([one, bad, two], Fields(malformed=0.43))
    assert [source[i] for i in range(len(source))] == ["a", "b", "c", "d"]
    assert [source.where(i) for i in (1, 2, 3)] == [
        f"{one}, line 4",
        f"{one}, line 6",
        f"{two}, line 1",
    ]
    with pytest.raises(DataError, match=r"3 of 7 lines are malformed, more than a share of 0\.42"):
        JsonLines([one, bad, two], Fields(malformed=0.42))
    assert len(JsonLines([one, bad, two])) == 7  # none is parsed yet


def test_line_number_is_found_only_for_the_reported_line(tmp_path, monkeypatch):
    """Finding a line number reads all lines before it."""
    told = []
    place = JsonLines.place
    monkeypatch.setattr(JsonLines, "place", lambda *args: told.append(args[1]) or place(*args))
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' + "oops\n" * 50)
    with pytest.warns(UserWarning, match=r"50 of 51 lines .*a\.jsonl, line 2: this is not JSON"):
        JsonLines(path, Fields(malformed=1.0))
    assert told == [1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "not JSON"),
        ("[1]", "expected a JSON object, got a list"),
        ('{"body": "x"}', "no field 'text'; fields: body"),
        ('{"text": 3}', "must be a text or a list of messages"),
        ('{"messages": []}', "'messages' must be a list of messages"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    source = JsonLines(path)
    assert source[0] == "fine"
    with pytest.raises(DataError, match=message) as raised:
        source[1]
    assert f"{path}, line 3" in str(raised.value)


def test_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        TextFiles(write(tmp_path / "empty.txt", ""))
    with pytest.raises(DataError, match="contains no documents"):
        TextFiles(write(tmp_path / "blank.txt", " \n<|endoftext|>\n"))
    with pytest.raises(DataError, match=r"missing\.txt cannot be read"):
        TextFiles(tmp_path / "missing.txt")
    with pytest.raises(DataError, match="No file was given"):
        JsonLines([])


def test_as_source_accepts_paths_texts_ids_and_sources(tmp_path):
    text = write(tmp_path / "a.txt", "one")
    lines = write(tmp_path / "b.jsonl", '{"text": "two"}')
    assert as_source(str(text))[0] == "one"
    assert as_source([text, text])[1] == "one"
    assert as_source(["a story"])[0] == "a story"
    assert as_source(["a story", "one.txt"])[1] == "one.txt"
    chex.assert_trees_all_equal(as_source(np.arange(6).reshape(2, 3))[1], np.array([3, 4, 5]))
    source = Documents([[1, 2]])
    assert as_source(source) is source
    with pytest.raises(DataError, match="cannot be mixed"):
        as_source([text, lines])
    with pytest.raises(DataError, match=r"name of a file.*as pathlib\.Path"):
        as_source([str(text), str(lines)])
    with pytest.raises(DataError, match="no documents"):
        as_source([])
    with pytest.raises(DataError, match="Cannot train on a dict"):
        as_source({"text": "x"})


def of_lines(path, lines):
    path.write_text("\n".join(lines))
    return fingerprint(as_source(path))


def texts(count):
    return [json.dumps({"text": str(i)}) for i in range(count)]


def test_fingerprint_ignores_the_path_and_not_the_length(tmp_path):
    lines = [json.dumps({"text": ""}), *texts(9)]
    first = of_lines(tmp_path / "a.jsonl", lines)
    assert of_lines(tmp_path / "b.jsonl", lines) == first
    assert of_lines(tmp_path / "c.jsonl", lines[:-1]) != first


def test_fingerprint_of_arrays_is_that_of_lists():
    arrays = [np.arange(4), np.arange(5)]
    assert fingerprint(as_source(arrays)) == fingerprint(as_source([x.tolist() for x in arrays]))


def test_line_outside_the_sample_can_be_repaired(tmp_path):
    """A run that stops at the second of 2,000 lines can be resumed once the line is repaired."""
    few, many, path = texts(9), texts(2000), tmp_path / "a.jsonl"
    with pytest.raises(DataError, match=r"a\.jsonl, line 6: this is not JSON"):
        of_lines(path, [*few[:5], "{oops", *few[6:]])
    assert of_lines(path, [many[0], "{oops", *many[2:]]) == of_lines(path, many)


def test_long_texts_are_divided_at_line_breaks(tmp_path):
    text = "".join(f"line {number}\n" for number in range(100)) + "x" * 60
    path = write(tmp_path / "long.txt", f"short<|endoftext|>{text}")
    parts = list(TextFiles(path, most=64))
    assert parts[0] == "short"
    assert "".join(parts[1:]) == text
    assert all(len(part) <= 64 and part.endswith("\n") for part in parts[1:-1])
    assert parts[-1] == "x" * 60
    assert len(TextFiles(path)) == 2
    assert len(as_source(write(tmp_path / "book.txt", "word " * 100_000))) == 2


def test_long_run_without_white_space_is_divided_between_characters(tmp_path):
    text = "a" * 150 + "\u4f60" * 150 + " end of it, in words" * 20
    path = write(tmp_path / "run.txt", text)
    parts = list(TextFiles(path, most=64))
    assert "".join(parts) == text
    assert max(len(part.encode()) for part in parts) <= 64


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no such files on Windows")
def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(pipe := tmp_path / "texts.txt")
    with pytest.raises(DataError, match=r"texts\.txt is a pipe; a regular file is needed"):
        as_source(pipe)

"""What tells the documents of a run from others, and what is the same to it."""

import json

import numpy as np
import pytest

from dms_jax.data.fingerprint import fingerprint
from dms_jax.data.sources import as_source
from dms_jax.errors import DataError


def of_lines(path, lines):
    path.write_text("\n".join(lines))
    return fingerprint(as_source(path))


def texts(count):
    return [json.dumps({"text": str(i)}) for i in range(count)]


def test_moved_files_are_the_same_and_fewer_documents_are_not(tmp_path):
    lines = [json.dumps({"text": ""}), *texts(9)]
    first = of_lines(tmp_path / "a.jsonl", lines)
    assert of_lines(tmp_path / "b.jsonl", lines) == first
    assert of_lines(tmp_path / "c.jsonl", lines[:-1]) != first


def test_arrays_are_the_lists_of_their_numbers():
    arrays = [np.arange(4), np.arange(5)]
    assert fingerprint(as_source(arrays)) == fingerprint(as_source([x.tolist() for x in arrays]))


def test_a_broken_line_is_told_or_can_be_mended_in_its_place(tmp_path):
    """Of 2,000 documents the second is not read: a run that it stops goes on once it is mended."""
    few, many, path = texts(9), texts(2000), tmp_path / "a.jsonl"
    with pytest.raises(DataError, match=r"a\.jsonl, line 6: this is not JSON"):
        of_lines(path, [*few[:5], "{oops", *few[6:]])
    assert of_lines(path, [many[0], "{oops", *many[2:]]) == of_lines(path, many)

"""The script that counts answers which depend on the batch."""

import json

import numpy as np
import pytest

from experiments.reproduction import batch_dependence as measure


@pytest.mark.nightly
def test_a_report_of_answers_and_operations(tmp_path):
    config = measure.Config(
        models=("stories260k",),
        dtypes=("float32",),
        arrangements=("a batch of 4",),
        prompts=3,
        new_tokens=3,
        out=tmp_path / "batch.json",
    )
    measure.main(config)
    report = json.loads(config.out.read_text())
    assert report["device"]
    assert report["command"]
    assert [row["prompts"] for row in report["answers"]] == ["random tokens", "tasks"]
    for row in report["answers"]:
        assert (row["differ"], row["of"], row["first_difference"]) == (0, 3, [])
    (parts,) = report["parts"]
    assert all(differ["1"] == 0 for differ in parts["differ"].values())


def test_where_answers_part():
    assert measure.where([1, 2, 3], [1, 2, 3]) == -1
    assert measure.where([1, 2, 3], [1, 5, 3]) == 1
    assert measure.where([1, 2], [1, 2, 3]) == 2


def test_the_share_that_differs_from_one_row_at_a_time():
    x = np.arange(measure.ROWS, dtype=np.float32)

    def operation(part):
        rows = x[part]
        return rows + (len(rows) > 2) * (rows % 4 == 0)

    assert measure.shares(operation) == {1: 0, 2: 0, 4: 0.25, 16: 0.25, 64: 0.25}

"""Every number of tables 2 to 4 of the DMS paper against the recipes.

`paper_tables.md` holds the tables as printed.
"""

import pathlib

import pytest

from dms_jax.training import recipes

LENGTHS = {"4K": 4096, "8K": 8192}
BATCHES = {"1K": 1024, "256": 256}
COMMON = ("clip", "weight_decay", "beta1", "beta2")


def tables() -> list[list[dict[str, str]]]:
    """Returns the rows of each table as dictionaries by column name."""
    text = (pathlib.Path(__file__).parent / "paper_tables.md").read_text()
    found: list[list[dict[str, str]]] = []
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = cells
            found.append([])
        elif set(line) - set("|-"):
            found[-1].append(dict(zip(columns, cells, strict=True)))
    return found


REASONING, LLAMA, HYPERPARAMETERS = tables()
ROWS = {(row["model"], row["method"]): row for row in LLAMA}


def number(text: str) -> float:
    """# In: 12K  Out: 12000"""
    return 1000 * float(text[:-1]) if text.endswith("K") else float(text)


def check_common(recipe):
    assert {row["hyperparameter"] for row in HYPERPARAMETERS} == set(COMMON)
    for row in HYPERPARAMETERS:
        assert getattr(recipe, row["hyperparameter"]) == number(row["value"])
    assert recipe.trainable == "all"


def stages(recipe):
    """Returns (kind, steps, rate, ratio, batch size) of every stage."""
    return [
        (s.kind, s.steps, s.learning_rate, s.compression_ratio, s.batch_size or recipe.batch_size)
        for s in recipe.stages
    ]


def test_tables_are_complete():
    assert [len(table) for table in tables()] == [3, 5, 4]


@pytest.mark.parametrize("row", REASONING, ids=lambda row: row["model"])
def test_table_2(row):
    reaches_8 = row["rate 4 to 8"] != "-"
    recipe = recipes.dms_paper(8 if reaches_8 else 4, model=row["model"])
    batch = BATCHES[row["batch"]]
    decay = (number(row["decay steps"]), number(row["decay rate"]), 1, BATCHES[row["decay batch"]])
    expected = [
        ("neuron_decay", *decay),
        ("ramp", number(row["steps 1 to 4"]), number(row["rate 1 to 4"]), 4, batch),
    ]
    if reaches_8:
        steps, rate = number(row["steps 4 to 8"]), number(row["rate 4 to 8"])
        expected.append(("ramp", steps, rate, 8, batch))
    assert stages(recipe) == expected
    assert (recipe.sequence_length, recipe.loss) == (LENGTHS["8K"], "distillation")
    check_common(recipe)


@pytest.mark.parametrize("row", LLAMA, ids=lambda row: f"{row['model']} {row['method']}")
@pytest.mark.parametrize("ratio", [2, 4])
def test_table_3(row, ratio):
    if row["method"] == "dms":
        recipe = recipes.dms_paper(ratio, model=row["model"])
    else:
        others = {"llama-2-7b": "llama-2-7b-dms-paper"}  # the DMC paper has a row of that name
        recipe = recipes.dmc_paper(ratio, model=others.get(row["model"], row["model"]))
    expected = [
        ("neuron_decay", number(row["decay steps"]), number(row["decay rate"]), 1, 1024),
        ("ramp", (ratio - 1) * number(row["steps"]), number(row["rate"]), ratio, 1024),
    ]
    if number(row["tuning steps"]):
        rate = number(row["tuning rate"])
        expected.append(("train", number(row["tuning steps"]), rate, 1, 1024))
        assert recipe.stages[-1].final_learning_rate == pytest.approx(number(row["final rate"]))
    assert stages(recipe) == expected
    assert recipe.sequence_length == LENGTHS[row["context"]]
    assert recipe.loss == row["loss"]
    check_common(recipe)

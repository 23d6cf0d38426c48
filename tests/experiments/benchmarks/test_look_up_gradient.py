"""The forms of the look-up's gradient give the same sums."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import look_up_gradient as script


@pytest.mark.nightly
def test_forms_agree_and_are_written(tmp_path):
    config = script.Config(shapes=("tiny",), calls=1, out=tmp_path / "look_up.json")
    rows = script.main(config)
    assert [row["form"] for row in rows] == list(script.FORMS)
    assert all(row["off"] < 1e-6 and row["repeats_its_bits"] for row in rows)
    assert json.loads(config.out.read_text())["rows"] == rows


def test_sums_depend_on_their_order():
    """Otherwise every form repeats its bits."""
    _, gradient = script.draw(64, 8, 4096)
    rows = np.asarray(gradient.astype(jnp.float32)).reshape(-1, 8)
    forth, back = (np.cumsum(each, 0, dtype=np.float32)[-1] for each in (rows, rows[::-1]))
    assert (forth != back).any()

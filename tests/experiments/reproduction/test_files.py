"""Files of run directories: whole or not there; and errors that are unknown."""

import math

import numpy as np
import pytest

from dms_jax.evaluation import Measured
from experiments.reproduction.claims import cells
from experiments.reproduction.evictions import page as evictions
from experiments.reproduction.files import error_text, write_arrays


def test_arrays_that_were_cut_off_while_they_were_written_are_not_there(tmp_path, monkeypatch):
    path = tmp_path / "data" / "0.npz"
    write_arrays(path, a=np.arange(3))
    with np.load(path) as stored:
        assert stored["a"].tolist() == [0, 1, 2]

    def stop(file, **arrays):
        file.write(b"PK")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", stop)
    with pytest.raises(KeyboardInterrupt):
        write_arrays(tmp_path / "data" / "1.npz", a=np.arange(3))
    assert [each.name for each in (tmp_path / "data").glob("*.npz")] == ["0.npz"]


def test_an_error_that_is_unknown_is_said_to_be():
    assert error_text(0.0213, ".2f") == "± 0.02"
    assert error_text(math.nan, ".2f") == error_text(None, ".2f") == "± unknown"
    # Where pages are made of it: read from JSON, of one problem.
    assert evictions._percent({"accuracy": 0.5, "error": None}) == "50.0 ± unknown"
    assert evictions._nats({"difference": 0.25, "error": math.nan}) == "+0.2500 ± unknown"
    assert cells.percent(Measured(0.5, math.nan)) == "50.0 ± unknown"

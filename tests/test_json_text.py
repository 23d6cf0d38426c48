"""Figures as JSON: NaN and infinity become null, and nothing else does."""

import json
import math
import pathlib

import numpy as np
import pytest

from dms_jax.json_text import json_text


def strictly(text):
    """Parses JSON strictly, refusing NaN."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_nan_becomes_null_at_any_depth():
    data = {
        "mean": 1.5,
        "error": math.nan,
        "rows": [{"far": (math.inf, -math.inf, 0.0)}, [np.float64("nan"), np.float64(2.5)]],
        "count": 3,
        "name": "NaN",
        "ended": True,
        "policy": None,
    }
    assert strictly(json_text(data)) == {
        "mean": 1.5,
        "error": None,
        "rows": [{"far": [None, None, 0.0]}, [None, 2.5]],
        "count": 3,
        "name": "NaN",
        "ended": True,
        "policy": None,
    }


def test_layout_equals_that_of_json():
    data = {"a": [1, 2.5], "b": {}}
    assert json_text(data) == json.dumps(data)
    assert json_text(data, indent=1) == json.dumps(data, indent=1)


def test_values_outside_json_are_refused():
    with pytest.raises(TypeError, match="float32"):
        json_text({"loss": np.float32("nan")})
    assert json_text({"out": pathlib.PurePosixPath("a/b")}, default=str) == '{"out": "a/b"}'

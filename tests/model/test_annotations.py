"""The typed test jobs check function arguments by the annotations of both packages."""

import jaxtyping
import numpy as np
import pytest

from dms_jax.sharding import constrain
from pallas_kernels import decode_attention


@pytest.fixture(autouse=True)
def checked(pytestconfig):
    if not pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("runs with --jaxtyping-packages: the first job of `make test`, and at night")


def test_lengths_of_other_rows_are_refused():
    q = np.zeros((2, 1, 4), np.float32)
    pages = np.zeros((3, 2, 4), np.float32)
    tables, lengths = np.zeros((2, 2), np.int32), np.zeros(5, np.int32)
    with pytest.raises(jaxtyping.TypeCheckError, match="lengths"):
        decode_attention(q, pages, pages, tables, lengths, scale=1.0)


def test_non_arrays_are_refused():
    with pytest.raises(jaxtyping.TypeCheckError):
        constrain("no array", "batch")

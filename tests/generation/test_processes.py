"""Engines stay in their process."""

import copy
import pickle

import pytest

from dms_jax.errors import ConfigError
from dms_jax.generation import Engine


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engine_cannot_be_copied_or_pickled(take):
    engine = object.__new__(Engine)
    with pytest.raises(ConfigError, match="cannot be pickled or copied"):
        take(engine)

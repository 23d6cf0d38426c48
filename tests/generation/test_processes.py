"""Engines stay in their process; forked processes, where programs would hang, are refused."""

import copy
import os
import pickle

import pytest

import dms_jax
from dms_jax import compilation
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError
from dms_jax.generation import Engine


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_engine_cannot_be_copied_or_pickled(take):
    engine = object.__new__(Engine)
    with pytest.raises(ConfigError, match="cannot be pickled or copied"):
        take(engine)


def test_process_forked_after_jax_ran_is_refused(monkeypatch):
    monkeypatch.setattr(compilation, "_ran", set())
    compilation.check_process()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            for call in (
                compilation.prepare,
                lambda: dms_jax.initialize(object.__new__(ModelConfig)),
                object.__new__(Engine).warm,
                lambda: dms_jax.load("nothing"),
            ):
                try:
                    call()
                    os.write(write, b"it ran\0")
                except ConfigError as error:
                    os.write(write, f"{error}\0".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        *answers, _ = said.read().split("\0")
    assert len(answers) == 4
    assert all("forked from one in which jax had run" in each for each in answers)
    os.waitpid(child, 0)
    compilation.check_process()  # this one may


def test_process_forked_before_jax_ran_is_allowed(monkeypatch):
    monkeypatch.setattr(compilation, "_ran", set())
    child = os.fork()
    if not child:
        try:
            compilation.check_process()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

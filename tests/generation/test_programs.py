"""The compiler options of compiled programs."""

import jax
import pytest

from dms_jax.generation import programs


def test_xla_knows_the_options_of_a_step():
    """XLA knows the names and values on every platform; it refuses an unknown one like this."""
    step = jax.jit(lambda x: x + 1, compiler_options=programs.GPU_STEP_OPTIONS)
    assert step(1) == 2
    unknown = programs.GPU_STEP_OPTIONS | {"xla_gpu_enable_while_loop_unrolling": "SOMETIMES"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="not a valid enum value"):
        jax.jit(lambda x: x + 2, compiler_options=unknown)(1)


@pytest.mark.parametrize("backend", ["cpu", "gpu"], ids="on {}".format)
def test_options_are_those_of_the_backend(backend, monkeypatch):
    """An unknown option on only one kind of device."""
    program = programs.Program(lambda x: x + 1, gpu_options={"xla_no_such_option": True})
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if backend == "cpu":
        assert program(1) == 2
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        program(1)

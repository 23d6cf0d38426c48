"""Compiler reports are reused only for exactly the same program."""

import jax
import jax.numpy as jnp
import pytest

from tests.support.ahead import compile_ahead

pytestmark = pytest.mark.nightly
SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def lowered(function=jnp.sin, **options):
    return jax.jit(function, **options).lower(SHAPE)


class Counted:
    """A lowered program that counts how often it is compiled."""

    def __init__(self, lowered):
        self.lowered, self.compiled = lowered, 0

    def __getattr__(self, name):
        return getattr(self.lowered, name)

    def compile(self, **options):
        self.compiled += 1
        return self.lowered.compile(**options)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    return tmp_path


def compiled_again(other, target="cpu", options=None) -> bool:
    """Whether a program is compiled again after `lowered()` for "cpu" was."""
    compile_ahead(lowered(), "cpu")
    program = Counted(other)
    compile_ahead(program, target, options)
    return program.compiled > 0


def test_report_is_stored():
    first, compiled = compile_ahead(lowered(), "cpu"), lowered().compile()
    assert first.text == compiled.as_text()
    analysis = compiled.memory_analysis()
    assert first.memory.argument_size_in_bytes == analysis.argument_size_in_bytes == 4 * 64
    assert first.memory.temp_size_in_bytes == analysis.temp_size_in_bytes
    assert not compiled_again(lowered())
    assert compile_ahead(lowered(), "cpu") == first


@pytest.mark.parametrize(
    "change",
    [
        lambda: dict(other=lowered(jnp.cos)),
        lambda: dict(other=lowered(donate_argnums=0)),
        lambda: dict(other=lowered(compiler_options={"xla_cpu_enable_fast_math": True})),
        lambda: dict(other=lowered(), options={"xla_cpu_enable_fast_math": True}),
        lambda: dict(other=lowered(), target="v5p:2x2x1"),
    ],
    ids=["program", "donation", "options of the function", "options", "target"],
)
def test_changed_programs_compile_again(change):
    assert compiled_again(**change())


def test_compiler_flags_are_part_of_the_key(monkeypatch, optimized):
    compile_ahead(lowered(), "cpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    other = Counted(lowered())
    compile_ahead(other, "cpu")
    assert other.compiled == 1
    jax.config.update("jax_disable_most_optimizations", True)
    quick = Counted(lowered())
    compile_ahead(quick, "cpu")
    assert quick.compiled == 1


def test_nothing_is_stored_without_a_cache(monkeypatch, folder):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    for _ in range(2):
        program = Counted(lowered())
        compile_ahead(program, "cpu")
        assert program.compiled == 1
    assert not list(folder.iterdir())

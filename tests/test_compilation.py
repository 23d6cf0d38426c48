"""The compilation cache: its place, and messages about compiling."""

import io
import itertools
import logging
import pathlib
import pwd

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

import dms_jax
from dms_jax import compilation, terminal

STORIES = pathlib.Path(dms_jax.__file__).parent / "assets/stories260k"

NAMES = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """Turns jax's cache off and moves the home directory; restores the settings."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(compilation.SWITCH, raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    yield monkeypatch
    for name, value in before.items():
        jax.config.update(name, value)


def kept_in() -> str | None:
    compilation.prepare()
    return jax.config.jax_compilation_cache_dir


def test_cache_is_in_the_home_directory(settings, tmp_path):
    del settings
    found = pathlib.Path(kept_in() or "")
    assert found.parent == tmp_path / ".cache" / "dms_jax"  # one folder per kind of processor
    assert found.is_dir()
    assert found.stat().st_mode & 0o077 == 0
    assert jax.config.jax_compilation_cache_max_size == compilation.MOST_BYTES


@pytest.mark.parametrize("place", ["elsewhere", "~/kept"])
def test_environment_variable_moves_cache(settings, tmp_path, place):
    settings.setenv(compilation.SWITCH, place.replace("elsewhere", str(tmp_path / "elsewhere")))
    assert pathlib.Path(kept_in() or "").parent == tmp_path / place.removeprefix("~/")


@pytest.mark.parametrize("off", ["off", "OFF", "0", "no", "file", "/proc/self", "no home"])
def test_no_cache_if_off_or_unwritable(settings, tmp_path, off):
    """Turned off, or on an unwritable disk, where jax would warn about every program."""
    (tmp_path / "file").write_text("")
    settings.chdir(tmp_path)
    settings.setenv(compilation.SWITCH, off)
    settings.setattr(jax, "default_backend", lambda: "gpu")  # a CPU has a directory below
    if off == "no home":  # containers run as users whom the system does not know
        settings.delenv(compilation.SWITCH)
        settings.delenv("HOME")
        settings.setattr(pwd, "getpwuid", {}.__getitem__)
    assert kept_in() is None


def test_settings_of_jax_take_precedence(settings, tmp_path):
    before = jax.config.jax_compilation_cache_max_size
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    settings.setenv(compilation.SWITCH, str(tmp_path / "elsewhere"))
    assert kept_in() == str(tmp_path / "own")
    assert jax.config.jax_compilation_cache_max_size == before


def test_long_compilations_are_reported(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="dms_jax")
    with compilation.reported("Nothing"):
        pass
    monkeypatch.setattr(compilation, "REPORTED_SECONDS", 1e-9)
    with compilation.without_jax_cache(), compilation.reported("Generation"):
        jax.jit(lambda x: x * 3 + 41)(1)  # a slow earlier run may have written it there
    (record,) = caplog.records
    assert record.getMessage().startswith("Generation: 1 program compiled in ")


def test_cache_hits_are_counted_separately(settings, tmp_path):
    """A second process finds them, and so does this one, which compiles a new function anew."""
    settings.setenv(compilation.SWITCH, str(tmp_path))
    compilation_cache.reset_cache()
    compilation.prepare()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    said = []
    for constants in ((47,), (47, 53, 59), (47,)):
        with compilation.watched() as made:
            for constant in constants:
                jax.jit(lambda x, constant=constant: x * 7 + constant)(np.float32(1))
        said.append((made.compiled, made.read, str(made)))
    compilation_cache.reset_cache()
    assert said == [
        (1, 0, "1 program compiled"),
        (2, 1, "2 programs compiled and 1 read from the cache"),
        (0, 1, "1 program read from the cache"),
    ]
    assert made.seconds > 0


def test_overlapping_compilations_count_once():
    """Two threads that compile for 4 s each within 5 s compile for 5 s of them, not for 8."""
    assert compilation.covered([(0.0, 4.0), (1.0, 5.0)]) == 5.0
    assert compilation.covered([(6.0, 7.0), (0.0, 4.0), (1.0, 2.0)]) == 5.0
    assert compilation.covered([]) == 0.0


def count_to_three(monkeypatch, seconds: float) -> None:
    """Counts three programs, each after a pause."""
    now = itertools.count(0.0, seconds)
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with compilation.counted(3) as count:
        for _ in range(3):
            count()


def test_a_file_gets_a_line_every_ten_seconds(monkeypatch, capsys):
    count_to_three(monkeypatch, 6.0)
    assert capsys.readouterr().err == "Compiling: 2 of 3 programs\n"


def test_a_short_wait_writes_nothing(monkeypatch, capsys):
    count_to_three(monkeypatch, 0.6)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_the_count_until_the_end(monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    console = Console(file=shown, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr(compilation, "console_for_progress", lambda *, stderr: console)
    with compilation.counted(3, "Loading", "array") as count:
        count()
        count()
    assert "Loading: 2/3 arrays" in shown.getvalue()

"""Runs commands and scripts: parses settings, prints errors as one line, returns an exit status.

`run` parses a dataclass of settings, calls the command with it, and returns the exit status:

    0    done
    1    the run failed: training diverged, a device ran out of memory, another process failed
    2    wrong call (options, data, files): one line on standard error says why
    130  interrupted
"""

import os
import pathlib
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

import dms_jax
from dms_jax.command_line import help_texts
from dms_jax.command_line.spelling import spelled_as_options
from dms_jax.errors import EngineFailedError

FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
# Failures of the run, not mistakes in the call.
_OF_THE_RUN = (
    dms_jax.OutOfMemoryError,
    dms_jax.TrainingDivergedError,
    dms_jax.OtherProcessError,
    EngineFailedError,
)


def run(
    main: Callable[[Any], Any],
    settings: type | Mapping[str, tuple[str, Any]],
    *,
    description: str | None,
    program: str | None = None,
    arguments: Sequence[str] | None = None,
    interrupted: str = "Interrupted.",
) -> int:
    """Parses the settings and calls the command with them.

    Args:
      main: the command, a function of the settings; an int result is the exit status.
      settings: the dataclass of settings, or presets, name -> (description, instance); the
        first is the default.
      description: text of --help, the docstring of the module.
      program: name in --help; by default that of the running script.
      arguments: by default the command line's.
      interrupted: message after Ctrl-C, such as how to resume.

    Returns:
      The exit status.

    Raises:
      SystemExit: for `--help` (status 0) and for unknown options (status 2).
    """
    called = running_program() if program is None else program
    given = list(sys.argv[1:] if arguments is None else arguments)

    def call() -> Any:
        if isinstance(settings, Mapping):
            config = _from_starting_point(settings, called, description, given)
        else:
            config = _parsed(settings, called, description, given)
        with spelled_as_options(type(config)):
            return main(config)

    return status_of(call, interrupted)


def _from_starting_point(
    points: Mapping[str, tuple[str, Any]], program: str, description: str | None, given: list[str]
) -> Any:
    """Parses the name of a preset and the options that change it.

    Raises:
      ConfigError: the preset is unknown, or there are no arguments.
      SystemExit: for `--help` (status 0) and for unknown options (status 2).
    """
    if given and given[0] in help_texts.ASKED:
        help_texts.show(description, given)
        help_texts.show_points(program, points)
        sys.exit(0)
    there_are = f"there are {', '.join(points)} ({program} --help)."
    if not given:
        raise dms_jax.ConfigError(f"{program} needs a preset or options; {there_are}")
    named = not given[0].startswith("-")
    name, options = (given[0], given[1:]) if named else (next(iter(points)), given)
    if name not in points:
        raise dms_jax.ConfigError(f"{name!r} is not a preset of {program}; {there_are}")
    what, start = points[name]
    how: dict[str, Any] = dict(default=start, config=(tyro.conf.AvoidSubcommands,))
    try:
        return _parsed(type(start), f"{program} {name}", what, options, **how)
    except SystemExit as end:
        if end.code and not named:
            print(f"The default preset is {name}; {there_are}", file=sys.stderr)
        raise


def _parsed(
    settings: type, program: str, description: str | None, given: list[str], **how: Any
) -> Any:
    """Parses the settings.

    Raises:
      SystemExit: for `--help` (status 0) and for unknown options (status 2).
    """
    help_texts.show(description, given)
    registry = help_texts.REGISTRY
    return tyro.cli(settings, prog=program, description="", args=given, registry=registry, **how)


def status_of(call: Callable[[], Any], interrupted: str = "Interrupted.") -> int:
    """Calls a function and returns the exit status; prints errors and warnings as one line each.

    If standard output is closed (`dms-jax policies | head`), writes nothing more and returns 1.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say
            status = call()
            sys.stdout.flush()
    except BrokenPipeError:
        if not _output_is_closed():
            raise
        return FAILED
    except dms_jax.DmsJaxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED if isinstance(error, _OF_THE_RUN) else WRONG_CALL
    except KeyboardInterrupt as stopped:
        why = str(stopped)
        said = (why[:1].upper() + why[1:], interrupted)
        print(". ".join(filter(None, said)), file=sys.stderr)
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _output_is_closed() -> bool:
    """Whether standard output is closed; if so, discards buffered output."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _say(message: Warning | str, *where: Any) -> None:
    """Shows a warning as one line, without its location in the library."""
    print(f"Warning: {message}", file=sys.stderr)


def running_program() -> str:
    """Returns the program as typed: `dms-jax`, or `python -m experiments.benchmarks.serving`."""
    name = pathlib.Path(sys.argv[0]).name
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if name == "dms-jax" or (spec is not None and spec.name == "dms_jax.command_line.__main__"):
        return "dms-jax"
    if spec is None:
        return f"python {name}"
    return f"python -m {spec.name.removesuffix('.__main__')}"


def command(*, without: Sequence[str] = ()) -> str:
    """Returns the running command, for a report.

    Args:
      without: options to omit with their values, such as the path of the report.
    """
    kept, skip = [], False
    for argument in sys.argv[1:]:
        name, _, value = argument.partition("=")
        if not skip and name not in without:
            kept.append(argument)
        skip = not skip and name in without and not value
    return " ".join([running_program(), shlex.join(kept)]).strip()

"""Errors of the library in the words of the command line: an option in place of an argument.

Two places of a message name an argument: what is in backquotes, and the beginning of an error that
carries it (`DmsJaxError.argument`). The rest stays, for it quotes paths and texts:

    # In: "... (`batch_size` 4, not 2) ... `restart_from=6`"    "Sampling: top_p must be ..."
    # Out: "... (--batch-size 4, not 2) ... --restart-from 6"   "--top-p must be ..."
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping

import tyro

from dms_jax.errors import DmsJaxError

# Whose arguments are options of the same name; others, such as those of tasks, may mean another.
_OWNERS = (
    *("", "Sampling", "EngineOptions", "Serving", "Recipe", "Stage", "LowRank", "RunOptions"),
    *("recipes", "dms_self_taught", "evaluate", "evaluate_choices", "hyperscale", "plan"),
)
_ARGUMENTS = {"memory_gb": "memory"}  # of options that are named otherwise
_NAMED = re.compile(r"`(\w+)(?:=([^`]+))?`")
_POLICY = re.compile(r"\bpolicy \([^()]*\)")  # what `differences` says of one
_CHANGED = re.compile(r"`(\w+)` (?=\S)")


@contextlib.contextmanager
def spelled_as_options(settings: type) -> Iterator[None]:
    """Raises errors that name arguments with the options of these settings instead."""
    try:
        yield
    except DmsJaxError as error:
        text = spelled(error, options_of(settings))
        if text == str(error):
            raise
        told = type(error)(text)
        told.finished = error.finished
        raise told from error


def options_of(settings: type) -> dict[str, str]:
    """Returns the option of each argument that a dataclass of settings has a field for.

    # Out: {"top_p": "--top-p", ...}; of a dataclass within, "problems": "--solve.problems", and
    #      the name itself where two of them have it
    """
    found: dict[str, str] = {}
    for field in dataclasses.fields(settings):
        option = f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(field.type) and isinstance(field.type, type):
            for name, own in options_of(field.type).items():
                found[name] = f"{option}.{own.removeprefix('--')}" if name not in found else name
        elif tyro.conf.Positional not in getattr(field.type, "__metadata__", ()):
            found[_ARGUMENTS.get(field.name, field.name)] = option
    return found


def spelled(error: DmsJaxError, options: Mapping[str, str]) -> str:
    """Returns the message of an error with options in place of arguments."""
    text = str(error)
    owner, _, name = error.argument.rpartition(": ")
    option = options.get(name) if owner in _OWNERS else None
    if error.argument.startswith("--"):
        option = error.argument
    if option is not None and text.startswith(error.argument):
        must, got, rest = text.removeprefix(error.argument).partition(", got ")
        must = must.replace(" None or", "").replace(" or None", "")  # nobody types it
        text = f"{option}{must}{got}{rest}"
    if "options" in options:
        text = _POLICY.sub(lambda part: _CHANGED.sub(r"--options \1=", part[0]), text)
    return _NAMED.sub(lambda found: _option(found, options), text)


def _option(found: re.Match[str], options: Mapping[str, str]) -> str:
    """Returns an argument in backquotes as an option, or as it is if there is none."""
    name, value = found.groups()
    if name not in options:
        return found[0]
    return options[name] if value is None else f"{options[name]} {value.strip("'")}"

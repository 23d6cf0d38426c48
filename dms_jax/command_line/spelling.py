"""Rewrite the library's errors so that they name options of a command, not arguments.

A message names an argument in two places: in backquotes, and at its start if the error carries the
argument (`DmsJaxError.argument`). The rest may quote paths and texts, so it is left alone:

    # In: "... (`batch_size` 4, not 2) ... `restart_from=6`"    "Sampling: top_p must be ..."
    # Out: "... (--batch-size 4, not 2) ... --restart-from 6"   "--top-p must be ..."
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping

import tyro

from dms_jax.errors import DmsJaxError

# Owners whose arguments are options of the same name. Arguments of others, such as tasks, may mean
# something else.
_OWNERS = (
    *("", "Sampling", "EngineOptions", "Serving", "Recipe", "Stage", "LowRank", "RunOptions"),
    *("recipes", "dms_self_taught", "evaluate", "hyperscale", "plan"),
)
_ARGUMENTS = {"memory_gb": "memory"}  # option -> an argument with another name
_NAMED = re.compile(r"`(\w+)(?:=([^`]+))?`")
_POLICY = re.compile(r"\bpolicy \([^()]*\)")  # the differences of a policy (`differences`)
_CHANGED = re.compile(r"`(\w+)` (?=\S)")


@contextlib.contextmanager
def spelled_as_options(settings: type) -> Iterator[None]:
    """Rewrites errors of the block to name the options of these settings."""
    try:
        yield
    except DmsJaxError as error:
        error.args = (spelled(error, options_of(settings)),)
        raise


def options_of(settings: type) -> dict[str, str]:
    """Returns argument -> option for the fields of a dataclass of settings.

    # Out: {"top_p": "--top-p", ...}; for a nested dataclass "problems": "--solve.problems", and the
    #      name itself if two nested dataclasses have it
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
    """Returns the error's message, naming options where it named arguments."""
    text = str(error)
    owner, _, name = error.argument.rpartition(": ")
    option = options.get(name) if owner in _OWNERS else None
    if error.argument.startswith("--"):
        option = error.argument
    if option is not None and text.startswith(error.argument):
        must, got, rest = text.removeprefix(error.argument).partition(", got ")
        must = must.replace(" None or", "").replace(" or None", "")  # not something to type
        text = f"{option}{must}{got}{rest}"
    if "options" in options:
        text = _POLICY.sub(lambda part: _CHANGED.sub(r"--options \1=", part[0]), text)
    return _NAMED.sub(lambda found: _option(found, options), text)


def _option(found: re.Match[str], options: Mapping[str, str]) -> str:
    """Returns the option of an argument in backquotes; unchanged if there is none."""
    name, value = found.groups()
    if name not in options:
        return found[0]
    return options[name] if value is None else f"{options[name]} {value.strip("'")}"

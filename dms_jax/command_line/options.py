"""Parses models, policies and tasks by name, and name=value options."""

import dataclasses
import inspect
import json
import math
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

import dms_jax
from dms_jax import assets
from dms_jax.checks import Count, check, guess
from dms_jax.data.tasks import Arithmetic, LinearEquation, Task, WordChain
from dms_jax.evaluation import Chat
from dms_jax.evaluation.sandbox import Sandbox
from dms_jax.evaluation.tasks import (
    AIME,
    GPQA,
    GSM8K,
    MATH500,
    RULER,
    HumanEval,
    Mathematics,
    ruler_tasks,
)
from dms_jax.evaluation.tasks.files import FileTask
from dms_jax.training.display import short_of_target

SHIPPED = ("stories260k", "reasoner-11m")
ADAPTERS = ("smollm2-135m-instruct-dms", *assets.BASES)
TASKS: dict[str, tuple[type[Task], ...]] = {
    task.name: (task,) for task in (LinearEquation, Arithmetic, WordChain)
}
TASKS["reasoning"] = (LinearEquation, Arithmetic, WordChain)
TASKS |= {task.name: (task,) for task in (GSM8K, MATH500, AIME, GPQA, Mathematics, HumanEval)}


def find_model(name: str) -> str | pathlib.Path:
    """Returns the path or hub id of --model, which may be the name of a shipped model.

    Raises:
      ConfigError: the name is that of a shipped adapter; or the path does not exist, and the name
        resembles a shipped model's.
    """
    return _shipped("--model", name, SHIPPED)


def find_adapter(name: str | None) -> str | pathlib.Path | None:
    """Returns the path of --adapter, which may be the name of a shipped adapter.

    Raises:
      ConfigError: the path does not exist, and the name resembles a shipped adapter's.
    """
    return None if name is None else _shipped("--adapter", name, ADAPTERS)


def find_both(
    model: str, adapter: str | None
) -> tuple[str | pathlib.Path, str | pathlib.Path | None]:
    """Returns --model and --adapter; a shipped adapter as --model is its base with the adapter.

    Raises:
      ConfigError: as `find_model` and `find_adapter`; or --model and --adapter are adapters.
    """
    base = assets.BASES.get(model)
    if base is None:
        return find_model(model), find_adapter(adapter)
    if adapter is not None:
        raise dms_jax.ConfigError(
            f"--model {model} is {base} with its adapter; leave out --adapter, or give --model "
            f"{base}."
        )
    return find_model(base), find_adapter(model)


def shipped(name: str) -> pathlib.Path:
    """Returns the directory of a shipped model or adapter; a wheel downloads large ones first.

    Raises:
      DataError: it is not on this machine and cannot be downloaded.
    """
    if assets.find(name) is None:
        assets.fetch(name, tell=lambda text: print(f"Fetching {text}", file=sys.stderr))
    return assets.path(name)


def _shipped(option: str, name: str, names: Sequence[str]) -> str | pathlib.Path:
    if name in names:
        return shipped(name)
    if name in SHIPPED + ADAPTERS and not pathlib.Path(name).exists():
        kind = "a model" if name in SHIPPED else "an adapter"
        if base := assets.BASES.get(name, name if name in SHIPPED else None):
            raise dms_jax.ConfigError(f"{option} {name}: that is {kind}; give --model {base}.")
        raise dms_jax.ConfigError(f"{option} {name}: that is {kind}; give --adapter {name}.")
    beginning = [each for each in names if name and each.startswith(name.lower())]
    meant = guess(beginning[0] if beginning else name, names)
    if meant and "/" not in name and not pathlib.Path(name).exists():
        raise dms_jax.ConfigError(
            f"{option} {name}{meant}: there is no such file or directory; what ships is "
            f"{', '.join(names)}."
        )
    return name


def load_model(
    name: str, adapter: str | None, dtype: str | None, mesh: jax.sharding.Mesh | None = None
) -> dms_jax.LanguageModel:
    """Loads --model with --adapter, merged; warns if its training ended short of the ratio."""
    found, beside = find_both(name, adapter)
    for each in filter(None, (found, beside)):
        tell_if_short(each)
    return dms_jax.load(found, dtype=dtype, adapter=beside, merge=True, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class Devices:
    """Placement of a model and its sequences on the devices of this machine."""

    data_shards: int = 1
    """Groups of devices, each with all weights and a share of the sequences and of the cache."""
    model_shards: int = 1
    """Devices over which each layer is split, in each of --data-shards."""

    def make_mesh(self) -> jax.sharding.Mesh | None:
        """The mesh; None for one device.

        Raises:
          ConfigError: there are too few devices, or a number is malformed.
        """
        check_devices(data_shards=self.data_shards, model_shards=self.model_shards)
        if self.data_shards == self.model_shards == 1:
            return None
        return dms_jax.make_mesh(self.data_shards, self.model_shards)


def check_devices(**shards: int) -> None:
    """Raises ConfigError, naming the options, if shards need more devices than there are."""
    given = {f"--{name.replace('_', '-')}": shard for name, shard in shards.items()}
    count = math.prod(check(option, each, Count) for option, each in given.items())
    if count > 1 and count > jax.device_count():  # one device: leave jax's backends alone
        asked = " x ".join(f"{option} {each}" for option, each in given.items() if each > 1)
        raise dms_jax.ConfigError(f"{asked} needs {count} devices; there are {jax.device_count()}.")


def tell_if_short(place: str | pathlib.Path) -> None:
    """Warns if the training of a model or an adapter ended short of its ratio."""
    if (short := short_of_target(pathlib.Path(place).expanduser())) is not None:
        warnings.warn(
            f"{place} stayed short of its target: its training ended at ratio {short[0]:.2f} of "
            f"{short[1]:.2f}, so the cache holds more. Train it longer: dms-jax retrofit with more "
            "--tokens.",
            stacklevel=2,
        )


def read_policy(name: str | None, options: Sequence[str]) -> dms_jax.policies.Policy | None:
    """Returns the policy of --policy and --options; None without --policy."""
    if name is None:
        if options:
            raise dms_jax.ConfigError("--options belong to a policy; name it with --policy.")
        return None
    return dms_jax.policies.from_dict({**read_options(options), "name": name})


def on_checkpoint(
    policy: dms_jax.policies.Policy | None, options: Mapping[str, Any], own: dms_jax.policies.Policy
) -> dms_jax.policies.Policy | None:
    """Merges a named policy with the one that a checkpoint declares.

    If both are of the same kind, missing options are those of the checkpoint, which was trained
    with them.

    Args:
      policy: the named policy; None for the checkpoint's.
      options: the given options.
      own: the policy that the checkpoint declares.
    """
    if policy is None or type(policy) is not type(own):
        return policy
    trained, given = (getattr(each, "window", None) for each in (own, policy))
    if own.retrofit.needed and "window" in options and trained != given:
        warnings.warn(
            f"--options window={given}: the model was trained for window={trained}, and its "
            f"decisions may not fit another. Leave the option out to run it as trained.",
            stacklevel=2,
        )
    return dms_jax.policies.from_dict({**own.to_dict(), **options})


def read_chat(
    *, asked: bool, system: str | None, template: Sequence[str], by: str = "--chat"
) -> Chat | None:
    """Returns the chat options; None for plain text prompts.

    Args:
      asked: whether --chat is given.
      system: --system.
      template: --template, as name=value.
      by: how a chat is asked for.

    Raises:
      ConfigError: --system or --template is given without --chat.
    """
    if asked:
        return Chat(system=system, variables=read_options(template, "--template"))
    for option, given in (("system", system), ("template", template)):
        if given:
            raise dms_jax.ConfigError(f"--{option} is for a chat: give {by} too.")
    return None


def read_tasks(
    name: str, options: Sequence[str], *, allow_code: bool = False, others: Sequence[str] = ()
) -> list[Task]:
    """The tasks of a name, each with the options that apply to it.

    Args:
      name: the name.
      options: options as written on a command line.
      allow_code: whether tasks may run model-written code in a sandbox.
      others: names that the command takes besides these tasks.
    """
    fields = read_options(options, "--task-options")
    if name == "ruler":
        return list(_ruler(fields))
    if name not in TASKS:
        known = [*TASKS, "ruler", *others]
        file = ""
        if os.path.exists(name):  # False for a name that is too long for a file
            file = f" A task reads a file: --task mathematics --task-options path={name}."
        raise dms_jax.ConfigError(
            f"--task {name!r}{guess(name, known)} is none of {', '.join(known)}.{file}"
        )
    fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
    known = {
        task: {field.name for field in dataclasses.fields(task)} & fields.keys()
        for task in TASKS[name]
    }
    unknown = fields.keys() - set().union(*known.values())
    if unknown:
        raise dms_jax.ConfigError(f"--task {name} has no option {', '.join(sorted(unknown))}.")
    if issubclass(TASKS[name][0], FileTask) and "path" not in fields:
        raise dms_jax.ConfigError(f"--task {name} reads a file: --task-options path=FILE.")
    if name == HumanEval.name:
        fields["sandbox"] = _sandbox(fields, allow_code)
        known[HumanEval].add("sandbox")
    return [task(**{key: fields[key] for key in keys}) for task, keys in known.items()]


def _sandbox(fields: Mapping[str, Any], allow_code: bool) -> Sandbox:
    """Returns the sandbox of a programming task, with the limits of `sandbox=`."""
    if not allow_code:
        raise dms_jax.ConfigError(
            "--task humaneval judges answers by running them: code that a model wrote would run on "
            "this machine. Allow it, in a sandbox, with --allow-code."
        )
    limits = fields.get("sandbox", {})
    if not isinstance(limits, dict):
        raise dms_jax.ConfigError(
            'sandbox= takes limits as a JSON object, such as sandbox={"seconds": 20}, got '
            f"{limits!r}."
        )
    return Sandbox(**limits)


def _ruler(fields: dict[str, Any]) -> Sequence[Task]:
    """Returns the RULER task named by `task=`, or all tasks whose data is given."""
    if "task" in fields:
        return [RULER(**fields)]
    check_names("--task-options", fields, inspect.signature(ruler_tasks).parameters)
    return ruler_tasks(**fields)


def read_files(tasks: Sequence[Task], problems: int | None) -> None:
    """Reads the files of tasks, so that their errors come before a long load.

    Raises:
      DataError: a file is missing or malformed, or holds fewer problems.
    """
    for task in tasks:
        if isinstance(task, FileTask):
            task.problem("test", (problems or 1) - 1)


def read_options(options: Sequence[str], named: str = "--options") -> dict[str, Any]:
    """Reads name=value pairs or one JSON object, given after the option `named`."""
    fields: dict[str, Any] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if option.lstrip().startswith("{"):
            fields |= _object(option, named)
        elif separator:
            fields[name.strip()] = _value(value)
        else:
            raise dms_jax.ConfigError(f"{named} takes name=value or a JSON object, got {option!r}.")
    return fields


def _object(text: str, named: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise dms_jax.ConfigError(f"{named} {text!r} is not a JSON object: {error}") from error


def _value(text: str) -> Any:
    """Parses a value as JSON; other values are text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_bytes(option: str, text: str) -> float | None:
    """Parses a number of bytes with its unit; None for "off".

    # In: "4GB"  Out: 4e9

    Raises:
      ConfigError: the text is neither.
    """
    if text.lower() == "off":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise dms_jax.ConfigError(f"{option} takes bytes (500MB, 4GB) or off, got {text!r}.")
    units = ["", "k", "m", "g", "t"]
    return float(found[1]) * 1000 ** units.index(found[2].lower())


def check_names(option: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ConfigError for unknown names, and suggests the nearest known one."""
    known = list(known)
    if unknown := [name for name in names if name not in known]:
        raise dms_jax.ConfigError(
            f"{option} {' '.join(unknown)}{guess(unknown[0], known)}: there are {', '.join(known)}."
        )

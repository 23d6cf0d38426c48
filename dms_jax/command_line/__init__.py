"""The command line: `dms-jax COMMAND`, or `python -m dms_jax.command_line COMMAND`.

Each command is a module of this package with a dataclass of settings, `Config`, which tyro fills
from the command line, and a function `main` that takes it. A module's `PRESETS` are named starting
points: the name comes before the options, and the first one is the default. Exit statuses are in
`running`. Listing the commands imports none of them.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from dms_jax.errors import ConfigError

COMMANDS = {
    "generate": "complete prompts from a small cache, streamed",
    "chat": "talk with a model whose turns share one small cache",
    "serve": "answer requests over HTTP as OpenAI's and Anthropic's APIs do",
    "retrofit": "train a checkpoint to run with a small cache",
    "evaluate": "score answers, or the loss on a text, under one policy or several",
    "hyperscale": "longer answers and more chains at equal reads and equal peak",
    "plan": "memory and time of a retrofit on a machine that you do not have",
    "policies": "the cache policies, and the options of each",
    "demo": "retrofit a small model, watch a larger one reason; four minutes",
}
WRONG_CALL = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status (see `running`).

    Args:
      arguments: by default the command line's.

    Raises:
      SystemExit: for `--help` (status 0) and for unknown options (status 2).
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("--help", "-h"):
        return _shown(overview())
    if name == "--version":
        import dms_jax

        return _shown(dms_jax.__version__)
    if name not in COMMANDS:
        from dms_jax.checks import guess

        known = ", ".join(COMMANDS)
        message = f"{name!r} is not a command{guess(name, COMMANDS)}; there are {known}."
        print(f"{ConfigError.__name__}: {message}", file=sys.stderr)
        return WRONG_CALL
    # Imported here: the list above needs no settings parser.
    from dms_jax.command_line import running

    module = importlib.import_module(f"{__name__}.{name}")
    return running.run(
        module.main,
        getattr(module, "PRESETS", module.Config),
        description=described(module),
        program=f"dms-jax {name}",
        arguments=rest,
        interrupted=getattr(module, "INTERRUPTED", "Interrupted."),
    )


def _shown(text: str) -> int:
    """Prints a text; returns 0, or 1 if standard output is closed (`dms-jax --help | head -1`)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        return 1
    return 0


def described(module: ModuleType) -> str:
    """Returns a command's docstring, with the list of policies if it takes any policy."""
    text = (module.__doc__ or "").strip()
    types = {field.name: field.type for field in dataclasses.fields(module.Config)}
    if types.get("policy") != str | None and "systems" not in types:
        return text
    from dms_jax.command_line import policy_options

    return f"{text}\n\n{policy_options.brief()}"


def overview() -> str:
    """Returns the text of `dms-jax --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: dms-jax COMMAND [options]",
            "",
            "Generate with a small KV cache.",
            "",
            *lines,
            "",
            "dms-jax COMMAND --help shows the options of a command.",
        ]
    )

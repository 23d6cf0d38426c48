"""The commands that measured what a page shows, as its reader would give them."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Any

from experiments.reproduction.files import command
from experiments.reproduction.real.settings import Config

SCRIPT = "python -m experiments.reproduction.real_models"
RESULTS = "experiments/results/real_models/results.json"
TAUGHT = "runs/three-commands/run"  # what `three_commands.sh runs/three-commands` leaves
# Where things lie with the reader.
_PLACES = {"qwen": "qwen.gguf", "smollm2": "smollm2.gguf", "data": "data", "self_taught": TAUGHT}
# What says when, how long and in which order calls worked, and what their page was of.
_OF_A_CALL = {"out", "pages", "pack", "also", "join", "only", "run", "earlier", "deadline_minutes"}
_OF_A_CALL |= {"parts"}
_TOGETHER = 88  # characters of an option with its values that stay on a line


def jobs_command(config: Config, parts: Sequence[str] = ()) -> str:
    """The command of a plan without its page: every setting that is not the default.

    # In: Config(qwen="/models/q.gguf", lanes=8)
    # Out: "python -m ... --qwen qwen.gguf --lanes 8 --only jobs"

    Args:
      config: the plan.
      parts: the jobs of it that were done, where not all were wanted.
    """
    options = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _OF_A_CALL and value != field.default:
            options.append(_option(field.name, _PLACES.get(field.name, value)))
    options += [_option("parts", tuple(parts))] if parts else []
    return " ".join([SCRIPT, *options, "--only jobs"])


def _option(name: str, value: Any) -> str:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    values = value if isinstance(value, tuple) else (value,)
    return f"--{name} {shlex.join(map(str, values))}"


def again(
    runs: dict[int, list[str]],
    judged: str = "",
    main: int | None = None,
    three: dict[str, Any] | None = None,
) -> str:
    """How the runs of a page are repeated, the last one first.

    Args:
      runs: number of a run -> the commands of its plans.
      judged: what the verdicts of the page are about, if it was decided.
      main: number of the run that measured it; later ones add to its page. The last one if None.
      three: the three commands as they were timed, and in which run; None if they were not.
    """
    parts = [_OPENING]
    if len(runs) > 1:
        parts[0] += (
            " What a run did not name was as the library and this script had it at its date."
        )
    for number in sorted(runs, reverse=True):
        decided = judged if number >= (main or max(runs)) else ""
        parts += [f"Run {number}:" if len(runs) > 1 else "", _run(number, runs, decided)]
        if any("--self-taught" in line for line in runs[number]):
            parts += [_TAUGHT, _three_commands(number)]
        elif three is not None and three.get("run") == number:
            parts += [_TIMED, _three_commands(number, three["command"])]
    return "\n\n".join([*filter(None, parts), "`results.json` holds every figure."])


_OPENING = (
    "The library is installed; the models and the data are the reader's own (`--help` says which "
    "files, and the first lines of this page which models). `--processes 2` gives two GPUs a "
    "worker each. `--deadline-minutes 20` ends a command after that time, and the same command "
    "goes on where it was cut off; `--only list` says what the jobs are called, and `--parts` "
    "chooses among them."
)
_TAUGHT = (
    "Its lessons and its first retrofit are those of the three commands, which were timed on "
    "another GPU beside it (`CUDA_VISIBLE_DEVICES` gives each command its own). That GPU then "
    "joined:"
)
_TIMED = (
    "The three commands were timed beside it, on a GPU of their own (`CUDA_VISIBLE_DEVICES` gives "
    "each command its own; `WHEEL` is the library's wheel):"
)


def _run(number: int, runs: dict[int, list[str]], judged: str) -> str:
    """The commands of a run, and that of its page, which may judge what its plan does not name."""
    folders = [_folder(number, place) for place in range(len(runs[number]))]
    told = zip(runs[number], folders, strict=True)
    lines = [f"{line} --out {folder}" for line, folder in told]
    page = f"{SCRIPT} --only report --run {number} --out {folders[0]}"
    page += f" --also {' '.join(folders[1:])}" if folders[1:] else ""
    page += f" --earlier {RESULTS}" if number > min(runs) else ""
    page += f" --judged {judged}" if judged and f"--judged {judged} " not in runs[number][0] else ""
    lines.append(f"{page} --pages {folders[0]}/page")
    return "\n".join(map(_block, lines))


def _three_commands(number: int, timed: str | None = None) -> str:
    """The commands that time the three, and what takes them in.

    Args:
      number: of the run that they belong to.
      timed: the third command as it was given; None for the planned one, whose GPU then joins.
    """
    folder, three = _folder(number), TAUGHT.removesuffix("/run")
    lines = ["    export QWEN=$PWD/qwen.gguf QUESTIONS=$PWD/data/gsm8k/train.jsonl"]
    if timed is not None:
        _, _, flags = timed.partition(" --out run ")
        flags = flags.removesuffix(" --model model.gguf")
        lines.append(_block(f'export FLAGS="{flags}"'))
    lines.append(f"    bash experiments/reproduction/real/three_commands.sh {three}")
    lines += [] if timed else [_block(f"{SCRIPT} --join --out {folder}")]
    lines.append(f"    mkdir -p {folder}/three && cp {three}/three.json {folder}/three/")
    return "\n".join(lines)


def _folder(number: int, place: int = 0) -> str:
    """Run directory of one of the plans of a run."""
    return f"runs/real-{number}" + (f"-{place + 1}" if place else "")


def _block(line: str) -> str:
    """A command over as many lines as it takes; an option and a few values stay together."""
    program, *options = line.split(" --")
    words = [f"--{option}" for option in options]
    return command(program, [each for option in words for each in _pieces(option)])


def _pieces(option: str) -> list[str]:
    """An option with its values, or each of them alone where they are many.

    # In: "--lanes 8"  Out: ["--lanes 8"]     "--parts one two ..."  ["--parts", "one", "two", ...]
    """
    return [option] if len(option) <= _TOGETHER else option.split()

"""What rows are called: which labels there will be, and that no two systems share one."""

import math
import pathlib
from typing import Any

import dms_jax
from dms_jax.command_line.comparison.systems import FEW_BITS, training_free
from dms_jax.command_line.options import find_adapter

# The rows that each thing to learn brings.
LEARNED = {
    "DMS": ("DMS", "DMS + Quest", "DMS + KCache", *(f"DMS + {bits}" for bits in FEW_BITS)),
    "DMC": ("DMC", "DMC, nothing merged"),
    "GQA": ("GQA", "GQA + DMS", "GQA + DMC", "GQA + DMC, nothing merged"),
}


def brought(checkpoints: tuple[str, ...]) -> list[tuple[str, float, str]]:
    """Label, ratio and directory of each.

    Raises:
      ConfigError: an entry has no label or directory, a ratio that is none, or a directory that
        does not exist.
    """
    parts = []
    for entry in checkpoints:
        name, _, path = entry.partition("=")
        path = str(find_adapter(path))
        label, _, ratio = name.partition("@")
        try:
            parts.append((label, float(ratio or 1), path))
        except ValueError:
            parts.append(("", 1.0, path))
        label, ratio, path = parts[-1]
        if not (label and path and 1 <= ratio < math.inf):
            raise dms_jax.ConfigError(
                f"--checkpoints {entry}: write label=directory, or label@ratio=directory with a "
                "ratio of at least 1."
            )
        # Found now, and not when all before it have been measured. Other paths may be hub ids.
        if not pathlib.Path(path).expanduser().is_dir() and path.count("/") != 1:
            raise dms_jax.ConfigError(f"--checkpoints {entry}: there is no such directory.")
    return parts


def check_labels(config: Any, model: dms_jax.LanguageModel) -> None:
    """Refuses labels that no row will have, and two systems of one name.

    Raises:
      ConfigError: there are such.
    """
    free = [system.label for each in config.ratios for system in training_free(model, each)]
    learnt = [label for each in config.learn for label in LEARNED[each]]
    entries = brought(config.checkpoints)
    names = [(label, ratio) for label, ratio, _ in entries]
    own = {"dense", *FEW_BITS, *free, *learnt}
    if again := sorted(
        {name for name, ratio in names if names.count((name, ratio)) > 1 or name in own}
    ):
        raise dms_jax.ConfigError(
            f"--checkpoints: another row is called {', '.join(again)}; give other labels."
        )
    over = {f"{name} + {way}" for name, _ in names for way in ("Quest", "KCache", *FEW_BITS)}
    known = own | over | {name for name, _ in names}
    if unknown := [label for label in config.only if label not in known]:
        raise dms_jax.ConfigError(
            f"--only {', '.join(unknown)}: no row will be called so. With this --learn there are "
            f"{', '.join(sorted(known))}."
        )

"""How the compression ratio of each head changes over a retrofit (figure 7 of the DMC paper)."""

import dataclasses
import pathlib
import re
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from dms_jax.analysis.retention import ratios, retention
from dms_jax.errors import DataError
from dms_jax.model.language_model import LanguageModel
from experiments.reproduction.summaries import total_ratio

_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")  # names of snapshots; other folders are somebody's own


@dataclasses.dataclass(frozen=True)
class OverTraining:
    """Measured compression at S moments of a retrofit.

    Attributes:
      targets: the compression ratio that training aimed at, or any other number of each moment.
      totals: measured ratio of all heads together at the last token.
      heads: measured ratio of each layer and head.
    """

    targets: Float[np.ndarray, " S"]
    totals: Float[np.ndarray, " S"]
    heads: Float[np.ndarray, "S L K"]


def over_training(
    snapshots: Iterable[tuple[float, LanguageModel]],
    tokens: Int[np.ndarray, "B T"],
    *,
    prompt_lengths: Int[np.ndarray, " B"] | None = None,
) -> OverTraining:
    """Measures the compression of each head at each snapshot, under the snapshot's own policy.

    Args:
      snapshots: (number, model) in the order of training, as `on_snapshot` of `retrofit` gets them
        or `snapshots_of` finds them. Models are used one after the other and not kept.
      tokens, prompt_lengths: see `retention`.

    Raises:
      DataError: there is no snapshot.
    """
    targets, totals, heads = [], [], []
    for target, model in snapshots:
        found = retention(model, tokens, prompt_lengths=prompt_lengths)
        targets.append(target)
        totals.append(total_ratio(found)[-1])
        heads.append(ratios(found))
    if not targets:
        raise DataError("There are no snapshots; name some in the recipe (snapshots=).")
    return OverTraining(np.array(targets, float), np.array(totals), np.array(heads))


def snapshots_of(directory: pathlib.Path | str) -> list[tuple[float, pathlib.Path]]:
    """Returns the (compression ratio, checkpoint) of the snapshots of a run, lowest ratio first.

    Raises:
      DataError: the directory holds none.
    """
    folder = pathlib.Path(directory) / "snapshots"
    named = [path for path in folder.glob("*") if _NUMBER.fullmatch(path.name) and path.is_dir()]
    found = sorted((float(path.name), path) for path in named)
    if not found:
        raise DataError(
            f"{folder} holds no snapshot. Runs write them there if the recipe names compression "
            "ratios (snapshots=) and the run has a directory (out=)."
        )
    return found

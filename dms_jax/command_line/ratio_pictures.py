"""Pictures of a retrofit at each export: the compression ratio of every layer and head."""

import pathlib
from typing import Any

import numpy as np

from dms_jax.analysis.head_pictures import Scale, draw_maps
from dms_jax.analysis.retention import retention
from dms_jax.analysis.summaries import ratios, total_ratio
from dms_jax.data import batches
from dms_jax.model.language_model import LanguageModel

LENGTH = 1024  # tokens that are run at most
SEQUENCES = 2


class RatioPictures:
    """Draws `<folder>/<ratio>.png` of a model that was exported at a ratio.

    Args:
      folder: where the pictures go.
      data: the documents of the run, of which the first sequences are run.
      length: tokens of a sequence of the run.
    """

    def __init__(self, folder: pathlib.Path, data: Any, length: int):
        self._folder, self._data, self._length = folder, data, min(length, LENGTH)

    def __call__(self, ratio: float, model: LanguageModel) -> None:
        """Draws the picture; the model is on one device."""
        options: dict[str, Any] = dict(batch_size=SEQUENCES, length=self._length, seed=None)
        drawn = next(batches(self._data, model.tokenizer, **options))["tokens"]
        found = retention(model, np.asarray(drawn))
        self._folder.mkdir(parents=True, exist_ok=True)
        reached = total_ratio(found)[-1]
        draw_maps(
            self._folder / f"{ratio:g}.png",
            {f"{self._length} tokens": ratios(found)},
            Scale("compression ratio"),
            title=f"{found.policy.name} trained to {ratio:g}: {reached:.2f} with its window",
        )

"""Pictures of a retrofit at each export: the compression ratio of every layer and head.

The ratio is that of the log, 1 / share of the tokens that no decision evicts or merges. It is of a
pass over whole sequences, so that a model that is split over any devices is measured where it lies.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from dms_jax import processes
from dms_jax.analysis.head_pictures import Scale, draw_maps
from dms_jax.command_line.reports import can_draw
from dms_jax.data import batches
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.training.compression_loss import evicted_shares

LENGTH = 1024  # tokens that are run at most
SEQUENCES = 2


class RatioPictures:
    """Draws `<folder>/<ratio>.png` of a model that was exported at a ratio.

    Of several processes all take part, and the first draws.

    Args:
      folder: where the pictures go.
      data: the documents of the run, of which the first sequences are run.
      length: tokens of a sequence of the run.
    """

    def __init__(self, folder: pathlib.Path, data: Any, length: int):
        self._folder, self._data, self._length = folder, data, min(length, LENGTH)
        self._draws = processes.is_first() and can_draw(folder)
        self._runs = self._draws or processes.several()

    def __call__(self, ratio: float, model: LanguageModel) -> None:
        """Draws the picture of a model."""
        if not self._runs:
            return
        options: dict[str, Any] = dict(batch_size=SEQUENCES, length=self._length, seed=None)
        drawn = next(batches(self._data, model.tokenizer, **options))["tokens"]
        found = head_ratios(model, np.asarray(drawn))
        if not self._draws:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        reached = 1 / np.mean(1 / found)
        draw_maps(
            self._folder / f"{ratio:g}.png",
            {f"{self._length} tokens": found},
            Scale("compression ratio"),
            title=f"{model.policy.name} trained to {ratio:g}: {reached:.2f}, window aside",
        )


def head_ratios(
    model: LanguageModel, tokens: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "layers heads"]:
    """Returns the compression ratio of each layer and KV head under the model's own policy.

    Args:
      model: the model, on one device or split over a mesh, whose processes all call this.
      tokens: token ids, the same in all processes.
    """
    with use_mesh(model.mesh):
        place = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())
        found = _ratios(place)(model.transformer, tokens.astype(np.int32), model.policy)
    return np.asarray(found.addressable_data(0))


@functools.cache
def _ratios(place: NamedSharding | None) -> Any:
    """Returns the program whose result is whole on every device."""

    def ratios(transformer: Transformer, tokens: Int[Array, "B T"], policy: Policy) -> Any:
        shares = evicted_shares(transformer(tokens, policy).decisions)
        # A head that keeps nothing is drawn as one that keeps a single token.
        return 1 / jnp.maximum(1 - jnp.mean(shares, axis=1), 1 / tokens.size)

    return jax.jit(ratios, out_shardings=place)

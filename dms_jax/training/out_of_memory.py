"""Handling of a device that runs out of memory in training.

With `remat="auto"`, the first step of a program falls back to keeping less, and a result that does
not fit when placed for decoding stays sharded. All other cases raise an error that says what to
change.
"""

import warnings

import jax

from dms_jax import processes
from dms_jax.devices import out_of_memory
from dms_jax.model.language_model import PACKAGE, LanguageModel
from dms_jax.model.rematerialisation import Remat
from dms_jax.training.parameters import parameters

LESS_MEMORY = (
    "These take less memory: `micro_batch_size=1`; `remat='everything'`; `trainable='adapter'` or "
    "'low_rank', without moments of frozen weights; a shorter `sequence_length`; more devices, "
    "along 'data', or along 'sequence' (make_mesh(..., sequence=2), --sequence-shards 2) for "
    "long sequences."
)
# From most memory to least.
_ORDER: tuple[Remat, ...] = ("nothing", "all_but_products", "all_but_attention", "everything")


def smaller(remat: Remat) -> Remat | None:
    """Returns the next `remat`, which keeps less for the backward pass; None for the last."""
    return next(iter(_ORDER[_ORDER.index(remat) + 1 :]), None)


def warn_of_fallback(before: Remat, after: Remat) -> None:
    """Warns that a step is compiled again."""
    warnings.warn(
        f"The step ran out of the device's memory with remat={before!r}; it is compiled again "
        f"with remat={after!r}. Say so in the recipe to save the first compilation.",
        skip_file_prefixes=(PACKAGE,),
    )


def placed(model: LanguageModel) -> LanguageModel:
    """Returns a trained model placed for decoding, or unchanged if that takes too much memory.

    Decoding splits no matrix over `data`, so a model trained over many devices may not fit. Several
    processes would have to agree on the fallback, so with them the error is raised.
    """
    try:
        result = model.place()
        jax.block_until_ready(parameters(result.transformer))
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error) or processes.several():
            raise
        warnings.warn(
            "The trained model does not fit the devices as it is placed for decoding; it is "
            "returned split over the devices as for training. What is saved is whole: load it over "
            "a mesh with more shards of `model` to generate.",
            skip_file_prefixes=(PACKAGE,),
        )
        return model
    return result

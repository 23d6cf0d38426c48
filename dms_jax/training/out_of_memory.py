"""What training does when a device runs out of memory.

With `remat="auto"`, the first step of a program falls back to keeping less, and a result that does
not fit when placed for decoding stays split. Everything else ends with an error that says what to
change.
"""

import contextlib
import warnings
from collections.abc import Iterator

import jax

from dms_jax import processes
from dms_jax.devices import out_of_memory
from dms_jax.errors import OutOfMemoryError, plain
from dms_jax.model.language_model import PACKAGE, LanguageModel
from dms_jax.model.rematerialisation import Remat
from dms_jax.sharding import mesh_sizes
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Recipe
from dms_jax.training.shards import finer_split

# From the most memory to the least.
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
    """Returns a trained model placed for decoding, or as it is where that takes too much memory.

    Decoding splits no matrix over `data`, so a model trained over many devices may not fit. Several
    processes would have to agree on the fallback: there the error is raised.
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


@contextlib.contextmanager
def with_advice(recipe: Recipe, mesh: jax.sharding.Mesh | None) -> Iterator[None]:
    """A context in which an allocation error on the device says what would need less memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        changes = ["remat='everything'"] if recipe.remat != "everything" else []
        if recipe.micro_batch_size != 1 and recipe.batch_size > 1:
            changes.insert(0, "a smaller micro_batch_size (1), whose passes take turns")
        if recipe.trainable == "all":
            changes.append("trainable='adapter' or 'low_rank', without moments of frozen weights")
        larger = "more devices" if mesh is None else f"more than {mesh.size} devices"
        changes.append(f"a mesh of {larger}")
        length = recipe.sequence_length
        if finer := finer_split(recipe, mesh_sizes(mesh)[1]):
            changes.append(
                f"make_mesh(..., sequence={finer}) or --sequence-shards {finer}, so that devices "
                f"share the {length:,} tokens of each sequence"
            )
        changes.append(f"sequence_length below {length:,}")
        raise OutOfMemoryError(
            f"The device ran out of memory in training. What takes less: {'; '.join(changes)}. "
            "dms_jax.plan (dms-jax plan) says beforehand what fits. The device said: "
            f"{plain(error, 300)}"
        ) from error

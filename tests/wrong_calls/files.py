"""Loading, saving, meshes and retrofits."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.config import ModelConfig
from tests.wrong_calls.case import Case


def file_cases(model: dms_jax.LanguageModel, scratch: pathlib.Path) -> dict[str, Case]:
    vanilla = dms_jax.Vanilla()
    stories = assets.path("stories260k")
    (scratch / "a file").write_text("kept")
    (scratch / "busy").mkdir()
    (scratch / "busy" / "thesis.tex").write_text("kept")

    def save(
        *says: str,
        path: Any,
        error="CheckpointError",
        given: Any = model,
        policy=vanilla,
        **options,
    ):
        return Case(lambda: dms_jax.save(given, policy, path, **options), error, says)

    def load(*says: str, path: Any = stories, error: str = "CheckpointError", **options) -> Case:
        return Case(lambda: dms_jax.load(path, **options), error, says)

    return {
        "load none": load("None", path=None),
        "load a number": load("7", path=7),
        "load nothing": load("no directory", path=scratch / "absent"),
        "load a file": load("is a file", path=scratch / "a file"),
        "load empty text": load("path of a checkpoint", path=""),
        "load dtype": load("dtype", "'half!'", dtype="half!", error="ConfigError"),
        "load whole dtype": load("dtype", "int32", dtype="int32", error="ConfigError"),
        "load mesh": load("mesh", mesh=4, error="ConfigError"),
        "load adapter": load("7", adapter=7),
        "load nameless adapter": load("path of an adapter", adapter=""),
        "load absent adapter": load("no directory", adapter=scratch / "absent"),
        "load merge": load("merge", "'yes'", merge="yes", error="ConfigError"),
        "load a model as adapter": load("holds a whole model", adapter=stories),
        "save an adapter perhaps": save(
            "adapter_only",
            "'perhaps'",
            path=scratch / "x",
            error="ConfigError",
            adapter_only="perhaps",
        ),
        "save the adapter of a policy without": save(
            "reads no adapter", path=scratch / "x", error="ConfigError", adapter_only=True
        ),
        "save under a file": save("cannot be written", path=scratch / "a file" / "model"),
        "save over a file": save("is a file", path=scratch / "a file"),
        "save over other things": save("thesis.tex", path=scratch / "busy"),
        "save nowhere": save("None", path=None),
        "save unwritable": save("cannot be written", path="/proc/model"),
        "save no model": save("dms_jax.load", path=scratch / "x", given=3, error="ConfigError"),
        "save no policy": save(
            "Not a cache policy", path=scratch / "x", policy="DMS", error="ConfigError"
        ),
        "save weights that are not numbers": save(
            "model.embed_tokens.weight", "NaN", path=scratch / "x", given=_without_numbers(model)
        ),
        "save an adapter that is not there": save(
            "adapter",
            path=scratch / "x",
            policy=dms_jax.DMS(source="adapter"),
            error="ConfigError",
        ),
        "tokenizer of nothing": Case(
            lambda: model.tokenizer.encode(None), "DataError", ("must be a string",)
        ),
        "tokenizer decodes text": Case(
            lambda: model.tokenizer.decode(["a"]), "DataError", ("token ids",)
        ),
        "tokenizer of a damaged file": Case(
            lambda: Tokenizer.from_directory(_damaged(scratch)), "CheckpointError", ("tokenizer",)
        ),
        "asset": Case(lambda: assets.path("gpt5"), "DataError", ("'gpt5'", "stories260k")),
        "config empty": Case(lambda: ModelConfig.from_hf({}), "ConfigError", ("model_type",)),
        "config a list": Case(lambda: ModelConfig.from_hf([1]), "ConfigError", ("object",)),
        "mesh too large": Case(
            lambda: dms_jax.make_mesh(100, 100), "ConfigError", ("10000", "devices")
        ),
        "mesh of nothing": Case(lambda: dms_jax.make_mesh(0, 1), "ConfigError", ("at least 1",)),
    }


def _without_numbers(model: dms_jax.LanguageModel) -> dms_jax.LanguageModel:
    transformer = jax.tree.map(lambda x: x * jnp.nan, model.transformer)
    return dataclasses.replace(model, transformer=transformer)


def _damaged(scratch: pathlib.Path) -> pathlib.Path:
    directory = scratch / "damaged"
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text("{")
    return directory


def retrofit_cases(model: dms_jax.LanguageModel, scratch: pathlib.Path) -> dict[str, Case]:
    recipe = dms_jax.recipes.dms_quickstart(2, steps_per_ratio=1)
    dms = dms_jax.DMS(window=16, source="adapter")
    text = ["Once upon a time there was a cat. " * 200]

    def case(*says: str, error: str = "ConfigError", given: Any = model, policy=dms, **options):
        options = {"recipe": recipe, "data": text, "progress": False} | options
        return Case(lambda: dms_jax.retrofit(given, policy, **options), error, says)

    def changed(*says: str, **fields: Any):
        return Case(lambda: dataclasses.replace(recipe, **fields), "ConfigError", says)

    return {
        "retrofit model": case("dms_jax.load", given="path"),
        "retrofit policy": case("TOVA", "DMS", policy=dms_jax.TOVA()),
        "retrofit policy a name": case("DMS", policy="DMS"),
        "retrofit recipe": case("recipe", recipe="dms_published"),
        "retrofit checkpoint_every": case("checkpoint_every", checkpoint_every=0),
        "retrofit seed": case("seed", seed="x"),
        "retrofit on_step": case("on_step must be a function or None, got []", on_step=[]),
        "retrofit progress": case("progress must be True or False", progress="no"),
        "retrofit mesh": case("mesh must be a Mesh or None, got 4", mesh=4),
        "retrofit option": case("no option outt", "it has adapter_only", outt="runs"),
        "retrofit no data": case("no document", error="DataError", data=[]),
        "retrofit data none": case("data", error="DataError", data=None),
        "retrofit data a number": case("data", error="DataError", data=5),
        "retrofit data that is not there": case(
            "absent.txt", error="DataError", data=[scratch / "absent.txt"]
        ),
        "retrofit out a file": case(
            "a file", error="CheckpointError", out=scratch / "a file" / "run"
        ),
        "recipe ratio": Case(
            lambda: dms_jax.recipes.dms_published(0.5), "ConfigError", ("compression_ratio", "0.5")
        ),
        "recipe regulariser": changed("regulariser", "'kl'", "'l2'", regulariser="l2"),
        "recipe prior": changed("prior", "'global' or 'layer'", prior="head"),
        "recipe variant": Case(
            lambda: dms_jax.recipes.dmc_paper(2, variant="dmc-d"), "ConfigError", ("'immediate'",)
        ),
    }

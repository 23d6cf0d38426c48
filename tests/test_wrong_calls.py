"""Every entry point answers a wrong call with an error that names it and says what to do.

One wrong value per option. Kinds of values are in `tests/test_checks.py`, options of policies in
`tests/policies/test_policies.py`, those of engines in `tests/generation/test_options.py`, damaged
files in `tests/checkpoint`. Calls run as for users, without jaxtyping's checks, so that a wrong
type reaches the code.
"""

import dataclasses
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.data.tasks import LinearEquation
from dms_jax.evaluation import Hyperscaling, System, evaluate

LONGEST_MESSAGE = 400


@dataclasses.dataclass
class Case:
    """A wrong call, the error it must raise, and words of its message."""

    call: Callable[[], Any]
    error: str
    says: tuple[str, ...]


def all_cases(scratch: pathlib.Path) -> dict[str, Case]:
    model = dms_jax.load(assets.path("stories260k"))
    return {
        **sampling_cases(),
        **generate_cases(model),
        **engine_cases(model),
        **logits_cases(model),
        **hyperscale_cases(model),
        **file_cases(model, scratch),
        **retrofit_cases(model, scratch),
    }


@pytest.mark.filterwarnings("ignore")
def test_wrong_calls_name_the_error_and_write_nothing(tmp_path, pytestconfig):
    if pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("jaxtyping's checks refuse what the code is to refuse")
    cases = all_cases(tmp_path)
    wrong, there = [], files(tmp_path)
    for name, case in cases.items():
        try:
            case.call()
        except (Exception, SystemExit) as error:
            raised, message, where = type(error).__name__, str(error), error
        else:
            raised, message, where = "nothing", "", None
        if case.error not in (kind.__name__ for kind in type(where).__mro__):
            wrong += [f"{name}: {raised} instead of {case.error}"]
            wrong += traceback.format_exception(where)[-4:] if where else []
        missing = [text for text in case.says if text not in message]
        if missing:
            wrong.append(f"{name}: {missing} not in {message!r}")
        if len(message) > LONGEST_MESSAGE:
            wrong.append(f"{name}: a message of {len(message)} characters")
        if left := files(tmp_path) - there:
            wrong.append(f"{name}: left {sorted(left)}")
            there |= left
    assert not wrong, "\n".join(wrong)


def files(scratch: pathlib.Path) -> set[str]:
    """Returns the files of a folder, except the checkpoint that is damaged on purpose."""
    found = {path.relative_to(scratch) for path in scratch.rglob("*")}
    return {str(path) for path in found if path.parts[0] != "damaged"}


def sampling_cases() -> dict[str, Case]:
    def case(says: tuple[str, ...], **fields) -> Case:
        return Case(lambda: dms_jax.Sampling(**fields), "ConfigError", ("Sampling", *says))

    return {
        "top_p zero": case(("top_p", "above 0 and at most 1"), top_p=0),
        "min_p two": case(("min_p", "at most 1"), min_p=2),
        "logprobs number": case(("logprobs", "True or False"), logprobs=3),
        "max_new_tokens zero": case(("max_new_tokens", "at least 1", "got 0"), max_new_tokens=0),
        "stop empty": case(("stop", "empty"), stop=["a", ""]),
        "stop ids": case(("stop", "a sequence, each a text"), stop=[13]),
        "seed below zero": case(("seed", "at most 4,294,967,295"), seed=-1),
    }


def generate_cases(model: dms_jax.LanguageModel) -> dict[str, Case]:
    short = dms_jax.Sampling(max_new_tokens=4)
    silent = dataclasses.replace(model, tokenizer=None)

    def case(error: str, *says: str, prompts: Any = ((1, 2, 3),), given: Any = model, **options):
        options.setdefault("sampling", short)
        prompts = list(prompts) if isinstance(prompts, tuple) else prompts
        return Case(lambda: dms_jax.generate(given, prompts, **options), error, says)

    def data(*says: str, prompts: Any, **options) -> Case:
        return case("DataError", *says, prompts=prompts, **options)

    ids = "token ids are whole numbers"
    chat = [{"role": "user", "content": "hello"}]
    return {
        "no prompts": data("the list of prompts is empty", prompts=[]),
        "a single string": data("Give a list of prompts, not a single string", prompts="Once"),
        "a single list of ids": data("one list of token ids goes into", prompts=[1, 2, 3]),
        "a single chat": data("one chat is a list of messages", prompts=chat),
        "prompts none": data("Give a list of prompts, got None", prompts=None),
        "quest budget of one page": case(
            "ConfigError",
            "a budget of 64 tokens holds no page of 64 beside the last page",
            "raise the budget to 128",
            policy=dms_jax.Quest(budget=64),
        ),
        "an option of engines alone": case(
            "ConfigError", "generate has no option num_lanes; it has chunk", num_lanes=8
        ),
        "an option of sampling": case(
            "ConfigError",
            "generate has no option max_new_tokens, which is one of Sampling",
            "give sampling=dms_jax.Sampling(max_new_tokens=...)",
            max_new_tokens=8,
        ),
        "empty prompt": data("Prompt 1 is empty", prompts=["a", []]),
        "float ids": data("Prompt 0 holds 1.5 at place 1", ids, prompts=[[1, 1.5]]),
        "bool ids": data("Prompt 0 holds True at place 0", ids, prompts=[[True, 2]]),
        "matrix": data("shape [2, 2]", "one dimension", prompts=[np.ones((2, 2), int)]),
        "id too large": data("Prompt 1", "0 ... 511", "512", prompts=[[1], [3, 512]]),
        "too long": data("Prompt 0", "600 tokens", "512 positions", prompts=[[1] * 600]),
        "text without a tokenizer": data("has no tokenizer", prompts=["a"], given=silent),
        "stop strings without a tokenizer": case(
            "ConfigError",
            "stop strings",
            "has no tokenizer",
            given=silent,
            sampling=dms_jax.Sampling(max_new_tokens=4, stop="a"),
        ),
        "chat without content": data("'role' and 'content'", prompts=[[{"role": "user"}]]),
        "model a path": case("ConfigError", "dms_jax.load", "'some/path'", given="some/path"),
        "policy a wrong name": case("ConfigError", "Unknown cache policy 'DSM'", policy="DSM"),
        "policy never learned": case(
            "ConfigError", "dms-jax retrofit", "such as TOVA", policy="DMS"
        ),
        "policy needs an adapter": case(
            "ConfigError", "DMS", "adapter", "retrofit", policy=dms_jax.DMS(source="adapter")
        ),
        "sampling a dict": case("ConfigError", "a Sampling", sampling={"temperature": 0}),
        "on_tokens a list": case("ConfigError", "on_tokens must be a function", on_tokens=[]),
        "memory too little": case(
            "CapacityError", "at least 20,480", "20 rows", "There are 100", page_size=16, memory=100
        ),
        "memory more than there is": case("CapacityError", "the device has", memory=1e16),
    }


def engine_cases(model: dms_jax.LanguageModel) -> dict[str, Case]:
    def engine(error: str, *says: str, given: Any = model, **options) -> Case:
        return Case(lambda: dms_jax.Engine(given, **options), error, says)

    def score(*says: str, sequences: Any, error: str = "DataError", given=model, **options) -> Case:
        return Case(lambda: dms_jax.score(given, sequences, **options), error, says)

    return {
        "engine model": engine("ConfigError", "dms_jax.load", given=3),
        "engine lanes": engine("ConfigError", "num_lanes must be", num_lanes=0),
        "engine max_tokens": engine("ConfigError", "max_tokens must be", max_tokens=0),
        "score nothing": score("the list of sequences is empty", sequences=[]),
        "score one token": score("Sequence 1 has one token", sequences=[[1, 2], [3]]),
        "score model": score("dms_jax.load", sequences=[[1, 2]], given=None, error="ConfigError"),
        "score max_length": score(
            "max_length must be", sequences=[[1, 2]], max_length=0.5, error="ConfigError"
        ),
        "evaluate serving": Case(
            lambda: evaluate(model, LinearEquation(), serving={"lanes": 4}),
            "ConfigError",
            ("evaluate: serving must be a Serving", "got {'lanes': 4}"),
        ),
        "evaluate task": Case(
            lambda: evaluate(model, 3),
            "ConfigError",
            ("evaluate needs a task", "got 3"),
        ),
    }


def logits_cases(model: dms_jax.LanguageModel) -> dict[str, Case]:
    def case(*says: str, tokens: Any = ((1, 2, 3),), error: str = "DataError", **options) -> Case:
        return Case(lambda: model.logits(tokens, **options), error, says)

    quest = dms_jax.Quest()
    return {
        "logits bools": case("token ids", "bool", tokens=np.ones((1, 3), bool)),
        "logits ragged": case("token ids", tokens=[[1, 2], [3]]),
        "logits outside": case("0 ... 511", tokens=[[1, 512]]),
        "logits too long": case("512 positions", tokens=np.ones((1, 600), int)),
        "logits prompt_lengths": case("prompt_lengths", policy=quest, prompt_lengths=[4]),
        "logits segments": case("segment_ids", segment_ids=np.ones((1, 5), int)),
        "logits segments under TOVA": case(
            "TOVA",
            "packed documents",
            policy=dms_jax.TOVA(),
            segment_ids=np.ones((1, 3), int),
            error="ConfigError",
        ),
    }


def hyperscale_cases(model: dms_jax.LanguageModel) -> dict[str, Case]:
    vanilla = System("vanilla", dms_jax.Vanilla())
    point = Hyperscaling({}, ())

    def case(*says: str, systems: Any = (vanilla,), **options) -> Case:
        options = {"lengths": (8,), "chains": (1,)} | options
        return Case(
            lambda: dms_jax.hyperscale(model, LinearEquation(), systems, **options),
            "ConfigError",
            says,
        )

    return {
        "hyperscale lengths": case("lengths must be a sequence", "got 5", lengths=5),
        "hyperscale serving": case("hyperscale: serving must be a Serving", serving=3),
        "hyperscale policy": case("hyperscale needs systems", systems=dms_jax.Vanilla()),
        "hyperscale method": Case(
            lambda: point.average_gain("vanilla", "TOVA", method="best"),
            "ConfigError",
            ("method must be 'single', 'vote'", "got 'best'"),
        ),
    }


def file_cases(model: dms_jax.LanguageModel, scratch: pathlib.Path) -> dict[str, Case]:
    vanilla = dms_jax.Vanilla()
    stories = assets.path("stories260k")
    (scratch / "a file").write_text("kept")

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
        "load dtype": load("dtype", "'half!'", dtype="half!", error="ConfigError"),
        "load a model as adapter": load("holds a whole model", adapter=stories),
        "save unwritable": save("cannot be written", path="/proc/model"),
        "save no model": save("dms_jax.load", path=scratch / "x", given=3, error="ConfigError"),
        "save weights that are not numbers": save(
            "model.embed_tokens.weight", "NaN", path=scratch / "x", given=_without_numbers(model)
        ),
        "save an adapter that is not there": save(
            "adapter",
            path=scratch / "x",
            policy=dms_jax.DMS(source="adapter"),
            error="ConfigError",
        ),
        "mesh too large": Case(
            lambda: dms_jax.make_mesh(100, 100), "ConfigError", ("10000", "devices")
        ),
    }


def _without_numbers(model: dms_jax.LanguageModel) -> dms_jax.LanguageModel:
    transformer = jax.tree.map(lambda x: x * jnp.nan, model.transformer)
    return dataclasses.replace(model, transformer=transformer)


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
        "retrofit recipe": case("recipe", recipe="dms_published"),
        "retrofit option": case("no option outt", "it has adapter_only", outt="runs"),
        "retrofit data a number": case("data", error="DataError", data=5),
        "retrofit data that is not there": case(
            "absent.txt", error="DataError", data=[scratch / "absent.txt"]
        ),
    }

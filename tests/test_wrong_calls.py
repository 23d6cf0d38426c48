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
from dms_jax import assets, policies
from dms_jax.checkpoint import Tokenizer
from dms_jax.config import ModelConfig
from dms_jax.data import tasks
from dms_jax.data.tasks import LinearEquation
from dms_jax.evaluation import Hyperscaling, System, evaluate
from dms_jax.evaluation.tasks import PIQA
from dms_jax.generation import Device

NAN = float("nan")
LONGEST_MESSAGE = 400
FEWEST_CALLS = 150


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
        **policy_cases(),
        **task_cases(),
        **generate_cases(model),
        **engine_cases(model),
        **logits_cases(model),
        **hyperscale_cases(model),
        **file_cases(model, scratch),
        **estimate_cases(model.config),
        **retrofit_cases(model, scratch),
    }


@pytest.mark.filterwarnings("ignore")
def test_wrong_calls_name_the_error_and_write_nothing(tmp_path, pytestconfig):
    if pytestconfig.getoption("--jaxtyping-packages"):
        pytest.skip("jaxtyping's checks refuse what the code is to refuse")
    cases = all_cases(tmp_path)
    assert len(cases) > FEWEST_CALLS
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

    number, whole = "must be a finite number", "must be a whole number"
    return {
        "temperature below zero": case(("temperature", number, "-1"), temperature=-1),
        "top_k below zero": case(("top_k", whole, "-1"), top_k=-1),
        "top_p zero": case(("top_p", "above 0 and at most 1"), top_p=0),
        "min_p two": case(("min_p", "at most 1"), min_p=2),
        "max_new_tokens zero": case(("max_new_tokens", "at least 1", "got 0"), max_new_tokens=0),
        "stop empty": case(("stop", "empty"), stop=["a", ""]),
        "stop empty text": case(("stop", "empty"), stop=""),
        "stop ids": case(("stop", "a sequence, each a text"), stop=[13]),
        "seed below zero": case(("seed", "at most 4,294,967,295"), seed=-1),
        "seeds fraction": case(("seed", "whole number"), seed=[1, 0.5]),
        "logprobs number": case(("logprobs", "True or False"), logprobs=3),
    }


def policy_cases() -> dict[str, Case]:
    def case(kind: type, *says: str, **fields) -> Case:
        return Case(lambda: kind(**fields), "ConfigError", (kind.__name__, *says))

    dms, dmc = dms_jax.DMS, dms_jax.DMC
    text: Any = "H2O"
    return {
        "dms option misspelt": case(dms, "no option windw", "did you mean window?", windw=3),
        "dms alpha_scale nan": case(dms, "alpha_scale", alpha_scale=NAN),
        "dms alpha_offset text": case(dms, "alpha_offset", alpha_offset="5"),
        "dmc window zero": case(dmc, "window", "None to merge without one", window=0),
        "dmc offset nan": case(dmc, "offset", offset=NAN),
        "dmc epsilon below zero": case(dmc, "epsilon", epsilon=-1.0),
        "h2o budget beyond any sequence": case(
            dms_jax.H2O, "1000000000000", "Vanilla keeps everything", budget=10**12
        ),
        "knorm interval beyond any answer": case(
            dms_jax.Knorm, "interval", "None to cut after the prompt alone", interval=10**12
        ),
        "snapkv budget within the window": case(
            dms_jax.SnapKV, "64 that always stay (window)", "raise the budget", budget=64
        ),
        "snapkv kernel even": case(dms_jax.SnapKV, "kernel", "odd number", kernel=4),
        "expected attention budget within the sinks": case(
            dms_jax.ExpectedAttention, "4 that always stay (sinks and recent)", budget=3
        ),
        "adakv without a scorer": case(
            dms_jax.AdaKV, "scorer", "does not score", "give SnapKV", scorer=dms_jax.DMS()
        ),
        "policy by its name alone": Case(
            lambda: policies.from_dict(text), "ConfigError", ("a dict with its name", "'H2O'")
        ),
        "policy with two names": Case(
            lambda: policies.from_dict({"name": ["H2O"]}), "ConfigError", ("['H2O']", "known are")
        ),
        "policy with an option that is no name": Case(
            lambda: policies.from_dict({"name": "H2O", 5: 3}), "ConfigError", ("no option 5",)
        ),
    }


def task_cases() -> dict[str, Case]:
    def case(kind: type, *says: str, **fields) -> Case:
        return Case(lambda: kind(**fields), "ConfigError", says)

    pair, whole = "a pair, each a whole number", "must be a whole number of at least "
    return {
        "task steps number": case(tasks.WordChain, "steps", pair, "3", steps=3),
        "task operations fraction": case(tasks.Arithmetic, "operations", pair, operations=(1.5, 2)),
        "task slips text": case(tasks.Arithmetic, "slips", "'often'", slips="often"),
        "task size text": case(tasks.Needle, "size", whole + "1", size="1k"),
        "task haystack": case(tasks.Needle, "haystack", "'hay'", haystack="hay"),
        "task split": Case(
            lambda: tasks.Needle().problem("dev", 0), "ConfigError", ("'dev'", "validation")
        ),
    }


def estimate_cases(config: ModelConfig) -> dict[str, Case]:
    def case(*says: str, error: str = "ConfigError", given: Any = config, **options) -> Case:
        options.setdefault("tokens", 64)
        return Case(lambda: dms_jax.estimate(given, **options), error, says)

    return {
        "estimate device none": case("device", "None", device=None),
        "device of nothing": Case(lambda: Device(1e9, 0, 1e9), "ConfigError", ("bandwidth",)),
        "estimate dtype": case("dtype", "'wide'", dtype="wide"),
        "estimate dtype of names": case("no dtype", "'names'", dtype={"names": 3}),
        "estimate dtype of whole numbers": case("dtype int8", "kv_dtype", dtype="int8"),
        "estimate dtype of a byte": case("float8_e4m3fn", "kv_dtype", dtype="float8_e4m3fn"),
        "estimate config": case("ModelConfig", given={"num_layers": 3}),
        "estimate policy": case("Unknown cache policy 'DSM'", "mean DMS", policy="DSM"),
        "estimate too small": case(
            "do not fit", error="CapacityError", device=Device(1000, 1e9, 1e9)
        ),
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
    big = dms_jax.Sampling(max_new_tokens=400)
    chat = [{"role": "user", "content": "hello"}]
    return {
        "no prompts": data("the list of prompts is empty", prompts=[]),
        "a single string": data("Give a list of prompts, not a single string", prompts="Once"),
        "a single list of ids": data("one list of token ids goes into", prompts=[1, 2, 3]),
        "a single chat": data("one chat is a list of messages", prompts=chat),
        "prompts none": data("Give a list of prompts, got None", prompts=None),
        "prompts a generator": data("Give a list of prompts", prompts=(p for p in ["a"])),
        "quest budget below a page": case(
            "ConfigError",
            "a budget of 32 tokens is less than one page of 64",
            "raise the budget",
            policy=dms_jax.Quest(budget=32),
        ),
        "kv_dtype a list": case(
            "ConfigError", "kv_dtype must be", "give 'float8_e4m3'", kv_dtype=["float8_e4m3"]
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
        "window beyond the memory": case(
            "CapacityError",
            "bytes of state for 1 sequences",
            "or the policy a smaller window",
            policy=dms_jax.RandomEviction(window=10**12),
        ),
        "empty prompt": data("Prompt 1 is empty", prompts=["a", []]),
        "empty string": data("Prompt 0 is an empty string", prompts=[""]),
        "float ids": data("Prompt 0 holds 1.5 at place 1", ids, prompts=[[1, 1.5]]),
        "bool ids": data("Prompt 0 holds True at place 0", ids, prompts=[[True, 2]]),
        "text ids": data("Prompt 0 holds 'a' at place 0", ids, prompts=[["a", "b"]]),
        "float array": data("array of float64", prompts=[np.ones(3)]),
        "matrix": data("shape [2, 2]", "one dimension", prompts=[np.ones((2, 2), int)]),
        "bytes": data("must be a string", prompts=[b"abc"]),
        "prompt none": data("Prompt 0 must be a string", "None", prompts=[None]),
        "id too large": data("Prompt 1", "0 ... 511", "512", prompts=[[1], [3, 512]]),
        "id below zero": data("Prompt 0", "0 ... 511", "-1", prompts=[[1, -1]]),
        "id huge": data("Prompt 0", prompts=[[2**70]]),
        "too long": data("Prompt 0", "600 tokens", "512 positions", prompts=[[1] * 600]),
        "no room": data("Prompt 0 has 512 tokens", "at most 511", prompts=[[1] * 512]),
        "text without a tokenizer": data("without a tokenizer", prompts=["a"], given=silent),
        "stop strings without a tokenizer": case(
            "ConfigError",
            "stop strings",
            "without a tokenizer",
            given=silent,
            sampling=dms_jax.Sampling(max_new_tokens=4, stop="a"),
        ),
        "chat without a template": data("no chat template", prompts=[chat]),
        "chat without content": data("'role' and 'content'", prompts=[[{"role": "user"}]]),
        "chat of strings": data("'role' and 'content'", prompts=[[chat[0], "hello"]]),
        "model a path": case("ConfigError", "dms_jax.load", "'some/path'", given="some/path"),
        "policy a wrong name": case("ConfigError", "Unknown cache policy 'DSM'", policy="DSM"),
        "policy a class": case("ConfigError", "Not a cache policy", "DMS()", policy=dms_jax.DMS),
        "policy never learned": case(
            "ConfigError", "dms-jax retrofit", "such as TOVA", policy="DMS"
        ),
        "policy needs an adapter": case(
            "ConfigError", "DMS", "adapter", "retrofit", policy=dms_jax.DMS(source="adapter")
        ),
        "sampling a dict": case("ConfigError", "a Sampling", sampling={"temperature": 0}),
        "seeds": case(
            "ConfigError", "3 seeds for 1 prompts", sampling=dms_jax.Sampling(seed=[1, 2, 3])
        ),
        "on_tokens a list": case("ConfigError", "on_tokens must be a function", on_tokens=[]),
        "memory zero": case("ConfigError", "memory must be a finite number above 0", memory=0),
        "memory too little": case(
            "CapacityError", "at least 20,480", "20 rows", "There are 100", page_size=16, memory=100
        ),
        "memory more than there is": case("CapacityError", "the device has", memory=1e16),
        "pool too small": case(
            "CapacityError",
            "cannot hold",
            "max_new_tokens",
            memory=30_000,
            page_size=16,
            sampling=big,
        ),
        "page_size large": case("CapacityError", "a smaller `page_size`", page_size=2**31 - 1),
        "ids of 5001 digits": case(
            "DataError", "Prompt 0 holds a number of 16610 bits", prompts=[[10**5000]]
        ),
    }


def engine_cases(model: dms_jax.LanguageModel) -> dict[str, Case]:
    def engine(error: str, *says: str, given: Any = model, **options) -> Case:
        return Case(lambda: dms_jax.Engine(given, **options), error, says)

    def say(*says: str, prompt: Any, error: str = "DataError", **options) -> Case:
        def call():
            conversation = dms_jax.Conversation(model, max_tokens=64)
            conversation.say(prompt, **options)

        return Case(call, error, says)

    def score(*says: str, sequences: Any, error: str = "DataError", given=model, **options) -> Case:
        return Case(lambda: dms_jax.score(given, sequences, **options), error, says)

    return {
        "engine model": engine("ConfigError", "dms_jax.load", given=3),
        "engine adapters list": engine(
            "ConfigError", "adapters must be a dict, name -> adapter, got ['a']", adapters=["a"]
        ),
        "adapter of a number": Case(
            lambda: dms_jax.Engine(model, max_tokens=16).generate([[5]], adapter=7),
            "ConfigError",
            ("adapter must be a name, or a list",),
        ),
        "engine lanes": engine("ConfigError", "num_lanes must be", num_lanes=0),
        "engine lanes millions": engine("CapacityError", "Use fewer lanes", num_lanes=10**8),
        "engine lanes millions, little memory": engine(
            "CapacityError", "Use fewer lanes", num_lanes=10**8, memory=10**7
        ),
        "engine prefill_tokens huge": engine(
            "ConfigError", "prefill_tokens", "at most 2,147,483,647", prefill_tokens=10**30
        ),
        "conversation chunk huge": Case(
            lambda: dms_jax.Conversation(model, chunk=10**30), "ConfigError", ("chunk must be",)
        ),
        "engine max_tokens": engine("ConfigError", "max_tokens must be", max_tokens=0),
        "engine memory": engine("ConfigError", "memory must be", memory=-1),
        "engine memory too little": engine("CapacityError", "at least", memory=1),
        "engine policy": engine("ConfigError", "Not a cache policy", policy=7),
        "engine cancel of one": Case(
            lambda: dms_jax.Engine(model, max_tokens=64).cancel(3),  # pyright: ignore[reportArgumentType]
            "ConfigError",
            ("cancel: indices must be a sequence", "got 3"),
        ),
        "engine prompts": Case(
            lambda: dms_jax.Engine(model, max_tokens=64).generate("Once"),
            "DataError",
            ("Give a list of prompts",),
        ),
        "conversation model": Case(
            lambda: dms_jax.Conversation("path"), "ConfigError", ("dms_jax.load",)
        ),
        "conversation policy": Case(
            lambda: dms_jax.Conversation(model, "DSM"), "ConfigError", ("Unknown cache policy",)
        ),
        "say nothing": say("The prompt is an empty string", prompt=""),
        "say no ids": say("The prompt is empty", prompt=[]),
        "say none": say("The prompt must be a string", prompt=None),
        "say bool": say("The prompt holds True", prompt=[True]),
        "say too much": say("600 tokens", "512 positions", prompt=[1] * 600),
        "say sampling": say("a Sampling", prompt=[1], error="ConfigError", sampling="greedy"),
        "score nothing": score("the list of sequences is empty", sequences=[]),
        "score text": score("Give a list of sequences, not a single", sequences="Once"),
        "score flat": score("one list of token ids goes into", sequences=[1, 2, 3]),
        "score one token": score("Sequence 1 has one token", sequences=[[1, 2], [3]]),
        "score an empty one": score("Sequence 0 is empty", sequences=[[]]),
        "score floats": score("Sequence 0 holds 0.5", sequences=[[1, 0.5]]),
        "score a float array": score("array of float32", sequences=np.ones((2, 3), np.float32)),
        "score too long": score("Sequence 0", "512 positions", sequences=[[1] * 513]),
        "score outside": score("Sequence 0", "0 ... 511", sequences=[[1, 999]]),
        "score lanes": score(
            "num_lanes must be", sequences=[[1, 2]], num_lanes=0, error="ConfigError"
        ),
        "score memory": score("at least", sequences=[[1, 2]], memory=9, error="CapacityError"),
        "score model": score("dms_jax.load", sequences=[[1, 2]], given=None, error="ConfigError"),
        "score policy": score(
            "Not a cache policy", sequences=[[1, 2]], policy=7, error="ConfigError"
        ),
        "score max_length": score(
            "max_length must be", sequences=[[1, 2]], max_length=0.5, error="ConfigError"
        ),
        "score table width": score(
            "table_width must be", sequences=[[1, 2]], table_width=0, error="ConfigError"
        ),
        "evaluate serving": Case(
            lambda: evaluate(model, LinearEquation(), serving={"lanes": 4}),
            "ConfigError",
            ("evaluate: serving must be a Serving", "got {'lanes': 4}"),
        ),
        "evaluate task": Case(
            lambda: evaluate(model, 3),
            "ConfigError",
            ("evaluate wants a task", "got 3"),
        ),
        "evaluate choices": Case(
            lambda: evaluate(model, PIQA("piqa.jsonl")),
            "ConfigError",
            ("evaluate wants tasks that are answered in words", "piqa", "evaluate_choices"),
        ),
    }


def logits_cases(model: dms_jax.LanguageModel) -> dict[str, Case]:
    def case(*says: str, tokens: Any = ((1, 2, 3),), error: str = "DataError", **options) -> Case:
        return Case(lambda: model.logits(tokens, **options), error, says)

    quest = dms_jax.Quest()
    return {
        "logits floats": case("token ids", "float", tokens=np.ones((1, 3))),
        "logits bools": case("token ids", "bool", tokens=np.ones((1, 3), bool)),
        "logits one dimension": case("[B, T]", tokens=np.array([1, 2, 3])),
        "logits ragged": case("token ids", tokens=[[1, 2], [3]]),
        "logits empty": case("no tokens", tokens=np.zeros((0, 4), int)),
        "logits no tokens": case("no tokens", tokens=np.zeros((2, 0), int)),
        "logits text": case("token ids", tokens=["Once"]),
        "logits outside": case("0 ... 511", tokens=[[1, 512]]),
        "logits below zero": case("0 ... 511", tokens=[[-1, 2]]),
        "logits too long": case("512 positions", tokens=np.ones((1, 600), int)),
        "logits prompt_lengths": case("prompt_lengths", policy=quest, prompt_lengths=[4]),
        "logits prompt_lengths below zero": case(
            "prompt_lengths", policy=quest, prompt_lengths=[-1]
        ),
        "logits prompt_lengths floats": case("prompt_lengths", policy=quest, prompt_lengths=[1.5]),
        "logits prompt_lengths of another batch": case(
            "prompt_lengths", policy=quest, prompt_lengths=[1, 2]
        ),
        "logits segments": case("segment_ids", segment_ids=np.ones((1, 5), int)),
        "logits segments floats": case("segment_ids", segment_ids=np.ones((1, 3))),
        "logits segments under TOVA": case(
            "TOVA",
            "packed documents",
            policy=dms_jax.TOVA(),
            segment_ids=np.ones((1, 3), int),
            error="ConfigError",
        ),
        "logits policy": case("Not a cache policy", policy=["DMS"], error="ConfigError"),
        "logits adapter": case(
            "adapter", policy=dms_jax.DMS(source="adapter"), error="ConfigError"
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
        "hyperscale out": case("hyperscale: out must be", "got 5", out=5),
        "hyperscale serving": case("hyperscale: serving must be a Serving", serving=3),
        "hyperscale mapping": case(
            "hyperscale wants systems of dms_jax.evaluation.System", systems={"a": vanilla}
        ),
        "hyperscale policy": case("hyperscale wants systems", systems=dms_jax.Vanilla()),
        "hyperscale system": Case(
            lambda: System("TOVA", 7),  # pyright: ignore[reportArgumentType]
            "ConfigError",
            ("System: policy must be a Policy or a text or None, got 7",),
        ),
        "hyperscale axis": Case(
            lambda: point.frontier("vanilla", "bytes"),
            "ConfigError",
            ("axis must be 'reads' or 'peak', got 'bytes'",),
        ),
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
            "Not a cache policy", path=scratch / "x", policy=None, error="ConfigError"
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
        "retrofit policy a wrong name": case("mean DMS", policy="DSM"),
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
        "recipe prior": changed("prior", "'global' or 'layer'", prior="head"),
        "recipe variant": Case(
            lambda: dms_jax.recipes.dmc_paper(2, variant="dmc-d"), "ConfigError", ("'immediate'",)
        ),
    }

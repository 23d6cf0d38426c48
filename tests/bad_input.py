"""Wrong calls of every entry point, run as a user runs them: without the checks of the tests.

Under pytest the annotations of the package are checked at run time, so that a wrong type never
reaches the code. Here it does. `python -m tests.bad_input` makes every call and prints, as JSON,
what each one raised and what it left behind.
"""

import dataclasses
import json
import pathlib
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import dms_jax
from dms_jax import assets, policies
from dms_jax.checkpoint import Tokenizer
from dms_jax.config import ModelConfig
from dms_jax.generation import Device

NAN = float("nan")


@dataclasses.dataclass
class Case:
    """A wrong call, the error it must raise, and what the message must say."""

    call: Callable[[], Any]
    error: str
    says: tuple[str, ...]


def sampling_cases() -> dict[str, Case]:
    def case(says: tuple[str, ...], **fields) -> Case:
        return Case(lambda: dms_jax.Sampling(**fields), "ConfigError", ("Sampling", *says))

    number, whole = "must be a finite number", "must be a whole number"
    return {
        "temperature below zero": case(("temperature", number, "-1"), temperature=-1),
        "temperature nan": case(("temperature", number, "nan"), temperature=NAN),
        "temperature infinite": case(("temperature", number, "inf"), temperature=float("inf")),
        "temperature text": case(("temperature", number, "'hot'"), temperature="hot"),
        "temperature bool": case(("temperature", number, "True"), temperature=True),
        "top_k below zero": case(("top_k", whole, "-1"), top_k=-1),
        "top_k fraction": case(("top_k", whole, "1.5"), top_k=1.5),
        "top_p zero": case(("top_p", "above 0 and at most 1"), top_p=0),
        "top_p two": case(("top_p", "above 0 and at most 1"), top_p=2),
        "min_p two": case(("min_p", "at most 1"), min_p=2),
        "max_new_tokens zero": case(("max_new_tokens", "at least 1", "got 0"), max_new_tokens=0),
        "max_new_tokens fraction": case(("max_new_tokens", whole), max_new_tokens=2.5),
        "max_new_tokens none": case(("max_new_tokens", whole, "None"), max_new_tokens=None),
        "stop empty": case(("stop", "none of them empty"), stop=["a", ""]),
        "stop empty text": case(("stop", "none of them empty"), stop=""),
        "stop ids": case(("stop", "list of strings"), stop=[13]),
        "stop none": case(("stop", "list of strings", "None"), stop=None),
        "seed below zero": case(("seed", "0 to 2**32 - 1"), seed=-1),
        "seed too large": case(("seed", "0 to 2**32 - 1"), seed=2**32),
        "seed text": case(("seed", "whole number"), seed="7"),
        "seed fraction": case(("seed", "whole number"), seed=0.5),
        "seeds fraction": case(("seed", "whole number"), seed=[1, 0.5]),
        "logprobs number": case(("logprobs", "True or False"), logprobs=3),
    }


def policy_cases() -> dict[str, Case]:
    def case(kind: type, *says: str, **fields) -> Case:
        return Case(lambda: kind(**fields), "ConfigError", (kind.__name__, *says))

    dms, dmc, tova, quest = dms_jax.DMS, dms_jax.DMC, dms_jax.TOVA, dms_jax.Quest
    streaming, drawn = dms_jax.StreamingLLM, dms_jax.RandomEviction
    cases = {
        "dms window below zero": case(dms, "window", "-1", window=-1),
        "dms window fraction": case(dms, "window", "2.5", window=2.5),
        "dms window text": case(dms, "window", "'wide'", window="wide"),
        "dms window bool": case(dms, "window", "True", window=True),
        "dms shift too far": case(dms, "shift", "window + 1 = 5", window=4, shift=6),
        "dms source": case(dms, "source", "'query_neuron' or 'adapter'", source="magic"),
        "dms per": case(dms, "per", "'head' or 'layer'", per="token"),
        "dms temperature zero": case(dms, "temperature", temperature=0),
        "dms temperature nan": case(dms, "temperature", temperature=NAN),
        "dms temperature text": case(dms, "temperature", temperature="warm"),
        "dms alpha_scale nan": case(dms, "alpha_scale", alpha_scale=NAN),
        "dms alpha_offset text": case(dms, "alpha_offset", alpha_offset="5"),
        "dmc neuron": case(dmc, "neuron", "'first' or 'last'", neuron="middle"),
        "dmc offset nan": case(dmc, "offset", offset=NAN),
        "dmc epsilon text": case(dmc, "epsilon", epsilon="small"),
        "dmc epsilon below zero": case(dmc, "epsilon", epsilon=-1.0),
        "tova budget zero": case(tova, "budget", "at least 1", budget=0),
        "tova budget fraction": case(tova, "budget", "2.5", budget=2.5),
        "tova budget text": case(tova, "budget", budget="8"),
        "tova per": case(tova, "per", per="all"),
        "quest budget zero": case(quest, "budget", budget=0),
        "quest budget text": case(quest, "budget", budget="8"),
        "quest budget fraction": case(quest, "budget", budget=8.5),
        "quest dense_layers": case(quest, "dense_layers", dense_layers=-1),
        "quest dense_layers fraction": case(quest, "dense_layers", dense_layers=0.5),
        "streaming sinks": case(streaming, "sinks", sinks=-1),
        "streaming sinks text": case(streaming, "sinks", sinks="4"),
        "streaming budget": case(streaming, "budget", "raise the budget", budget=4),
        "streaming budget fraction": case(streaming, "budget", budget=8.5),
        "random window": case(drawn, "window", window=-1),
        "random window fraction": case(drawn, "window", window=1.5),
        "random rate": case(drawn, "rate", rate=1.5),
        "random rate nan": case(drawn, "rate", rate=NAN),
        "random rate text": case(drawn, "rate", rate="half"),
        "random spread": case(drawn, "spread", spread=-0.5),
        "random seed": case(drawn, "seed", seed=-1),
        "random seed text": case(drawn, "seed", seed="x"),
    }
    unknown = {"name": "H3O"}
    extra = {"name": "TOVA", "budget": 8, "bugdet": 9}
    return cases | {
        "policy unknown": Case(
            lambda: policies.from_dict(unknown), "ConfigError", ("'H3O'", "known are Vanilla, DMS")
        ),
        "policy without a name": Case(
            lambda: policies.from_dict({"budget": 8}), "ConfigError", ("None", "known are")
        ),
        "policy with an unknown option": Case(
            lambda: policies.from_dict(extra), "ConfigError", ("bugdet", "budget, per")
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
        "prompts a number": data("Give a list of prompts, got 5", prompts=5),
        "prompts a generator": data("Give a list of prompts", prompts=(p for p in ["a"])),
        "empty prompt": data("Prompt 1 is empty", prompts=["a", []]),
        "empty string": data("Prompt 0 is an empty string", prompts=[""]),
        "float ids": data("Prompt 0 holds 1.5 at place 1", ids, prompts=[[1, 1.5]]),
        "whole float ids": data("Prompt 0 holds 1.0 at place 0", ids, prompts=[[1.0, 2.0]]),
        "bool ids": data("Prompt 0 holds True at place 0", ids, prompts=[[True, 2]]),
        "text ids": data("Prompt 0 holds 'a' at place 0", ids, prompts=[["a", "b"]]),
        "none ids": data("Prompt 0 holds None at place 1", ids, prompts=[[1, None]]),
        "float array": data("array of float64", prompts=[np.ones(3)]),
        "bool array": data("array of bool", prompts=[np.ones(3, bool)]),
        "matrix": data("shape [2, 2]", "one dimension", prompts=[np.ones((2, 2), int)]),
        "bytes": data("must be a string", prompts=[b"abc"]),
        "prompt none": data("Prompt 0 must be a string", "None", prompts=[None]),
        "id too large": data("Prompt 1", "0 ... 511", "512", prompts=[[1], [3, 512]]),
        "id below zero": data("Prompt 0", "0 ... 511", "-1", prompts=[[1, -1]]),
        "id huge": data("Prompt 0", prompts=[[2**70]]),
        "too long": data("Prompt 0", "600 tokens", "512 positions", prompts=[[1] * 600]),
        "no room": data("Prompt 0 has 512 tokens", "at most 511", prompts=[[1] * 512]),
        "text without a tokenizer": data("without a tokenizer", prompts=["a"], given=silent),
        "chat without a template": data("no chat template", prompts=[chat]),
        "chat without content": data("'role' and 'content'", prompts=[[{"role": "user"}]]),
        "chat of strings": data("'role' and 'content'", prompts=[[chat[0], "hello"]]),
        "model a path": case("ConfigError", "dms_jax.load", "'some/path'", given="some/path"),
        "model none": case("ConfigError", "dms_jax.load", "None", given=None),
        "policy a name": case("ConfigError", "Not a cache policy: 'DMS'", policy="DMS"),
        "policy a class": case("ConfigError", "Not a cache policy", policy=dms_jax.DMS),
        "policy needs an adapter": case(
            "ConfigError", "DMS", "adapter", "Retrofit", policy=dms_jax.DMS(source="adapter")
        ),
        "sampling a dict": case("ConfigError", "dms_jax.Sampling", sampling={"temperature": 0}),
        "seeds": case(
            "ConfigError", "3 seeds for 1 prompts", sampling=dms_jax.Sampling(seed=[1, 2, 3])
        ),
        "on_tokens a list": case("ConfigError", "on_tokens must be a function", on_tokens=[]),
        "memory zero": case("ConfigError", "memory must be a finite number above 0", memory=0),
        "memory below zero": case(
            "ConfigError", "memory must be a finite number above 0", memory=-5
        ),
        "memory nan": case("ConfigError", "memory must be a finite number above 0", memory=NAN),
        "memory text": case("ConfigError", "memory must be", "'4GB'", memory="4GB"),
        "memory bool": case("ConfigError", "memory must be", "True", memory=True),
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
        "chunk zero": case("ConfigError", "chunk must be a whole number", "got 0", chunk=0),
        "chunk fraction": case("ConfigError", "chunk must be", "2.5", chunk=2.5),
        "chunk none": case("ConfigError", "chunk must be", "None", chunk=None),
        "page_size zero": case("ConfigError", "page_size must be", "got 0", page_size=0),
        "page_size below zero": case("ConfigError", "page_size must be", "-64", page_size=-64),
        "page_size bool": case("ConfigError", "page_size must be", "True", page_size=True),
        "prefill_chunk zero": case("ConfigError", "prefill_chunk must be", prefill_chunk=0),
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
        "engine lanes": engine("ConfigError", "num_lanes must be", num_lanes=0),
        "engine lanes fraction": engine("ConfigError", "num_lanes must be", num_lanes=1.5),
        "engine max_tokens": engine("ConfigError", "max_tokens must be", max_tokens=0),
        "engine max_tokens below zero": engine("ConfigError", "max_tokens must be", max_tokens=-8),
        "engine memory": engine("ConfigError", "memory must be", memory=-1),
        "engine memory too little": engine("CapacityError", "at least", memory=1),
        "engine policy": engine("ConfigError", "Not a cache policy", policy=7),
        "engine prompts": Case(
            lambda: dms_jax.Engine(model, max_tokens=64).generate("Once"),
            "DataError",
            ("Give a list of prompts",),
        ),
        "conversation model": Case(
            lambda: dms_jax.Conversation("path"), "ConfigError", ("dms_jax.load",)
        ),
        "conversation policy": Case(
            lambda: dms_jax.Conversation(model, "DMS"), "ConfigError", ("Not a cache policy",)
        ),
        "say nothing": say("The prompt is an empty string", prompt=""),
        "say no ids": say("The prompt is empty", prompt=[]),
        "say none": say("The prompt must be a string", prompt=None),
        "say bool": say("The prompt holds True", prompt=[True]),
        "say too much": say("600 tokens", "512 positions", prompt=[1] * 600),
        "say sampling": say("dms_jax.Sampling", prompt=[1], error="ConfigError", sampling="greedy"),
        "score nothing": score("the list of sequences is empty", sequences=[]),
        "score text": score("Give a list of sequences, not a single", sequences="Once"),
        "score flat": score("one list of token ids goes into", sequences=[1, 2, 3]),
        "score one token": score("Sequence 1 has one token", sequences=[[1, 2], [3]]),
        "score an empty one": score("Sequence 0 is empty", sequences=[[]]),
        "score floats": score("Sequence 0 holds 0.5", sequences=[[1, 0.5]]),
        "score a float array": score("array of float32", sequences=np.ones((2, 3), np.float32)),
        "score too long": score("Sequence 0", "512 positions", sequences=[[1] * 513]),
        "score outside": score("Sequence 0", "0 ... 511", sequences=[[1, 999]]),
        "score chunk": score("chunk must be", sequences=[[1, 2]], chunk=0, error="ConfigError"),
        "score lanes": score(
            "num_lanes must be", sequences=[[1, 2]], num_lanes=0, error="ConfigError"
        ),
        "score memory": score("at least", sequences=[[1, 2]], memory=9, error="CapacityError"),
        "score model": score("dms_jax.load", sequences=[[1, 2]], given=None, error="ConfigError"),
        "score policy": score(
            "Not a cache policy", sequences=[[1, 2]], policy="TOVA", error="ConfigError"
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
        "logits policy": case("Not a cache policy", policy="DMS", error="ConfigError"),
        "logits adapter": case(
            "adapter", policy=dms_jax.DMS(source="adapter"), error="ConfigError"
        ),
    }


def file_cases(model: dms_jax.LanguageModel, scratch: pathlib.Path) -> dict[str, Case]:
    vanilla = dms_jax.Vanilla()
    stories = assets.path("stories260k")
    (scratch / "a file").write_text("kept")
    (scratch / "busy").mkdir()
    (scratch / "busy" / "thesis.tex").write_text("kept")

    def save(*says: str, path: Any, error="CheckpointError", given: Any = model, policy=vanilla):
        return Case(lambda: dms_jax.save(given, policy, path), error, says)

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
        "save under a file": save("cannot be written", path=scratch / "a file" / "model"),
        "save over a file": save("is a file", path=scratch / "a file"),
        "save over other things": save("thesis.tex", path=scratch / "busy"),
        "save nowhere": save("None", path=None),
        "save unwritable": save("cannot be written", path="/proc/model"),
        "save no model": save("dms_jax.load", path=scratch / "x", given=3, error="ConfigError"),
        "save no policy": save(
            "Not a cache policy", path=scratch / "x", policy="DMS", error="ConfigError"
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


def _damaged(scratch: pathlib.Path) -> pathlib.Path:
    directory = scratch / "damaged"
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text("{")
    return directory


def estimate_cases(config: ModelConfig) -> dict[str, Case]:
    def case(*says: str, error: str = "ConfigError", given: Any = config, **options) -> Case:
        options.setdefault("tokens", 64)
        return Case(lambda: dms_jax.estimate(given, **options), error, says)

    whole = "must be a whole number of at least 1"
    return {
        "estimate tokens zero": case("tokens", whole, tokens=0),
        "estimate tokens fraction": case("tokens", whole, tokens=0.5),
        "estimate tokens text": case("tokens", whole, tokens="8k"),
        "estimate batch": case("batch", whole, batch=-1),
        "estimate page_size": case("page_size", whole, page_size=0),
        "estimate ratio": case("compression_ratio", policy=dms_jax.DMS(), compression_ratio=0.5),
        "estimate ratio nan": case(
            "compression_ratio", policy=dms_jax.DMS(), compression_ratio=NAN
        ),
        "estimate ratio of vanilla": case("Vanilla", compression_ratio=8),
        "estimate device": case("'b300'", "h200", device="b300"),
        "estimate device none": case("device", "None", device=None),
        "estimate device of nothing": case("bandwidth", device=Device(1e9, 0, 1e9)),
        "estimate dtype": case("dtype", "'wide'", dtype="wide"),
        "estimate config": case("ModelConfig", given={"num_layers": 3}),
        "estimate policy": case("Not a cache policy", policy="DMS"),
        "estimate too small": case(
            "do not fit", error="CapacityError", device=Device(1000, 1e9, 1e9)
        ),
    }


def retrofit_cases(model: dms_jax.LanguageModel, scratch: pathlib.Path) -> dict[str, Case]:
    recipe = dms_jax.recipes.dms_quickstart(2, steps_per_ratio=1)
    dms = dms_jax.DMS(window=16, source="adapter")
    text = ["Once upon a time there was a cat. " * 200]

    def case(*says: str, error: str = "ConfigError", given: Any = model, policy=dms, **options):
        options = {"recipe": recipe, "data": text, "progress": False} | options
        return Case(lambda: dms_jax.retrofit(given, policy, **options), error, says)

    return {
        "retrofit model": case("dms_jax.load", given="path"),
        "retrofit policy": case("TOVA", "DMS", policy=dms_jax.TOVA()),
        "retrofit policy a name": case("DMS", policy="DMS"),
        "retrofit recipe": case("recipe", recipe="dms_published"),
        "retrofit checkpoint_every": case("checkpoint_every", checkpoint_every=0),
        "retrofit seed": case("seed", seed="x"),
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
    }


def all_cases(scratch: pathlib.Path) -> dict[str, Case]:
    model = dms_jax.load(assets.path("stories260k"))
    return {
        **sampling_cases(),
        **policy_cases(),
        **generate_cases(model),
        **engine_cases(model),
        **logits_cases(model),
        **file_cases(model, scratch),
        **estimate_cases(model.config),
        **retrofit_cases(model, scratch),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    wanted = sys.argv[1:]
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        cases = all_cases(scratch)
        before = sorted(str(path) for path in scratch.rglob("*"))
        for name, case in cases.items():
            if wanted and not any(text in name for text in wanted):
                continue
            raised, message, where = "nothing", "", ""
            try:
                case.call()
            except BaseException as error:
                raised, message = type(error).__name__, str(error)
                if not isinstance(error, dms_jax.DmsJaxError):
                    where = "".join(traceback.format_exception(error)[-4:])
            left = sorted(
                set(map(str, scratch.rglob("*"))) - set(before) - {str(scratch / "damaged")}
            )
            before += left
            report[name] = {
                "expected": case.error,
                "raised": raised,
                "message": message,
                "missing": [text for text in case.says if text not in message],
                "left": [path for path in left if "damaged" not in path],
                "where": where,
            }
    json.dump(report, sys.stdout, indent=1)


if __name__ == "__main__":
    main()

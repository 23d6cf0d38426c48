"""Running a model: generate, engines, conversations, scores, logits."""

import dataclasses
from typing import Any

import numpy as np

import dms_jax
from dms_jax.data.tasks import LinearEquation
from dms_jax.evaluation import Hyperscaling, System, evaluate
from dms_jax.evaluation.tasks import PIQA
from tests.wrong_calls.case import NAN, Case


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
        "an option misspelt": case(
            "ConfigError", "generate has no option page_sise (did you mean page_size?)", page_sise=8
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
        "model none": case("ConfigError", "dms_jax.load", "None", given=None),
        "policy a name": case("ConfigError", "Not a cache policy: 'DMS'", policy="DMS"),
        "policy a class": case("ConfigError", "Not a cache policy", policy=dms_jax.DMS),
        "policy needs an adapter": case(
            "ConfigError", "DMS", "adapter", "Retrofit", policy=dms_jax.DMS(source="adapter")
        ),
        "sampling a dict": case("ConfigError", "a Sampling", sampling={"temperature": 0}),
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
        "memory beyond floats": case("ConfigError", "memory must be", memory=10**400),
        "chunk huge": case("ConfigError", "chunk", "at most 2**31 - 1", chunk=10**30),
        "page_size huge": case("ConfigError", "page_size", "at most 2**31 - 1", page_size=10**30),
        "page_size large": case("CapacityError", "a smaller page_size", page_size=2**31 - 1),
        "page_size of 5001 digits": case(
            "ConfigError", "page_size", "at most 2**31 - 1", "16610 bits", page_size=10**5000
        ),
        "prefill_chunk huge": case("ConfigError", "prefill_chunk must be", prefill_chunk=10**30),
        "ids of 5001 digits": case(
            "DataError", "Prompt 0 holds a number of 16610 bits", prompts=[[10**5000]]
        ),
        "chunk fraction": case("ConfigError", "chunk must be", "2.5", chunk=2.5),
        "chunk none": case("ConfigError", "chunk must be", "None", chunk=None),
        "page_size zero": case("ConfigError", "page_size must be", "got 0", page_size=0),
        "page_size below zero": case("ConfigError", "page_size must be", "-64", page_size=-64),
        "page_size bool": case("ConfigError", "page_size must be", "True", page_size=True),
        "unknown option": case("ConfigError", "did you mean page_size?", page_sizes=16),
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
        "engine lanes millions": engine("CapacityError", "Use fewer lanes", num_lanes=10**8),
        "engine lanes millions, little memory": engine(
            "CapacityError", "Use fewer lanes", num_lanes=10**8, memory=10**7
        ),
        "engine lanes huge": engine(
            "ConfigError", "num_lanes", "at most 2**31 - 1", num_lanes=10**30
        ),
        "engine lanes far below zero": engine(
            "ConfigError", "num_lanes must be", "16610 bits", num_lanes=-(10**5000)
        ),
        "engine prefill_tokens huge": engine(
            "ConfigError", "prefill_tokens", "at most 2**31 - 1", prefill_tokens=10**30
        ),
        "conversation chunk huge": Case(
            lambda: dms_jax.Conversation(model, chunk=10**30), "ConfigError", ("chunk must be",)
        ),
        "engine lanes fraction": engine("ConfigError", "num_lanes must be", num_lanes=1.5),
        "engine max_tokens": engine("ConfigError", "max_tokens must be", max_tokens=0),
        "engine max_tokens below zero": engine("ConfigError", "max_tokens must be", max_tokens=-8),
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
            lambda: dms_jax.Conversation(model, "DMS"), "ConfigError", ("Not a cache policy",)
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
        "score chunk": score("chunk must be", sequences=[[1, 2]], chunk=0, error="ConfigError"),
        "score lanes": score(
            "num_lanes must be", sequences=[[1, 2]], num_lanes=0, error="ConfigError"
        ),
        "score memory": score("at least", sequences=[[1, 2]], memory=9, error="CapacityError"),
        "score model": score("dms_jax.load", sequences=[[1, 2]], given=None, error="ConfigError"),
        "score policy": score(
            "Not a cache policy", sequences=[[1, 2]], policy="TOVA", error="ConfigError"
        ),
        "score max_length huge": score(
            "max_length",
            "at most 2**31 - 1",
            sequences=[[1, 2]],
            max_length=10**30,
            error="ConfigError",
        ),
        "score chunk huge": score(
            "chunk", "at most 2**31 - 1", sequences=[[1, 2]], chunk=10**30, error="ConfigError"
        ),
        "evaluate max_length huge": Case(
            lambda: evaluate(model, LinearEquation(), max_length=10**30),
            "ConfigError",
            (
                "evaluate: max_length",
                "at most 2**31 - 1",
            ),
        ),
        "score max_length": score(
            "max_length must be", sequences=[[1, 2]], max_length=0.5, error="ConfigError"
        ),
        "score table width": score(
            "table_width must be", sequences=[[1, 2]], table_width=0, error="ConfigError"
        ),
        "score max_tokens": score(
            "score has no option max_tokens", sequences=[[1, 2]], max_tokens=8, error="ConfigError"
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
        "evaluate max_length": Case(
            lambda: evaluate(model, LinearEquation(), max_length=2.5),
            "ConfigError",
            ("evaluate: max_length must be", "got 2.5"),
        ),
        "evaluate max_lengths": Case(
            lambda: evaluate(model, LinearEquation(), max_length=[8, 9]),
            "ConfigError",
            ("2 max_lengths were given for 1 tasks",),
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
        "hyperscale chains": case("chains must be", "at least 1", chains=(0,)),
        "hyperscale seeds": case("seeds must be", "got (-1,)", seeds=(-1,)),
        "hyperscale stop": case("stop_decided must be True or False, got 1", stop_decided=1),
        "hyperscale out": case("hyperscale: out must be", "got 5", out=5),
        "hyperscale serving": case("hyperscale: serving must be a Serving", serving=3),
        "hyperscale mapping": case(
            "hyperscale wants systems of dms_jax.evaluation.System", systems={"a": vanilla}
        ),
        "hyperscale policy": case("hyperscale wants systems", systems=dms_jax.Vanilla()),
        "hyperscale system": Case(
            lambda: System("TOVA", "TOVA"),
            "ConfigError",
            ("System: policy must be a Policy or None, got 'TOVA'",),
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

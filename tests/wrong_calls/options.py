"""Options of sampling, of policies and of estimates."""

from typing import Any

import dms_jax
from dms_jax import policies
from dms_jax.config import ModelConfig
from dms_jax.data import tasks
from dms_jax.generation import Device
from tests.wrong_calls.case import NAN, Case


def sampling_cases() -> dict[str, Case]:
    def case(says: tuple[str, ...], **fields) -> Case:
        return Case(lambda: dms_jax.Sampling(**fields), "ConfigError", ("Sampling", *says))

    number, whole = "must be a finite number", "must be a whole number"
    return {
        "temperature below zero": case(("temperature", number, "-1"), temperature=-1),
        "temperature beyond floats": case(("temperature", number), temperature=10**400),
        "seed of 5001 digits": case(("seed must be", "16610 bits"), seed=10**5000),
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
        "stop empty": case(("stop", "empty"), stop=["a", ""]),
        "stop empty text": case(("stop", "empty"), stop=""),
        "stop ids": case(("stop", "a sequence, each a text"), stop=[13]),
        "stop none": case(("stop", "a sequence, each a text", "None"), stop=None),
        "seed below zero": case(("seed", "at most 2**32 - 1"), seed=-1),
        "seed too large": case(("seed", "at most 2**32 - 1"), seed=2**32),
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
        "dms option misspelt": case(dms, "no option windw", "did you mean window?", windw=3),
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
        "dms decisions": case(dms, "'threshold' or 'bernoulli'", decisions="coin"),
        "dms seed": case(dms, "seed", "2**32 - 1", seed=2**32),
        "dms alpha_scale nan": case(dms, "alpha_scale", alpha_scale=NAN),
        "dms alpha_offset text": case(dms, "alpha_offset", alpha_offset="5"),
        "dmc neuron": case(dmc, "neuron", "'first' or 'last'", neuron="middle"),
        "dmc window zero": case(dmc, "window", "None to merge without one", window=0),
        "dmc window fraction": case(dmc, "window", "2.5", window=2.5),
        "dmc per": case(dmc, "per", "'head' or 'layer'", per="token"),
        "dmc importance": case(dmc, "importance", "'learned' or 'uniform'", importance="no"),
        "dmc temperature zero": case(dmc, "temperature", temperature=0),
        "dmc offset nan": case(dmc, "offset", offset=NAN),
        "dmc epsilon text": case(dmc, "epsilon", epsilon="small"),
        "dmc epsilon below zero": case(dmc, "epsilon", epsilon=-1.0),
        "pooling every zero": case(dms_jax.FixedPooling, "every", "0", every=0),
        "pooling every fraction": case(dms_jax.FixedPooling, "every", "2.5", every=2.5),
        "tova budget zero": case(tova, "budget", "at least 1", budget=0),
        "tova budget fraction": case(tova, "budget", "2.5", budget=2.5),
        "tova budget text": case(tova, "budget", budget="8"),
        "tova per": case(tova, "per", per="all"),
        "tova prefill": case(tova, "prefill", "'dense_then_evict'", "'dense'", prefill="dense"),
        "h2o compression_ratio half": case(
            dms_jax.H2O, "compression_ratio", "at least 1", compression_ratio=0.5
        ),
        "h2o compression_ratio text": case(
            dms_jax.H2O, "compression_ratio", "'4'", compression_ratio="4"
        ),
        "h2o compression_ratio beyond floats": case(
            dms_jax.H2O, "compression_ratio", compression_ratio=10**400
        ),
        "h2o budget beyond any sequence": case(
            dms_jax.H2O, "1000000000000", "Vanilla() to keep everything", budget=10**12
        ),
        "knorm interval beyond any answer": case(
            dms_jax.Knorm, "interval", "None to cut after the prompt alone", interval=10**12
        ),
        "snapkv budget within the window": case(
            dms_jax.SnapKV, "64 that always stay (window)", "raise the budget", budget=64
        ),
        "snapkv kernel even": case(dms_jax.SnapKV, "kernel", "odd number", kernel=4),
        "snapkv interval zero": case(dms_jax.SnapKV, "interval", "or None", interval=0),
        "expected attention budget within the sinks": case(
            dms_jax.ExpectedAttention, "4 that always stay (sinks)", budget=3
        ),
        "expected attention future": case(dms_jax.ExpectedAttention, "future", "0", future=0),
        "adakv alpha": case(dms_jax.AdaKV, "alpha", "of at least 0 and at most 1", alpha=2),
        "adakv without a scorer": case(
            dms_jax.AdaKV, "scorer", "does not score", "give SnapKV", scorer=dms_jax.DMS()
        ),
        "adakv scorer text": case(dms_jax.AdaKV, "scorer", "does not score", scorer="SnapKV"),
        "pyramidkv beta": case(dms_jax.PyramidKV, "beta", "0", beta=0),
        "quest per": case(quest, "per", "'kv_head'", per="layer"),
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
    text: Any = "H2O"
    extra = {"name": "TOVA", "budget": 8, "bugdet": 9}
    return cases | {
        "policy unknown": Case(
            lambda: policies.from_dict(unknown), "ConfigError", ("'H3O'", "known are Vanilla, DMS")
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
        "policy without a name": Case(
            lambda: policies.from_dict({"budget": 8}), "ConfigError", ("None", "known are")
        ),
        "policy with an unknown option": Case(
            lambda: policies.from_dict(extra),
            "ConfigError",
            ("bugdet", "did you mean budget?", "budget, compression_ratio, per"),
        ),
    }


def task_cases() -> dict[str, Case]:
    def case(kind: type, *says: str, **fields) -> Case:
        return Case(lambda: kind(**fields), "ConfigError", says)

    pair, whole = "a pair, each a whole number", "must be a whole number of at least "
    return {
        "task steps number": case(tasks.WordChain, "steps", pair, "3", steps=3),
        "task steps alone": case(tasks.WordChain, "steps", pair, "(3,)", steps=(3,)),
        "task steps falling": case(tasks.WordChain, "steps", "(low, high)", steps=(4, 3)),
        "task operations fraction": case(tasks.Arithmetic, "operations", pair, operations=(1.5, 2)),
        "task slips text": case(tasks.Arithmetic, "slips", "'often'", slips="often"),
        "task slips nan": case(tasks.Arithmetic, "slips", "nan", slips=NAN),
        "task slips of equations": case(tasks.LinearEquation, "have no slips", slips=0.1),
        "task size text": case(tasks.Needle, "size", whole + "1", size="1k"),
        "task needles bool": case(tasks.Needle, "needles", whole + "1", needles=True),
        "task haystack": case(tasks.Needle, "haystack", "'hay'", haystack="hay"),
        "task chains text": case(tasks.VariableTracking, "chains", whole + "1", chains="x"),
        "task hops fraction": case(tasks.VariableTracking, "hops", whole + "0", hops=0.5),
        "task split": Case(
            lambda: tasks.Needle().problem("dev", 0), "ConfigError", ("'dev'", "validation")
        ),
    }


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
        "device of nothing": Case(lambda: Device(1e9, 0, 1e9), "ConfigError", ("bandwidth",)),
        "estimate dtype": case("dtype", "'wide'", dtype="wide"),
        "estimate dtype of names": case("no dtype", "'names'", dtype={"names": 3}),
        "estimate dtype of whole numbers": case("dtype int8", "kv_dtype", dtype="int8"),
        "estimate dtype of a byte": case("float8_e4m3fn", "kv_dtype", dtype="float8_e4m3fn"),
        "estimate config": case("ModelConfig", given={"num_layers": 3}),
        "estimate policy": case("Not a cache policy", policy="DMS"),
        "estimate too small": case(
            "do not fit", error="CapacityError", device=Device(1000, 1e9, 1e9)
        ),
    }

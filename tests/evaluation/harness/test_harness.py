"""lm-evaluation-harness over the real cache: three kinds of requests, and the command line."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.errors import ConfigError
from dms_jax.evaluation import harness
from tests.generation.support import log_softmax, stories
from tests.support.models import random_model, tiny_config
from tests.support.tree import CLIENTS, ROOT

pytestmark = pytest.mark.nightly

HERE = pathlib.Path(__file__).parent
PATH = str(assets.path("stories260k"))
SMALL = dict(lanes=4, page_size=16, chunk=8, prefill_chunk=32)


@pytest.fixture(scope="module")
def lm_eval():
    """From the extra `eval`, or else from `make clients`, after installed packages on the path."""
    sys.path.append(str(CLIENTS / "python"))
    yield pytest.importorskip("lm_eval", reason="lm-eval is not there: `make clients`")
    sys.path.pop()


@functools.cache
def harness_model(**options):
    from dms_jax.evaluation.harness_model import HarnessModel

    return HarnessModel(PATH, **SMALL, **options)


def instances(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)
        for i, each in enumerate(arguments)
    ]


CONTEXTS = ("Once upon a time, there was", "Tom and", "", "The cat sat down. The cat was")
CONTINUATIONS = (" a little girl", " his dog went to the park", "One day", " happy")


def test_registered_with_the_harness(lm_eval):
    from lm_eval.api.registry import get_model

    harness.register()
    harness.register()
    assert get_model("dms_jax").__name__ == "HarnessModel"
    assert get_model("dummy").__name__ == "DummyLM"


def test_an_adapter_is_loaded_with_its_checkpoint(lm_eval, monkeypatch):
    from dms_jax.evaluation import harness_model

    loaded = []
    monkeypatch.setattr(
        harness_model, "load", lambda *path, **options: loaded.append((path, options)) or stories()
    )
    harness_model.HarnessModel("m.gguf", adapter="a", dtype="bfloat16")
    assert loaded == [(("m.gguf",), {"adapter": "a", "dtype": "bfloat16"})]


@functools.cache
def tiny():
    """A random float32 model with the shipped tokenizer."""
    config = dataclasses.replace(tiny_config(), vocab_size=512)
    return dataclasses.replace(
        stories(), transformer=random_model(config, dtype=np.float32), policy=dms_jax.Vanilla()
    )


@pytest.mark.parametrize("load", [tiny, stories])
def test_loglikelihoods_equal_a_plain_pass(lm_eval, load):
    from dms_jax.evaluation.harness_model import HarnessModel

    requests = instances("loglikelihood", *zip(CONTEXTS, CONTINUATIONS, strict=True))
    found = HarnessModel(load(), **SMALL).loglikelihood(requests)
    tokenizer = stories().tokenizer
    for context, continuation, (logprob, greedy) in zip(
        CONTEXTS, CONTINUATIONS, found, strict=True
    ):
        tokens = tokenizer.encode(context + continuation)
        begin = len(tokenizer.encode(context))
        own = log_softmax(np.asarray(load().logits(np.asarray([tokens])))[0, begin - 1 : -1])
        want = own[np.arange(len(tokens) - begin), tokens[begin:]].sum()
        assert logprob == pytest.approx(want, abs=1e-4)
        assert greedy == (own.argmax(-1) == tokens[begin:]).all()


def test_rolling_loglikelihoods_equal_plain_passes(lm_eval, monkeypatch):
    """Also of a text of several windows, the last of which sees as much context as fits."""
    text = "Once upon a time, there was a dog. The dog had a red ball and liked to play with it."
    model = harness_model()
    tokens = stories().tokenizer.encode(text)  # with the token that begins a sequence
    requests = instances("loglikelihood_rolling", (text,), ("One day",), ("",))
    whole = model.loglikelihood_rolling(requests)
    own = log_softmax(np.asarray(stories().logits(np.asarray([tokens])))[0, :-1])
    want = own[np.arange(len(tokens) - 1), tokens[1:]].sum()
    assert whole[0] == pytest.approx(want, abs=1e-4)
    assert whole[2] == 0
    monkeypatch.setattr(type(model), "max_length", 17)
    parts = model.loglikelihood_rolling(requests[:1])
    want, done = 0.0, 0
    while done < len(tokens) - 1:
        end = min(done + 16, len(tokens) - 1)  # of the tokens after the first
        start = max(0, end - 16)
        window = tokens[start : end + 1]
        own = log_softmax(np.asarray(stories().logits(np.asarray([window])))[0, :-1])
        scores = own[np.arange(len(window) - 1), window[1:]]
        want += scores[done - end :].sum()
        done = end
    assert parts[0] == pytest.approx(want, abs=1e-3)


def test_answers_end_at_stop_strings(lm_eval):
    requests = instances(
        "generate_until",
        ("Once upon a time", {"until": ["."], "max_gen_toks": 24}),
        ("Tom had a", {"until": [], "max_gen_toks": 3}),
        ("One day", {"until": ".", "max_gen_toks": 24, "do_sample": False}),
    )
    found = harness_model().generate_until(requests)
    for request, answer in zip(requests, found, strict=True):
        context, options = request.args
        sampling = dms_jax.Sampling(
            temperature=0,
            max_new_tokens=options["max_gen_toks"],
            stop=options["until"] or (),
        )
        (want,) = dms_jax.generate(stories(), [context], sampling=sampling).texts
        assert answer == want
    assert "." not in found[0]


def test_policies_and_options(lm_eval):
    small = harness_model(policy="TOVA", budget=10)
    assert small.policy == dms_jax.TOVA(budget=10)
    requests = instances("loglikelihood", *zip(CONTEXTS, CONTINUATIONS, strict=True))
    assert small.loglikelihood(requests) != harness_model().loglikelihood(requests)
    assert small.get_model_info()["policy"]["budget"] == 10
    assert small.get_model_info()["peak_tokens"] <= 11
    for options, message in (
        ({"budget": 10}, "budget: these are not options of the model"),
        ({"policy": "TOWA"}, "Unknown cache policy 'TOWA'"),
        ({"policy": "TOVA", "bugdet": 10}, "did you mean budget"),
    ):
        with pytest.raises(ConfigError, match=message):
            harness_model(**options)


def test_chat_template_applies(lm_eval):
    model = harness_model(enable_thinking=False)
    model.model.tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
    )
    history = [{"role": "user", "content": "Why?"}]
    assert model.apply_chat_template(history) == "<user>Why?</s><assistant><quiet>"
    history.append({"role": "assistant", "content": "Since"})
    left_open = model.apply_chat_template(history, add_generation_prompt=False)
    assert left_open == "<user>Why?</s><assistant>Since"
    assert model.chat_template(True) == model.model.tokenizer.chat_template
    assert model.chat_template() == ""


def test_a_local_task_from_the_command_line(lm_eval, tmp_path):
    """A likelihood task and a generation task, as `lm_eval` runs them."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dms_jax.evaluation.harness", "--model", "dms_jax"),
            *("--model_args", f"path={PATH},policy=TOVA,budget=16,page_size=16,chunk=8"),
            *("--tasks", "likely_words,next_words", "--include_path", str(HERE)),
            *("--output_path", str(tmp_path / "results")),
        ],
        cwd=HERE,
        env=os.environ
        | {
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(CLIENTS / "python")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "results").rglob("*.json")
    data = json.loads(file.read_text())
    # Likely words, except the last, whose stated answer is "kqjv".
    assert data["results"]["likely_words"]["acc,none"] == pytest.approx(2 / 3)
    assert data["results"]["next_words"]["exact_match,none"] == 0
    assert data["config"]["policy"] == dms_jax.TOVA(budget=16).to_dict()

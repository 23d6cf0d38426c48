"""A chat with a tiny random model of every family, over HTTP."""

import dataclasses
import json
import pathlib
import string

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

import dms_jax
from dms_jax.checkpoint import Tokenizer, load
from tests.serving.support import serving
from tests.support.instances import nightly_but

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "families"
KINDS = {
    json.loads((folder / "config.json").read_text())["model_type"]: folder.name
    for folder in sorted(GOLDEN.iterdir(), reverse=True)
}
LETTERS = (string.ascii_letters + string.digits)[:61]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}A"
NEW = 12


def with_letters(model: dms_jax.LanguageModel) -> dms_jax.LanguageModel:
    """The model with a token for each letter, and none that ends an answer."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[])
    )
    backend.decoder = decoders.Fuse()
    tokenizer = Tokenizer(backend, chat_template=TEMPLATE)
    return dataclasses.replace(model, tokenizer=tokenizer, generation=type(model.generation)())


@pytest.mark.parametrize("family", nightly_but(set(), KINDS))
def test_a_chat_is_answered(family):
    """The answer has the likeliest tokens of one pass over prompt and answer."""
    model = with_letters(load(GOLDEN / KINDS[family], untrained=True))
    grows = model.config.num_full_layers > 0
    policy = dms_jax.TOVA(budget=8, prefill="evict_past_budget") if grows else dms_jax.Vanilla()
    shape = dict(model=model, policy=policy, max_tokens=48, page_size=4, prefill_chunk=8)
    messages = [{"role": "user", "content": "HowAreYouToday"}]
    with serving(**shape) as client:
        asked = dict(chat=True, messages=messages, temperature=0, max_tokens=NEW, logprobs=True)
        (choice,) = client.ask(**asked)["choices"]
        told = client.stream(**asked)
    text = choice["message"]["content"]
    assert (len(text), choice["finish_reason"]) == (NEW, "length")
    parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in told]
    assert "".join(parts) == text
    prompt = model.tokenizer.encode("uHowAreYouTodayA")
    tokens = np.array([[*prompt, *model.tokenizer.encode(text)]], np.int32)
    logits = np.asarray(model.logits(tokens, policy=policy), np.float64)[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens[0, len(prompt) :].tolist()
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.log(weights.max(-1) / weights.sum(-1))
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert np.abs(np.array(logprobs) - expected).max() < 1e-3

"""Answers over HTTP, whole and streamed, equal those of the engine."""

import pytest

import dms_jax
from dms_jax.generation import Engine
from tests.generation.support import answer
from tests.serving.support import LANES, MAX_TOKENS, SHAPE, stories

STORY = dict(prompt="Once upon a time", max_tokens=14)
DRAWN = dict(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, seed=7)
TALK = [{"role": "user", "content": "Lily"}]
fakes = pytest.mark.usefixtures("fakes")


def encoded(text):
    return stories().tokenizer.encode(text)


def expected(prompt, *, copy=0, **sampling):
    """Returns the answer of the fakes to a text or to token ids."""
    prompt = encoded(prompt) if isinstance(prompt, str) else prompt
    return answer(prompt, dms_jax.Sampling(**sampling), "served", copy=copy)


def joined(chunks, choice=0):
    parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice]
    return "".join(part.get("text", part.get("delta", {}).get("content", "")) for part in parts)


def test_answer_equals_that_of_engine(idle):
    """With real programs."""
    greedy = dms_jax.Sampling(temperature=0, max_new_tokens=14, logprobs=True)
    options = dict(num_lanes=LANES, max_tokens=MAX_TOKENS, **SHAPE)
    engine = Engine(stories(), dms_jax.TOVA(budget=24), **options)
    (want,) = engine.generate([STORY["prompt"]], sampling=greedy)
    (choice,) = idle.ask(logprobs=1, temperature=0, **STORY)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (want.text, "length")
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(want.logprobs, abs=1e-5)


@fakes
def test_several_choices_whole_and_streamed(idle):
    want = [expected(STORY["prompt"], copy=copy, max_new_tokens=14, **DRAWN) for copy in range(2)]
    texts = [each.text for each in want]
    whole = idle.ask(model="stories", n=2, logprobs=1, **STORY, **DRAWN)
    assert (whole["object"], whole["model"]) == ("text_completion", "stories")
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2
    for choice, each in zip(whole["choices"], want, strict=True):
        assert choice["logprobs"]["token_logprobs"] == each.logprobs
    usage = whole["usage"]
    prompt = len(encoded(STORY["prompt"]))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 28)
    assert usage["total_tokens"] == prompt + 28
    kept = [each.usage for each in want]
    assert usage["kv_cache"]["kv_reads"] == sum(each["kv_reads"] for each in kept)
    assert usage["kv_cache"]["peak_tokens"] == pytest.approx(sum(x["peak_tokens"] for x in kept))
    assert usage["kv_cache"]["live_tokens"] == pytest.approx(sum(x["live_tokens"] for x in kept))
    assert 0 < usage["kv_cache"]["cache_bytes"] <= usage["kv_cache"]["peak_cache_bytes"]

    asked = dict(n=2, stream_options={"include_usage": True}, logprobs=1, **STORY, **DRAWN)
    *chunks, last = idle.stream(**asked)
    assert [joined(chunks, choice) for choice in range(2)] == texts
    assert len(chunks) > 4  # it came in parts
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], usage)
    logged = [
        logprob
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == 1
        for logprob in choice["logprobs"]["token_logprobs"]
    ]
    assert logged == want[1].logprobs


@fakes
def test_chat_uses_template(idle):
    ids = stories().tokenizer.encode("user: Lily\nassistant: ", False)
    want = expected(ids, temperature=0, max_new_tokens=10).text
    asked = dict(chat=True, messages=TALK, temperature=0, max_completion_tokens=10)
    whole = idle.ask(logprobs=True, **asked)
    (choice,) = whole["choices"]
    assert whole["object"] == "chat.completion"
    assert choice["message"] == {
        "role": "assistant",
        "content": want,
        "refusal": None,
    }
    logged = choice["logprobs"]["content"]
    assert len(logged) == whole["usage"]["completion_tokens"] == 10
    assert "".join(each["token"] for each in logged).strip() == want.strip()
    first, *chunks = idle.stream(**asked)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == want
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    parts = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Li", "ly")]}]
    assert idle.ask(**asked | {"messages": parts})["choices"][0]["message"] == choice["message"]
    other = idle.ask(**asked, chat_template_kwargs={"start": "poet"})
    assert other["usage"]["prompt_tokens"] != whole["usage"]["prompt_tokens"]


@fakes
def test_prompt_forms_and_stop(idle):
    ids = encoded("The cat")
    greedy = dict(temperature=0, max_tokens=12)
    text = idle.ask(prompt="The cat", **greedy)["choices"][0]["text"]
    assert text == expected(ids, temperature=0, max_new_tokens=12).text
    assert idle.ask(prompt=ids, **greedy)["choices"][0]["text"] == text
    both = idle.ask(prompt=[ids, ids], **greedy)["choices"]
    assert [choice["text"] for choice in both] == [text, text]
    middle = text[len(text) // 2 :][:3]
    stopped = idle.ask(prompt="The cat", stop=[middle], **greedy)["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text.partition(middle)[0], "stop")
    chunks = idle.stream(prompt="The cat", stop=middle, **greedy)
    assert joined(chunks) == stopped["text"]


@fakes
def test_logprobs_have_bytes_of_partial_characters(idle):
    hot = dict(messages=TALK, temperature=30, seed=3, max_tokens=60, logprobs=True)
    (choice,) = idle.ask(chat=True, **hot)["choices"]
    told = [bytes(each["bytes"]) for each in choice["logprobs"]["content"]]
    assert any(len(part) == 1 and part[0] >= 128 for part in told)
    assert "\ufffd".encode() not in told


@fakes
def test_seed_decides_answer(idle):
    texts = [idle.ask(**STORY, seed=3)["choices"][0]["text"] for _ in range(2)]
    assert texts == [expected(STORY["prompt"], max_new_tokens=14, seed=3).text] * 2
    drawn = {idle.ask(**STORY)["choices"][0]["text"] for _ in range(3)}
    assert len(drawn) > 1

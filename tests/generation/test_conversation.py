"""Turns over one cache equal one run over all tokens, and recompute nothing."""

import dataclasses
import shutil

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data import encode_document
from dms_jax.errors import CapacityError, ConfigError, DataError
from tests.generation.support import (
    GREEDY,
    ROWS_OF,
    answer,
    engine_for,
    model_for,
    prompts,
    stories,
)

SHAPE = dict(max_tokens=64, page_size=16, chunk=8, prefill_chunk=8)
# Programs of conversations, including those with questions.
BRANCHES = SHAPE | dict(branches=2)
SHORT = dataclasses.replace(GREEDY, max_new_tokens=9)
on_fakes = pytest.mark.usefixtures("fakes")
every_row = pytest.mark.parametrize("name", ["keeps", "evicts", "bounded"])


def begun(name="keeps", **options):
    """Returns a conversation on the plain model."""
    return dms_jax.Conversation(model_for("vanilla", ends=False), ROWS_OF[name], **options)


def check_turn(completion, past, turn, name="keeps", sampling=SHORT) -> None:
    """Compares a turn with the answer to the whole conversation; it prefills only its part."""
    want = answer([*past, *turn], sampling, name)
    own = dict(prompt_tokens=len(turn) + bool(past))  # the last token of an answer had not been run
    dataclasses.replace(want, usage=want.usage | own).check(completion)


@on_fakes
@every_row
def test_turns_equal_one_run_over_all_tokens(name, prefilled):
    conversation, past = begun(name, **BRANCHES), []
    for turn in prompts([9, 4, 11]):
        completion = conversation.say(turn, sampling=SHORT)
        assert sum(prefilled) == len(turn) + bool(past)
        check_turn(completion, past, turn, name)
        past += turn + completion.tokens
        prefilled.clear()
    assert [len(turn.tokens) for turn in conversation.turns] == [9, 9, 9]


@on_fakes
@every_row
def test_cleared_conversation_starts_over(name, prefilled):
    conversation = begun(name, **BRANCHES)
    first, turn = prompts([9, 4])
    conversation.say(first, sampling=SHORT)
    conversation.clear()
    assert conversation.turns == []
    prefilled.clear()
    completion = conversation.say(turn, sampling=SHORT)
    assert sum(prefilled) == len(turn)
    check_turn(completion, [], turn, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["vanilla", "dms", "dmc", "tova"])
def test_turns_equal_one_run_with_real_programs(name):
    conversation, past = dms_jax.Conversation(model_for(name, ends=False), **BRANCHES), []
    for turn in prompts([9, 4, 11]):
        completion = conversation.say(turn, sampling=SHORT)
        (whole,) = engine_for(name).generate([past + turn], sampling=SHORT)
        assert completion.tokens == whole.tokens
        for figure in ("live_tokens", "kv_reads", "compression_ratio", "cache_bytes"):
            found, want = (getattr(each.usage, figure) for each in (completion, whole))
            assert found == pytest.approx(want)
        past += turn + completion.tokens


@on_fakes
def test_stop_string_ends_turn(prefilled):
    prompt, turn = prompts([9, 3])
    sampling = dataclasses.replace(SHORT, stop=answer(prompt).text[9:12], max_new_tokens=20)
    conversation = begun(**SHAPE)
    first = conversation.say(prompt, sampling=sampling)
    assert first.finish_reason == "stop"
    answer(prompt, sampling).check(first)
    prefilled.clear()
    second = conversation.say(turn, sampling=SHORT)
    assert sum(prefilled) == 1 + 3  # the previous turn is not recomputed
    check_turn(second, prompt + first.tokens, turn)


@on_fakes
@pytest.mark.parametrize("name", ["evicts", "bounded"])
def test_interrupted_turn_leaves_conversation_unchanged(name, prefilled):
    turns, past = prompts([9, 4, 11]), []

    def interrupt(update):
        raise KeyboardInterrupt

    conversation = begun(name, **SHAPE)
    for turn in turns:
        with pytest.raises(KeyboardInterrupt):
            conversation.say([5, 6, 7], sampling=SHORT, on_tokens=interrupt)
        prefilled.clear()
        completion = conversation.say(turn, sampling=SHORT)
        assert sum(prefilled) == len(past) + len(turn)  # the history was recomputed, once
        check_turn(completion, past, turn, name)
        past += turn + completion.tokens
    assert len(conversation.turns) == 3


@on_fakes
def test_conversation_runs_out_of_positions():
    conversation = begun("bounded", page_size=16, chunk=8, prefill_chunk=512)
    conversation.say(prompts([480])[0], sampling=SHORT)
    with pytest.raises(DataError, match=r"has 489 tokens and the new prompt 30.* at most 22"):
        conversation.say(prompts([30])[0], sampling=SHORT)
    last = conversation.say(prompts([20])[0], sampling=SHORT)
    assert (len(last.tokens), last.finish_reason) == (3, "length")
    with pytest.raises(DataError, match="Start a new conversation"):
        conversation.say([5], sampling=SHORT)
    assert len(conversation.turns) == 2


@on_fakes
def test_conversation_runs_out_of_memory():
    conversation, (prompt, long) = with_pages(begun(**SHAPE), 3 * 20), prompts([9, 29])
    first = conversation.say(prompt, sampling=SHORT)
    with pytest.raises(CapacityError, match="cannot hold the sequence to its end"):
        conversation.say(long, sampling=SHORT)
    second = conversation.say([7, 8, 9], sampling=SHORT)  # a shorter turn still fits
    check_turn(second, prompt + first.tokens, [7, 8, 9])


@on_fakes
def test_later_turns_have_no_beginning_token():
    tokenizer, conversation = stories().tokenizer, begun(**SHAPE)
    first = conversation.say("Once upon a time", sampling=SHORT)
    second = conversation.say(" and then", sampling=SHORT)
    start = tokenizer.encode("Once upon a time")
    more = tokenizer.encode(" and then", add_special_tokens=False)
    assert start[0] == tokenizer.bos_token_id != more[0]
    check_turn(second, start + first.tokens, more)


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message.role }}] {{ message.content }}{% if message.role == 'assistant' %}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def chatting(tmp_path):
    """The shipped model with a chat template, whose answers end at </s>."""
    shutil.copy(assets.path("stories260k") / "tokenizer.json", tmp_path)
    shutil.copy(assets.path("stories260k") / "tokenizer_config.json", tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    tokenizer.chat_template = TEMPLATE
    return dataclasses.replace(model_for("vanilla", ends=False), tokenizer=tokenizer)


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


@on_fakes
def test_chat_template_renders_each_turn_once(chatting, prefilled):
    encode = chatting.tokenizer.encode
    conversation = dms_jax.Conversation(chatting, **(SHAPE | {"max_tokens": 128}))
    first = conversation.say(user("A cat"), sampling=SHORT)
    opening = encode("<s>[user] A cat[assistant] ", False)
    assert sum(prefilled) == len(opening)
    prefilled.clear()
    second = conversation.say(user("sat"), sampling=SHORT)
    # The template closes the truncated answer; neither <s> nor the first turn is repeated.
    more = encode("</s>[user] sat[assistant] ", False)
    assert sum(prefilled) == 1 + len(more)
    check_turn(second, opening + first.tokens, more)
    third = conversation.say(user("on it"), sampling=dataclasses.replace(SHORT, max_new_tokens=2))
    assert third.usage.prompt_tokens == 1 + len(encode("</s>[user] on it[assistant] ", False))


@on_fakes
def test_template_variables_apply_everywhere(chatting, prefilled):
    """Prompts, every turn of a conversation, and documents to train on."""
    chatting.tokenizer.chat_template = TEMPLATE + "{{ thinking | default('') }}"
    thinking = chatting.with_template(thinking="hm")
    encode = chatting.tokenizer.encode

    def text_of(model):
        prefilled.clear()
        dms_jax.generate(model, [user("A cat")], sampling=SHORT, chunk=8, prefill_chunk=8)
        return sum(prefilled)

    assert text_of(thinking) == len(encode("<s>[user] A cat[assistant] hm", False))
    assert text_of(chatting) == len(encode("<s>[user] A cat[assistant] ", False))
    written = thinking.tokenizer.apply_chat_template(user("A cat"), thinking="no")
    assert written == "<s>[user] A cat[assistant] no"  # the variables of a call take precedence

    trained = encode_document(user("A cat"), thinking.tokenizer)
    assert list(trained) == encode("<s>[user] A cat" + "hm", False)


def test_invalid_template_variables_are_refused(chatting):
    with pytest.raises(ConfigError, match="with_template: messages cannot be given"):
        chatting.with_template(messages=[])
    chatting.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template, so.*enable_thinking"):
        chatting.with_template(enable_thinking=False)


@on_fakes
def test_chat_after_plain_text_is_refused(chatting):
    conversation = dms_jax.Conversation(chatting, **SHAPE)
    conversation.say("A cat", sampling=SHORT)
    with pytest.raises(DataError, match="began with plain text"):
        conversation.say(user("sat"), sampling=SHORT)
    chatting.tokenizer.chat_template = "{{ messages | length }}"
    conversation = dms_jax.Conversation(chatting, **SHAPE)
    conversation.say(user("A cat"), sampling=SHORT)
    with pytest.raises(DataError, match="does not repeat an earlier answer"):
        conversation.say(user("sat"), sampling=SHORT)


# -- questions about one context ---------------------------------------------------------------


@on_fakes
@pytest.mark.parametrize("name", ["keeps", "evicts"])
def test_questions_prefill_their_context_once(name, prefilled):
    """Three questions in two branches equal three conversations; the context stays."""
    context, *questions = prompts([17, 4, 9, 6])
    conversation = begun(name, **BRANCHES)
    conversation.read(context)
    prefilled.clear()

    def check(found, past, question):
        want = answer([*past, *question], SHORT, name)
        own = want.usage | dict(prompt_tokens=len(question) + (past != context))
        dataclasses.replace(want, usage=own).check(found)

    for _ in range(2):  # questions leave nothing behind
        answers = conversation.ask(questions, sampling=SHORT)
        for found, question in zip(answers, questions, strict=True):
            check(found, context, question)
    assert sum(prefilled) == 2 * sum(map(len, questions))
    assert conversation.turns == []
    turn = conversation.say(questions[0], sampling=SHORT)
    check(turn, context, questions[0])
    (last,) = conversation.ask(questions[1:2], sampling=SHORT)
    check(last, context + questions[0] + turn.tokens, questions[1])
    assert len(conversation.turns) == 1


def with_pages(conversation, pages: int):
    """Returns a new conversation with a pool of that many pages."""
    free = conversation._engine.runner.reservation.allocator._free
    free[0] = free[0][len(free[0]) - pages :]
    return conversation


@on_fakes
def test_invalid_questions_and_contexts_are_refused(chatting):
    conversation = dms_jax.Conversation(chatting, **SHAPE)
    with pytest.raises(ConfigError, match="branches="):
        conversation.ask([[5]], sampling=SHORT)
    with pytest.raises(DataError, match="not to read"):
        conversation.read(user("A cat"))
    with pytest.raises(DataError, match="list of questions"):
        conversation.ask("Who?", sampling=SHORT)
    with pytest.raises(ConfigError, match="branches"):
        dms_jax.Conversation(chatting, branches=-1)
    conversation.read("A cat")
    with pytest.raises(DataError, match="began with plain text"):
        conversation.say(user("sat"), sampling=SHORT)

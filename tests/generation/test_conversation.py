"""Turns that share a cache equal one run over all tokens, and recompute nothing."""

import dataclasses
import shutil

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data.encoding import encode_document
from dms_jax.errors import CapacityError, ConfigError, DataError
from dms_jax.generation.runner import Runner
from tests.generation.support import GREEDY, POLICIES, engine_for, model_for, prompts, stories
from tests.support.instances import further, nightly_but

pytestmark = pytest.mark.usefixtures("two_programs")
SHAPE = dict(max_tokens=64, page_size=16, chunk=8, prefill_chunk=8)
# The programs of conversations that are asked questions, too.
BRANCHES = SHAPE | dict(branches=2)
SHORT = dataclasses.replace(GREEDY, max_new_tokens=9)
# RandomEviction is DMS with other decisions; Quest's turns differ from one run, see below.
SPLIT_INVARIANT = ("vanilla", "dms", "dmc", "tova", "streaming")


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """Records the number of tokens of each call of Runner.extend."""
    counts = []
    extend = Runner.extend

    def counted(self, tokens, **options):
        counts.append(sum(map(len, tokens.values())))
        return extend(self, tokens, **options)

    monkeypatch.setattr(Runner, "extend", counted)
    return counts


@pytest.mark.parametrize("name", nightly_but({"vanilla", "dms"}, SPLIT_INVARIANT))
def test_turns_equal_one_run_over_all_tokens(name, fed):
    conversation = dms_jax.Conversation(model_for(name, ends=False), **BRANCHES)
    turns = prompts([9, 4, 11])
    past: list[int] = []
    for turn in turns:
        completion = conversation.say(turn, sampling=SHORT)
        # Only the prompt and the last token of the last answer, which had not been run.
        assert sum(fed) == len(turn) + (len(past) > 0)
        assert completion.usage.prompt_tokens == sum(fed)
        (whole,) = engine_for(name).generate([past + turn], sampling=SHORT)
        assert completion.tokens == whole.tokens
        assert completion.usage.live_tokens == pytest.approx(whole.usage.live_tokens)
        assert completion.usage.kv_reads == pytest.approx(whole.usage.kv_reads)
        assert completion.usage.compression_ratio == pytest.approx(whole.usage.compression_ratio)
        assert completion.usage.cache_bytes == whole.usage.cache_bytes
        past += turn + completion.tokens
        fed.clear()
    assert [len(turn.tokens) for turn in conversation.turns] == [9, 9, 9]


@pytest.mark.nightly
def test_quest_turns_keep_their_prompts_dense():
    """It differs from one run over all tokens: the earlier answer was computed with selection."""
    conversation = dms_jax.Conversation(model_for("quest", ends=False), **BRANCHES)
    for turn in prompts([20, 6]):
        completion = conversation.say(turn, sampling=SHORT)
    assert completion.usage.live_tokens == 20 + 9 + 6 + 9 - 1
    assert len(completion.tokens) == 9


@pytest.mark.nightly
def test_a_stop_string_ends_a_turn_and_nothing_beyond_it_is_cached(fed):
    model = model_for("vanilla", ends=False)
    (free,) = engine_for("vanilla").generate(prompts([9]), sampling=GREEDY)
    stop = free.text[9:12]
    sampling = dataclasses.replace(SHORT, stop=stop, max_new_tokens=20)
    conversation = dms_jax.Conversation(model, **SHAPE)
    first = conversation.say(prompts([9])[0], sampling=sampling)
    assert first.finish_reason == "stop"
    assert first.text == free.text[: free.text.index(stop)]
    assert first.tokens == free.tokens[: len(first.tokens)]
    assert stop not in model.tokenizer.decode(first.tokens[:-1])
    fed.clear()
    second = conversation.say([7, 8, 9], sampling=SHORT)
    assert sum(fed) == 1 + 3  # the turn before it is not read again
    whole = prompts([9])[0] + first.tokens + [7, 8, 9]
    (expected,) = engine_for("vanilla").generate([whole], sampling=SHORT)
    assert second.tokens == expected.tokens
    assert second.usage.live_tokens == expected.usage.live_tokens


@pytest.mark.parametrize("name", ["dms", *further("quest")])
def test_an_interrupted_turn_leaves_the_conversation_as_it_was(name, fed):
    model, options = model_for(name, ends=False), SHAPE if name == "dms" else BRANCHES
    turns = prompts([9, 4, 11])
    undisturbed = dms_jax.Conversation(model, **options)
    expected = [undisturbed.say(turn, sampling=SHORT) for turn in turns]

    def interrupt(update):
        raise KeyboardInterrupt

    conversation = dms_jax.Conversation(model, **options)
    for index, turn in enumerate(turns):
        with pytest.raises(KeyboardInterrupt):
            conversation.say([5, 6, 7], sampling=SHORT, on_tokens=interrupt)
        fed.clear()
        completion = conversation.say(turn, sampling=SHORT)
        assert completion.tokens == expected[index].tokens
        assert completion.usage.live_tokens == expected[index].usage.live_tokens
        past = sum(map(len, turns[:index])) + 9 * index
        assert sum(fed) == past + len(turn)  # the past was recomputed, once
    assert len(conversation.turns) == 3


@pytest.mark.nightly
def test_when_the_positions_run_out():
    conversation = dms_jax.Conversation(
        model_for("streaming", ends=False), page_size=16, chunk=8, prefill_chunk=512
    )
    conversation.say(prompts([480])[0], sampling=SHORT)
    with pytest.raises(DataError, match=r"has 489 tokens and the new prompt 30.* at most 22"):
        conversation.say(prompts([30])[0], sampling=SHORT)
    last = conversation.say(prompts([20])[0], sampling=SHORT)
    assert (len(last.tokens), last.finish_reason) == (3, "length")
    with pytest.raises(DataError, match="Start a new conversation"):
        conversation.say([5], sampling=SHORT)
    assert len(conversation.turns) == 2


@pytest.mark.nightly
def test_when_the_memory_runs_out():
    model = model_for("vanilla", ends=False)
    conversation = with_pages(dms_jax.Conversation(model, **SHAPE), 3 * 20)
    first = conversation.say(prompts([9])[0], sampling=SHORT)
    with pytest.raises(CapacityError, match="cannot hold the sequence to its end"):
        conversation.say(prompts([29])[0], sampling=SHORT)
    second = conversation.say([7, 8, 9], sampling=SHORT)  # a shorter turn still fits
    whole = prompts([9])[0] + first.tokens + [7, 8, 9]
    (expected,) = engine_for("vanilla").generate([whole], sampling=SHORT)
    assert second.tokens == expected.tokens


def test_text_goes_on_without_a_beginning_token():
    model = stories()
    conversation = dms_jax.Conversation(model_for("vanilla", ends=False), **SHAPE)
    first = conversation.say("Once upon a time", sampling=SHORT)
    second = conversation.say(" and then", sampling=SHORT)
    start = model.tokenizer.encode("Once upon a time")
    more = model.tokenizer.encode(" and then", add_special_tokens=False)
    assert start[0] == model.tokenizer.bos_token_id != more[0]
    assert second.usage.prompt_tokens == len(more) + 1
    (expected,) = engine_for("vanilla").generate([start + first.tokens + more], sampling=SHORT)
    assert second.tokens == expected.tokens


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


@pytest.mark.nightly
def test_chat_turns_are_written_once(chatting, fed):
    encode = chatting.tokenizer.encode
    conversation = dms_jax.Conversation(chatting, **(SHAPE | {"max_tokens": 128}))
    first = conversation.say(user("A cat"), sampling=SHORT)
    assert sum(fed) == len(encode("<s>[user] A cat[assistant] ", False))
    fed.clear()
    second = conversation.say(user("sat"), sampling=SHORT)
    # The template closes the truncated answer; neither <s> nor the first turn is repeated.
    more = encode("</s>[user] sat[assistant] ", False)
    assert sum(fed) == 1 + len(more)
    past = encode("<s>[user] A cat[assistant] ", False) + first.tokens
    (expected,) = engine_for("vanilla").generate([past + more], sampling=SHORT)
    assert second.tokens == expected.tokens
    third = conversation.say(user("on it"), sampling=dataclasses.replace(SHORT, max_new_tokens=2))
    assert third.usage.prompt_tokens == 1 + len(encode("</s>[user] on it[assistant] ", False))


@pytest.mark.nightly
def test_variables_of_the_template_reach_all_that_writes_messages(chatting, fed):
    """Prompts, every turn of a conversation, and documents to train on."""
    chatting.tokenizer.chat_template = TEMPLATE + "{{ thinking | default('') }}"
    thinking = chatting.with_template(thinking="hm")
    encode = chatting.tokenizer.encode

    def text_of(model):
        fed.clear()
        dms_jax.generate(model, [user("A cat")], sampling=SHORT, chunk=8, prefill_chunk=8)
        return sum(fed)

    assert text_of(thinking) == len(encode("<s>[user] A cat[assistant] hm", False))
    assert text_of(chatting) == len(encode("<s>[user] A cat[assistant] ", False))
    written = thinking.tokenizer.apply_chat_template(user("A cat"), thinking="no")
    assert written == "<s>[user] A cat[assistant] no"  # what a call gives goes first

    trained = encode_document(user("A cat"), thinking.tokenizer)
    assert list(trained) == encode("<s>[user] A cat" + "hm", False)


def test_variables_that_no_template_takes_are_refused(chatting):
    with pytest.raises(ConfigError, match="with_template: messages cannot be given"):
        chatting.with_template(messages=[])
    chatting.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template, so that.*enable_thinking"):
        chatting.with_template(enable_thinking=False)


@pytest.mark.nightly
def test_an_answer_that_ended_is_not_ended_twice(chatting):
    generation = dataclasses.replace(
        chatting.generation, eos_token_ids=tuple(range(chatting.config.vocab_size))
    )
    model = dataclasses.replace(chatting, generation=generation)
    conversation = dms_jax.Conversation(model, **(SHAPE | {"max_tokens": 128}))
    conversation.say(user("A cat"), sampling=SHORT)  # any first token ends it
    ended = (chatting.tokenizer.eos_token_id,)
    conversation._history = dataclasses.replace(conversation._history, before=ended)
    second = conversation.say(user("sat"), sampling=SHORT)
    more = chatting.tokenizer.encode("</s>[user] sat[assistant] ", False)
    assert second.usage.prompt_tokens == len(more)


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


def test_several_seeds_for_one_conversation_are_refused():
    conversation = dms_jax.Conversation(model_for("vanilla", ends=False), **SHAPE)
    with pytest.raises(ConfigError, match="2 seeds for 1 prompts"):
        conversation.say([5], sampling=dms_jax.Sampling(seed=[1, 2]))


# -- questions about one context ---------------------------------------------------------------

# Of the policies, those that keep all, evict as they learned, merge, and know something of a page.
CASES = {name: POLICIES[name] for name in ("vanilla", "dms", "dmc", "quest")} | {
    "snapkv": dms_jax.SnapKV(budget=12, window=4, interval=4),
    "kcache": dms_jax.KCache(top=4, first_layers=1),
}


def said(model, policy, context, *turns):
    """Returns the last answer of a conversation of its own, by the programs of two branches."""
    conversation = dms_jax.Conversation(model, policy, **BRANCHES)
    conversation.read(context)
    for turn in turns:
        completion = conversation.say(turn, sampling=SHORT)
    return completion


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_questions_about_one_context_read_it_once(name, fed):
    """Three questions in two branches equal three conversations, and the context stays."""
    model, policy = model_for("vanilla", ends=False), CASES[name]
    context, *questions = prompts([17, 4, 9, 6])
    expected = [said(model, policy, context, question) for question in questions]
    conversation = dms_jax.Conversation(model, policy, **BRANCHES)
    conversation.read(context)
    fed.clear()
    for _ in range(2):  # what is asked leaves nothing behind
        answers = conversation.ask(questions, sampling=SHORT)
        for found, want in zip(answers, expected, strict=True):
            assert found.tokens == want.tokens
            assert found.logprobs == pytest.approx(want.logprobs, abs=1e-4)
            for figure in ("kv_reads", "peak_tokens", "live_tokens", "prompt_tokens"):
                assert getattr(found.usage, figure) == getattr(want.usage, figure)
    assert sum(fed) == 2 * sum(map(len, questions))
    assert conversation.turns == []
    turn = conversation.say(questions[0], sampling=SHORT)
    assert turn.tokens == expected[0].tokens
    last = conversation.ask(questions[1:2], sampling=SHORT)
    assert last[0].tokens == said(model, policy, context, *questions[:2]).tokens
    assert len(conversation.turns) == 1


@pytest.mark.nightly
def test_chains_of_one_question_read_it_once(fed):
    conversation = dms_jax.Conversation(model_for("dms", ends=False), **BRANCHES)
    context, question = prompts([17, 6])
    conversation.read(context)
    fed.clear()
    sampling = dataclasses.replace(SHORT, temperature=3.0)  # at 1 the model is all but certain
    answers = conversation.ask([question] * 2, sampling=sampling)
    assert sum(fed) == len(question)
    assert [answer.usage.prefilled_tokens for answer in answers] == [6, 0]
    assert len({tuple(answer.tokens) for answer in answers}) > 1


def with_pages(conversation, pages: int):
    """Returns a conversation that has begun nothing, with so many pages in its pool."""
    free = conversation._engine.runner.allocator._free
    free[0] = free[0][len(free[0]) - pages :]
    return conversation


@pytest.mark.nightly
def test_questions_that_do_not_fit_together_wait():
    """Memory for the context and one question, though there are two branches."""
    model = model_for("vanilla", ends=False)
    context, *questions = prompts([17, 4, 9])
    expected = [said(model, None, context, question) for question in questions]
    conversation = with_pages(dms_jax.Conversation(model, **BRANCHES), 7 * 20)
    conversation.read(context)
    answers = conversation.ask(questions, sampling=SHORT)
    assert [answer.tokens for answer in answers] == [each.tokens for each in expected]
    small = with_pages(dms_jax.Conversation(model, **BRANCHES), 3 * 20)
    small.read(context)
    with pytest.raises(CapacityError, match=r"the prompt of prompt 1 \(26 tokens so far\)"):
        small.ask(questions, sampling=SHORT)
    assert small.say(questions[0], sampling=SHORT).tokens == expected[0].tokens


def test_an_interrupted_question_leaves_the_conversation_as_it_was():
    def interrupt(update):
        raise KeyboardInterrupt

    conversation = dms_jax.Conversation(model_for("dms", ends=False), **BRANCHES)
    context, question = prompts([17, 4])
    conversation.read(context)
    (expected,) = conversation.ask([question], sampling=SHORT)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask([question], sampling=SHORT, on_tokens=interrupt)
    (found,) = conversation.ask([question], sampling=SHORT)
    assert found.tokens == expected.tokens


def test_what_cannot_be_asked_or_read(chatting):
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


def test_an_interrupt_while_a_text_is_awaited_loses_nothing(monkeypatch):
    """A text is read when `read` returns: its errors are not those of the next turn."""
    context, question = prompts([7, 6])

    def refuse(runner, *_):
        raise KeyboardInterrupt

    def answered(interrupted):
        conversation = dms_jax.Conversation(model_for("dms", ends=False), **SHAPE)
        with monkeypatch.context() as patch:
            if interrupted:
                patch.setattr(Runner, "read_lengths", refuse)
                with pytest.raises(KeyboardInterrupt):
                    conversation.read(context)
        conversation.read(context)
        return conversation.say(question, sampling=SHORT)

    assert answered(interrupted=True) == answered(interrupted=False)

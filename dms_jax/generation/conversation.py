"""Conversations: several turns over one cache.

A conversation keeps its sequence in a lane, not as a cached prefix (`prefixes`). So its turns can
continue after cuts of the policy, which depend on where turns ended and not on the tokens alone;
nothing is copied; and it works on a mesh.
"""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, Unpack

from dms_jax import sharding
from dms_jax.checks import Whole, check, check_keywords, require, show_options
from dms_jax.errors import DataError
from dms_jax.generation.engine import Engine, EngineKeywords, EngineOptions, Source
from dms_jax.generation.requests import (
    Completion,
    OnTokens,
    Past,
    Prompt,
    check_call,
    check_list,
    check_messages,
    encode_prompt,
    is_chat,
    make_request,
    make_requests,
)
from dms_jax.generation.sampling import Sampling
from dms_jax.interrupts import unless_busy
from dms_jax.model.language_model import LanguageModel, check_model, use_mesh
from dms_jax.policies import Policy

_ANSWER = "(the answer that stands here)"  # marks where a chat template puts an answer


@dataclasses.dataclass(frozen=True)
class Turn:
    """A part of a conversation that is in the cache.

    Attributes:
      tokens: token ids in order.
      prompt: whether they are a prompt; otherwise they are an answer.
      max_length: length that the conversation could reach in this turn.
    """

    tokens: list[int]
    prompt: bool
    max_length: int


@dataclasses.dataclass(frozen=True)
class _History:
    """The state of a conversation. Each turn replaces it atomically.

    Attributes:
      past: the prompts and answers in the cache.
      before: the last token of the last answer, which is not cached yet.
      messages: the chat messages up to the last answer; None after a turn that was not a chat.
      turns: the completions so far.
    """

    past: tuple[Turn, ...] = ()
    before: tuple[int, ...] = ()
    messages: tuple[Any, ...] | None = ()
    turns: tuple[Completion, ...] = ()

    @property
    def seen(self) -> int:
        """Number of tokens in the cache."""
        return sum(len(turn.tokens) for turn in self.past)

    def with_context(self, tokens: list[int], max_length: int) -> "_History":
        """Returns the history with a context appended, without an answer."""
        turn = Turn([*self.before, *tokens], True, max_length)
        return dataclasses.replace(self, past=(*self.past, turn), before=(), messages=None)

    def with_turn(
        self, prompt: Prompt, tokens: list[int], max_length: int, completion: Completion
    ) -> "_History":
        """Returns the history with one more turn."""
        messages = None
        if self.messages is not None and is_chat(prompt):
            answered = [{"role": "assistant", "content": turn.text} for turn in self.turns[-1:]]
            messages = (*self.messages, *answered, *prompt)
        return _History(
            past=(
                *self.past,
                Turn([*self.before, *tokens], True, max_length),
                Turn(completion.tokens[:-1], False, max_length),
            ),
            before=tuple(completion.tokens[-1:]),
            messages=messages,
            turns=(*self.turns, completion),
        )


class Conversation:
    """A conversation whose turns share one cache: no earlier turn is recomputed.

    Args:
      model: from `load` or `retrofit`.
      policy: the cache policy; None for the one that the checkpoint declares.
      max_tokens: length of the whole conversation; None for all of the model's positions.
      branches: the most questions of `ask` that are answered at a time. Each takes as much memory
        as the conversation. On a mesh that would split these lanes over devices, one lane is added.
      memory, chunk, **options: see `dms_jax.generation.EngineOptions`.

    It answers one call at a time: a second one, from another thread or from inside a
    callback, raises BusyError and changes nothing.
    """

    @show_options(EngineOptions)
    def __init__(
        self,
        model: LanguageModel,
        policy: Policy | str | None = None,
        *,
        max_tokens: int | None = None,
        branches: int = 0,
        memory: float | int | None = None,
        chunk: int = 32,
        **options: Unpack[EngineKeywords],
    ):
        check_keywords("Conversation", Conversation, options)
        self._engine = Engine(
            model,
            policy,
            num_lanes=_lanes(model, check("branches", branches, Whole)),
            max_tokens=max_tokens,
            memory=memory,
            chunk=chunk,
            **options,
        )
        self._lock = threading.Lock()
        self._history = _History()

    @property
    def turns(self) -> list[Completion]:
        """The completions so far."""
        return list(self._history.turns)

    def clear(self) -> None:
        """Forgets all turns. The next one begins a conversation, in the same memory.

        Raises:
          BusyError: a turn is being answered.
        """
        with unless_busy(self._lock, "The conversation"):
            self._history = _History()

    def say(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Appends a prompt to the conversation and returns the answer.

        In later turns, text is encoded without the beginning-of-sequence token, and only the new
        chat messages are given. The usage is that of this turn, over a cache that holds all turns.
        A turn that fails or is interrupted leaves the conversation as it was; the next one
        recomputes the past.

        Raises:
          DataError: the prompt is malformed, or the conversation outgrows the model's positions.
          CapacityError: the conversation outgrows its memory.
          BusyError: another turn is being answered.
        """
        sampling = check_call(sampling, on_tokens)
        with unless_busy(self._lock, "The conversation"):
            engine, history = self._engine, self._history
            tokens = self._encode(prompt)
            (seed,) = sampling.seeds(1)
            past = Past(history.before, history.seen)
            request = make_request(engine.model.config, tokens, sampling, seed=seed, past=past)
            self._recall()
            (completion,) = engine.serve(Source([request], on_tokens=on_tokens, keep=True))
            # An interrupt before this line leaves the cache ahead of the history; the next turn
            # recomputes it.
            self._history = history.with_turn(prompt, tokens, request.max_length, completion)
        return completion

    def read(self, context: Prompt) -> None:
        """Appends a context without an answer, for questions to follow.

        The policy treats it as a prompt, and may evict at its end; a budget relative to the longest
        length uses the length of the conversation so far.

        Raises:
          DataError: the text is malformed, or chat messages, or leaves no position for an answer.
          CapacityError: the conversation outgrows its memory.
          BusyError: a turn is being answered.
        """
        with unless_busy(self._lock, "The conversation"):
            engine, history = self._engine, self._history
            if is_chat(context):
                raise DataError("Chat messages are answered: give them to say or ask, not to read.")
            tokens = self._encode(context)
            past = Past(history.before, history.seen)
            request = make_request(
                engine.model.config, tokens, Sampling(max_new_tokens=1), past=past
            )
            history = history.with_context(tokens, request.max_length - 1)
            self._recall()
            _prefill(engine, history.past[-1], past.seen)
            self._history = history

    def ask(
        self,
        questions: Sequence[Prompt],
        *,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Answers questions, each as if it were said next; the conversation does not change.

        The conversation is not recomputed: each question continues a copy of its cache, up to
        `branches` at a time.

        Raises:
          ConfigError: the conversation was created without `branches`.
          DataError, CapacityError, BusyError: see `say`.
        """
        check_list(questions, "questions")
        sampling = check_call(sampling, on_tokens)
        with unless_busy(self._lock, "The conversation"):
            engine, history = self._engine, self._history
            require(
                engine.runner.num_lanes > 1,
                "Conversation.ask needs room for copies of the cache: give Conversation the number "
                "of questions to answer at a time (branches=).",
            )
            tokens = [self._encode(question) for question in questions]
            past = Past(history.before, history.seen, base=0)
            requests = make_requests(engine.model.config, tokens, sampling, past)
            self._recall()
            return engine.serve(Source(requests, on_tokens=on_tokens))

    def _recall(self) -> None:
        """Recomputes the past if the cache does not hold it after an interrupt."""
        runner, history = self._engine.runner, self._history
        if runner.dirty or int(runner.seen[0]) != history.seen:
            runner.restart()
            for turn in history.past:
                _prefill(self._engine, turn, int(runner.seen[0]))

    def _encode(self, prompt: Prompt) -> list[int]:
        model, history = self._engine.model, self._history
        if not history.past or not is_chat(prompt):
            return encode_prompt(model, prompt, continuing=bool(history.past))
        if history.messages is None:
            raise DataError(
                "The conversation began with plain text or token ids, which chat messages cannot "
                "follow. Continue in the same form, or start a new conversation."
            )
        text = _text_after_answer(model, history.messages, prompt)
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        # The end token of the answer is both in the template and generated.
        return tokens[1:] if list(history.before) == tokens[:1] else tokens


def _text_after_answer(model: LanguageModel, past: Sequence[Any], messages: Sequence[Any]) -> str:
    """Returns the text that the chat template puts between the last answer and the next one.

    Args:
      model: the model whose chat template applies.
      past: messages of the earlier turns, without the last answer.
      messages: the new messages.

    Raises:
      DataError: a message is malformed, or the template refuses the conversation.
    """
    check_messages(messages)
    text = model.tokenizer.apply_chat_template(
        [*past, {"role": "assistant", "content": _ANSWER}, *messages], add_generation_prompt=True
    )
    if text.count(_ANSWER) != 1:
        raise DataError(
            "The chat template does not repeat an earlier answer as it was, so a conversation "
            "cannot continue through it. Give the next turn as text."
        )
    return text.partition(_ANSWER)[2]


def _lanes(model: LanguageModel, branches: int) -> int:
    """The lanes of a conversation and its branches, all on the same devices, as copies must be."""
    check_model(model)
    with use_mesh(model.mesh):
        split, _ = sharding.row_axes(1 + branches, model.config.num_kv_heads)
    return 1 + branches if split is None else 2 + branches


def _prefill(engine: Engine, turn: Turn, seen: int) -> None:
    """Computes a turn of a conversation in lane 0, after the tokens that it has seen.

    Raises:
      CapacityError: the pool does not hold it.
    """
    # Like a request that was preempted after its last token, which is not cached.
    sampling = Sampling(max_new_tokens=1)
    request = make_request(engine.model.config, [], sampling, past=Past(seen=seen))
    request.prompt, answer = (turn.tokens, []) if turn.prompt else ([], turn.tokens)
    request.generated = [*answer, 0]
    request.max_new_tokens, request.max_length = len(request.generated), turn.max_length
    engine.serve(Source([request], keep=True))

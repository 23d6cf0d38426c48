"""Conversations: several turns over one cache."""

import dataclasses
import threading
from typing import Any, Unpack

from dms_jax.checks import check_keywords, show_options
from dms_jax.errors import DataError
from dms_jax.generation.calls import unless_busy
from dms_jax.generation.engine import Engine
from dms_jax.generation.options import EngineKeywords, EngineOptions
from dms_jax.generation.prompts import check_call, encode_prompt, is_chat, text_after_answer
from dms_jax.generation.requests import Completion, OnTokens, Prompt, Turn, make_request
from dms_jax.generation.sampling import Sampling
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy


@dataclasses.dataclass(frozen=True)
class _History:
    """The state of a conversation. Each turn replaces it as a whole, so no turn is half recorded.

    Attributes:
      past: the prompts and answers in the cache.
      before: the last token of the last answer, which is not in the cache yet.
      messages: the chat messages up to the last answer; None once a turn was no chat.
      turns: the completions so far.
    """

    past: tuple[Turn, ...] = ()
    before: tuple[int, ...] = ()
    messages: tuple[Any, ...] | None = ()
    turns: tuple[Completion, ...] = ()

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
      memory, chunk, **options: see `dms_jax.generation.EngineOptions`.

    It answers one call of `say` at a time: a second one, from another thread or from inside a
    callback, raises BusyError and changes nothing.
    """

    @show_options(EngineOptions)
    def __init__(
        self,
        model: LanguageModel,
        policy: Policy | None = None,
        *,
        max_tokens: int | None = None,
        memory: float | int | None = None,
        chunk: int = 32,
        **options: Unpack[EngineKeywords],
    ):
        check_keywords("Conversation", Conversation, options)
        self._engine = Engine(
            model,
            policy,
            num_lanes=1,
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
            past = sum(len(turn.tokens) for turn in history.past)
            (seed,) = sampling.seeds(1)
            request = make_request(
                engine.model.config, tokens, sampling, seed=seed, before=history.before, seen=past
            )
            if engine.runner.dirty or int(engine.runner.seen[0]) != past:
                engine.replay(history.past)
            (completion,) = engine.serve([request], sampling, on_tokens, keep=True)
            # After an interrupt before this line the cache holds more than the history, and the
            # next turn recomputes it.
            self._history = history.with_turn(prompt, tokens, request.max_length, completion)
        return completion

    def _encode(self, prompt: Prompt) -> list[int]:
        model, history = self._engine.model, self._history
        if not history.turns or not is_chat(prompt):
            return encode_prompt(model, prompt, continuing=bool(history.turns))
        if history.messages is None:
            raise DataError(
                "The conversation began with plain text or token ids, which chat messages cannot "
                "follow. Continue in the same form, or start a new conversation."
            )
        text = text_after_answer(model, history.messages, prompt)
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        # The answer's end token is in the template as well as among the generated tokens.
        return tokens[1:] if list(history.before) == tokens[:1] else tokens

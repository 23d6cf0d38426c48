"""OpenAI's text completions, /v1/completions, in and out.

Besides OpenAI's fields, `usage.kv_cache` has the use of the cache. With `echo`, the answer begins
with the prompt, whose tokens are scored one by one like an answer to its first token; this is what
lm-evaluation-harness uses.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checks import Whole, show
from dms_jax.generation import Completion
from dms_jax.generation.grammar import Opening
from dms_jax.generation.text import TextOffsets
from dms_jax.serving.fields import (
    COMPLETING,
    NEUTRAL,
    Table,
    include_usage,
    sampling_of,
)
from dms_jax.serving.formatting import Figures, Formatter, TokenTexts, data_event, to_json
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.requests import Asked, GenerationRequest, output_rule
from dms_jax.serving.rpc import ServedModel
from dms_jax.serving.service import Delta

_FIELDS = Table(
    COMPLETING | {"prompt": Any, "logprobs": Whole, "max_tokens": Whole, "echo": bool},
    NEUTRAL | {"add_special_tokens": (True,)},
    {
        "messages": "/v1/chat/completions takes messages",
        "tools": "/v1/chat/completions takes tools",
    },
)
FINISH_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


def read(body: bytes, served: ServedModel) -> Asked:
    """Parses a body; raises RefusalError."""
    given, unknown = _FIELDS.read(body, served.models)
    if given.get("logprobs", 0) > 1:
        raise RefusalError(
            "logprobs: only the log-probability of the chosen token is known; ask for 0 or 1.",
            param="logprobs",
        )
    output, output_field = output_rule(given)
    prompts, echo = _prompts(given), given.get("echo", False)
    if echo:
        _check_echo(given, prompts, output)
    return Asked.of(
        given,
        unknown,
        prompts=prompts,
        sampling=sampling_of(given) | {"logprobs": "logprobs" in given},
        max_new_tokens=given.get("max_tokens"),
        choices=given.get("n", 1),
        output=output,
        output_field=output_field,
        details=include_usage(given),
        echo=echo,
    )


def _check_echo(given: Mapping[str, Any], prompts: Sequence[Any], output: str | None) -> None:
    """Refuses fields that cannot be combined with `echo`."""
    for is_there, what in (
        (given.get("stream", False), "a stream"),
        (len(prompts) > 1, "several prompts in a request"),
        (given.get("n", 1) > 1, "several answers"),
        (output is not None, "structured answers"),
        (bool(given.get("stop")), "stop strings, which the prompt may hold"),
    ):
        if is_there:
            raise RefusalError(f"echo: it is not supported with {what}.", param="echo")


def _prompts(given: Mapping[str, Any]) -> list[Any]:
    """Returns the prompts: `prompt` is a text, token ids, or a list of either."""
    if "prompt" not in given:
        raise RefusalError("prompt is missing.", param="prompt")
    prompt = given["prompt"]
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RefusalError(
            f"prompt must be a text, a list of token ids, or a list of either, got {show(prompt)}.",
            param="prompt",
        )
    prompts = prompt if isinstance(prompt[0], str | list) else [prompt]
    firsts = (one[0] if isinstance(one, list) and one else one for one in prompts)
    if any(isinstance(each, dict) for each in firsts):
        raise RefusalError("prompt takes no messages: /v1/chat/completions does.", param="prompt")
    return prompts


class CompletionFormatter(Formatter):
    """Formats text completions; chat completions differ in their choices.

    `request.asked.details` says whether the last chunk of a stream has the usage.
    """

    names = "cmpl", "text_completion", "text_completion"  # for ids, whole answers, chunks

    def __init__(self, request: GenerationRequest, served: ServedModel):
        super().__init__(request, served)
        self.token_texts = TokenTexts(served.tokenizer)
        self._offsets: dict[int, TextOffsets] = {}

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [
            {"index": index, **self.whole_choice(index, completion)}
            for index, completion in enumerate(completions)
        ]
        usage = {"usage": self.usage(completions).completion}
        return self._envelope(self.names[1], choices) | usage

    def events(self, delta: Delta) -> list[str]:
        choice = self.choice(delta)
        return [] if choice is None else [self.chunk({"index": delta.choice, **choice})]

    def closing(self, completions: Sequence[Completion]) -> list[str]:
        events = [data_event("[DONE]")]
        if self.request.asked.details:
            usage = {"usage": self.usage(completions).completion}
            events.insert(0, data_event(to_json(self._envelope(self.names[2], []) | usage)))
        return events

    def failure(self, error: RefusalError) -> list[str]:
        return [data_event(to_json(error.openai_body()))]

    def whole_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Returns a choice of a whole answer."""
        if completion.likeliest is not None:
            return self._echoed(completion)
        return {
            "text": completion.text,
            "logprobs": self.logprobs(index, completion.tokens, completion.logprobs or []),
            "finish_reason": FINISH_REASONS[completion.finish_reason],
        }

    def _echoed(self, completion: Completion) -> dict[str, Any]:
        """Returns the choice of an answer that begins with its prompt."""
        assert completion.likeliest is not None
        tokenizer, prompt = self.served.tokenizer, self.request.prompts[0]
        begin = "" if tokenizer is None else tokenizer.decode(prompt)
        choice = {"text": begin + completion.text, "logprobs": None}
        choice["finish_reason"] = FINISH_REASONS[completion.finish_reason]
        if not self.request.sampling.logprobs:
            return choice
        own = completion.logprobs or []
        found = self.logprobs(0, completion.tokens, own)
        assert found is not None
        best = [
            TokenTexts(tokenizer).of(0, [before], [token])[0]
            for before, (token, _) in zip(
                [*prompt, *completion.tokens], completion.likeliest, strict=False
            )
        ]
        top = [
            {text: logprob, likeliest: highest}
            for text, logprob, likeliest, (_, highest) in zip(
                found["tokens"], own, best, completion.likeliest, strict=True
            )
        ]
        choice["logprobs"] = {
            "tokens": [begin, *found["tokens"]],
            "token_logprobs": [None, *own],
            "top_logprobs": [None, *top],
            "text_offset": [0, *(len(begin) + place for place in found["text_offset"])],
        }
        return choice

    def usage(self, completions: Sequence[Completion]) -> Figures:
        figures, opening = super().usage(completions), self.request.sampling.grammar
        moved = len(opening.tokens) if isinstance(opening, Opening) else 0
        return dataclasses.replace(
            figures,
            prompt_tokens=figures.prompt_tokens + moved,
            new_tokens=figures.new_tokens - moved,
        )

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """Returns the choice of the chunk of a delta; None if there is nothing to send."""
        if not (delta.text or delta.logprobs or delta.completion):
            return None
        ended = delta.completion
        return {
            "text": delta.text,
            "logprobs": self.logprobs(delta.choice, delta.tokens, delta.logprobs),
            "finish_reason": None if ended is None else FINISH_REASONS[ended.finish_reason],
        }

    def logprobs(
        self, choice: int, tokens: list[int], logprobs: list[float]
    ) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens, if they are asked for."""
        if not self.request.sampling.logprobs:
            return None
        prompt = self.prompt_of(choice)
        if choice not in self._offsets:
            self._offsets[choice] = TextOffsets(self.served.tokenizer, prompt)
        return {
            "tokens": self.token_texts.of(choice, prompt, tokens),
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": self._offsets[choice].add(tokens),
        }

    def prompt_of(self, choice: int) -> list[int]:
        """Returns the token ids of the prompt of a choice."""
        return self.request.prompts[choice // self.request.asked.choices]

    def chunk(self, choice: dict[str, Any]) -> str:
        """Returns the event of a choice."""
        head, tail = self._chunk_frame
        return data_event(f"{head}{to_json(choice)}{tail}")

    @functools.cached_property
    def _chunk_frame(self) -> tuple[str, str]:
        """The JSON before and after the choice, the same in every chunk."""
        usage = {"usage": None} if self.request.asked.details else {}
        head, tail = to_json(self._envelope(self.names[2], []) | usage).split('"choices":[]')
        return f'{head}"choices":[', f"]{tail}"

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.names[0]}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.request.asked.model,
            "choices": choices,
        }

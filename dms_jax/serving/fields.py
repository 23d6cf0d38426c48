"""The fields of a request body: supported, ignored, and refused ones.

An unsupported field that would change the answer is refused by name, unless its value changes
nothing (`presence_penalty: 0`). All other fields are accepted: clients send many about themselves
or for other servers. A name that nearly equals a supported one is refused as a typo, because the
answer would differ from the client's intention.
"""

import dataclasses
import difflib
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from dms_jax.checks import Count, Number, Range, Seed, Share, check, show
from dms_jax.serving.refusals import RefusalError, naming, unknown_model, unserved

MOST_CHOICES = 128
MOST_STOPS = 16
_TYPO = 0.8  # similarity of two names, by `difflib`
_NEVER: tuple[Any, ...] = ()
_GIVEN = ("temperature", "top_p", "min_p", "seed", "ignore_eos")

# Fields of every endpoint that generates.
SAMPLING: dict[str, Any] = {
    "model": str,
    "stream": bool,
    "temperature": Annotated[Number, Range(0)],
    "top_p": Annotated[Number, Range(0, 1, above=True)],
    "top_k": Annotated[int, Range(-1, 2**31 - 1)],
    "min_p": Share,
    "seed": Seed,
    "priority": Annotated[int, Range(-(2**31), 2**31 - 1)],
}
# Fields of OpenAI's chat and text completions, with common extensions of other servers.
COMPLETING: dict[str, Any] = SAMPLING | {
    "stream_options": Any,
    "n": Annotated[int, Range(1, MOST_CHOICES)],
    "max_tokens": Count,
    "stop": Any,
    "ignore_eos": bool,
    "guided_json": Any,
    "guided_regex": Any,
    "guided_choice": Any,
    "structured_outputs": Any,
    "response_format": Any,
}
# Unsupported fields that change answers, with the values that are accepted as neutral.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "length_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ({}, []),
    "logits_processors": ([],),
    "bad_words": ([],),
    "allowed_token_ids": _NEVER,
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "typical_p": (1,),
    "mirostat": (0,),
    "top_a": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (-1,),
    "truncation": ("disabled",),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "guided_grammar": _NEVER,
    "grammar": _NEVER,
    "ebnf": _NEVER,
    "regex": _NEVER,
    "json_schema": _NEVER,
    "chat_template": _NEVER,
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": _NEVER,
    "web_search_options": _NEVER,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "lora_path": _NEVER,
}
WHY = {
    "top_logprobs": "only the log-probability of the chosen token is known",
    "functions": "send tools",
    "function_call": "send tool_choice",
    "guided_grammar": "send response_format, guided_json, guided_regex or guided_choice",
    "grammar": "send response_format, guided_json, guided_regex or guided_choice",
    "ebnf": "send response_format, guided_json, guided_regex or guided_choice",
    "regex": "send guided_regex",
    "json_schema": "send response_format",
    "min_tokens": "ignore_eos with max_tokens makes answers of one length",
    "best_of": "it would rank answers, and n gives all of them",
}
# Fields about the caller, or about how other servers work.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "store",
        "service_tier",
        "verbosity",
        "prediction",
        "request_id",
        "cache_salt",
        "guided_decoding_backend",
    }
)


@dataclasses.dataclass(frozen=True)
class Table:
    """The fields of one endpoint.

    Attributes:
      served: supported fields, name -> kind (`dms_jax.checks`).
      neutral: unsupported fields that change answers, name -> values that change nothing.
      why: name -> addition to the message that refuses it.
      ignored: fields that change nothing and cause no warning.
    """

    served: Mapping[str, Any]
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=lambda: NEUTRAL)
    why: Mapping[str, str] = dataclasses.field(default_factory=lambda: WHY)
    ignored: frozenset[str] = IGNORED

    def read(self, body: bytes, models: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Returns the checked supported fields, and the names of unknown ones.

        `model` is always included; it defaults to the first of `models`.

        Args:
          body: JSON.
          models: names of the models that are served.

        Raises:
          RefusalError: the body is no JSON object, names an unknown model, or has an unsupported
            field or a value of a wrong kind.
        """
        fields = parse_object(body)
        fields.setdefault("model", next(iter(models)))
        if fields["model"] not in [*models]:
            raise unknown_model(fields["model"], models)
        unknown = []
        for name, value in fields.items():
            if name in self.served or name in self.ignored:
                continue
            if name not in self.neutral:
                self._check_typo(name)
                unknown.append(name)
            elif value not in self.neutral[name]:
                raise unserved(name, value, self.why.get(name, ""))
        given = {name: value for name, value in fields.items() if name in self.served}
        kinds = self.served
        return {n: check_field(n, value, kinds[n]) for n, value in given.items()}, tuple(unknown)

    def _check_typo(self, name: str) -> None:
        if meant := difflib.get_close_matches(name.lower(), self.served, 1, _TYPO):
            raise RefusalError(
                f"A request has no field {show(name)} (did you mean {meant[0]}?).",
                param=name,
                code="unknown_parameter",
            )


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the fields of a body that are not null; raises RefusalError."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusalError(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RefusalError(f"The body must be a JSON object, got {show(fields)}.")
    return {name: value for name, value in fields.items() if value is not None}


def check_field(name: str, value: Any, kind: Any) -> Any:
    """Returns a value in plain Python; raises RefusalError if it has a wrong kind."""
    with naming(name):
        return check(name, value, kind)


def sampling_of(given: Mapping[str, Any], *, stop: str = "stop") -> dict[str, Any]:
    """Returns the fields of `Sampling` that a request sets.

    Args:
      given: the fields of the request.
      stop: name of the field with stop strings.
    """
    found = {each: given[each] for each in _GIVEN if each in given}
    if "top_k" in given:
        found["top_k"] = max(given["top_k"], 0)  # -1 means all, like 0
    if stop in given:
        found["stop"] = _stops(stop, given[stop])
    return found


def _stops(name: str, stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop
    texts = isinstance(stops, list) and all(isinstance(each, str) and each for each in stops)
    if not texts or len(stops) > MOST_STOPS:
        raise RefusalError(
            f"{name} must be a text or a list of up to {MOST_STOPS} texts, none of them empty, got "
            f"{show(stop)}.",
            param=name,
        )
    return tuple(stops)


def include_usage(given: Mapping[str, Any]) -> bool:
    """Whether the last chunk of a stream has the usage; raises RefusalError."""
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise RefusalError(
            f'stream_options takes {{"include_usage": true}}, got {show(options)}.',
            param="stream_options",
        )
    if options and not given.get("stream", False):
        raise RefusalError("stream_options is for stream=true.", param="stream_options")
    return check_field("stream_options.include_usage", options.get("include_usage", False), bool)

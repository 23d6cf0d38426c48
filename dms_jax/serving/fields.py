"""The fields of a request body: supported, ignored, and refused ones.

An unsupported field that would change the answer is refused by name, unless its value changes
nothing (`presence_penalty: 0`). All other fields are accepted: clients send many about themselves
or for other servers. A name that nearly equals a supported one is refused as a typo, because the
answer would differ from the client's intention.
"""

import dataclasses
import difflib
import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from dms_jax.checks import Count, Number, Range, Seed, Share, check, show
from dms_jax.serving.refusals import RefusalError, naming, unknown_model, unserved

MOST_CHOICES = 128
MOST_STOPS, LONGEST_STOP = 16, 1024
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # as JSON writes one, or half of a pair
_TYPO = 0.8  # similarity of two names, by `difflib`
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
# Fields that change answers, of every endpoint here and of OpenAI, vLLM, SGLang, llama.cpp and
# transformers, by the values that are accepted as neutral where a field is not supported.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    name: values
    for values, names in (
        (
            (0,),
            "diversity_penalty dry_multiplier dynatemp_range epsilon_cutoff eta_cutoff "
            "frequency_penalty logprobs min_length min_new_tokens min_tokens mirostat "
            "no_repeat_ngram_size presence_penalty prompt_logprobs top_a top_logprobs "
            "xtc_probability",
        ),
        (
            (1,),
            "best_of encoder_repetition_penalty guidance_scale length_penalty n num_beam_groups "
            "num_beams num_return_sequences repeat_penalty repetition_penalty tfs_z typical_p",
        ),
        (
            (False,),
            "add_special_tokens background continue_final_message early_stopping echo ignore_eos "
            "include_stop_str_in_output no_stop_trim renormalize_logits token_healing "
            "use_beam_search",
        ),
        (
            (True,),
            "add_generation_prompt include_reasoning parallel_tool_calls separate_reasoning "
            "skip_special_tokens spaces_between_special_tokens",
        ),
        (
            ([], {}, ""),
            "bad_words chat_template_kwargs documents functions logit_bias logits_processors "
            "mcp_servers stop stop_sequences stop_strings stop_token_ids suffix tools",
        ),
        (("none", "auto"), "function_call tool_choice"),
        ((-1,), "truncate_prompt_tokens"),
        (("disabled",), "truncation"),
        (("auto", "deepseek", "parsed"), "reasoning_format"),
        ((["text"],), "modalities"),
        (({"type": "text"},), "response_format"),
        (({}, {"format": {"type": "text"}}), "text"),
        (
            (),
            "allowed_token_ids audio bad_words_ids begin_suppress_tokens chat_template constraints "
            "container conversation custom_logit_processor custom_params do_sample dola_layers "
            "ebnf enable_thinking eos_token_id exponential_decay_length_penalty "
            "force_words_ids forced_bos_token_id forced_eos_token_id format generation_config "
            "grammar guided_choice guided_grammar guided_json guided_regex "
            "guided_whitespace_pattern input input_ids inputs instructions json_schema lora_path "
            "max_completion_tokens max_length max_new_tokens max_output_tokens max_time max_tokens "
            "max_tool_calls messages n_predict num_predict options output_config output_format "
            "penalty_alpha previous_response_id prompt prompt_embeds prompt_token_ids reasoning "
            "reasoning_effort regex sampling_params sampling_seed sequence_bias stop_regex "
            "structural_tag structured_outputs suppress_tokens system think thinking "
            "thinking_budget thinking_token_budget top_h vllm_xargs watermarking_config "
            "web_search_options",
        ),
    )
    for name in names.split()
}
# Fields of one meaning: where one is refused, the message names the first that is served.
_SAME = tuple(
    names.split()
    for names in (
        "messages input prompt inputs input_ids prompt_token_ids prompt_embeds",
        "system instructions messages prompt",
        "max_tokens max_completion_tokens max_output_tokens max_new_tokens max_length n_predict "
        "num_predict",
        "stop stop_sequences stop_strings",
        "n num_return_sequences",
        "seed sampling_seed",
        "temperature do_sample",
        "guided_regex regex guided_grammar grammar ebnf",
        "response_format text output_config output_format json_schema format guided_json",
        "tools functions",
        "tool_choice function_call parallel_tool_calls",
        "reasoning_effort reasoning thinking chat_template_kwargs enable_thinking think",
    )
)
_STATELESS = "no answers are stored; send the whole conversation"
_WHY = {
    "top_logprobs": "only the log-probability of the chosen token is known",
    "min_tokens": "ignore_eos with max_tokens makes answers of one length",
    "best_of": "it would rank answers, and n gives all of them",
    "max_tool_calls": "this server runs no tools itself",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "background": _STATELESS,
}
# Fields about the caller, or about how other servers work.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "client_metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "cache_control",
        "cache_salt",
        "store",
        "include",
        "service_tier",
        "speed",
        "inference_geo",
        "betas",
        "context_management",
        "verbosity",
        "prediction",
        "request_id",
        "stream_options",
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
    """

    served: Mapping[str, Any]
    neutral: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=lambda: NEUTRAL)
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
            if name in self.served or name in IGNORED:
                continue
            if name not in self.neutral:
                self._check_typo(name)
                unknown.append(name)
            elif value not in self.neutral[name]:
                raise unserved(name, value, self._reason(name))
        given = {name: value for name, value in fields.items() if name in self.served}
        kinds = self.served
        return {n: check_field(n, value, kinds[n]) for n, value in given.items()}, tuple(unknown)

    def _reason(self, name: str) -> str:
        if why := self.why.get(name) or _WHY.get(name):
            return why
        same = [each for names in _SAME if name in names for each in names if each in self.served]
        return f"send {same[0]}" if same else ""

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
        text = body.decode("utf-8-sig")
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusalError(f"The body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RefusalError(f"The body must be a JSON object, got {show(fields)}.")
    if _SURROGATE.search(text):
        _check_surrogates(fields)
    return {name: value for name, value in fields.items() if value is not None}


def _check_surrogates(fields: Mapping[str, Any]) -> None:
    """Refuses half of a surrogate pair, which JSON can write and no text can hold."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise RefusalError(
                f"{name} holds half of a surrogate pair ({half!r}), which is no character. Leave "
                "it out.",
                param=name,
                code="invalid_json",
            ) from None


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
    if not texts or len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
        raise RefusalError(
            f"{name} must be a text or a list of up to {MOST_STOPS} texts, none of them empty or "
            f"longer than {LONGEST_STOP:,} characters, got {show(stop)}.",
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

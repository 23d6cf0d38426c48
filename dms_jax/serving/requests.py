"""A parsed request of any API: `Asked`, which becomes a `GenerationRequest`.

    body --an API's reader--> Asked --prepare--> GenerationRequest --> Service.submit
    deltas --an API's formatter--> events or one JSON object

Each API is a file that translates requests and responses. The shared part is here: encode prompts,
check lengths, and build the grammar of the answer.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dms_jax.checks import show
from dms_jax.errors import ConfigError, TooLongError
from dms_jax.generation import Sampling
from dms_jax.generation.answer_readers import PLAIN, AnswerForm
from dms_jax.generation.call_formats import FORMATS, literal
from dms_jax.generation.grammar import Grammar, Opening, json_rule, regex_rule
from dms_jax.generation.requests import encode_prompt
from dms_jax.serving.chats import Chat
from dms_jax.serving.refusals import TOO_LONG, RefusalError, naming
from dms_jax.serving.rpc import ServedModel


@dataclasses.dataclass(frozen=True)
class Asked:
    """A parsed request, the same for all APIs.

    Attributes:
      model: name of the model, one of `ServedModel.models`.
      prompts: texts or token ids, or the one conversation to answer.
      sampling: the given fields of `Sampling`.
      max_new_tokens: the most tokens of an answer; None for the server's default.
      choices: answers to each prompt.
      output: what an answer must match, as the right side of a rule of a Lark grammar.
      output_field: the field of `output`, for errors.
      stream: whether to stream tokens.
      max_field: the field of `max_new_tokens`, for errors.
      cuts_max: whether `max_new_tokens` is reduced to what fits, for clients that always send a
        large number.
      echo: whether the only prompt is scored too, after its first token.
      priority: see `Service.submit`.
      details: anything else that the API's formatter needs.
      unknown: names of unknown fields.
    """

    model: str
    prompts: Sequence[Any] | Chat
    sampling: Mapping[str, Any]
    max_new_tokens: int | None = None
    choices: int = 1
    output: str | None = None
    output_field: str = "response_format"
    stream: bool = False
    max_field: str = "max_tokens"
    cuts_max: bool = False
    echo: bool = False
    priority: int = 0
    details: Any = None
    unknown: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any], unknown: tuple[str, ...], **more: Any) -> "Asked":
        """Builds it from the fields of a body; all APIs have model, stream and priority."""
        return cls(
            model=given["model"],
            stream=given.get("stream", False),
            priority=given.get("priority", 0),
            unknown=unknown,
            **more,
        )


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """A request that is ready for the engine.

    Attributes:
      asked: the parsed request.
      prompts: token ids, one list for each prompt.
      sampling: how answers are sampled.
      form: how the text of an answer is parsed.
    """

    asked: Asked
    prompts: list[list[int]]
    sampling: Sampling
    form: AnswerForm = PLAIN

    @property
    def answers(self) -> int:
        """The number of answers."""
        return len(self.prompts) * self.asked.choices


def prepare(asked: Asked, served: ServedModel, seed: int) -> GenerationRequest:
    """Returns the request for the engine.

    Args:
      asked: the parsed request.
      served: the model; its default `max_new_tokens` is reduced to what fits.
      seed: seed of the sampling if the client gives none.

    Raises:
      RefusalError: the request cannot be answered.
      DataError: a prompt is invalid.
    """
    chat = asked.prompts if isinstance(asked.prompts, Chat) else None
    field = "prompt" if chat is None else chat.field
    count = 1 if chat else len(asked.prompts)  # pyright: ignore[reportArgumentType]
    _check_answers(count, asked.choices, served.max_requests, field)
    prompts, form = encode(asked.prompts, served, field)
    room = served.max_tokens - max(map(len, prompts))
    if room < 1 and not (asked.echo and asked.max_new_tokens == 0):
        raise RefusalError(
            f"The prompt has {served.max_tokens - room:,} tokens, which leaves no room for an "
            f"answer in the {served.max_tokens:,} of a sequence here. Shorten it to at most "
            f"{served.max_tokens - 1:,}.",
            param=field,
            code=TOO_LONG,
        )
    most = asked.max_new_tokens
    if most is not None and asked.cuts_max:
        most = min(most, room)
    if most is not None and most > room:
        raise RefusalError(
            f"The prompt has {served.max_tokens - room:,} tokens and its answer up to {most:,}; "
            f"a sequence may have {served.max_tokens:,} here. Ask for at most {room:,}.",
            param=asked.max_field,
            code=TOO_LONG,
        )
    if most is None:
        most = min(served.defaults.max_new_tokens, room)
    given, grammar = dict(asked.sampling), _grammar(asked, form)
    if asked.echo:
        ((first, *others),) = prompts
        prompts, grammar, most = [[first]], Opening(tuple(others)), most + len(others)
        given["stop"] = ()  # drop the server's default too: the prompt may contain one
    if grammar is not None and given.get("ignore_eos"):
        raise RefusalError(
            "ignore_eos cannot be used with a grammar or echo: an end token ends such an answer.",
            param="ignore_eos",
        )
    if not most:
        raise RefusalError(
            f"{asked.max_field}: at least 1; 0 is for a prompt with echo=true that has more tokens "
            "than one.",
            param=asked.max_field,
        )
    sampling = dataclasses.replace(
        served.defaults,
        **{"seed": seed, "logprobs": False} | given,
        max_new_tokens=most,
        grammar=grammar,
    )
    return GenerationRequest(asked, prompts, sampling, form)


def encode(
    prompts: Sequence[Any] | Chat, served: ServedModel, field: str
) -> tuple[list[list[int]], AnswerForm]:
    """Returns the token ids of prompts, and how their answers are parsed.

    Raises:
      RefusalError, DataError: see `prepare`.
    """
    most = served.max_tokens
    try:
        if isinstance(prompts, Chat):
            tokens, form = prompts.encode(served, most, served.call_format)
            return [tokens], form
        found = [
            encode_prompt(served, prompt, name=f"Prompt {index}", most=most)
            for index, prompt in enumerate(prompts)
        ]
        return found, PLAIN
    except TooLongError as error:
        raise RefusalError(error, param=field, code=TOO_LONG) from None


def _check_answers(prompts: int, choices: int, most: int, field: str) -> None:
    """Refuses more answers than can run or wait; a body of 16 MB can ask for a hundred million."""
    if (asked := prompts * choices) > most:
        raise RefusalError(
            f"{asked:,} answers ({prompts:,} prompt{'s'[: prompts > 1]}, n={choices}) are "
            f"requested at once, and at most {most:,} can run or wait here. Ask for fewer.",
            param="n" if choices > 1 else field,
        )


# -- grammars ------------------------------------------------------------------------------------


def _grammar(asked: Asked, form: AnswerForm) -> Grammar | None:
    """Returns the grammar of an answer: its format, and the calls that it must make.

    Thoughts before the answer are free.
    """
    tools = asked.prompts.tools if isinstance(asked.prompts, Chat) else None
    calls = None if form.calls is None else FORMATS[form.calls]
    bound = tools is not None and (tools.required or any(each.strict for each in tools.offered))
    if asked.output is None and not bound:
        return None
    rules, kinds = list[str](), list[str]()
    if asked.output is not None and not (tools is not None and tools.required):
        with naming(asked.output_field, asked.output_field):
            Grammar.lark(f"start: {asked.output}")  # compiled alone, so that errors name its field
        header = "" if calls is None else calls.header
        rules += [f"output: {literal(header)} content", f"content: {asked.output}"]
        kinds.append("output")
    if tools is not None and tools.offered and calls is not None:
        forced = tools.required or asked.output is not None
        for place, tool in enumerate(tools.callable):
            if tool.strict or forced:
                with naming("tools", f"tools[{place}] ({tool.name})"):
                    Grammar.lark(f"start: {json_rule({'type': 'object', **tool.parameters})}")
        rules += calls.rules(tools.callable, parallel=tools.parallel, forced=forced)
        kinds.append("calls")
    rules += [f"answer: {' | '.join(kinds)}", *_thinking(form), r"TEXT: /(.|\n)*/"]
    with naming(asked.output_field if asked.output is not None else "tools"):
        return Grammar.lark("\n".join(rules))


def _thinking(form: AnswerForm) -> Iterator[str]:
    opening, closing = map(json.dumps, form.markers)
    match form.thinks:
        case "no":
            yield "start: answer"
            return
        case "channels":
            yield "start: thought* answer"
            yield 'thought: "<|channel|>analysis<|message|>" thinking "<|start|>assistant"'
            yield 'thinking[lazy]: TEXT "<|end|>"'
            return
        case "yes":
            yield "start: thought answer"
        case "perhaps":
            yield f"start: ({opening} thought)? answer"
    yield "thought: thinking LINES"
    yield f"thinking[lazy]: TEXT {closing}"
    yield r"LINES: /\n{0,2}/"


def output_rule(given: Mapping[str, Any]) -> tuple[str | None, str]:
    """Returns the rule that an answer must match, or None, and the field that sets it.

    The fields are OpenAI's response_format, and those of other servers: guided_json, guided_regex,
    guided_choice and structured_outputs, which has one of json, regex and choice.

    Raises:
      RefusalError: a field is malformed, or there are several.
    """
    found: list[tuple[str, str]] = []
    if (rule := response_format_rule(given.get("response_format"), "response_format")) is not None:
        found.append((rule, "response_format"))
    named = {name: given[f"guided_{name}"] for name in _RULES if f"guided_{name}" in given}
    found += [
        (_rule(name, value, f"guided_{name}"), f"guided_{name}") for name, value in named.items()
    ]
    if "structured_outputs" in given:
        field, outputs = "structured_outputs", given["structured_outputs"]
        if (
            not isinstance(outputs, dict)
            or len(outputs) != 1
            or not outputs.keys() <= _RULES.keys()
        ):
            raise RefusalError(
                f"{field} takes one of json, regex and choice, got {show(outputs)}.", param=field
            )
        ((name, value),) = outputs.items()
        found.append((_rule(name, value, field), field))
    if len(found) > 1:
        names = " and ".join(field for _, field in found)
        raise RefusalError(f"{names}: an answer matches one of them. Send one.", param=found[1][1])
    return found[0] if found else (None, "response_format")


def response_format_rule(form: Any, field: str) -> str | None:
    """Returns the rule of OpenAI's response_format, or None; raises RefusalError."""
    kind = form.get("type") if isinstance(form, dict) else None
    match kind:
        case None if form is None:
            return None
        case "text":
            return None
        case "json_object":
            return json_rule({"type": "object"})
        case "json_schema":
            # Chat completions nest the schema one level deeper than the Responses API.
            described = form.get("json_schema", form)
            schema = described.get("schema") if isinstance(described, dict) else None
            return _rule("json", schema, field)
    raise RefusalError(
        f'{field} must be {{"type": "text"}}, {{"type": "json_object"}} or {{"type": '
        f'"json_schema", ...}} with a schema, got {show(form)}.',
        param=field,
    )


def _rule(kind: str, value: Any, field: str) -> str:
    with naming(field, field):
        return _RULES[kind](value)


def _json(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"a JSON schema must be an object, got {show(value)}.") from None
    return json_rule(value)


def _choice(value: Any) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) and x for x in value):
        raise ConfigError(f"give a list of texts, none of them empty, got {show(value)}.")
    return " | ".join(json.dumps(each, ensure_ascii=False) for each in value)


_RULES = {"json": _json, "regex": regex_rule, "choice": _choice}

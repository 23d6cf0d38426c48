"""Parse requests of lm-evaluation-harness: sampling options, and turns to continue.

Works without lm-eval.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checkpoint.messages import read_messages, text_of
from dms_jax.checks import show
from dms_jax.errors import ConfigError, DataError
from dms_jax.generation import Sampling

ANSWER_TOKENS = 256  # default of tasks that set no length
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_DRAWN = ("top_k", "top_p", "min_p", "seed")
_READ = ("until", "do_sample", "temperature", *_LENGTHS, *_DRAWN)
# Unsupported options, with the values that are accepted as neutral.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (0, 1),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "n": (1,),
    "best_of": (1,),
    "typical_p": (1,),
    "early_stopping": (False,),
    "use_cache": (True,),
}
_TAG = "(the turn goes on here)"


def read_sampling(options: Mapping[str, Any]) -> Sampling:
    """The sampling for a task's generation options; greedy unless `do_sample` is set.

    Raises:
      ConfigError: an option does not fit, is not supported (penalties, beams) or is unknown.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in _READ and value not in _WITHOUT_EFFECT.get(name, ()):
            known = "not supported" if name in _WITHOUT_EFFECT else "unknown"
            raise ConfigError(
                f"A task asks for {name}={show(value)}, which is {known} and would change its "
                f"answers. Supported are {', '.join(_READ)}: take {name} out of the task's "
                "generation_kwargs."
            )
    lengths = {given[name] for name in _LENGTHS if name in given}
    if len(lengths) > 1:
        raise ConfigError(
            f"A task gives several lengths of answers, {show(sorted(map(str, lengths)))}: keep one "
            f"of {', '.join(name for name in _LENGTHS if name in given)}."
        )
    until = given.get("until", ())
    until = (until,) if isinstance(until, str) else until
    if not isinstance(until, list | tuple) or not all(isinstance(text, str) for text in until):
        raise ConfigError(f"until must be a text or a list of texts, got {show(until)}.")
    temperature = given.get("temperature")
    sampled = bool(given.get("do_sample", temperature))
    return Sampling(
        temperature=(1.0 if temperature is None else temperature) if sampled else 0.0,
        max_new_tokens=next(iter(lengths), ANSWER_TOKENS),
        stop=tuple(text for text in until if text),
        **{name: given[name] for name in _DRAWN if name in given},
    )


def open_turn(tokenizer: Any, messages: Sequence[Any], **variables: Any) -> str:
    """The text of a conversation up to the end of the last message's content, to be continued.

    Like `continue_final_message` of transformers: appends a marker to the content, renders, and
    cuts the text there. If the template trims contents, trailing space of the last one is lost too.

    Raises:
      DataError: there is no message, one is malformed, or the template drops content of the last.
    """
    if not messages or (last := read_messages(messages)[-1])["content"] is None:
        raise DataError("a turn to continue needs a content, which may be empty.")
    content, tag = text_of(last["content"]), _TAG
    while any(tag in str(message) for message in messages):
        tag = f"({tag})"
    marked = [*messages[:-1], {**last, "content": f"{content}{tag} "}]
    text = tokenizer.apply_chat_template(marked, add_generation_prompt=False, **variables)
    place = text.rfind(tag)
    if place < 0 or content.strip() not in text[:place]:
        raise DataError(
            f"the chat template leaves out content of the last turn ({last['role']}), so that it "
            "cannot be continued. Let the model begin the answer."
        )
    trimmed = text[place + len(tag) : place + len(tag) + 1] != " "
    return text[:place].rstrip() if trimmed else text[:place]

"""Answers that match a grammar: a JSON schema, a regular expression, or a context-free grammar.

An answer may also be forced to begin with given tokens, to score a prompt (`Opening`).

`Sampling.grammar` holds the grammar of a request. Its `Matcher` follows the answer token by token
and computes which tokens may come next; all others are excluded from the draw. Both are based on
llguidance (https://github.com/guidance-ai/llguidance, the extra `grammar`), which is imported with
the first grammar.

The first token of an answer is drawn under a mask of the allowed ones. Later ones are checked, and
drawn again where they are not allowed (`checked_steps`); chunks without such a lane run as usual.
"""

import collections
import dataclasses
import functools
import json
import math
import re
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from dms_jax.checks import show
from dms_jax.errors import ConfigError, plain
from dms_jax.extras import import_extra
from dms_jax.model.language_model import LanguageModel

BITS = 32  # tokens of a word of a mask
# JSON as Python writes it, in one line. With free white space an answer might never end.
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
# A compilation takes seconds for so many properties, or for such a multiple, and grows faster than
# they do: minutes and gigabytes for one of 10,000,000.
_MOST_PROPERTIES, _LARGEST_MULTIPLE = 5000, 100_000
# Compiled grammars to keep for requests that send one again, by number and by characters, and the
# longest one: a regular expression of 1,000,000 characters takes 200 MB.
_MOST_COMPILED, _MOST_CHARACTERS, _LONGEST_SOURCE = 64, 2**20, 2**18
_LONGEST_ERROR = 600
_NO_DIGITS = re.compile(r"e.*|\D")  # of a number, also its exponent
_PLACE = re.compile(r"^at \d+\(\d+\): ")


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What an answer must match from its first to its last token.

    An answer ends with an end token once it matches. If `max_new_tokens` ends it, it is the start
    of a match.

    Attributes:
      source: the grammar as llguidance reads it, Lark or its JSON form; see `json_schema`, `regex`
        and `lark`.

    Raises:
      ConfigError: it cannot be compiled, or llguidance is not installed.
    """

    source: str

    def __post_init__(self):
        if len(self.source) > _LONGEST_SOURCE:
            raise ConfigError(
                f"The grammar has {len(self.source):,} characters, and at most "
                f"{_LONGEST_SOURCE:,} are compiled. Give a shorter one."
            )
        _check_source(self.source)

    @classmethod
    def json_schema(cls, schema: Any) -> "Grammar":
        """Returns the grammar of JSON that a schema allows, in one line.

        Keywords of a schema that are not implemented are an error, not left out.
        """
        return cls.lark(f"start: {json_rule(schema)}")

    @classmethod
    def regex(cls, pattern: Any) -> "Grammar":
        """Returns the grammar of texts that match a regular expression as a whole."""
        return cls.lark(f"start: {regex_rule(pattern)}")

    @classmethod
    def lark(cls, text: Any) -> "Grammar":
        """Returns a context-free grammar in llguidance's form of Lark, which begins with start."""
        if not isinstance(text, str):
            raise ConfigError(f"A Lark grammar is a text, got {show(text)}.")
        return cls(_library().LLMatcher.grammar_from_lark(text))


@dataclasses.dataclass(frozen=True)
class Opening:
    """The tokens with which an answer must begin; after them it is free.

    Attributes:
      tokens: token ids; an end token is not allowed among them.
    """

    tokens: tuple[int, ...]


def json_rule(schema: Any) -> str:
    """Returns the right side of a rule of a Lark grammar: JSON that a schema allows.

    Raises:
      ConfigError: the schema is no JSON object, or would take minutes to compile.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"A JSON schema is an object, got {show(schema)}.")
    try:
        rule = f"%json {json.dumps({**schema, 'x-guidance': _JSON_FORM})}"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"The JSON schema is no JSON: {plain(error, 200)}") from None
    _check_cost(schema)
    return rule


def _check_cost(schema: Mapping[str, Any]) -> None:
    """Raises ConfigError if a schema has too many properties, or too large multiples."""
    count, multiple, left = 0, 1, list[Any]([schema])
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            properties, number = part.get("properties"), part.get("multipleOf")
            count += len(properties) if isinstance(properties, Mapping) else 0
            if isinstance(number, float | int):
                multiple = math.lcm(multiple, _odd_part(number))
            left.extend(part.values())
        elif isinstance(part, list | tuple):
            left.extend(part)
    if count > _MOST_PROPERTIES:
        raise ConfigError(
            f"The JSON schema has {count:,} properties, and at most {_MOST_PROPERTIES:,} are "
            "compiled. Give a smaller one."
        )
    if multiple > _LARGEST_MULTIPLE:
        raise ConfigError(
            "The JSON schema has values of multipleOf whose least common multiple is "
            f"{show(multiple)} (without factors 2 and 5), and at most {_LARGEST_MULTIPLE:,} is "
            "compiled. Give smaller ones."
        )


def _odd_part(number: float | int) -> int:
    """Returns the digits of a number, without factors 2 and 5, which cost nothing; at least 1."""
    found = int(_NO_DIGITS.sub("", repr(number)) or 1)
    for factor in (2, 5):
        while found and found % factor == 0:
            found //= factor
    return max(found, 1)


def regex_rule(pattern: Any) -> str:
    """Returns the right side of a rule of a Lark grammar: the matches of a regular expression.

    Raises:
      ConfigError: it is no text.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"A regular expression is a text, got {show(pattern)}.")
    return f"/{_library().regex_to_lark(pattern)}/"


class Matcher:
    """Follows one answer through its grammar.

    Args:
      compiled: a matcher of llguidance at the beginning of the answer.
      end_tokens: token ids that end an answer.
    """

    def __init__(self, compiled: Any, end_tokens: Iterable[int]):
        self.compiled, self._end_tokens = compiled, tuple(end_tokens)

    def restart(self, tokens: list[int]) -> None:
        """Starts over, and consumes the first tokens of the answer."""
        self.compiled.reset()
        self.compiled.consume_tokens(tokens)

    def consume(self, token: int) -> None:
        """Consumes the next token of the answer, which is allowed and no end token."""
        self.compiled.consume_token(token)

    def consume_allowed(self, tokens: list[int]) -> int:
        """Consumes tokens without end tokens up to the first that is not allowed.

        Returns their number.
        """
        return self.compiled.try_consume_tokens(tokens)

    @property
    def may_end(self) -> bool:
        """Whether an end token may come next."""
        return self.compiled.is_accepting()

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None if it can."""
        if not self.compiled.is_error():
            return None
        return plain(_error_of(self.compiled), _LONGEST_ERROR)

    def fill(self, mask: Int[np.ndarray, " words"]) -> None:
        """Writes the mask of the tokens that may come next; see `Filter.allowed`."""
        self.compiled.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if not self.may_end:  # llguidance allows an end token that a tokenizer calls ordinary text
            for token in self._end_tokens:
                mask.view(np.uint32)[token // BITS] &= ~np.uint32(1 << token % BITS)


class OpeningMatcher:
    """Follows one answer through its opening.

    Args:
      opening: the opening.
    """

    def __init__(self, opening: Opening):
        self._tokens, self._next = opening.tokens, 0

    def restart(self, tokens: list[int]) -> None:
        """Starts over, and consumes the first tokens of the answer."""
        self._next = len(tokens)

    def force(self, count: int) -> tuple[int, ...]:
        """Returns the tokens that the next `count` steps must take, fewer at the end.

        The first step reads the newest token of the answer, and draws the one after it.
        """
        first, self._next = self._next + 1, self._next + count
        return self._tokens[first : first + count]

    @property
    def only(self) -> int | None:
        """The token that must come next; None after the opening."""
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def fill(self, mask: Int[np.ndarray, " words"]) -> None:
        """Writes the mask of the tokens that may come next; see `Filter.allowed`."""
        if self.only is not None:
            mask[:] = 0
            mask.view(np.uint32)[self.only // BITS] = 1 << self.only % BITS


def is_served(model: LanguageModel) -> bool:
    """Whether a model supports grammars; see `check_model`."""
    try:
        check_model(model)
    except ConfigError:
        return False
    return True


def check_model(model: LanguageModel) -> None:
    """Raises ConfigError unless a model supports grammars and llguidance is installed."""
    _library()
    if model.tokenizer is None:
        raise ConfigError(
            "A grammar is one of text, and this model has no tokenizer. Leave it out."
        )
    if not model.generation.eos_token_ids:
        raise ConfigError(
            "An answer with a grammar ends with an end token, and this model has none. Give it one "
            "(generation_config.json: eos_token_id)."
        )


def make_matchers(model: LanguageModel, requests: Iterable[Any]) -> None:
    """Makes the matchers of requests with a grammar, unless they have one.

    Compiling a large grammar can take a second: avoid it in the engine's thread.

    Raises:
      ConfigError: see `check_model`; or the grammar does not compile with this vocabulary, or an
        opening has an end token.
    """
    for request in requests:
        grammar = request.sampling.grammar
        if grammar is None or request.matcher is not None:
            continue
        if isinstance(grammar, Opening):
            _check_ends(model, grammar)
            request.matcher = OpeningMatcher(grammar)
        else:
            check_model(model)
            compiled = _compiled(_tokens(model), grammar.source).matcher()
            request.matcher = Matcher(compiled, model.generation.eos_token_ids)


def _check_ends(model: LanguageModel, opening: Opening) -> None:
    for place, token in enumerate(opening.tokens):
        if token in model.generation.eos_token_ids:
            raise ConfigError(
                f"Token {place + 1} is {token}, an end token of this model, so nothing after "
                "it can be scored. Leave out this token and those after it."
            )


def mask_words(vocab_size: int) -> int:
    """Returns the words of a mask of `vocab_size` tokens."""
    return -(-vocab_size // BITS)


def masks_of(
    matchers: Mapping[int, Matcher | OpeningMatcher], num_lanes: int, vocab_size: int
) -> Int[np.ndarray, "B words"]:
    """Returns the masks of the next tokens of all lanes; lanes without a matcher allow all."""
    masks = np.full((num_lanes, mask_words(vocab_size)), -1, np.int32)
    for lane, matcher in matchers.items():
        matcher.fill(masks[lane])
    return masks


@functools.lru_cache(maxsize=_MOST_COMPILED)
def _check_source(source: str) -> None:
    """Raises ConfigError unless a grammar compiles, which takes a millisecond or more."""
    wrong, messages = _library().LLMatcher.validate_grammar_with_warnings(source)
    if wrong:
        raise _refused(messages[0])


def _refused(message: str) -> ConfigError:
    """Returns a ConfigError with llguidance's message, without position and source text."""
    what = _PLACE.sub("", message.partition("\n   1 | ")[0])
    return ConfigError(f"The grammar cannot be compiled: {plain(what, _LONGEST_ERROR)}")


def _library() -> Any:
    return import_extra("llguidance", extra="grammar", purpose="An answer that matches a grammar")


# The vocabularies of models that were asked for a grammar. Reading one of 150,000 tokens takes
# about a second.
_vocabularies: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_keeping = threading.Lock()  # of `_kept`


def _tokens(model: LanguageModel) -> Any:
    """Returns the vocabulary of a model as llguidance knows it."""
    key = model.config.vocab_size, model.generation.eos_token_ids
    with _lock:
        known = _vocabularies.setdefault(model.tokenizer, {})
        if key not in known:
            text = _exact(model.tokenizer.backend.to_str())
            try:
                known[key] = _library().LLTokenizer(text, n_vocab=key[0], eos_token=list(key[1]))
            except ValueError as error:
                raise ConfigError(
                    f"Grammars cannot be followed with this tokenizer: {plain(error, 300)}"
                ) from error
        return known[key]


def _exact(vocabulary: str) -> str:
    """Returns a tokenizer.json whose tokens have all bytes of a text, and no others.

    Tokenizers of sentencepiece drop, join and prepend spaces. llguidance tokenizes text that the
    grammar forces, and would lose a forced text that is a single space.
    """
    read = json.loads(vocabulary)
    decoder = read.get("decoder") or {}
    parts = decoder.get("decoders", [decoder])
    if any("\u2581" in json.dumps(each, ensure_ascii=False) for each in parts):
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        read |= {"normalizer": space, "pre_tokenizer": None}
    return json.dumps(read)


class _Compiled:
    """A grammar with a vocabulary; the first thread that needs a matcher compiles it.

    Args:
      tokens: the vocabulary.
      source: the grammar.
    """

    def __init__(self, tokens: Any, source: str):
        self._tokens, self._source, self._first = tokens, source, None
        self._lock = threading.Lock()

    def matcher(self) -> Any:
        """Returns a matcher at the beginning of an answer; raises ConfigError without any match."""
        with self._lock:
            if self._first is None:
                first = _library().LLMatcher(self._tokens, self._source, log_level=0)  # no prints
                if not first.is_error():
                    first.compute_bitmask()
                if first.is_error():
                    raise _refused(_error_of(first))
                self._first = first
            return self._first.deep_copy()


_kept = collections.OrderedDict[tuple[Any, str], _Compiled]()  # first: used longest ago


def _compiled(tokens: Any, source: str) -> _Compiled:
    """Returns a grammar with a vocabulary, perhaps of an earlier request."""
    key = tokens, source
    with _keeping:
        found = _kept[key] = _kept.pop(key, None) or _Compiled(tokens, source)
        while len(_kept) > _MOST_COMPILED or sum(len(text) for _, text in _kept) > _MOST_CHARACTERS:
            _kept.popitem(last=False)
    return found


def _error_of(compiled: Any) -> str:
    """Returns the error of a matcher of llguidance."""
    error = compiled.get_error().partition("\n<state>")[0]
    return "no text matches it" if error.startswith("NoExtension") else error

"""Answers that match a grammar: a JSON schema, a regular expression, or a context-free grammar.

An answer may also be forced to begin with given tokens, to score a prompt (`Opening`).

`Sampling.grammar` holds the grammar of a request. Its `Matcher` follows the answer token by token
and computes which tokens may come next; all others are excluded from the draw. Both are based on
llguidance (https://github.com/guidance-ai/llguidance, the extra `grammar`), which is imported with
the first grammar.

The mask of a token depends on the token before it, which is drawn on the device. So a chunk of
steps with such a lane is not a loop on the device: each step is two programs, and a thread of the
host computes the masks while the first one is launched and runs:

    device   | advance: layers | draw | advance: layers | draw | ...
    thread        masks ----^              masks ----^
                  ^ the token before, read from the device

While it waits for masks, the engine's thread sends the updates of the previous chunk. The results
of steps are recorded by chunks, as always.

The other lanes of such a chunk pay two launches per step instead of one per chunk, and wait for the
masks if these take longer than the layers. 256 masks of 152,000 tokens of a simple grammar take 1
to 2 ms. More threads only share much longer work (`_ALONE_SECONDS`). The masks stay on the device,
and only changed ones are sent, 19 KB each (all, 5 MB, if more than `runner.MASKS` have changed).
Chunks without such a lane run as usual.
"""

import dataclasses
import functools
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int

from dms_jax.checks import show
from dms_jax.errors import ConfigError, DataError, plain
from dms_jax.model.language_model import LanguageModel

BITS = 32  # tokens of a word of a mask
# JSON as Python writes it, in one line. With free white space an answer might never end.
_JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}
# Masks of a step that take longer than this are shared among threads. Threads that wait for work
# spin, and slow down launches: 256 lanes of a 1.5B model on an H200 with 16 CPU cores generated
# 26,000 tokens/s with 2 ms, and 37,000 without sharing.
_ALONE_SECONDS = 10e-3
_MOST_THREADS = 8
_MOST_COMPILED = 64  # compiled grammars to keep, for requests that send one again
_LONGEST_ERROR = 600
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
        wrong, messages = _library().LLMatcher.validate_grammar_with_warnings(self.source)
        if wrong:
            raise _refused(messages[0])

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
      ConfigError: the schema is no JSON object.
    """
    if not isinstance(schema, Mapping):
        raise ConfigError(f"A JSON schema is an object, got {show(schema)}.")
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': _JSON_FORM})}"
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"The JSON schema is no JSON: {plain(error, 200)}") from None


def regex_rule(pattern: Any) -> str:
    """Returns the right side of a rule of a Lark grammar: the matches of a regular expression.

    Raises:
      ConfigError: it is no text.
    """
    if not isinstance(pattern, str):
        raise ConfigError(f"A regular expression is a text, got {show(pattern)}.")
    return f"/{_library().regex_to_lark(pattern)}/"


class GrammarError(DataError):
    """A grammar became too complex in the middle of an answer.

    Attributes:
      indices: the requests that failed; the other requests of the call are valid.
    """

    def __init__(self, message: str, indices: Iterable[int]):
        super().__init__(message)
        self.indices = frozenset(indices)


class Matcher:
    """Follows one answer through its grammar.

    Args:
      compiled: a matcher of llguidance at the beginning of the answer.
    """

    def __init__(self, compiled: Any):
        self.compiled = compiled

    def restart(self, tokens: list[int]) -> None:
        """Starts over, and consumes the first tokens of the answer."""
        self.compiled.reset()
        self.compiled.consume_tokens(tokens)


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

    def read(self) -> None:
        """Consumes the next token of the answer."""
        self._next += 1

    @property
    def only(self) -> int | None:
        """The token that must come next; None after the opening."""
        return self._tokens[self._next] if self._next < len(self._tokens) else None


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
            "A grammar is one of text, and this model came without a tokenizer. Leave it out."
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
            request.matcher = Matcher(_compiled(_tokens(model), grammar.source))


def _check_ends(model: LanguageModel, opening: Opening) -> None:
    for place, token in enumerate(opening.tokens):
        if token in model.generation.eos_token_ids:
            raise ConfigError(
                f"Token {place + 1} is {token}, an end token of this model, so nothing after "
                "it can be scored. Leave out this token and those after it."
            )


class TokenMasks:
    """The masks of allowed next tokens, as bits, for the lanes of an engine.

    Args:
      num_lanes: number of lanes (B).
      vocab_size: number of logits (V); word w of a lane has tokens 32 w ... 32 w + 31.
      reused: whether `after` overwrites its last result; only on a single device.
    """

    def __init__(self, num_lanes: int, vocab_size: int, *, reused: bool = True):
        self._shape, self._reused = (num_lanes, -(-vocab_size // BITS)), reused
        self._steps: Int[np.ndarray, "B words"] | None = None  # the masks of `after`
        self._bound = np.zeros(num_lanes, bool)  # lanes with masks in `_steps` that exclude tokens

    @functools.cached_property
    def _executor(self) -> Any:
        return _library().LLExecutor(min(_MOST_THREADS, os.cpu_count() or 1))

    def everything(self) -> Int[np.ndarray, "B words"]:
        """Returns the masks of lanes without a grammar."""
        return np.full(self._shape, -1, np.int32)

    def next(self, matchers: Mapping[int, Matcher | OpeningMatcher]) -> Int[np.ndarray, "B words"]:
        """Returns the masks of all lanes, by matchers where given."""
        masks = self.everything()
        self._fill(masks, *_by_kind(matchers))
        return masks

    def _fill(
        self,
        masks: Int[np.ndarray, "B words"],
        compiled: list[tuple[Any, int]],
        openings: list[tuple[OpeningMatcher, int]],
    ) -> None:
        start, size = masks.ctypes.data, 4 * self._shape[1]
        end = time.perf_counter() + _ALONE_SECONDS
        for place, (matcher, lane) in enumerate(compiled):
            if time.perf_counter() > end:
                rest = compiled[place:]
                self._executor.unsafe_compute_mask_ptr(rest, start, size, len(masks))
                break
            matcher.unsafe_compute_mask_ptr(start + lane * size, size)
        for matcher, lane in openings:
            if (only := matcher.only) is None:
                masks[lane] = -1
            else:
                masks[lane] = 0
                masks.view(np.uint32)[lane, only // BITS] = 1 << only % BITS

    def after(
        self,
        requests: Mapping[int, Any],
        newest: Int[np.ndarray, " B"],
        remaining: Int[np.ndarray, " B"],
        end_tokens: Collection[int],
    ) -> Int[np.ndarray, "B words"]:
        """Consumes the newest token of each request; returns the masks of the next ones.

        The next call overwrites the result, because allocating megabytes takes longer than filling
        them. That is safe on one device: a caller that has the newest tokens has waited for the
        program that read the last masks. On a mesh tokens come from one device while another may
        still run that program, so the result is new.

        Args:
          requests: lane -> its request, if that has a grammar.
          newest: the newest token of each lane.
          remaining: the most tokens that each lane may generate after it.
          end_tokens: token ids that end an answer.

        Raises:
          GrammarError: a grammar has become too complex.
        """
        goes_on = (remaining > 0) & ~np.isin(newest, list(end_tokens))
        tokens, going = newest.tolist(), goes_on.tolist()
        matchers = {lane: each.matcher for lane, each in requests.items() if going[lane]}
        compiled, openings = _by_kind(matchers)
        for matcher, lane in compiled:
            matcher.consume_token(tokens[lane])
        for matcher, _ in openings:
            matcher.read()
        if self._steps is None or not self._reused:
            self._steps = self.everything()
            self._bound[:] = False
        bound = np.zeros_like(self._bound)
        bound[list(matchers)] = True
        self._steps[self._bound & ~bound] = -1
        self._bound = bound
        self._fill(self._steps, compiled, openings)
        if wrong := [(each, lane) for each, lane in compiled if each.is_error()]:
            first, lane = wrong[0]
            what = first.get_error().partition("\n<state>")[0]
            read = requests[lane].max_new_tokens - remaining[lane]
            raise GrammarError(
                f"The grammar of an answer cannot be followed after token {read:,}: "
                f"{plain(what, _LONGEST_ERROR)}. Give a simpler grammar.",
                (requests[lane].index for _, lane in wrong),
            )
        return self._steps


def _by_kind(
    matchers: Mapping[int, Matcher | OpeningMatcher],
) -> tuple[list[tuple[Any, int]], list[tuple[OpeningMatcher, int]]]:
    """Returns matchers of llguidance and of openings, each with its lane."""
    compiled, openings = [], []
    for lane, each in matchers.items():
        if isinstance(each, Matcher):
            compiled.append((each.compiled, lane))
        else:
            openings.append((each, lane))
    return compiled, openings


def _refused(message: str) -> ConfigError:
    """Returns a ConfigError with llguidance's message, without position and source text."""
    what = _PLACE.sub("", message.partition("\n   1 | ")[0])
    return ConfigError(f"The grammar cannot be compiled: {plain(what, _LONGEST_ERROR)}")


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "Answers that match a grammar need llguidance, which is not installed. Install the "
            "extra `grammar`: pip install 'dms-jax[grammar]'."
        ) from error
    return llguidance


# The vocabularies of models that were asked for a grammar. Reading one of 150,000 tokens takes
# about a second.
_vocabularies: "weakref.WeakKeyDictionary[Any, dict[Any, Any]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


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


@functools.lru_cache(maxsize=_MOST_COMPILED)
def _first(tokens: Any, source: str) -> Any:
    matcher = _library().LLMatcher(tokens, source, log_level=0)  # 0: prints nothing
    if matcher.is_error():
        raise _refused(matcher.get_error())
    return matcher


def _compiled(tokens: Any, source: str) -> Any:
    return _first(tokens, source).deep_copy()

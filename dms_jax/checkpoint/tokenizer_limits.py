"""Limits for a `tokenizer.json`, which is untrusted input: a program that runs on every text.

A few kilobytes can ask for the impossible: nine steps that each write sixteen letters for one make
6 * 10^10 characters of a word of five. So before the tokenizer is built, these have limits: the
number of its steps and how deep they nest, how much longer they can make a text, the tokens that
they put around it, its added tokens, and how its regular expressions backtrack. (One that tries
10^7 ways in a single match is also stopped by the library.)
"""

import json
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Regex, pre_tokenizers

from dms_jax.errors import CheckpointError, plain

# The largest in use: Gemma has 6,000 added tokens and XLM-R's kind a dozen steps; NFKC makes 18
# characters of one, and models that write more than two for one are not known.
MAX_ADDED_TOKENS = 100_000
MAX_STEPS = 200
MAX_DEPTH = 12
MAX_AROUND = 64  # tokens that a template puts around a text
MAX_GROWTH = 2_000  # characters that one becomes, at the worst
MAX_WRITTEN = 64  # of these, what replacements make
MAX_TEXT = 20_000  # characters of a step's texts and regular expressions

_PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_GROWTH = {
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Precompiled": 18,
    "Lowercase": 3,
    "BertNormalizer": 12,
    "ByteLevel": 4,
}
_MAY_BE_EMPTY = ("*", "?", "^", "$", "|", "{0", "{,", "\\")
_PROBES = (20, 24, 28)  # characters, which a nested repetition tries 2^20 ... ways to match
_PROBE_SECONDS = 0.01  # of processor time; usual are 0.00002


def check_layout(data: bytes) -> None:
    """Check the content of a tokenizer.json.

    Raises:
        CheckpointError: it asks for more than any tokenizer needs.
    """
    try:
        layout = json.loads(data)
    except RecursionError as error:
        raise _refused("it is nested too deeply") from error
    except ValueError:
        return  # the library says what is wrong
    if not isinstance(layout, dict):
        return
    added = layout.get("added_tokens")
    if isinstance(added, list) and len(added) > MAX_ADDED_TOKENS:
        raise _refused(f"it adds {len(added):,} tokens, more than {MAX_ADDED_TOKENS:,}")
    for part in _PARTS:
        steps = []
        for step in _steps(layout.get(part), part, 1):
            steps.append(step)
            if len(steps) > MAX_STEPS:
                raise _refused(f"its {part} has more than {MAX_STEPS} steps")
        written = math.prod(map(_written, steps))
        growth = written * math.prod(_GROWTH.get(str(step.get("type")), 1) for step in steps)
        if written > MAX_WRITTEN or growth > MAX_GROWTH:
            raise _refused(f"its {part} makes up to {growth:,.0f} characters of one")
        for step in steps:
            _check_step(step, part)


def _refused(why: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.json is refused, for no tokenizer needs this: {why}")


def _steps(node: Any, part: str, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part, of sequences within sequences too."""
    if not isinstance(node, Mapping):
        return
    if depth > MAX_DEPTH:
        raise _refused(f"its {part} nests sequences more than {MAX_DEPTH} deep")
    yield node
    for value in node.values():
        for inner in value if isinstance(value, list) else ():
            if isinstance(inner, Mapping) and "type" in inner:
                yield from _steps(inner, part, depth + 1)


def _pattern(step: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The pattern of a step: a text, or a regular expression."""
    pattern = step.get("pattern")
    if not isinstance(pattern, Mapping):
        return None, None
    text, regex = pattern.get("String"), pattern.get("Regex")
    return (
        text if isinstance(text, str) else None,
        regex if isinstance(regex, str) else None,
    )


def _written(step: Mapping[str, Any]) -> float | int:
    """How many characters a replacement makes of one, at the worst."""
    content = step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str) or not content:
        return 1
    text, regex = _pattern(step)
    if regex is not None and any(sign in regex for sign in _MAY_BE_EMPTY):
        return 1 + len(content)
    if text == "":
        return 1 + len(content)
    return max(1, len(content) / len(text or " "))


def _check_step(step: Mapping[str, Any], part: str) -> None:
    text, regex = _pattern(step)
    for value in (text, regex, step.get("content"), step.get("prepend")):
        if isinstance(value, str) and len(value) > MAX_TEXT:
            raise _refused(f"a step of its {part} has a text of {len(value):,} characters")
    prepended = step.get("prepend")
    if isinstance(prepended, str) and len(prepended) > MAX_AROUND:
        raise _refused(f"its {part} puts {len(prepended):,} characters in front of every text")
    tokens = step.get("special_tokens")
    around = [step.get("single"), step.get("pair")]
    if isinstance(tokens, Mapping):
        around += [t.get("ids") for t in tokens.values() if isinstance(t, Mapping)]
    for listed in around:
        if isinstance(listed, list) and len(listed) > MAX_AROUND:
            raise _refused(f"its {part} puts {len(listed):,} tokens around every text")
    if regex is not None:
        _check_regex(regex, part)


def _check_regex(regex: str, part: str) -> None:
    """Refuse a regular expression that tries exponentially many ways to match a short text."""
    try:
        split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    except Exception:  # the library says what is wrong when it builds the tokenizer
        return
    for letter in dict.fromkeys([*"aA0 \n!", *regex[:200]]):
        for length in _PROBES:
            start = time.thread_time()
            split.pre_tokenize_str(letter * length + "\0")
            if time.thread_time() - start > _PROBE_SECONDS:
                raise _refused(
                    f"a regular expression of its {part} needs exponential time: {plain(regex, 60)}"
                )

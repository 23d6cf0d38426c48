"""Limits for a `tokenizer.json`, which is untrusted input: a program that runs on every text.

A few kilobytes can cause unbounded work: nine steps that each write sixteen letters for one turn
a letter into 7 * 10^10 characters. So before the tokenizer is built, limits apply to the number of
steps, their nesting, the growth of a text, the tokens around it, and the added tokens. The library
stops regular expressions that backtrack without end.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from dms_jax.errors import CheckpointError

# The largest in use: Gemma has 6,000 added tokens, XLM-R's kind a dozen steps; NFKC turns one
# character into up to 18, and no known model's own steps turn one into more than two.
MAX_ADDED_TOKENS = 100_000
MAX_STEPS = 200
MAX_DEPTH = 12
MAX_AROUND = 64  # tokens or characters put around a text
MAX_GROWTH = 2_000  # characters that one character can become
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


def check_layout(data: bytes) -> None:
    """Check the content of a tokenizer.json.

    Raises:
        CheckpointError: it exceeds a limit.
    """
    try:
        layout = json.loads(data)
    except RecursionError as error:
        raise _refused("it is nested too deeply") from error
    except ValueError:
        return  # the library reports the error
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
            _check_step(step, part)
        growth = math.prod(map(_growth, steps))
        if growth > MAX_GROWTH:
            raise _refused(f"its {part} makes up to {growth:,.0f} characters of one")


def _refused(why: str) -> CheckpointError:
    return CheckpointError(f"tokenizer.json is refused, for no tokenizer needs this: {why}")


def _steps(node: Any, part: str, depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a part, including those of nested sequences."""
    if not isinstance(node, Mapping):
        return
    if depth > MAX_DEPTH:
        raise _refused(f"its {part} nests sequences more than {MAX_DEPTH} deep")
    yield node
    for value in node.values():
        for inner in value if isinstance(value, list) else ():
            if isinstance(inner, Mapping) and "type" in inner:
                yield from _steps(inner, part, depth + 1)


def _growth(step: Mapping[str, Any]) -> float | int:
    """The most characters into which a step turns one character."""
    content = step.get("content")
    if step.get("type") != "Replace" or not isinstance(content, str):
        return _GROWTH.get(str(step.get("type")), 1)
    pattern = step.get("pattern")
    text = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(text, str) and text:
        return max(1, len(content) / len(text))
    return 1 + len(content)  # a regular expression or an empty text may match at every character


def _check_step(step: Mapping[str, Any], part: str) -> None:
    pattern = step.get("pattern")
    texts = [step.get("content"), *(pattern.values() if isinstance(pattern, Mapping) else ())]
    if any(isinstance(text, str) and len(text) > MAX_TEXT for text in texts):
        raise _refused(f"a step of its {part} has a text of more than {MAX_TEXT:,} characters")
    tokens = step.get("special_tokens")
    around = [step.get(name) for name in ("prepend", "single", "pair")]
    if isinstance(tokens, Mapping):
        around += [token.get("ids") for token in tokens.values() if isinstance(token, Mapping)]
    for added in around:
        if isinstance(added, str | list) and len(added) > MAX_AROUND:
            what = "characters" if isinstance(added, str) else "tokens"
            raise _refused(f"its {part} puts {len(added):,} {what} around every text")

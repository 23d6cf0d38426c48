r"""Judging answers to mathematical problems, with Math-Verify (the extra `eval`).

An answer is read where the prompts request it (`\boxed{...}`, "the final answer is ..."), otherwise
from the expressions of the text. Two answers are the same if they are the same number, expression,
set, interval or word in any notation: 0.5 is \frac{1}{2}.

Parsing and comparing run in worker processes (`mathematics_worker.py`), because sympy computes some
expressions for hours, and a worker has a timeout that works from any thread. An answer that exceeds
it counts as missing or wrong, and is logged. There is one worker per processor, and results are
cached.
"""

import functools
import json
import logging
import pathlib
from typing import Any

from dms_jax.data.written_answers import readable
from dms_jax.errors import CapacityError, plain
from dms_jax.evaluation.sandbox import cores
from dms_jax.extras import import_extra
from dms_jax.helper_process import Helpers

MAX_CHARACTERS = 20_000  # only the end of a completion is parsed: answers come last
_SECONDS = 5  # timeout for parsing and for comparing
_logger = logging.getLogger("dms_jax")
_workers = Helpers(
    pathlib.Path(__file__).with_name("mathematics_worker.py"),
    str(_SECONDS),
    seconds=6.0 * _SECONDS,  # in case the worker's own timeout does not fire
    count=cores(),
)


def require_math_verify(task: str) -> None:
    """Raises ConfigError unless the answers of a task can be judged."""
    purpose = f"Judging the answers of {task}"
    import_extra("math_verify", extra="eval", purpose=purpose, package="Math-Verify")


@functools.lru_cache(maxsize=1 << 16)  # all chains of an evaluation, for score and vote
def find_answer(completion: str) -> str | None:
    r"""The answer of a completion in a normal form, as LaTeX; None without one.

    # In: "... the final answer is: $\boxed{0.5}$."  Out: "\frac{1}{2}"
    # In: "... the final answer is $1,000.00"  Out: "1000"
    # In: "... the final answer is −\\$5."  Out: "-5"

    Raises:
      ConfigError: Math-Verify is not installed.
      CapacityError: no process can be started.
    """
    return _ask("find", readable(completion[-MAX_CHARACTERS:])).get("find")


@functools.lru_cache(maxsize=1 << 14)  # chains of one problem often agree
def is_same(expected: str, answer: str) -> bool:
    """Whether an answer, in LaTeX, is the expected one.

    Raises:
      ConfigError, CapacityError: see `find_answer`.
    """
    return _ask("same", [readable(expected), answer]).get("same", False)


@functools.lru_cache(maxsize=1 << 14)
def vote_of(answer: str) -> str:
    r"""The key of an answer in a vote: a text that equal answers share (a number is its own key).

    Expressions are computed and expanded, so most equal ones get the same key. Unlike pairwise
    comparison, equality of keys is transitive and takes n computations for n answers. An expression
    that takes too long gets its own key.

    # In: "\frac{\pi}{2}" and "\pi/2"  Out: "Mul(Rational(1, 2), pi)"

    Raises:
      ConfigError, CapacityError: see `find_answer`.
    """
    return _ask("vote", answer).get("vote", answer)


def _ask(what: str, given: Any) -> dict[str, Any]:
    try:
        reply = _workers.ask(json.dumps({what: given}))
    except OSError as error:
        require_math_verify("mathematics")
        raise CapacityError(
            "Answers are compared in a worker process, which cannot be started: "
            f"{plain(error, 300)}. End other processes, or judge later: with `out=` the answers "
            "are kept."
        ) from error
    if "late" in reply or "error" in reply:
        why = reply.get("error", f"it takes more than {_SECONDS} seconds")
        _logger.warning("An answer counts as none, or as another one: %s. %s", why, plain(given))
    return reply

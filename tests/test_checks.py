"""Argument checks: accepted values, conversions and errors."""

import dataclasses
import fractions
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax import Sampling, policies
from dms_jax.checks import (
    Count,
    Number,
    Options,
    Range,
    Ratio,
    Seed,
    Share,
    Whole,
    check,
)
from dms_jax.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (5, Count, 5),
        (np.int64(5), Count, 5),
        (np.uint8(0), Whole, 0),
        (np.asarray(7), Count, 7),
        (jnp.asarray(7), Count, 7),
        (4, float, 4.0),
        (np.float32(0.5), Share, 0.5),
        (jnp.bfloat16(0.5), Share, 0.5),
        (fractions.Fraction(1, 4), Share, 0.25),
        (np.int32(4), Ratio, 4),
        (np.float64(4), Ratio, 4.0),
        (None, Count | None, None),
        (np.bool_(True), bool, True),
        ("head", Literal["head", "layer"], "head"),
        (print, Callable[[str], None] | None, print),
        ([np.int64(1), 2], Sequence[Seed], (1, 2)),
        (np.asarray([3, 4]), tuple[Count, Count], (3, 4)),
        (2**32 - 1, Seed, 2**32 - 1),
    ],
)
def test_accepted_values_become_plain_python(value, kind, plain):
    answer = check("x", value, kind)
    assert answer == plain
    assert type(answer) is type(plain)


@pytest.mark.parametrize(
    ("value", "kind", "says"),
    [
        (0, Count, "a whole number of at least 1, got 0"),
        (True, Count, "a whole number of at least 1, got True"),
        (np.bool_(True), Whole, "a whole number"),
        (5.0, Count, "a whole number of at least 1, got 5.0"),
        (np.float64(5), Count, "a whole number"),
        (np.asarray([5]), Count, "a whole number"),
        ("5", Count, "got '5'"),
        (None, Count, "got None"),
        (10**30, Count, "a whole number in 64 bits"),
        pytest.param(10**5000, Count, "16610 bits", id="beyond printing"),
        (-1, Seed, r"of at least 0 and at most 4,294,967,295"),
        (2**32, Seed, r"of at least 0 and at most 4,294,967,295"),
        (float("nan"), Share, "a finite number of at least 0 and at most 1, got nan"),
        (float("inf"), Number, "a finite number, got inf"),
        (10**400, Number, "a finite number"),
        (True, Number, "a finite number"),
        (1.5, Share, "at most 1, got 1.5"),
        (1, Annotated[Number, Range(1, above=True)], "a finite number above 1, got 1"),
        (1, Annotated[Number, Range(0, 1, below=True)], "of at least 0 and below 1, got 1"),
        (0, Annotated[Count | None, "give None for all"], "or None, got 0; give None for all"),
        (1, bool, "True or False, got 1"),
        ("middle", Literal["first", "last"], "'first' or 'last', got 'middle'"),
        (["first"], Literal["first", "last"], r"got \['first'\]"),
        (np.asarray([1, 2]), Literal[1, 2], "got array"),
        ("text", Sequence[str] | None, "a sequence, each a text or None, got 'text'"),
        ((1, 2, 3), tuple[Count, Count], "a pair, each a whole number"),
        (3, Sampling, "a Sampling, got 3"),
    ],
)
def test_values_of_another_kind_are_refused(value, kind, says):
    with pytest.raises(ConfigError, match=f"^x must be .*{says}"):
        check("x", value, kind)


def test_traced_numbers_are_refused():
    with pytest.raises(ConfigError, match="x must be a whole number"):
        jax.jit(lambda x: check("x", x, Count))(3)


@dataclasses.dataclass(frozen=True)
class Cutting(Options):
    width: Count = 3
    rate: Share = 0.5
    per: Literal["head", "layer"] = "head"


def test_options_hold_plain_python():
    plain: Any = Cutting(width=7, rate=0.25)
    others: Any = ((np.int64(7), np.float32(0.25)), (jnp.asarray(7), np.asarray(0.25)))
    for width, rate in others:
        given: Any = Cutting(width=width, rate=rate)
        assert (given, hash(given)) == (plain, hash(plain))
        assert json.dumps(dataclasses.asdict(given)) == json.dumps(dataclasses.asdict(plain))
    traces = []

    def traced(options, x):
        traces.append(options)
        return x

    compiled = jax.jit(traced, static_argnums=0)
    compiled(plain, 1)
    compiled(given, 1)
    assert len(traces) == 1


def test_options_say_whose_field_is_wrong():
    with pytest.raises(ConfigError, match=r"^Cutting: rate must be .* got 2\.$"):
        Cutting(rate=2)
    with pytest.raises(ConfigError, match=r"^Cutting: width must be"):
        dataclasses.replace(Cutting(), width=0)


def test_unknown_options_name_the_nearest():
    unknown: Any = {"widht": 3}
    says = r"Cutting has no option widht \(did you mean width\?\); it has per, rate, width\."
    with pytest.raises(ConfigError, match=says):
        Cutting(**unknown)
    with pytest.raises(ConfigError, match=says):
        dataclasses.replace(Cutting(), **unknown)
    with pytest.raises(ConfigError, match=r"DMS has no option windw \(did you mean window\?\)"):
        policies.from_dict({"name": "DMS", "windw": 3})
    with pytest.raises(ConfigError, match="Vanilla has no option budget; it has none"):
        policies.from_dict({"name": "Vanilla", "budget": 3})

"""Checks arguments against annotations ("kinds"), and converts them to plain Python.

    check("tokens", np.int64(5), Count)     # 5
    check("rate", 1.5, Share)               # ConfigError: rate must be a finite number of at least
                                            # 0 and at most 1, got 1.5.

A kind is `int`, `float`, `bool`, `str` or another class; a `Literal`; a `Callable`;
`Sequence[kind]`, `tuple[kind, ...]` or `tuple[kind, kind]`; a union of those; or one of them in
`Annotated`, with a `Range`, with a text of advice for the caller, and with `Traced` if it is an
argument of programs.

A whole number is any `numbers.Integral` and a number any finite `numbers.Real`, including NumPy's
and JAX's; an array stands for its contents. A bool is neither. `float | int` keeps integers.

A frozen dataclass of options inherits from `Options`, which checks every field by its annotation.
Classes check conditions on several fields with `require`.
"""

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, TypeGuard, Union, overload

from dms_jax.errors import ConfigError, plain

MOST = 2**63 - 1  # the largest whole number
LARGEST = sys.float_info.max  # the largest number
MOST_ON_DEVICE = 2**31 - 1  # the largest size of an array axis, and the largest int32


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`.

    Attributes:
      least, most: the ends of the range.
      above: whether `least` is excluded.
      below: whether `most` is excluded.
    """

    least: float | int = -math.inf
    most: float | int = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float | int) -> bool:
        reaches = self.least < value if self.above else self.least <= value
        return reaches and (value < self.most if self.below else value <= self.most)

    def __str__(self) -> str:
        ends = []
        if self.least > -math.inf:
            ends.append(f"{'above' if self.above else 'of at least'} {_bound(self.least)}")
        if self.most < math.inf:
            ends.append(f"{'below' if self.below else 'at most'} {_bound(self.most)}")
        return " and ".join(ends)


@dataclasses.dataclass(frozen=True)
class Traced:
    """Marks a purely numeric field of a pytree of options.

    Compiled programs take it as an argument, so one program serves all its values. A field without
    this mark is static: it affects shapes or code, and each value is a separate program.

    Attributes:
      leaf: converts the number to the program's argument: `float`, `int`, a NumPy type, or a
        function that returns a pytree.
      number: converts the argument back to the number, if it holds a number and not arrays.
      bounded: whether an upper bound is static (`Policy.bound`), for the size of an array.
    """

    leaf: Callable[[Any], Any]
    number: Callable[[Any], Any] | None = None
    bounded: bool = False


def traced(kind: Any) -> Traced | None:
    """Returns the mark of an annotation, or None for a static field."""
    marks = (each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Traced))
    return next(marks, None)


Whole = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
CountOnDevice = Annotated[int, Range(1, MOST_ON_DEVICE)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Number = float | int
Positive = Annotated[Number, Range(0, above=True)]
NotNegative = Annotated[Number, Range(0)]
Share = Annotated[Number, Range(0, 1)]
Ratio = Annotated[Number, Range(1)]  # a compression ratio


def require(condition: bool, message: str) -> None:
    """Raises ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is an integer of any type; a bool is not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def show(value: Any) -> str:
    """Returns a short representation of any value, for messages."""
    try:
        return plain(repr(value), 80)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a number of {value.bit_length()} bits" if is_whole(value) else "numbers too long"


@overload
def check[T](name: str, value: Any, kind: type[T]) -> T: ...
@overload
def check(name: str, value: Any, kind: Any) -> Any: ...
def check(name: str, value: Any, kind: Any) -> Any:
    """Returns the value in plain Python.

    Args:
      name: name of the argument, for the message.
      value: the value that was given.
      kind: annotation of the allowed values; see the module docstring.

    Raises:
      ConfigError: the value is of another kind.
    """
    fit = _fit(value, kind)
    if fit is _UNFIT:
        error = ConfigError(
            f"{name} must be {_describe(kind, value)}, got {show(value)}{_advice(kind)}."
        )
        error.argument = name
        raise error
    return fit


def check_names(what: str, given: Iterable[Any], known: Sequence[str]) -> None:
    """Raises ConfigError for unknown options, and suggests the most similar one."""
    if unknown := sorted(map(str, set(given) - set(known))):
        raise ConfigError(
            f"{what} has no option {', '.join(unknown)}{guess(unknown[0], known)}; it has "
            f"{', '.join(sorted(known)) or 'none'}."
        )


def guess(name: str, known: Iterable[str]) -> str:
    """Returns " (did you mean ...?)" for an unknown name, or nothing if none is close."""
    plain = {each.lower(): each for each in known}
    meant = difflib.get_close_matches(name.lower(), plain, 1)
    return f" (did you mean {plain[meant[0]]}?)" if meant else ""


class Options:
    """Base class of frozen dataclasses of options; errors name unknown options and wrong values.

    Fields are converted to plain Python, so equal options are equal as dataclasses, as JSON and as
    static arguments of `jit`, regardless of the types given.
    """

    def __new__(cls, *values: Any, **options: Any):
        """Checks the names here, because Python's error is no DmsJaxError."""
        del values
        check_names(cls.__name__, options, list(kinds(cls)))
        return super().__new__(cls)

    def __post_init__(self):
        for name, kind in kinds(type(self)).items():
            value = check(f"{type(self).__name__}: {name}", getattr(self, name), kind)
            object.__setattr__(self, name, value)


def show_options[F: Callable](options: type) -> Callable[[F], F]:
    """Decorates a function whose last parameter is `**options: Unpack[Keywords]`.

    `help` and `inspect.signature` then show the keywords, with the defaults of the dataclass
    `options`, as if the function declared each of them.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, rest = signature.parameters.values()
        (keywords,) = typing.get_args(rest.annotation)
        shown = [
            inspect.Parameter(name, rest.KEYWORD_ONLY, default=defaults[name], annotation=kind)
            for name, kind in typing.get_type_hints(keywords).items()
        ]
        function.__signature__ = signature.replace(parameters=[*named, *shown])  # pyright: ignore
        return function

    return decorate


def check_keywords(what: str, function: Callable, given: Iterable[str], **within: type) -> None:
    """Raises ConfigError for keywords that the function does not have (see `show_options`).

    Args:
      what: the function's name, for the message.
      function: the called function.
      given: names of the keywords.
      within: keyword -> the dataclass of options that it takes. If one of its fields is given as a
        separate keyword, the message says where it belongs.
    """
    shown = inspect.signature(function).parameters.values()
    known = [each.name for each in shown if each.kind is each.KEYWORD_ONLY]
    unknown = sorted(set(given) - set(known))
    for keyword, options in within.items():
        if displaced := [name for name in unknown if name in kinds(options)]:
            raise ConfigError(
                f"{what} has no option {displaced[0]}, which is one of {options.__name__}: give "
                f"{keyword}=dms_jax.{options.__name__}({displaced[0]}=...)."
            )
    check_names(what, unknown, known)


@functools.cache
def kinds(options: type) -> dict[str, Any]:
    """Returns the fields of a dataclass with their annotations."""
    hints = typing.get_type_hints(options, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(options)}


# -- kinds ----------------------------------------------------------------------------------------

_UNFIT = object()
_NOUNS = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text"}


def _fit(value: Any, kind: Any) -> Any:
    """Returns the value in plain Python, or _UNFIT."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        fit = _fit(value, arguments[0])
        limits = [each for each in arguments[1:] if isinstance(each, Range)]
        is_number = isinstance(fit, int | float)
        return fit if not is_number or all(fit in limit for limit in limits) else _UNFIT
    if origin in (Union, types.UnionType):
        kinds = sorted(arguments, key=lambda each: each is float)  # 4 stays an int if allowed
        return next((fit for each in kinds if (fit := _fit(value, each)) is not _UNFIT), _UNFIT)
    if kind is Any:
        return value
    value = _unwrapped(value)
    if origin is Literal:
        allowed = any(type(value) is type(each) and value == each for each in arguments)
        return value if allowed else _UNFIT
    if origin in (tuple, collections.abc.Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            return _UNFIT
        fits = tuple(_fit(each, arguments[0]) for each in value)
        short = _is_pair(kind) and len(fits) != 2
        return _UNFIT if short or _UNFIT in fits else fits
    if origin is collections.abc.Callable:
        return value if callable(value) else _UNFIT
    if kind is int:
        return int(value) if is_whole(value) and abs(value) <= MOST else _UNFIT
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return _UNFIT
        real: Any = value  # `Real` and float have no order for type checkers
        return float(real) if -LARGEST <= real <= LARGEST else _UNFIT  # NaN is unfit too
    return value if isinstance(value, kind) else _UNFIT


def _is_pair(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind)


def _unwrapped(value: Any) -> Any:
    """Returns the contents of a scalar or an array of NumPy or JAX as plain Python."""
    if not (hasattr(value, "tolist") and hasattr(value, "ndim")):
        return value
    try:
        return value.tolist()
    except TypeError:  # a traced array has no value yet
        return value


def _describe(kind: Any, value: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        limits = [str(each) for each in arguments[1:] if isinstance(each, Range)]
        return " ".join([_describe(arguments[0], value), *limits])
    if origin in (Union, types.UnionType):
        kinds = [each for each in arguments if not (each is int and float in arguments)]
        return " or ".join(_describe(each, value) for each in kinds)
    if origin is Literal:
        shown = [repr(each) for each in arguments]
        return " or ".join([", ".join(shown[:-1]), shown[-1]]) if shown[1:] else shown[0]
    if origin in (tuple, collections.abc.Sequence):
        noun = "a pair" if _is_pair(kind) else "a sequence"
        return f"{noun}, each {_describe(arguments[0], value)}"
    if origin is collections.abc.Callable:
        return "a function"
    if kind is types.NoneType:
        return "None"
    if kind is int and is_whole(value) and abs(value) > MOST:
        return "a whole number in 64 bits"
    return _NOUNS.get(kind) or f"a {kind.__name__}"


def _advice(kind: Any) -> str:
    """Returns the texts of an annotation, each after a semicolon."""
    texts = [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, str)]
    return "".join(f"; {each}" for each in texts)


def _bound(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"

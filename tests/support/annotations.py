"""The checks of jaxtyping annotations, made when a function is first called.

Under test jaxtyping decorates every function of the two packages as it is defined, and makes two
functions that check its arguments and its result. That takes milliseconds each, on import for
thousands of functions that a process never calls, and for functions inside others at every call of
those: whenever a program is traced. Here a function's checks are made at its first call, and one
without annotations, which has nothing to check, is left as it is.

What jaxtyping makes then binds the arguments of each call to their names, for the message of a
check that fails, and checks them a second time beside the result: a sixth of the time of tests of
data and of lowering. So a call is checked by beartype alone, once, in a scope of axis sizes of its
own; where an argument is wrong, jaxtyping's own checks are made to say so.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation

# The decorator itself, whatever stands in its place later.
_jaxtyped = jaxtyping.jaxtyped


def install() -> None:
    """Puts `jaxtyped` in the place of jaxtyping's; modules imported later are decorated by it."""
    jaxtyping.jaxtyped = jaxtyped


def jaxtyped(fn: Any = None, *, typechecker: Callable | None) -> Any:
    """As `jaxtyping.jaxtyped` for functions, methods, properties and classes."""
    if fn is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    again = functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(fn):
        exempt = getattr(fn, "__no_type_check__", False) or hasattr(fn.__init__, "checked_later")
        if dataclasses.is_dataclass(fn) and not exempt:
            fn.__init__ = again(fn.__init__)
        return fn
    if isinstance(fn, classmethod | staticmethod):
        return type(fn)(again(fn.__func__))
    if isinstance(fn, property):
        return property(*(each and again(each) for each in (fn.fget, fn.fset, fn.fdel)))
    if not getattr(fn, "__annotations__", None):
        return fn
    return _checked_later(fn, typechecker)


def _checked_later(fn: Callable, typechecker: Callable | None) -> Callable:
    @functools.cache
    def checks():
        # The scope imports jax, which tests/conftest.py sets up first.
        scope = _jaxtyped("context")
        if typechecker is None:
            return fn, scope
        try:
            typing.get_type_hints(fn)
        except NameError:  # imported for type checkers alone: jaxtyping checks the other arguments
            return _jaxtyped(fn, typechecker=typechecker), scope
        return typechecker(fn), scope

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        __tracebackhide__ = True
        checked, scope = checks()
        try:
            with scope:
                return checked(*args, **kwargs)
        except BeartypeCallHintParamViolation:
            # `fn` has not been called.
            return _jaxtyped(fn, typechecker=typechecker)(*args, **kwargs)
        except BeartypeCallHintReturnViolation as violation:
            raise jaxtyping.TypeCheckError(str(violation)) from None

    wrapped.checked_later = True
    return wrapped

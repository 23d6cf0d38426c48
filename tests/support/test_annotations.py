"""Annotations are checked, wherever a function stands and whatever it is called through."""

import dataclasses

import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jaxtyping import Float, TypeCheckError

from dms_jax.sharding import constrain
from tests.support.annotations import jaxtyped

RIGHT, WRONG = np.zeros((2, 3), np.float32), np.zeros(3, np.float32)
checked = jaxtyped(typechecker=beartype)


@checked
def rows(x: Float[np.ndarray, "B T"]) -> Float[np.ndarray, " B"]:
    return x[:, 0]


@checked
def columns(x: Float[np.ndarray, "B T"]) -> Float[np.ndarray, " T"]:
    return x[:, 0]


@checked
def twice(x: Float[np.ndarray, "B T"]):
    @checked
    def inner(y: Float[np.ndarray, "B T"]):
        return y

    return inner(x[0])


@checked
def named(x: Float[np.ndarray, "B T"], other: "Nowhere | None" = None):  # noqa: F821
    return x


@checked
@dataclasses.dataclass
class Holder:
    x: Float[np.ndarray, "B T"]

    @property
    @checked
    def first(self) -> Float[np.ndarray, "B T"]:
        return self.x[0]

    @classmethod
    @checked
    def of(cls, x: Float[np.ndarray, "B T"]):
        return cls(x)


@checked
class Below(Holder):
    """Inherits what makes it."""


@pytest.mark.parametrize(
    "function", [rows, named, Holder, Below, Holder.of, checked(staticmethod(rows))]
)
def test_what_is_wrong_is_refused_at_the_first_call_and_later(function):
    for _ in range(2):
        with pytest.raises(TypeCheckError, match=r"parameters"):
            function(WRONG)
        function(RIGHT)


def test_results_are_checked():
    for wrong in (columns, lambda x: Holder(x).first, twice):
        with pytest.raises(TypeCheckError):
            wrong(RIGHT)


def test_a_function_keeps_its_name_and_one_without_annotations_is_itself():
    def plain(x):
        return x

    assert checked(plain) is plain
    assert (rows.__name__, rows.__module__) == ("rows", __name__)


def test_the_packages_are_decorated_so():
    assert jaxtyping.jaxtyped is jaxtyped
    assert constrain.checked_later

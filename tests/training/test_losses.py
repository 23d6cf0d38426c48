"""The losses against NumPy in float64 and against finite differences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.training import losses

BATCH, LENGTH, WIDTH, VOCABULARY = 2, 7, 3, 5


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def numpy_log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def case():
    random = np.random.default_rng(0)
    return {
        "student": random.normal(size=(BATCH, LENGTH, WIDTH)),
        "teacher": random.normal(size=(BATCH, LENGTH, WIDTH)),
        "matrix": 2 * random.normal(size=(WIDTH, VOCABULARY)),
        "other": 2 * random.normal(size=(WIDTH, VOCABULARY)),
        "targets": random.integers(0, VOCABULARY, (BATCH, LENGTH)),
        "mask": random.random((BATCH, LENGTH)) < 0.7,
        "target_mask": random.random((BATCH, LENGTH)) < 0.6,
    }


def sums(case, *, direction="reverse", chunk=None, student=None, matrix=None, teacher=True):
    matrix = case["matrix"] if matrix is None else matrix
    hidden = case["student"] if student is None else student
    matrix = jnp.asarray(matrix).T
    return losses.token_losses(
        losses.Head(jnp.asarray(hidden), matrix, matrix),
        losses.Head(jnp.asarray(case["teacher"]), jnp.asarray(case["other"]).T)
        if teacher
        else None,
        targets=jnp.asarray(case["targets"]),
        mask=jnp.asarray(case["mask"]),
        target_mask=jnp.asarray(case["target_mask"]),
        direction=direction,
        chunk=chunk,
    )


@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 20])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_divergence_and_likelihood_equal_numpy(case, direction, chunk):
    student = numpy_log_softmax(case["student"] @ case["matrix"])
    teacher = numpy_log_softmax(case["teacher"] @ case["other"])
    first, second = (student, teacher) if direction == "reverse" else (teacher, student)
    divergence = (np.exp(first) * (first - second)).sum(-1)
    likelihood = np.take_along_axis(student, case["targets"][..., None], -1)[..., 0]
    found = sums(case, direction=direction, chunk=chunk)
    chex.assert_trees_all_close(found.distillation, divergence[case["mask"]].sum(), rtol=1e-12)
    expected = -likelihood[case["target_mask"]].sum()
    chex.assert_trees_all_close(found.language_modeling, expected, rtol=1e-12)


class DirectionsTest(chex.TestCase):
    @pytest.fixture(autouse=True)
    def _case(self, case):
        self.case = case

    def divergence(self, case, direction):
        def distillation(student):
            return sums(case, direction=direction, student=student).distillation

        return self.variant(distillation)(case["student"])

    @chex.variants(with_jit=True, without_jit=True)
    def test_they_differ_and_vanish_at_the_teacher(self):
        reverse, forward = (self.divergence(self.case, way) for way in ("reverse", "forward"))
        assert abs(reverse - forward) > 0.1
        same = self.case | {"teacher": self.case["student"], "other": self.case["matrix"]}
        for direction in ("reverse", "forward"):
            found = self.divergence(same, direction)
            chex.assert_trees_all_close(found, 0, rtol=1e-7, atol=1e-12)


def numpy_gradients(case, direction, teacher):
    """Returns the gradients of the main loss for the hidden states and the matrix [E, V]."""
    student = numpy_log_softmax(case["student"] @ case["matrix"])
    other = numpy_log_softmax(case["teacher"] @ case["other"])
    if not teacher:
        chosen = np.arange(student.shape[-1]) == case["targets"][..., None]
        of_logits = (np.exp(student) - chosen) * case["target_mask"][..., None]
    elif direction == "forward":
        of_logits = (np.exp(student) - np.exp(other)) * case["mask"][..., None]
    else:
        distance = student - other
        mean = (np.exp(student) * distance).sum(-1, keepdims=True)
        of_logits = np.exp(student) * (distance - mean) * case["mask"][..., None]
    return (
        of_logits @ case["matrix"].T,
        np.einsum("BTE,BTV->EV", case["student"], of_logits),
    )


@pytest.mark.parametrize("chunk", [2, 7])
@pytest.mark.parametrize(
    ("direction", "teacher"), [("reverse", True), ("forward", True), ("reverse", False)]
)
def test_gradients_equal_numpy(case, direction, teacher, chunk):
    def loss(student, matrix):
        options = dict(student=student, matrix=matrix, teacher=teacher)
        found = sums(case, direction=direction, chunk=chunk, **options)
        return 0.3 * (found.distillation + found.language_modeling)

    found = jax.grad(loss, argnums=(0, 1))(
        jnp.asarray(case["student"]), jnp.asarray(case["matrix"])
    )
    want = tuple(0.3 * x for x in numpy_gradients(case, direction, teacher))
    chex.assert_trees_all_close(found, want, rtol=1e-10, atol=1e-12)


def test_chunks_of_bfloat16_add_up_in_float32():
    """The error of the output matrix's gradient is that of rounding once, for any chunks."""
    random = np.random.default_rng(1)
    length, width, vocabulary = 2048, 8, 32
    hidden = jnp.asarray(random.normal(size=(1, length, width)), jnp.bfloat16)
    matrix = jnp.asarray(random.normal(size=(vocabulary, width)), jnp.bfloat16)
    case = {
        "student": np.asarray(hidden, float),
        "matrix": np.asarray(matrix, float).T,
        "teacher": np.asarray(hidden, float),
        "other": np.asarray(matrix, float).T,
        "targets": random.integers(0, vocabulary, (1, length)),
        "mask": np.ones((1, length), bool),
        "target_mask": np.ones((1, length), bool),
    }
    _, want = numpy_gradients(case, "reverse", teacher=False)

    def loss(parameter, chunk):
        return losses.token_losses(
            losses.Head(hidden, matrix, parameter),
            None,
            targets=jnp.asarray(case["targets"]),
            mask=jnp.ones((1, length), bool),
            target_mask=jnp.ones((1, length), bool),
            direction="reverse",
            chunk=chunk,
        ).language_modeling

    for chunk in (1, 8, length):
        found = jax.jit(jax.grad(loss), static_argnums=1)(matrix.astype(jnp.float32), chunk)
        chex.assert_type(found, jnp.float32)
        error = np.linalg.norm(found.T - want) / np.linalg.norm(want)
        # Rounding each gradient of a logit to 8 bits; sums in bfloat16 were off by 0.036.
        assert error < 2**-9, chunk


def test_without_a_teacher_there_is_only_the_likelihood(case):
    found = sums(case, teacher=False)
    assert found.distillation == 0
    assert found.language_modeling == sums(case).language_modeling


def test_logits_of_all_positions_are_never_alive_at_once():
    """The largest array of the compiled loss and its gradient is one chunk of logits."""
    length, vocabulary, chunk = 64, 512, 4

    def loss(hidden, matrix):
        found = losses.token_losses(
            losses.Head(hidden, matrix, matrix),
            losses.Head(hidden, matrix),
            targets=jnp.zeros((1, length), jnp.int32),
            mask=jnp.ones((1, length), bool),
            target_mask=jnp.ones((1, length), bool),
            direction="reverse",
            chunk=chunk,
        )
        return found.distillation

    shapes = (
        jax.ShapeDtypeStruct((1, length, 2), "f4"),
        jax.ShapeDtypeStruct((vocabulary, 2), "f4"),
    )
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().as_text()
    assert f"f32[1,{chunk},{vocabulary}]" in text or f"f32[{chunk},{vocabulary}]" in text
    assert f"{length},{vocabulary}]" not in text

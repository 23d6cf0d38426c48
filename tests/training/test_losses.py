"""The losses against NumPy in float64 and against finite differences."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dms_jax.training import losses
from tests.support.instances import further

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


def sums(case, *, chunk=None, student=None, matrix=None, teacher=True, **options):
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
        chunk=chunk,
        **options,
    )


@pytest.mark.parametrize(
    ("chunk", "temperature"),
    [*((chunk, 1.0) for chunk in (None, 1, 3, 7, 20)), (3, 0.5), (3, 2.0), (3, 4.0)],
)
def test_divergence_and_likelihood_equal_numpy(case, chunk, temperature):
    """T^2 KL(softmax(student / T), softmax(teacher / T)) (Hinton et al., arXiv 1503.02531).

    Language modelling loss is measured at temperature 1.
    """
    logits, other = case["student"] @ case["matrix"], case["teacher"] @ case["other"]
    student, teacher = (
        numpy_log_softmax(logits / temperature),
        numpy_log_softmax(other / temperature),
    )
    divergence = temperature**2 * (np.exp(student) * (student - teacher)).sum(-1)
    likelihood = np.take_along_axis(numpy_log_softmax(logits), case["targets"][..., None], -1)
    found = sums(case, chunk=chunk, temperature=temperature, text_weight=0.3)
    total = divergence[case["mask"]].sum()
    chex.assert_trees_all_close(found.distillation, total, rtol=1e-12)
    expected = -likelihood[case["target_mask"], 0].sum()
    chex.assert_trees_all_close(found.language_modeling, expected, rtol=1e-12)
    chex.assert_trees_all_close(found.main, total + 0.3 * expected, rtol=1e-12)
    alone = sums(case, chunk=chunk, teacher=False)
    assert alone.distillation == 0
    chex.assert_trees_all_close(alone.language_modeling, expected, rtol=1e-12)
    chex.assert_trees_all_close(alone.main, expected, rtol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, *further(0.25, 3.0)])
@pytest.mark.parametrize("far", ["both", *further("student", "teacher", "neither")])
def test_logit_far_above_origin_does_not_overflow(far, temperature):
    """In float32 exp(300) is infinite; the origin is the maximum of the first two logits."""
    random = np.random.default_rng(2)
    size = 32
    student, teacher = random.normal(size=(2, 1, 3, size)).astype(np.float32)
    student[0, 1, 20] += 300 * (far in ("student", "both"))
    teacher[0, 1, 20] += 300 * (far in ("teacher", "both"))
    targets = np.array([[20, 3, 31]])
    everywhere = jnp.ones((1, 3), bool)

    def divergence(logits):
        found = losses.token_losses(
            losses.Head(logits, jnp.eye(size, dtype=jnp.float32)),
            losses.Head(jnp.asarray(teacher), jnp.eye(size, dtype=jnp.float32)),
            targets=jnp.asarray(targets),
            mask=everywhere,
            target_mask=everywhere,
            temperature=temperature,
        )
        return found.main, found.language_modeling

    (value, likelihood), slope = jax.value_and_grad(divergence, has_aux=True)(jnp.asarray(student))
    ours, theirs = (numpy_log_softmax(x.astype(float) / temperature) for x in (student, teacher))
    apart = ours - theirs
    each = (np.exp(ours) * apart).sum(-1, keepdims=True)
    expected = np.exp(ours) * (apart - each)
    chex.assert_trees_all_close(
        np.asarray(value, float), temperature**2 * each.sum(), rtol=1e-4, atol=1e-4
    )
    chex.assert_trees_all_close(
        np.asarray(slope, float), temperature * expected, rtol=1e-4, atol=1e-4
    )
    chosen = np.take_along_axis(numpy_log_softmax(student.astype(float)), targets[..., None], -1)
    chex.assert_trees_all_close(np.asarray(likelihood, float), -chosen.sum(), rtol=1e-4)


def numpy_gradients(case, teacher, text_weight=0.0):
    """Returns the gradients of the main loss for the hidden states and the matrix [E, V]."""
    student = numpy_log_softmax(case["student"] @ case["matrix"])
    other = numpy_log_softmax(case["teacher"] @ case["other"])
    chosen = np.arange(student.shape[-1]) == case["targets"][..., None]
    of_text = (np.exp(student) - chosen) * case["target_mask"][..., None]
    if not teacher:
        of_logits = of_text
    else:
        distance = student - other
        mean = (np.exp(student) * distance).sum(-1, keepdims=True)
        of_logits = np.exp(student) * (distance - mean) * case["mask"][..., None]
    if teacher:
        of_logits = of_logits + text_weight * of_text
    return (
        of_logits @ case["matrix"].T,
        np.einsum("BTE,BTV->EV", case["student"], of_logits),
    )


@pytest.mark.parametrize("chunk", [2, 7])
@pytest.mark.parametrize(("teacher", "text_weight"), [(True, 0.0), (False, 0.0), (True, 0.4)])
def test_gradients_equal_numpy(case, teacher, text_weight, chunk):
    def loss(student, matrix):
        options = dict(student=student, matrix=matrix, teacher=teacher, text_weight=text_weight)
        found = sums(case, chunk=chunk, **options)
        parts = found.distillation + text_weight * found.language_modeling
        return 0.3 * (found.main + parts)  # the parts have no gradients

    found = jax.grad(loss, argnums=(0, 1))(
        jnp.asarray(case["student"]), jnp.asarray(case["matrix"])
    )
    want = tuple(0.3 * x for x in numpy_gradients(case, teacher, text_weight))
    chex.assert_trees_all_close(found, want, rtol=1e-10, atol=1e-12)


def test_chunks_of_bfloat16_add_up_in_float32():
    """The output matrix's gradient has the error of one rounding, for any chunk size."""
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
    _, want = numpy_gradients(case, teacher=False)

    def loss(parameter, chunk):
        return losses.token_losses(
            losses.Head(hidden, matrix, parameter),
            None,
            targets=jnp.asarray(case["targets"]),
            mask=jnp.ones((1, length), bool),
            target_mask=jnp.ones((1, length), bool),
            chunk=chunk,
        ).main

    for chunk in (1, 8, length):
        found = jax.jit(jax.grad(loss), static_argnums=1)(matrix.astype(jnp.float32), chunk)
        chex.assert_type(found, jnp.float32)
        error = np.linalg.norm(found.T - want) / np.linalg.norm(want)
        # Each logit's gradient is rounded to 8 bits; sums in bfloat16 were off by 0.036.
        assert error < 2**-9, chunk


def test_only_a_chunk_of_logits_exists_at_a_time():
    """The largest array of the compiled loss and its gradient is one chunk of logits."""
    length, vocabulary, chunk = 64, 512, 4

    def loss(hidden, matrix):
        found = losses.token_losses(
            losses.Head(hidden, matrix, matrix),
            losses.Head(hidden, matrix),
            targets=jnp.zeros((1, length), jnp.int32),
            mask=jnp.ones((1, length), bool),
            target_mask=jnp.ones((1, length), bool),
            chunk=chunk,
        )
        return found.main

    shapes = (
        jax.ShapeDtypeStruct((1, length, 2), "f4"),
        jax.ShapeDtypeStruct((vocabulary, 2), "f4"),
    )
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().as_text()
    assert f"f32[1,{chunk},{vocabulary}]" in text or f"f32[{chunk},{vocabulary}]" in text
    assert f"{length},{vocabulary}]" not in text

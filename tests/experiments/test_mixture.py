"""Mixtures: whole documents, shares, loss masks, batches that depend on the step."""

import multiprocessing
import os
import random
import signal

import chex
import numpy as np
import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.data.tasks import LinearEquation, VariableTracking
from dms_jax.errors import ConfigError
from experiments.mixture import Mixture, Part, standard_parts

LINEAR = Part("linear", 0.5, (LinearEquation(),))
TRACKING = Part("tracking", 0.5, (VariableTracking(size=2, hops=1),))
# Encoding the training split's prose takes ten seconds in every process that makes batches.
LITTLE_PROSE = dict(split="validation")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_directory(assets.path("reasoner-11m"))


@pytest.fixture(scope="module")
def mixture(tokenizer):
    return Mixture(tokenizer, (LINEAR, TRACKING), batch_size=4, length=512, **LITTLE_PROSE)


def documents(tokenizer, batch):
    for tokens, segments, counts in zip(
        batch["tokens"], batch["segment_ids"], batch["loss_mask"], strict=True
    ):
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            yield tokens[inside], counts[inside]


def test_documents_are_whole_and_only_solutions_count(tokenizer, mixture):
    whole = 0
    for tokens, counts in documents(tokenizer, mixture.batch(0)):
        assert tokens[0] == tokenizer.bos_token_id
        if tokens[-1] != tokenizer.eos_token_id or counts[0]:
            assert counts.all()  # prose
            continue
        text, solution = tokenizer.decode(tokens), tokenizer.decode(tokens[counts])
        assert text.endswith(solution)
        assert counts[-1]
        kind = "Problem: Solve" if text.startswith("Problem") else "Memorize and track"
        assert text.startswith(kind)
        assert not solution.startswith(kind)
        assert np.all(np.diff(counts.astype(int)) >= 0)  # a prompt, then its solution
        whole += 1
    assert whole > 8


def test_cached_encoding_equals_the_tokenizers(tokenizer):
    mixture = Mixture(tokenizer)
    rng, same = random.Random(0), random.Random(0)
    for part in standard_parts():
        for _ in range(12):
            ids, prompt = mixture.document(part, rng)
            task = part.tasks[same.randrange(len(part.tasks))]
            problem = task.problem("train", same.getrandbits(48))
            expected = tokenizer.encode(problem.prompt)
            assert ids[:prompt] == expected
            solution = tokenizer.encode(problem.solution, add_special_tokens=False)
            assert ids[prompt:] == [*solution, tokenizer.eos_token_id]


def test_parts_have_their_shares(tokenizer):
    mixture = Mixture(tokenizer, batch_size=16, length=2048, **LITTLE_PROSE)
    spent = dict.fromkeys(
        ("Problem: Solve", "Problem: Compute", "Problem: ", "Memorize", "A spec"), 0
    )
    for tokens, _ in documents(tokenizer, mixture.batch(1)):
        text = tokenizer.decode(tokens)
        for start in spent:
            if text.startswith(start):
                spent[start] += len(tokens)
                break
    total = sum(spent.values())
    shares = [
        part.share for part in standard_parts()
    ]  # linear, arithmetic, words, needle, tracking
    expected = [shares[0], shares[1], shares[2], shares[4], shares[3]]
    assert [value / total for value in spent.values()] == pytest.approx(expected, abs=0.06)
    assert total > 0.75 * 16 * 2048  # the rest is prose


def test_dropped_documents_do_not_count_for_their_part(tokenizer):
    """Documents of 7 and of 2 tokens, equal shares, one sequence of 20.

    One of 7, four of 2; then the first part is behind again but does not fit, and prose follows
    instead of more of the second part.
    """

    class Sized(Mixture):
        def document(self, part, rng):
            return {"linear": [5] * 7, "tracking": [6] * 2}[part.name], 1

        def _prose(self, rng, room):
            return np.zeros(0, np.int32)

    one = Sized(tokenizer, (LINEAR, TRACKING), batch_size=1, length=20)
    chex.assert_trees_all_equal(one.batch(0)["tokens"][0], np.array([5] * 7 + [6] * 8 + [0] * 5))
    # In earlier sequences it waits for the next one, and counts already.
    two = Sized(tokenizer, (LINEAR, TRACKING), batch_size=2, length=20)
    first, second = two.batch(0)["tokens"].tolist()
    assert first == [5] * 7 + [6] * 12 + [0]
    assert second[:7] == [5] * 7
    spent = [first.count(token) + second.count(token) for token in (5, 6)]
    assert abs(spent[0] - spent[1]) <= 7


def test_batch_depends_only_on_seed_split_and_step(tokenizer, mixture):
    again = Mixture(tokenizer, (LINEAR, TRACKING), batch_size=4, length=512, **LITTLE_PROSE)
    first = mixture.batch(7)
    chex.assert_trees_all_equal(again.batch(7), first)
    other = Mixture(tokenizer, (LINEAR, TRACKING), batch_size=4, length=512, split="test")
    for different in (mixture.batch(8), other.batch(7)):
        assert (different["tokens"] != first["tokens"]).any()


@pytest.mark.nightly
def test_workers_give_the_same_batches_and_restore(mixture):
    ahead = mixture.batches(start=3, workers=2)
    try:
        place = None
        for step in (3, 4, 5):
            place = ahead.get_state() if step == 4 else place
            chex.assert_trees_all_equal(next(ahead)["tokens"], mixture.batch(step)["tokens"])
        ahead.set_state(place)
        chex.assert_trees_all_equal(next(ahead)["tokens"], mixture.batch(4)["tokens"])
        # Workers survive Ctrl-C, which a terminal sends to them too, so the last step has its data.
        workers = multiprocessing.active_children()
        assert len(workers) >= 2
        for process in workers:
            os.kill(process.pid, signal.SIGINT)
        for step in range(5, 25):
            chex.assert_trees_all_equal(next(ahead)["tokens"], mixture.batch(step)["tokens"])
    except KeyboardInterrupt:
        pytest.fail("a worker was interrupted")
    finally:
        ahead.close()


def test_tokenizer_without_begin_and_end_refused(tokenizer):
    bare = Tokenizer(tokenizer.backend)
    with pytest.raises(ConfigError, match="begin and an end token"):
        Mixture(bare)


def test_shipped_tokenizer_round_trips_and_splits_digits(tokenizer):
    text = "Été 2024: 12,5 kg → 東京 \n\t'x'"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    assert tokenizer.vocab_size == 2048
    assert not [
        piece for piece in pieces if len(piece.strip()) > 1 and any(map(str.isdigit, piece))
    ]

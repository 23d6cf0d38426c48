"""Batches of lists of tokens, for the tests of packing and batches."""

import itertools

import numpy as np

from dms_jax.data import Documents, batches


def take(iterator, count):
    return list(itertools.islice(iterator, count))


def draw(documents, count=None, **options):
    options = dict(batch_size=1, length=4, seed=None, repeat=False) | options
    return take(batches(Documents(documents), **options), count)


def tokens_of(drawn):
    return np.concatenate([batch["tokens"] for batch in drawn]).tolist()

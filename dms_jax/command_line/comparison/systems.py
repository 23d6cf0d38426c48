"""Who is compared at a compression ratio.

A ratio says how many times fewer tokens than dense a row keeps, on average over what is asked of
it: of sequences of n_1 ... n_S tokens it keeps b each, with mean(min(n_s, b)) = mean(n_s) / ratio.
Systems that read or fetch less than they keep take that for what a query head reads; a learned one
aims at the ratio, and what it reaches is measured.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import dms_jax
from dms_jax.policies import POLICIES, FixedPooling, Policy
from dms_jax.policies.budget import BudgetedPolicy, EvictionByToken
from dms_jax.policies.periodic_eviction import Scorer

# A system that cuts rows every so often does so once every so many tokens here.
INTERVAL = 16
FEW_BITS = {"float8": "float8_e4m3", "int4": "int4"}  # by label, what the cache is stored in
WHOLE = dict(compression_ratio=1)  # budgets come with the sequences: one program for all of them


def limit_for(lengths: np.ndarray, peak: float) -> int:
    """The limit whose mean of min(length, limit) comes closest to `peak`.

    # In: [10, 20, 30], 15   Out: 17, for (10 + 17 + 17) / 3 = 14.7; 18 gives 15.3, no closer
    """
    limits = np.arange(1, int(lengths.max()) + 1)
    means = np.minimum(lengths[:, None], limits).mean(0)
    return int(limits[np.abs(means - peak).argmin()])


@dataclasses.dataclass(frozen=True)
class Share:
    """What a ratio leaves of some sequences.

    Attributes:
      lengths: tokens of each.
      limit: tokens that a row keeps.
    """

    lengths: np.ndarray
    limit: int

    @classmethod
    def of(cls, lengths: np.ndarray, ratio: float) -> "Share":
        """The share of sequences of these lengths."""
        return cls(lengths, limit_for(lengths, lengths.mean() / ratio))


@dataclasses.dataclass(frozen=True)
class System:
    """One row of the comparison.

    Attributes:
      label: for the table.
      ratio: nominal; 1 for what does not compress.
      model: what runs; of a learned system its own.
      policy: how its cache is kept, given a share of the tokens.
      kv_dtype: of the cache; None for the model's.
    """

    label: str
    ratio: float
    model: dms_jax.LanguageModel
    policy: Callable[[Share], Policy]
    kv_dtype: str | None = None


def learned(label: str, ratio: float, model: dms_jax.LanguageModel) -> System:
    """A model with the policy that it was trained for."""
    return System(label, ratio, model, lambda share: model.policy)


def training_free(model: dms_jax.LanguageModel, ratio: float) -> Iterator[System]:
    """Every system that needs no training."""
    makers = _makers(ratio)
    if ratio != int(ratio):
        del makers["FixedPooling"]
    for name, make in makers.items():
        yield System(name, ratio, model, make)
    for name, kind in POLICIES.items():
        if issubclass(kind, BudgetedPolicy) and not kind().retrofit.needed:
            yield System(name, ratio, model, _budgeted(kind))
    snapkv = _budgeted(dms_jax.SnapKV)
    yield System("AdaKV", ratio, model, lambda share: dms_jax.AdaKV(scorer=snapkv(share)))
    yield System("PyramidKV", ratio, model, lambda share: dms_jax.PyramidKV(scorer=snapkv(share)))


def _makers(ratio: float) -> dict[str, Callable[[Share], Policy]]:
    """Those whose option is not a budget that may come with the sequences."""

    def random(share: Share) -> Policy:
        recent = share.limit // 2
        gone, old = (np.maximum(share.lengths - size, 0).sum() for size in (share.limit, recent))
        return dms_jax.RandomEviction(window=recent, rate=float(gone / old))

    return {
        "RandomEviction": random,
        "KCache": lambda share: dms_jax.KCache(top=share.limit),
        # As it is: nothing was trained for it.
        "FixedPooling": lambda share: FixedPooling(every=int(ratio)),
    }


def _budgeted(kind: type[BudgetedPolicy]) -> Callable[[Share], Policy]:
    """A policy that keeps a number of tokens."""

    def make(share: Share) -> Policy:
        options: dict[str, Any] = dict(WHOLE)
        if issubclass(kind, Scorer):
            options["interval"] = INTERVAL
        if issubclass(kind, EvictionByToken):  # a prompt that is cut at its end would be the peak
            options["prefill"] = "evict_past_budget"
        if kind is dms_jax.SnapKV:
            half = max(share.limit // 2, 1)
            options["window"] = min(32, 1 << (half.bit_length() - 1))  # few sizes
        return kind(**options)

    return make


def combined(base: System) -> Iterator[System]:
    """What reads less of, or stores in fewer bits, what a learned system kept."""
    over = base.model.policy

    def quest(share: Share) -> Policy:
        return dms_jax.Quest(budget=max(share.limit // 2, 16), over=over)

    def kcache(share: Share) -> Policy:
        return dms_jax.KCache(top=max(share.limit // 2, 16), over=over)

    yield dataclasses.replace(base, label=f"{base.label} + Quest", policy=quest)
    yield dataclasses.replace(base, label=f"{base.label} + KCache", policy=kcache)
    for label, kv_dtype in FEW_BITS.items():
        yield dataclasses.replace(base, label=f"{base.label} + {label}", kv_dtype=kv_dtype)

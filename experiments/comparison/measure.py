"""One system at a time over the same text, and the same problems."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import dms_jax
from comparison.systems import System
from dms_jax.data.tasks import Task
from dms_jax.evaluation import evaluate


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a system was seen to do.

    Tokens and reads are averages over layers and the KV heads of the original, so that half as many
    heads count as half as many tokens.

    Attributes:
      label, ratio, policy, kv_dtype: what ran, and its nominal ratio.
      nats, error: negative log-likelihood a token, and its standard error over sequences.
      increase, increase_error: against dense on the same tokens.
      live, peak: live tokens of a sequence at its end, and at most.
      reads: cache entries that the steps of a sequence read.
      bytes, peak_bytes: of pages and policy state of a sequence, at its end and at most; on the
        device, with `host_bytes` of values in host memory besides.
      accuracy, accuracy_error: of the task's answers, if there is one.
      seconds: of wall time, compilation included.
      failed: why it could not run, if it could not.
    """

    label: str
    ratio: float
    policy: dict[str, Any]
    kv_dtype: str | None
    nats: float = 0.0
    error: float = 0.0
    increase: float = 0.0
    increase_error: float = 0.0
    live: float = 0.0
    peak: float = 0.0
    reads: float = 0.0
    bytes: float = 0.0
    peak_bytes: float = 0.0
    host_bytes: float = 0.0
    accuracy: float | None = None
    accuracy_error: float | None = None
    seconds: float = 0.0
    failed: str | None = None

    @property
    def name(self) -> str:
        """Label and ratio."""
        return self.label if self.ratio == 1 else f"{self.label} at {self.ratio:g}"

    @property
    def summary(self) -> str:
        """A line for the log."""
        if self.failed is not None:
            return f"{self.name}: {self.failed}"
        return (
            f"{self.name}: {self.nats:.4f} nats ({self.increase:+.4f}), peak {self.peak:.0f}, "
            f"reads {self.reads:,.0f}, {self.seconds:.0f} s"
        )


class Bench:
    """The text and the problems that every system gets.

    Args:
      sequences: [B, T] tokens.
      page_size: of the cache.
      tasks: whose problems are answered; None for none.
      problems: how many.
      max_new_tokens: longest answer.
    """

    def __init__(
        self,
        sequences: np.ndarray,
        *,
        page_size: int,
        tasks: Sequence[Task] | None,
        problems: int,
        max_new_tokens: int,
    ):
        self.sequences, self.page_size = sequences, page_size
        self.tasks, self.problems, self.max_new_tokens = tasks, problems, max_new_tokens
        self.rows: list[Measured] = []
        self._dense = np.zeros(len(sequences))
        self._kv_heads = 1

    @property
    def tokens(self) -> int:
        """Tokens that are predicted."""
        return self.sequences.shape[0] * (self.sequences.shape[1] - 1)

    def run(self, system: System) -> Measured:
        """Measures a system; the first one is what the others are compared with."""
        start = time.perf_counter()
        row = Measured(system.label, system.ratio, system.policy.to_dict(), system.kv_dtype)
        try:
            fields = self._score(system) | self._solve(system)
        except dms_jax.ConfigError as error:
            fields = {"failed": str(error)}
        row = dataclasses.replace(row, **fields, seconds=time.perf_counter() - start)
        self.rows.append(row)
        return row

    def _score(self, system: System) -> dict[str, Any]:
        scores = dms_jax.score(
            system.model,
            self.sequences.tolist(),
            policy=system.policy,
            page_size=self.page_size,
            kv_dtype=system.kv_dtype,
        )
        losses = np.array([-score.logprobs.mean() for score in scores])
        kv_heads = system.model.config.num_kv_heads
        if not self.rows:
            self._dense, self._kv_heads = losses, kv_heads
        heads = kv_heads / self._kv_heads

        def mean(name: str) -> float:
            return float(np.mean([getattr(score.usage, name) for score in scores]))

        return dict(
            nats=float(losses.mean()),
            error=standard_error(losses),
            increase=float((losses - self._dense).mean()),
            increase_error=standard_error(losses - self._dense),
            live=heads * mean("live_tokens"),
            peak=heads * mean("peak_tokens"),
            reads=heads * mean("kv_reads"),
            bytes=mean("cache_bytes"),
            peak_bytes=mean("peak_cache_bytes"),
            host_bytes=mean("host_bytes"),
        )

    def _solve(self, system: System) -> dict[str, Any]:
        if self.tasks is None:
            return {}
        result = evaluate(
            system.model,
            self.tasks,
            policy=system.policy,
            problems=self.problems,
            sampling=dms_jax.Sampling(temperature=0, max_new_tokens=self.max_new_tokens),
            page_size=self.page_size,
        )
        return dict(accuracy=result.accuracy.value, accuracy_error=result.accuracy.error)


def standard_error(values: np.ndarray) -> float:
    """Standard error of the mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0

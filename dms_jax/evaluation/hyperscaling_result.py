"""The result of `hyperscale`: points, their frontiers on two budgets, and gains between them.

A point is one L-W-CR configuration of a system (DMS paper, section 5): answers of at most L tokens,
W chains of each problem, and the compression ratio, drawn at a temperature. Its two budgets are the
KV reads and the peak tokens of a problem, both summed over its W chains, which run side by side.

Frontiers are compared only if both systems have a greedy point (temperature 0, one chain) at every
length: otherwise votes of sampled chains may gain only what sampling lost. The comparison uses a
system's best result at a budget, greedy or sampled.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Float
from rich.table import Table

from dms_jax.checks import check, require
from dms_jax.evaluation.bootstrap import Trial, measured_average_gain
from dms_jax.evaluation.pareto import frontier
from dms_jax.evaluation.result import markdown_table, percent, terminal_table
from dms_jax.evaluation.statistics import METHODS, Measured, Method, mean_over_seeds

Axis = Literal["reads", "peak"]
AXES: tuple[Axis, ...] = get_args(Axis)
PerProblem = Float[np.ndarray, "seeds problems"]


def point_label(
    length: int, chains: int, compression_ratio: float | int | None, temperature: float | int
) -> str:
    """L-W-CR@T.

    # In: 512, 4, 8.0, 0.7  Out: "512-4-8@0.7"
    """
    ratio = "" if compression_ratio is None else f"-{compression_ratio:g}"
    return f"{length}-{chains}{ratio}@{temperature:g}"


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """A system with answers of at most `length` tokens in `chains` chains.

    Attributes:
      system: name of the system.
      compression_ratio: its nominal ratio; None if it has none.
      length, chains: L and W.
      temperature: sampling temperature; 0 takes the most likely tokens.
      policy: the cache policy, as JSON data.
      scores: score of each problem by method, see `statistics`; if more chains were drawn, the
        mean over disjoint groups of `chains` chains.
      reads, peak: tokens of all chains of a problem, the mean over the same groups.
      new_tokens: mean number of tokens of a chain.
      ended: share of the chains that ended by themselves.
    """

    system: str
    compression_ratio: float | int | None
    length: int
    chains: int
    temperature: float | int
    policy: Mapping[str, Any]
    scores: Mapping[Method, PerProblem]
    reads: PerProblem
    peak: PerProblem
    new_tokens: float
    ended: float

    @property
    def label(self) -> str:
        """L-W-CR as in the paper, and the temperature: 512-4-8@0.7."""
        return point_label(self.length, self.chains, self.compression_ratio, self.temperature)

    @property
    def greedy(self) -> bool:
        """Whether the point is a single greedy chain."""
        return self.temperature == 0 and self.chains == 1

    def accuracy(self, method: Method = "vote") -> Measured:
        """Mean score with its standard error over problems and seeds."""
        return mean_over_seeds(self.scores[method])

    def budget(self, axis: Axis) -> float:
        """Mean tokens of a problem."""
        return float(getattr(self, axis).mean())

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON data."""
        names = ("system", "compression_ratio", "length", "chains", "temperature")
        data = {name: getattr(self, name) for name in (*names, "policy", "new_tokens", "ended")}
        data |= {axis: self.budget(axis) for axis in AXES}
        data["scores"] = {method: self.accuracy(method).to_list() for method in METHODS}
        return data


@dataclasses.dataclass(frozen=True)
class Hyperscaling:
    """All points of all systems on the same problems.

    Attributes:
      settings: task, sampling, seeds and all other settings, as JSON data.
      points: the points, system by system.
    """

    settings: Mapping[str, Any]
    points: tuple[Point, ...]

    @functools.cached_property
    def _known(self) -> dict[tuple[str, str, Axis, Method, float], Measured | None]:
        """Cache of average gains, because a bootstrap is slow."""
        return {}

    @property
    def systems(self) -> tuple[str, ...]:
        """Names of the systems, in the given order."""
        return tuple(dict.fromkeys(point.system for point in self.points))

    def of(self, system: str) -> tuple[Point, ...]:
        """The points of a system.

        Raises:
          ConfigError: the system is unknown.
        """
        require(
            system in self.systems,
            f"There is no system {system!r}; there are {', '.join(self.systems) or 'none'}.",
        )
        return tuple(point for point in self.points if point.system == system)

    def has_greedy(self, system: str) -> bool:
        """Whether one greedy chain of every length is among the points of a system."""
        own = self.of(system)
        return {p.length for p in own} == {p.length for p in own if p.greedy}

    def frontier(
        self, system: str, axis: Axis = "reads", method: Method = "vote"
    ) -> tuple[Point, ...]:
        """The points of a system with no better point of it at the same or a smaller budget."""
        _check(axis, method)
        points = {
            (point.budget(axis), point.accuracy(method).value): point
            for point in reversed(self.of(system))
        }
        return tuple(points[each] for each in frontier(list(points)))

    def average_gain(
        self,
        left: str,
        right: str,
        axis: Axis = "reads",
        method: Method = "vote",
        *,
        at_least: float = 0.0,
    ) -> Measured | None:
        """Mean gap between the frontiers of two systems over the budgets that both cover.

        Smaller budgets than `at_least` are left out. The error is that of a paired bootstrap over
        problems and seeds (`bootstrap`). None if the systems share no budgets, or one of them has
        no greedy point.
        """
        _check(axis, method)
        if not (self.has_greedy(left) and self.has_greedy(right)):
            return None
        key = (left, right, axis, method, at_least)
        if key not in self._known:
            trials = [
                [Trial(getattr(point, axis), point.scores[method]) for point in self.of(system)]
                for system in (left, right)
            ]
            self._known[key] = measured_average_gain(*trials, at_least=at_least)
        return self._known[key]

    # -- tables -----------------------------------------------------------------------------------

    def table(self, method: Method = "vote") -> str:
        """A Markdown table of all points; see `rows`."""
        return markdown_table(self.rows(method))

    def gains_table(self, method: Method = "vote") -> str:
        """A Markdown table of the average gains of every system over every earlier one."""
        return markdown_table(self.gain_rows(method))

    def rows(self, method: Method = "vote", methods: Sequence[Method] = METHODS) -> list[list[str]]:
        """The cells of the table of points, headings first.

        Scores in percent with one standard error. A star after reads or peak marks points on the
        frontier of their system by `method`. `methods` selects the columns of scores.
        """
        stars = {
            axis: {each for system in self.systems for each in self.frontier(system, axis, method)}
            for axis in AXES
        }
        heads = ["system", "L-W-CR@T", *methods, *AXES, "new tokens", "ended"]
        rows = [heads]
        for point in self.points:
            cells = [point.system, point.label]
            cells += [percent(point.accuracy(each).to_list()) for each in methods]
            cells += [
                f"{point.budget(axis):,.0f}{' *' if point in stars[axis] else ''}" for axis in AXES
            ]
            cells += [f"{point.new_tokens:,.0f}", f"{point.ended:.0%}"]
            rows.append(cells)
        return rows

    def gain_rows(self, method: Method = "vote") -> list[list[str]]:
        """The cells of the table of gains, headings first."""
        rows = [["system", "over", *(f"gain by {axis}" for axis in AXES)]]
        for left, right in self._pairs():
            gains = [self.average_gain(left, right, axis, method) for axis in AXES]
            known = self.has_greedy(left) and self.has_greedy(right)
            none = "no shared budget" if known else "no greedy point recorded"
            cells = [none if g is None else percent(g.to_list()) for g in gains]
            rows.append([left, right, *cells])
        return rows

    def __rich__(self) -> Table:
        return self.rich_table()

    def rich_table(self, method: Method = "vote") -> Table:
        """The points by one method, for a terminal of 80 columns; see `rows`."""
        caption = f"percent ± one standard error; * on the system's frontier by {method}"
        return terminal_table(self.rows(method, [method]), caption=caption)

    def to_dict(self, method: Method = "vote") -> dict[str, Any]:
        """Returns points, frontiers and gains as JSON data.

        Args:
          method: the method of scoring for frontiers and gains.
        """
        frontiers = {
            axis: {
                system: [point.label for point in self.frontier(system, axis, method)]
                for system in self.systems
            }
            for axis in AXES
        }
        return {
            **self.settings,
            "points": [point.to_dict() for point in self.points],
            "method": method,
            "frontiers": frontiers,
            "gains": [
                self._gain(left, right, axis, method)
                for left, right in self._pairs()
                for axis in AXES
            ],
        }

    def _gain(self, left: str, right: str, axis: Axis, method: Method) -> dict[str, Any]:
        gain = self.average_gain(left, right, axis, method)
        return {
            "system": left,
            "over": right,
            "budget": axis,
            "average_gain": None if gain is None else gain.to_list(),
        }

    def _pairs(self) -> Sequence[tuple[str, str]]:
        names = self.systems
        return [(left, right) for i, left in enumerate(names) for right in names[:i]]


def _check(axis: Axis, method: Method) -> None:
    check("axis", axis, Axis)
    check("method", method, Method)

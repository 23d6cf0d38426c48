"""The result of an evaluation: scores, votes, and the use of the cache.

The two budgets are those of the DMS paper: **KV reads**, the entries attended to, summed over the
decode steps, and **peak tokens**, the most live entries after any token. Both are averaged over
layers and KV heads and summed over the W chains of a problem, which run in parallel. A prompt
prefilled in one pass briefly holds more entries than the peak: **held** is the most entries held at
once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

from dms_jax.evaluation.statistics import Measured, mean_over_problems, vote_scores

Chains = Float[np.ndarray, "problems chains"]


@dataclasses.dataclass(frozen=True)
class Result:
    """A system's answers to the problems of one or several tasks, W chains each.

    Attributes:
      settings: tasks, policy, sampling and seed, as JSON data.
      tasks: names of the tasks; problem i belongs to task `task_of[i]`.
      scores: score of each chain, 0 to 1.
      answers: the answer of each chain; None if it gave none.
      answer_scores: score of that answer alone. A completion may name several answers (RULER's
        score finds the right one anywhere), but votes for only one.
      prompt_tokens: tokens of each prompt.
      new_tokens: generated tokens, end tokens included.
      reads, peak, held, live: tokens of each chain, averaged over layers and KV heads: read by all
        its decode steps; the peak of live tokens; the most held at once (`Usage.peak_held_tokens`);
        live at its end.
      cache_bytes: peak bytes of each chain's pages and policy state.
      ended: whether a chain ended with an end token, not at its maximum length.
      completions: the generated texts.
      seconds: wall time, compilation included.
    """

    settings: Mapping[str, Any]
    tasks: tuple[str, ...]
    task_of: Int[np.ndarray, " problems"]
    scores: Chains
    answers: tuple[tuple[str | None, ...], ...]
    answer_scores: Chains
    prompt_tokens: Int[np.ndarray, " problems"]
    new_tokens: Int[np.ndarray, "problems chains"]
    reads: Chains
    peak: Chains
    held: Chains
    live: Chains
    cache_bytes: Int[np.ndarray, "problems chains"]
    ended: Bool[np.ndarray, "problems chains"]
    completions: tuple[tuple[str, ...], ...]
    seconds: float

    @property
    def accuracy(self) -> Measured:
        """Mean score of one chain."""
        return mean_over_problems(self.scores)

    @property
    def voted(self) -> Measured:
        """Mean score of the majority vote of the chains."""
        return mean_over_problems(vote_scores(self.answers, self.answer_scores)[:, None])

    @property
    def best(self) -> Measured:
        """Mean over problems of the best chain's score: pass@all."""
        return mean_over_problems(self.scores.max(1, keepdims=True))

    @property
    def reads_per_problem(self) -> float:
        """KV reads of all chains of a problem."""
        return float(self.reads.sum(1).mean())

    @property
    def peak_per_problem(self) -> float:
        """Peak tokens of all chains of a problem."""
        return float(self.peak.sum(1).mean())

    @property
    def compression_ratio(self) -> float:
        """Tokens seen / live tokens at the ends of chains, each summed over the chains."""
        seen = self.prompt_tokens[:, None] + self.new_tokens - 1  # the newest token is not cached
        return float(seen.sum() / self.live.sum())

    def of_task(self, name: str) -> "Result":
        """The result restricted to one task."""
        own = np.flatnonzero(self.task_of == self.tasks.index(name))
        changes: dict[str, Any] = {
            field.name: getattr(self, field.name)[own]
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        changes["task_of"] = np.zeros(len(own), np.int64)
        for field in ("answers", "completions"):
            values = getattr(self, field)
            changes[field] = tuple(values[i] for i in own)
        return dataclasses.replace(self, tasks=(name,), **changes)

    def to_dict(self, *, problems: bool = False, samples: int = 0) -> dict[str, Any]:
        """Returns the figures as JSON data.

        Args:
          problems: include the mean score, reads and peak of each problem, for paired comparisons.
          samples: number of problems, from the first, whose first completion is included.
        """
        chains = self.scores.shape[1]
        data: dict[str, Any] = {
            **self.settings,
            "problems": len(self.scores),
            "chains": chains,
            "accuracy": self.accuracy.to_list(),
            "voted": self.voted.to_list(),
            "best": self.best.to_list(),
            "reads": self.reads_per_problem,
            "peak": self.peak_per_problem,
            "held": float(self.held.sum(1).mean()),
            "live": float(self.live.sum(1).mean()),
            "compression_ratio": self.compression_ratio,
            "cache_bytes": float(self.cache_bytes.sum(1).mean()),
            "prompt_tokens": float(self.prompt_tokens.mean()),
            "new_tokens": float(self.new_tokens.mean()),
            "ended": float(self.ended.mean()),
            "seconds": self.seconds,
        }
        if len(self.tasks) > 1:
            parts = {name: self.of_task(name) for name in self.tasks}
            data["tasks"] = {
                name: {
                    "accuracy": part.accuracy.to_list(),
                    "voted": part.voted.to_list(),
                    "best": part.best.to_list(),
                    "ended": float(part.ended.mean()),
                    "new_tokens": float(part.new_tokens.mean()),
                }
                for name, part in parts.items()
            }
        if problems:
            data["per_problem"] = {
                "scores": np.round(self.scores.mean(1), 6).tolist(),
                "reads": np.round(self.reads.sum(1), 1).tolist(),
                "peak": np.round(self.peak.sum(1), 2).tolist(),
                "tokens": np.round(self.prompt_tokens + self.new_tokens.mean(1), 2).tolist(),
            }
        if samples:
            data["samples"] = [
                {"completion": texts[0], "answer": answers[0], "score": float(score)}
                for texts, answers, score in zip(
                    self.completions[:samples], self.answers, self.scores[:, 0], strict=False
                )
            ]
        return data


def summary_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of results; see `summary_rows`."""
    return markdown_table(summary_rows(rows), numbers=True)


def summary_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The cells of a table of results (`Result.to_dict`), each with a "label"; headings first.

    Scores in percent with one standard error clustered by problem; tokens per problem. Votes are
    left out if every problem has one answer.
    """
    voted = any(row["chains"] > 1 for row in rows)
    votes = ["vote", "pass@all"] if voted else []
    table = [["", "one chain", *votes, "peak", "reads", "ratio", "new", "ended"]]
    for row in rows:
        cells = [
            str(row["label"]),
            percent(row["accuracy"]),
            *([percent(row["voted"]), percent(row["best"])] if voted else []),
            f"{row['peak']:,.0f}",
            f"{row['reads']:,.0f}",
            f"{row['compression_ratio']:.2f}",
            f"{row['new_tokens']:,.0f}",
            f"{row['ended']:.0%}",
        ]
        table.append(cells)
    return table


def markdown_table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A Markdown table, headings first; with `numbers` all columns but the first align right."""
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    heads, *rest = ["| " + " | ".join(row) + " |" for row in cells]
    aligned = "|---:" if numbers else "|---"
    return "\n".join([heads, "|---" + aligned * (len(rows[0]) - 1) + "|", *rest])


def terminal_table(
    rows: Sequence[Sequence[str]], *, title: str = "", caption: str = "", numbers: bool = False
) -> Table:
    """A table for a terminal, headings first; with `numbers` as in `markdown_table`.

    Errors are written shorter.  # In: "50.0 ± 2.1", "50.0 ± unknown"  Out: "50.0 ±2.1", "50.0 ±?"
    """
    heads, *rest = rows
    padding = (0, 1, 0, 0)
    table = Table(title=title or None, caption=caption or None, box=SIMPLE, padding=padding)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if numbers and index else "left", no_wrap=True)
    for row in rest:
        table.add_row(*(escape(cell.replace("± unknown", "±?").replace("± ", "±")) for cell in row))
    return table


def percent(figure: Sequence[float | None]) -> str:
    """A figure and its error in percent.

    # In: [0.5, 0.021]  Out: "50.0 ± 2.1"       [0.5, None]  "50.0 ± unknown"
    """
    value, error = figure
    assert value is not None
    return f"{100 * value:.1f} ± {'unknown' if error is None else f'{100 * error:.1f}'}"

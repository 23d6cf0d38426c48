"""Compare several policies on the same problems or text: parse them, and print the table."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import dms_jax
from dms_jax import assets
from dms_jax.command_line.options import on_checkpoint, read_options
from dms_jax.devices import out_of_memory
from dms_jax.evaluation import (
    Measured,
    Perplexity,
    Result,
    mean_over_problems,
    standard_error,
)
from dms_jax.policies import Policy

Evaluated = Result | Perplexity

# A policy that fails with one of these is reported, and the others still run.
FAILURES = (dms_jax.DmsJaxError, jax.errors.JaxRuntimeError, NotImplementedError)
NOTE = """\
change: against the first row, with the standard error of the paired
differences. peak, reads: tokens, averages over layers and heads. kB: pages and
policy state of a sequence, at most."""


def gave_up(error: BaseException) -> bool:
    """Whether the device itself failed; running out of memory does not count."""
    return isinstance(error, jax.errors.JaxRuntimeError) and not out_of_memory(error)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One row of a comparison.

    Attributes:
      name: name of its row.
      policy: its policy; None for the one that the checkpoint declares.
      options: the given options of the policy.
      model, adapter: as in `Config`.
      kv_dtype: type of its cache; None for the model's type.
    """

    name: str
    policy: Policy | None
    options: Mapping[str, Any]
    model: str
    adapter: str | None = None
    kv_dtype: str | None = None

    def policy_for(self, model: dms_jax.LanguageModel) -> Policy | None:
        """Returns the policy on a model (`on_checkpoint`)."""
        return on_checkpoint(self.policy, self.options, model.policy)


def read_candidates(
    texts: Sequence[str], *, model: str, adapter: str | None
) -> tuple[Candidate, ...]:
    """Reads --policies: POLICY,option=value,... each.

    Args:
      texts: the values of --policies.
      model, adapter: defaults of the candidates.

    Raises:
      ConfigError: a policy or an option is unknown, or two rows have the same name.
    """
    found = []
    for text in texts:
        policy, *given = text.split(",")
        fields = read_options(given, "--policies")
        own = str(fields.pop("model", model))
        # A shipped adapter as the model of a row has no other adapter.
        usual = None if own != model and own in assets.BASES else adapter
        places: dict[str, Any] = {
            "model": own,
            "adapter": fields.pop("adapter", usual),
            "kv_dtype": fields.pop("kv_dtype", None),
        }
        options = [each for each in given if each.partition("=")[0] not in ("name", *places)]
        name = ",".join(filter(None, (policy, *options, places["kv_dtype"])))
        name = str(fields.pop("name", name))
        made = dms_jax.policies.from_dict({**fields, "name": policy})
        found.append(Candidate(name, made, fields, **places))
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1 or "/" in name or not name.strip("."):
            raise dms_jax.ConfigError(
                f"--policies: {name!r} cannot be the name of a row, as two have it or no file can; "
                "give name=..."
            )
    return tuple(found)


def observed(result: Evaluated) -> tuple[Measured, Float[np.ndarray, " observations"]]:
    """Returns a result's mean with its error, and the observations that it averages.

    In percent per problem, or in nats per token for each window of a text.
    """
    if isinstance(result, Perplexity):
        return result.loss, result.window_nats
    scores = 100 * result.scores.mean(1)
    return mean_over_problems(scores[:, None]), scores


def change(result: Evaluated, first: Evaluated) -> Measured:
    """Returns the paired difference of a result from the first one, with its error."""
    (value, own), (base, others) = observed(result), observed(first)
    return Measured(value.value - base.value, standard_error(own - others))


def table(results: Mapping[str, Evaluated], title: str) -> Table:
    """Returns a table with a row for each result, compared with the first."""
    first = next(iter(results.values()))
    shown = Table(title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("policy", overflow="fold")  # wraps between options first
    rows = {name: _cells(result, first) for name, result in results.items()}
    for name in rows[next(iter(rows))]:
        shown.add_column(name, justify="right", no_wrap=True)
    for name, cells in rows.items():
        shown.add_row(re.sub(r",(?=\S)", ", ", name), *cells.values())
    return shown


def _cells(result: Evaluated, first: Evaluated) -> dict[str, str]:
    text = isinstance(result, Perplexity)
    digits = 4 if text else 1
    difference = "" if result is first else _written(change(result, first), f"+.{digits}f")
    what = "nats/token" if text else "right, %"
    cells = {what: _written(observed(result)[0], f".{digits}f"), "change": difference}
    if isinstance(result, Result) and result.scores.shape[1] > 1:
        cells["vote, %"] = f"{100 * result.voted.value:.1f}"
    if isinstance(result, Perplexity):
        peak, reads, size = result.peak, result.reads, result.cache_bytes
        cells |= {
            "peak": f"{peak:,.0f}",
            "reads/token": f"{reads:,.1f}",
            "kB": f"{size / 1e3:,.0f}",
        }
    else:
        cells |= {
            "peak": f"{result.peak_per_problem:,.0f}",
            "reads": f"{result.reads_per_problem:,.0f}",
            "ratio": f"{result.compression_ratio:.2f}",
            "kB": f"{result.cache_bytes.mean() / 1e3:,.0f}",
        }
    return cells


def _written(figure: Measured, form: str) -> str:
    known = np.isfinite(figure.error)
    return f"{figure.value:{form}} ±{format(figure.error, form.lstrip('+')) if known else '?'}"


def show(console: Console, results: Mapping[str, Evaluated], task: str) -> None:
    """Prints the table of all problems, and one for each of several tasks."""
    console.print(table(results, task))
    parts = {name: each for name, each in results.items() if isinstance(each, Result)}
    names = next(iter(parts.values())).tasks if parts else ()
    for name in names if len(names) > 1 else ():
        console.print(table({label: each.of_task(name) for label, each in parts.items()}, name))
    console.print(NOTE, highlight=False)

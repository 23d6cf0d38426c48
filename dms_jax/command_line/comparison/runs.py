"""Runs on disk, and those that share a table: what they must have in common, which rows stay."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import dms_jax
from dms_jax.command_line.comparison.measure import Measured
from dms_jax.command_line.reports import make_folder, provenance, write_json

# What was decoded, and from what pages; what was asked, and how the answers were drawn.
TEXT = ("model", "text", "sequences", "length", "page_size")
QUESTIONS = ("problems", "temperature", "max_new_tokens", "seed")
SAME = 1e-3  # nats a token
PLACES = ("command", "date", "device", "versions", "config")


def read_report(path: pathlib.Path) -> dict[str, Any]:
    """A quality.json with its rows.

    Raises:
      ConfigError: there is none, or something else.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        rows = [Measured.from_dict(row) for row in report["rows"]]
        if not rows or rows[0].label != "dense" or rows[0].failed is not None:
            raise ValueError("its first row is not that of dense")
        return {place: report[place] for place in (*PLACES, "tokens")} | {
            "rows": rows,
            "runs": report.get("runs", [{place: report[place] for place in PLACES}]),
        }
    except OSError as error:
        raise dms_jax.ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise dms_jax.ConfigError(f"{path} does not hold a comparison: {error}") from error


def check_same(
    path: pathlib.Path, theirs: Mapping[str, str], ours: Mapping[str, str], tokens: Iterable[int]
) -> None:
    """Refuses rows of another run that was asked something else.

    Args:
      path: of their report, for the message.
      theirs, ours: settings as they stand in reports. What one of them does not name is not
        compared: it had no such option.
      tokens: that were predicted, theirs and ours.

    Raises:
      ConfigError: model, text, pages or problems differ.
    """
    asked = all(each.get("tasks", "()") != "()" for each in (theirs, ours))
    for name in TEXT + (QUESTIONS if asked else ()):
        one, other = theirs.get(name), ours.get(name)
        if one is not None and other is not None and one != other:
            option = f"--{name.replace('_', '-')}"
            raise dms_jax.ConfigError(
                f"{path} was measured with {option} {one}, not {other}: its rows cannot stand "
                "in the same table."
            )
    one, other = tokens
    if one != other:
        raise dms_jax.ConfigError(f"{path} was measured on {one:,} tokens, not {other:,}.")


def check_dense(path: pathlib.Path, theirs: Measured, ours: Measured) -> None:
    """Refuses rows that were compared with another dense: settings name a model, not its weights.

    Raises:
      ConfigError: its likelihoods are not the same, beyond what a device rounds.
    """
    if abs(theirs.nats - ours.nats) > SAME:
        raise dms_jax.ConfigError(
            f"{path} has dense at {theirs.nats:.4f} nats a token, not {ours.nats:.4f}: another "
            "model or text, though they are called the same."
        )


def check_answers(path: pathlib.Path, rows: Iterable[Measured], dense: Iterable[str]) -> None:
    """Refuses answers to questions that dense was not asked, with which they are compared.

    Raises:
      ConfigError: there are some.
    """
    if more := sorted({name for row in rows for name in row.answers} - set(dense)):
        raise dms_jax.ConfigError(
            f"{path} has answers ({', '.join(more)}) that the dense row of this table lacks. Give "
            "the same --tasks, or join the run with the most tasks first."
        )


def put(rows: dict[str, Measured], row: Measured, *, last: bool) -> None:
    """Puts a row among others by its name.

    Args:
      rows: so far.
      row: one more. If it failed, it takes no place of one that did not.
      last: whether the later of two that did not fail stays.
    """
    before = rows.get(row.name)
    if before is None or before.failed is not None or (last and row.failed is None):
        rows[row.name] = row


def write(config: Any, name: str, content: dict[str, Any]) -> None:
    """Writes a JSON file with where and when it was measured.

    Raises:
      ConfigError: the folder cannot be written to.
    """
    make_folder("--out", config.out)
    try:
        write_json(config.out / name, provenance(config) | content)
    except OSError as error:
        raise dms_jax.ConfigError(f"--out {config.out}: {error.strerror}.") from error


def write_rows(config: Any, rows: dict[str, Measured], tokens: int, more: dict[str, Any]) -> None:
    """Writes quality.json."""
    content = [dataclasses.asdict(row) for row in rows.values()]
    write(config, "quality.json", {"tokens": tokens} | more | {"rows": content})


def join(config: Any) -> tuple[str, dict[str, Measured]]:
    """The model and the rows of several runs.

    Of rows that have the same name the first that did not fail.
    """
    paths = [folder / "quality.json" for folder in config.join]
    reports = [read_report(path) for path in paths]
    first = reports[0]
    rows: dict[str, Measured] = {}
    for path, report in zip(paths, reports, strict=True):
        tokens = (report["tokens"], first["tokens"])
        check_same(path, report["config"], first["config"], tokens)
        check_dense(path, report["rows"][0], first["rows"][0])
        for row in report["rows"]:
            put(rows, row, last=False)
        check_answers(path, report["rows"], next(iter(rows.values())).answers)
    runs = [run for report in reports for run in report["runs"]]
    places = {place: first[place] for place in PLACES if place != "command"}
    write_rows(config, rows, first["tokens"], places | {"runs": runs})
    return first["config"]["model"], rows

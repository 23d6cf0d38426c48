"""Descriptions of the cache policies, read from their classes, for --help and the documentation.

The prefill of a policy follows from `Policy.parallel`, `shrinks` and `kept_whole`. The meaning of
an option is its entry under "Attributes:" in the docstring of its class; "see `Scorer`" there
points to a base class.
"""

import dataclasses
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from dms_jax.policies import POLICIES, Policy
from dms_jax.policies.budget import LONGEST, BudgetedPolicy

_PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")
_ENTRY = re.compile(r"^ {2}((?:\w+, )*\w+): ", re.MULTILINE)
_ELSEWHERE = re.compile(r"^see `(\w+)`")


@dataclasses.dataclass(frozen=True)
class Option:
    """A field of a policy.

    Attributes:
      name: its name on a command line and in a config.
      kind: its type, in words.
      default: its default as written on a command line.
      meaning: a sentence or two.
    """

    name: str
    kind: str
    default: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Described:
    """A policy.

    Attributes:
      name: its name on a command line.

        does: a sentence.
      paper: its arXiv number; empty for controls.
      prompts: how it prefills a prompt, and which options change that.
      options: in the order of the dataclass.
    """

    name: str
    does: str
    paper: str
    prompts: str
    options: tuple[Option, ...]


def described() -> Iterator[Described]:
    """Yields a description of every policy."""
    for name, policy in POLICIES.items():
        module = sys.modules[policy.__module__].__doc__ or ""
        paper = _PAPER.search(policy.__doc__ or "") or _PAPER.search(module)
        options = tuple(
            Option(
                field.name,
                kind_of(field.type),
                _written(_default(field)),
                meaning(policy, field.name),
            )
            for field in dataclasses.fields(policy)
        )
        does = (policy.__doc__ or name).strip().splitlines()[0]
        yield Described(name, does, paper[1] if paper else "", _prompts_of(policy), options)


def prompts(policy: Policy) -> str:
    """Returns how a policy prefills a prompt.

    # In: TOVA()  Out: "full attention in one pass, then a cut"
    """
    if policy.parallel == "always":
        return "in one pass, exactly as token by token"
    if policy.parallel == "prompts":
        then = "a cut" if policy.shrinks else "nothing is cut"
        return f"full attention in one pass, then {then}"
    if policy.kept_whole(LONGEST):
        return "in one pass up to the budget, then token by token"
    return "token by token"


def _prompts_of(kind: type[Policy]) -> str:
    """Returns how a policy class prefills a prompt, and which options change that."""
    usual = prompts(kind())
    told = {usual: usual}
    for option, values in _other_options(kind):
        other = prompts(kind(**values))
        told.setdefault(other, f"with {option}: {other}")
    return "; ".join(told.values())


def _other_options(kind: type[Policy]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields options that can change the prefill: as text, and as arguments."""
    for field in dataclasses.fields(kind):
        if typing.get_origin(field.type) is typing.Literal:
            for value in typing.get_args(field.type):
                yield f"{field.name}={value}", {field.name: value}
    if issubclass(kind, BudgetedPolicy):
        yield "a compression_ratio", {"compression_ratio": 4}


def meaning(policy: type[Policy], option: str) -> str:
    """Returns an option's entry in the docstring of a policy or its base class."""
    for kind in policy.__mro__:
        entries = _entries(kind.__doc__ or "")
        if option in entries and not _ELSEWHERE.match(entries[option]):
            return entries[option]
    return ""


def kind_of(annotation: Any) -> str:
    """Returns the type of a field as text."""
    if typing.get_origin(annotation) is typing.Annotated:
        return kind_of(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) is typing.Literal:
        return " or ".join(map(str, typing.get_args(annotation)))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = dict.fromkeys(kind_of(part) for part in typing.get_args(annotation))
        return " or ".join(part for part in parts if not (part == "integer" and "number" in parts))
    names = {int: "integer", float: "number", bool: "true or false", type(None): "null"}
    return names.get(annotation, "a policy")


def text(names: Sequence[str] = ()) -> str:
    """Returns the explanations of these policies, or of all, for a terminal."""
    lines = []
    for policy in described():
        if names and policy.name not in names:
            continue
        lines.append(f"{policy.name}: {policy.does}")
        if policy.paper:
            lines.append(f"    paper: https://arxiv.org/abs/{policy.paper}")
        told = f"prompts: {policy.prompts}"
        lines += textwrap.wrap(told, 76, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for option in policy.options:
            head = f"    {option.name}={option.default}  ({option.kind})"
            body = textwrap.wrap(option.meaning, 72)
            lines += [head, *(f"        {line}" for line in body)]
    return "\n".join(lines)


def brief() -> str:
    """Returns a line or two for each policy, of 80 characters, for --help."""
    lines = [
        "Policies, with the options that --options takes (dms-jax policies explains them):",
        "",
    ]
    for policy in described():
        given = " ".join(f"{option.name}={option.default}" for option in policy.options)
        lines += textwrap.wrap(
            f"{policy.name}: {given or 'none'}", 80, initial_indent="  ", subsequent_indent="      "
        )
    return "\n".join(lines)


def markdown() -> str:
    """Returns the tables of the documentation."""
    parts = []
    for policy in described():
        paper = f" ([{policy.paper}](https://arxiv.org/abs/{policy.paper}))" if policy.paper else ""
        parts.append(f"### {policy.name}\n\n{policy.does}{paper}\n")
        parts.append(f"Prompts: {policy.prompts}.\n")
        if policy.options:
            rows = [
                f"| `{option.name}` | {option.kind} | `{option.default}` | {option.meaning} |"
                for option in policy.options
            ]
            parts.append(
                "| option | takes | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"
            )
    return "\n".join(parts)


def _default(field: Any) -> Any:
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


def _written(value: Any) -> str:
    """Returns a default as written in name=value."""
    if isinstance(value, Policy):
        return value.name
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _entries(docstring: str) -> dict[str, str]:
    """Returns the entries under "Attributes:" of a docstring, by name."""
    _, found, section = docstring.partition("Attributes:\n")
    if not found:
        return {}
    section = textwrap.indent(textwrap.dedent(section), "  ")
    parts = _ENTRY.split(section)[1:]
    entries = {}
    for names, said in zip(parts[::2], parts[1::2], strict=True):
        for name in names.split(", "):
            entries[name] = " ".join(said.split())
    return entries

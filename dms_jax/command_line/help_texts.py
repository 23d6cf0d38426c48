"""What --help says, in paragraphs that fill the lines of the terminal, whatever its width is.

tyro prints a description in lines as long as its paragraphs, keeps the line breaks that an
explanation of an option has in the source, and writes what an option takes as Python's types have
it. Here the description is wrapped, an explanation is one paragraph, and what need not be given is
not named: `--adapter STR`, not `--adapter {None}|STR`.
"""

import dataclasses
import pathlib
import shutil
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

LONGEST = 100  # characters of a line of prose, on terminals that are wider
ASKED = ("-h", "--help")


def show(description: str | None, given: Sequence[str]) -> None:
    """Prints a description where help is asked for; tyro's list of options follows it."""
    if description and not set(ASKED).isdisjoint(given):
        print(filled(description, _columns()), end="\n\n")


def show_points(program: str, points: Mapping[str, tuple[str, Any]]) -> None:
    """Prints starting points, each with what it is."""
    width = max(map(len, points)) + 2
    print(f"usage: {program} [STARTING-POINT] [OPTIONS]\n")
    for name, (what, _) in points.items():
        lines = textwrap.wrap(what, _columns() - width - 2, break_on_hyphens=False)
        print(f"  {name:{width}}" + f"\n{' ' * (width + 2)}".join(lines))
    print(
        f"\n{program} NAME --help shows the options of one. Without a name: {next(iter(points))}."
    )


def _columns() -> int:
    """Characters of a line of prose here."""
    return min(shutil.get_terminal_size().columns, LONGEST)


def filled(text: str, width: int) -> str:
    """A text with its paragraphs wrapped; indented lines, such as commands, stay as they are."""
    parts: list[str] = []
    for block in textwrap.dedent(text).strip().split("\n\n"):
        indented = any(line.startswith(" ") for line in block.splitlines())
        parts.append(block if indented else textwrap.fill(block, width, break_on_hyphens=False))
    return "\n\n".join(parts)


class _Explained:
    """tyro's own reading of a dataclass, with each explanation as one paragraph."""

    def __init__(self):
        self.inside = False

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        """The fields, or None for tyro to read them: what is no dataclass, and from inside here."""
        if self.inside or not dataclasses.is_dataclass(info.type):
            return None
        self.inside = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            self.inside = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, fields=tuple(map(_explained, spec.fields)))


def _explained(field: StructFieldSpec) -> StructFieldSpec:
    """A field whose explanation has no line breaks; that nothing is the default is said."""
    said = field.helptext() if callable(field.helptext) else field.helptext
    told: dict[str, Any] = {}
    if field.default in ((), "", None):
        told["help_behavior_hint"] = "(default: none)"
    takes, marks = _takes(field.type, field.default), getattr(field.type, "__metadata__", ())
    if tyro.conf.Positional in marks:
        takes = f"[{field.name.upper().removesuffix('S')} ...]"
    if takes is not None and tyro.conf.UseAppendAction in marks:  # the option is given again
        takes = takes.removesuffix(" ...")
    if takes is not None:
        told["metavar"] = takes
    kind: Any = Annotated[field.type, tyro.conf.arg(**told)] if told else field.type
    return dataclasses.replace(field, type=kind, helptext=said and " ".join(said.split()))


def _takes(kind: Any, default: Any) -> str | None:
    """What is written behind an option of a type; None for tyro to say it.

    # In: str | None, None   Out: "STR"         tuple[int, ...], (1, 4)     Out: "INT ..."
    # In: int | None, 12     Out: "INT|none"    int | Literal["all"], 1     Out: "INT|all"
    """
    if typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if kind in _WORDS:
        return _WORDS[kind]
    if kind is types.NoneType:
        return "None"
    inner = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Literal:
            return "|".join(map(str, inner))
        case types.UnionType | typing.Union:
            parts = [each for each in inner if default is not None or each is not types.NoneType]
            words = [_takes(each, default) for each in parts]
            return None if None in words else "|".join(map(str, words))
        case built if built is tuple and inner[1:] == (...,):
            word = _takes(inner[0], None)
            return None if word is None else f"{word} ..."
    return None


_WORDS = {str: "STR", int: "INT", float: "FLOAT", pathlib.Path: "PATH"}
REGISTRY = ConstructorRegistry()
REGISTRY.struct_rule(_Explained())

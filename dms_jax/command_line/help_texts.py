"""Formats `--help`: wraps paragraphs, and shows `--adapter STR` instead of `{None}|STR`.

tyro does not wrap descriptions, keeps the source's line breaks in explanations, and shows Python
types.
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

LONGEST = 100  # the most characters of a line of prose
ASKED = ("-h", "--help")


def show(description: str | None, given: Sequence[str]) -> None:
    """Prints the description if --help is among the arguments; tyro then prints the options."""
    if description and not set(ASKED).isdisjoint(given):
        print(filled(description, _columns()), end="\n\n")


def show_points(program: str, points: Mapping[str, tuple[str, Any]]) -> None:
    """Prints the presets with their descriptions."""
    width = max(map(len, points)) + 2
    print(f"usage: {program} [STARTING-POINT] [OPTIONS]\n")
    for name, (what, _) in points.items():
        lines = textwrap.wrap(what, _columns() - width - 2, break_on_hyphens=False)
        print(f"  {name:{width}}" + f"\n{' ' * (width + 2)}".join(lines))
    print(
        f"\n{program} NAME --help shows the options of one. Without a name: {next(iter(points))}."
    )


def _columns() -> int:
    """Returns the width of prose on this terminal."""
    return min(shutil.get_terminal_size().columns, LONGEST)


def filled(text: str, width: int) -> str:
    """Returns a text with wrapped paragraphs; indented blocks, such as commands, are kept."""
    parts: list[str] = []
    for block in textwrap.dedent(text).strip().split("\n\n"):
        indented = any(line.startswith(" ") for line in block.splitlines())
        parts.append(block if indented else textwrap.fill(block, width, break_on_hyphens=False))
    return "\n\n".join(parts)


class _Explained:
    """A tyro rule that reads a dataclass like tyro and rewrites each field's explanation."""

    def __init__(self):
        self.inside = False

    def __call__(self, info: StructTypeInfo) -> StructConstructorSpec | None:
        """Returns the fields; None falls back to tyro (not a dataclass, or a nested call)."""
        if self.inside or not dataclasses.is_dataclass(info.type):
            return None
        self.inside = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            self.inside = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, fields=tuple(map(_explain, spec.fields)))


def _explain(field: StructFieldSpec) -> StructFieldSpec:
    """Returns a field with its explanation in one paragraph, and "none" for an empty default."""
    text = field.helptext() if callable(field.helptext) else field.helptext
    options: dict[str, Any] = {}
    if field.default in ((), "", None):
        options["help_behavior_hint"] = "(default: none)"
    placeholder = _placeholder(field.type, field.default)
    marks = getattr(field.type, "__metadata__", ())
    if tyro.conf.Positional in marks:
        placeholder = f"[{field.name.upper().removesuffix('S')} ...]"
    if placeholder is not None and tyro.conf.UseAppendAction in marks:  # a repeatable option
        placeholder = placeholder.removesuffix(" ...")
    if placeholder is not None:
        options["metavar"] = placeholder
    kind: Any = Annotated[field.type, tyro.conf.arg(**options)] if options else field.type
    return dataclasses.replace(field, type=kind, helptext=text and " ".join(text.split()))


def _placeholder(kind: Any, default: Any) -> str | None:
    """Returns the placeholder after an option of a type; None falls back to tyro.

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
            words = [_placeholder(each, default) for each in parts]
            return None if None in words else "|".join(map(str, words))
        case built if built is tuple and inner[1:] == (...,):
            word = _placeholder(inner[0], None)
            return None if word is None else f"{word} ..."
    return None


_WORDS = {str: "STR", int: "INT", float: "FLOAT", pathlib.Path: "PATH"}
REGISTRY = ConstructorRegistry()
REGISTRY.struct_rule(_Explained())

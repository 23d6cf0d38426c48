"""What --help says, in paragraphs that fill the lines of the terminal, whatever its width is.

tyro prints a description in lines as long as its paragraphs, and keeps the line breaks that an
explanation of an option has in the source. Here the description is wrapped, and an explanation is
one paragraph.
"""

import dataclasses
import shutil
import textwrap
from collections.abc import Sequence
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
        columns = shutil.get_terminal_size().columns
        print(filled(description, min(columns, LONGEST)), end="\n\n")


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
    kind: Any = field.type
    if field.default in ((), ""):
        kind = Annotated[kind, tyro.conf.arg(help_behavior_hint="(default: none)")]
    return dataclasses.replace(field, type=kind, helptext=said and " ".join(said.split()))


REGISTRY = ConstructorRegistry()
REGISTRY.struct_rule(_Explained())

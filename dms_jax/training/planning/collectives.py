"""The collectives of a compiled program: which, how often, how many bytes a device sends.

Read from the text of the optimized program (HLO). What a loop's body does counts as often as the
loop runs: its condition compares the counter with a constant, or the compiler has written down the
number. What a TPU does beside other work is written where it starts, in what runs beside it and
where it is done: all parts name one chain, which counts once. Of n devices in a ring each sends

    all-gather      (n - 1) / n of the result          reduce-scatter  (n - 1) / n of the operand
    all-reduce      2 (n - 1) / n of the operand       all-to-all      (n - 1) / n of the operand
    collective-permute  the operand
"""

import dataclasses
import math
import re
from collections import Counter

_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPERATION = re.compile(r"(?:^|[\s)}])([a-z][a-z\-]*)\(")
_ARRAY = re.compile(r"\b(pred|bf16|f\d+\w*|[su]\d+|c\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)\}?")
_CONSTANT = re.compile(r"%?([\w.\-]+) = [su]\d+\[\]\S* constant\((\d+)\)")
_CHAIN = re.compile(r'chain_id="(\d+)"')
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# A fusion of this name is an all-reduce of which each device keeps its part.
_SCATTERING = "all-reduce-scatter"


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind, shape and group in a program.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
      shape: the largest array that takes part, e.g. "bf16[4096,2048]".
      group: number of devices that take part together.
      count: how often a device runs it in one call of the program.
      bytes_sent: bytes that a device sends in one run of it.
    """

    kind: str
    shape: str
    group: int
    count: int
    bytes_sent: float

    @property
    def total_bytes(self) -> float:
        """The bytes that a device sends in one call of the program."""
        return self.count * self.bytes_sent


def collectives(text: str, devices: int) -> list[Collective]:
    """Returns the collectives of a program, those that send most first.

    Args:
      text: `compiled.as_text()`.
      devices: number of devices that the program runs on.
    """
    computations, entry = _computations(text)
    found: Counter[tuple[str, str, int, float]] = Counter()

    def walk(name: str, times: int, chains: set[tuple[str, str, str]]) -> None:
        """Counts; `chains` are those of this body of a loop that were met before."""
        for line in computations.get(name, ()):
            operation = _operation(line)
            kind = operation.removesuffix("-start")
            if kind in _KINDS:
                scattered = kind == "all-reduce" and name.startswith(_SCATTERING)
                key = _measure("reduce-scatter" if scattered else kind, line, devices)
                chain = _CHAIN.search(line)
                part = (chain[1], *key[:2]) if chain else None
                found[key] += 0 if part in chains else times
                chains |= {part} if part else set()
            if operation == "while":
                walk(_named("body", line), times * _trips(line, computations), set())
            elif kind not in _KINDS and (called := _CALLED.search(line)):
                for each in called[1].split(", "):
                    walk(each.removeprefix("%"), times, chains)

    walk(entry, 1, set())
    each = [Collective(*key[:3], count, key[3]) for key, count in found.items()]
    return sorted(each, key=lambda one: -one.total_bytes)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of each computation, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            current = computations.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = []
        else:
            current.append(line)
    return computations, entry


def _operation(line: str) -> str:
    """Returns the name of an instruction's operation.

    # In: %a = (f32[2]{0}, s32[]) while(%b), condition=...   Out: while
    """
    found = _INSTRUCTION.match(line)
    operation = found and _OPERATION.search(_without_layouts(found[2]))
    return operation[1] if operation else ""


def _without_layouts(text: str) -> str:
    return re.sub(r"(?<=\])\{[^}]*\}", "", text.partition(", metadata=")[0])


def _named(attribute: str, line: str) -> str:
    found = re.search(rf"\b{attribute}=%?([\w.\-]+)", line)
    return found[1] if found else ""


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """Returns how often a loop runs; 1 if that cannot be told."""
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', line):
        return int(known[1])
    condition = computations.get(_named("condition", line), [])
    constants = [found for each in condition if (found := _CONSTANT.search(each))]
    return max((int(found[2]) for found in constants), default=1)


def _measure(kind: str, line: str, devices: int) -> tuple[str, str, int, float]:
    """Returns the kind, largest shape, group size and bytes sent of a collective.

    Several arrays may be sent together; what starts a collective shows operands and results.

    # f32[2] reduce-scatter(%a)                                        Out: 8 bytes a device
    # ((bf16[2], bf16[4]), (bf16[4], bf16[8])) all-gather-start(%a, %b)      24 bytes in all
    # (bf16[2], bf16[4]) all-gather-start(%a)                                 8 bytes in all
    """
    text = _without_layouts(_INSTRUCTION.match(line)[2])  # pyright: ignore
    types, operation, _ = re.split(r"([a-z][a-z\-]*)\(", text, maxsplit=1)[:3]
    arrays = lambda part: [(_size(*x.groups()), x[0]) for x in _ARRAY.finditer(part)]  # noqa: E731
    total = lambda part: sum(size for size, _ in arrays(part))  # noqa: E731
    group = _group_size(line, devices)
    if types.startswith("(("):
        operands, _, results = types.partition("), ")
        size = max(total(operands), total(results))
    elif operation.endswith("-start") and kind != "all-reduce":
        size = max(arrays(types), default=(0, ""))[0]
    else:
        size = total(types) * (group if operation == "reduce-scatter" else 1)
    _, shape = max(arrays(types), default=(0, ""))
    share = 1.0 if kind == "collective-permute" else (group - 1) / group
    return kind, shape, group, size * share * (2 if kind == "all-reduce" else 1)


def _size(dtype: str, shape: str) -> int:
    digits = re.search(r"\d+", dtype)
    width = _BYTES.get(dtype) or max(1, int(digits[0]) // 8 if digits else 4)
    return width * math.prod(int(side) for side in shape.split(",") if side)


def _group_size(line: str, devices: int) -> int:
    """Returns the devices in a group.

    # In: replica_groups={{0,1},{2,3}}                    Out: 2
    # In: replica_groups=[2,4]<=[8]                       Out: 4
    # In: replica_groups=mesh['data'=4,'model'=2] {'data'}  Out: 4
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(found[2])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([\w]+)'=(\d+)", found[1]))
        named = re.findall(r"'([\w]+)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes.get(axis, 1)) for axis, part in named)
    return devices

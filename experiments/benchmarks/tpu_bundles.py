"""What libtpu's compiler made of a program: its instruction bundles, loops and copies.

No TPU is needed, and none runs: with `LIBTPU_INIT_ARGS` of `dump_options` libtpu writes the final
bundles of every operation that it compiles. A TensorCore issues one bundle a cycle, so the bundles
of a loop are a lower bound of its cycles; copies by DMA go on beside them. What stalls a bundle
(a wait for a copy, a full queue of copies) is not in this text.
"""

import dataclasses
import pathlib
import re

# Size of the unit in which bundles count the bytes of a copy.
GRANULE = 32
# Bundles after a branch that are executed whether it is taken or not.
_DELAY_SLOTS = 4

_BUNDLE = re.compile(r"^ *(?:0x)?[0-9a-f]+ *(?:[A-Z]{2})? *: *>* *\{", re.MULTILINE)
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (\([^)]*\) )?target = \$region(\d+)")
_COPY = re.compile(r"= dma\.(\w+).*?/\*size_in_granules=\*/(\d+)")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+) /\* loop exit test")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a compiled kernel, or the whole of one.

    Attributes:
      bundles: number of bundles of one round, those of inner loops left out. Branches count as if
        everything between were executed.
      copies: bytes of the copies that one round starts, by direction ("hbm_to_vmem"); those of
        inner loops left out.
      waits: number of waits for copies in one round, those of inner loops left out.
      rounds: number of rounds, where the compiler knows it.
      loops: inner loops, in the order of the program.
    """

    bundles: int
    copies: tuple[tuple[str, int], ...]
    waits: int
    rounds: int | None
    loops: tuple["Loop", ...]

    @property
    def nested(self) -> tuple["Loop", ...]:
        """The loop and all loops inside, in the order of the program."""
        return (self, *(found for loop in self.loops for found in loop.nested))

    def total(self) -> int:
        """Returns the bundles of all rounds of this loop and of its inner ones.

        A loop whose number of rounds is only known when it runs is counted once.
        """
        return (self.rounds or 1) * (self.bundles + sum(loop.total() for loop in self.loops))


def dump_options(folder: pathlib.Path) -> str:
    """Returns what `LIBTPU_INIT_ARGS` must hold for `read` to find the bundles in a folder."""
    return (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )


def read(folder: pathlib.Path) -> dict[str, Loop]:
    """Returns the operations of the program whose bundles are in a folder, by name."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        name = re.sub(r"^\d+-(.*)-\d+-(schedule-analysis_)?final_bundles\.txt$", r"\1", path.name)
        if "schedule-analysis" not in path.name and not name.startswith("<"):
            found[name] = parse(path.read_text())
    return found


def parse(text: str) -> Loop:
    """Returns the loops of the bundles of one operation."""
    starts = [match.start() for match in _BUNDLE.finditer(text)]
    ends = [*starts[1:], len(text)]
    bundles = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    first = {}
    for index, bundle in enumerate(bundles):
        for region in _START.findall(bundle):
            first.setdefault(region, index)
    spans = []
    for index, bundle in enumerate(bundles):
        for _, region in _BRANCH.findall(bundle):
            if first.get(region, index + 1) <= index:
                spans.append((first[region], min(index + _DELAY_SLOTS + 1, len(bundles))))
    return _loop(bundles, 0, len(bundles), sorted(spans, key=lambda span: (span[0], -span[1])), 1)


def _loop(bundles, start, end, spans, rounds) -> Loop:
    """Returns the loop of the bundles from `start` to `end`."""
    inner, mine, place = [], [], start
    while spans:
        span, spans = spans[0], spans[1:]
        inside = [other for other in spans if other[1] <= span[1]]
        spans = [other for other in spans if other[1] > span[1]]
        mine += bundles[place : span[0]]
        place = span[1]
        inner.append(_loop(bundles, span[0], span[1], inside, None))
    mine += bundles[place:end]
    if rounds is None:
        known = [int(limit) for bundle in mine for limit in _EXIT.findall(bundle)]
        rounds = known[-1] if known else None
    copies = [copy for bundle in mine for copy in _COPY.findall(bundle)]
    return Loop(
        bundles=len(mine),
        copies=tuple((direction, int(size) * GRANULE) for direction, size in copies),
        waits=sum(bundle.count("dma.done.wait") for bundle in mine),
        rounds=rounds,
        loops=tuple(inner),
    )

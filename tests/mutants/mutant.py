"""A mutant: a mistake that somebody could make, and the tests that must notice it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
      name: the area and what goes wrong.
      file: where, from the root of the tree.
      find: the text that is right; it occurs in the file exactly once.
      replace: the text that is wrong.
      tests: arguments of pytest, of which at least one test must fail: the narrowest choice.
      night: whether tests of the night are needed; otherwise those of the gate notice it.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    night: bool = False

    def plant(self, text: str) -> str:
        """The file's text with the mistake in it.

        Raises:
          ValueError: the right text does not occur exactly once, or the mistake changes nothing.
        """
        count = text.count(self.find)
        if count != 1:
            raise ValueError(
                f"{self.name}: the text to replace occurs {count} times in {self.file}"
            )
        if self.find == self.replace:
            raise ValueError(f"{self.name}: nothing is changed")
        return text.replace(self.find, self.replace)

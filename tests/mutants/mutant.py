"""A mutant: a plausible mistake, and the tests that must fail with it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
      name: the area and what goes wrong.
      file: where, from the root of the tree.
      find: the right text, which occurs in the file exactly once.
      replace: the wrong text.
      tests: pytest arguments, as narrow as possible; at least one of these tests must fail.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def plant(self, text: str) -> str:
        """Returns the file's text with the mistake.

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

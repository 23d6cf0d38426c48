"""Stop strings in a text that grows: where one is complete, and what may become one.

    stop strings  "two thread", "three"
    text          "one two thre"         its last 8 characters may become the first, 4 the second

Strings are matched as Knuth, Morris and Pratt do ("Fast pattern matching in strings", 1977): how
much of a string a text ends with follows from how much it ended with a character before, and where
the next character is not that of the string, the longest shorter part that the text still ends with
is known from the string alone. So the work follows the text, however long the strings are.
"""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one text.

    Args:
      strings: the strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]):
        self._strings = [_Matcher(each) for each in strings]
        self._matched = [0] * len(strings)

    @property
    def held(self) -> int:
        """The most characters at the end of the text that may become a stop string."""
        return max(self._matched, default=0)

    def find(self, more: str) -> int | None:
        """Returns where the first stop string begins if the text goes on so; None if it has none.

        The place counts from the beginning of `more`, and is negative if it is before that.
        """
        found = []
        for matcher, matched in zip(self._strings, self._matched, strict=True):
            matched, end = matcher.match(matched, more)
            if matched == len(matcher.string):
                found.append(end - matched)
        return min(found, default=None)

    def add(self, more: str) -> None:
        """Adds to the text what completes no stop string."""
        self._matched = [
            matcher.match(matched, more)[0]
            for matcher, matched in zip(self._strings, self._matched, strict=True)
        ]


class _Matcher:
    """One string, and for each of its beginnings the longest shorter one that it ends with.

    # In: "abab"  Out: 0 for "a" and "ab", 1 for "aba", 2 for "abab"
    """

    def __init__(self, string: str):
        self.string = string
        self._shorter = [0, 0]  # by length; as far as a text has needed them

    def match(self, matched: int, text: str) -> tuple[int, int]:
        """Returns how much of the string the text ends with, and where it is complete or the end.

        Args:
          matched: how much of it comes before the text, less than all.
          text: the text.
        """
        string, at = self.string, 0
        while at < len(text):
            if not matched:
                at = text.find(string[0], at)
                if at < 0:
                    return 0, len(text)
            while matched and text[at] != string[matched]:
                matched = self._shorter_than(matched)
            matched += text[at] == string[matched]
            at += 1
            if matched == len(string):
                break
        return matched, at

    def _shorter_than(self, length: int) -> int:
        shorter, string = self._shorter, self.string
        while len(shorter) <= length:
            last, known = string[len(shorter) - 1], shorter[-1]
            while known and string[known] != last:
                known = shorter[known]
            shorter.append(known + (string[known] == last))
        return shorter[length]

"""KERNEL: a magic's line as words."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from fsdp_magic.core.errors import UsageError
from fsdp_magic.core.wording import quoted


class Words(Iterator[str]):
    """The words of a line, one after the other.

    Attributes:
        left: those that were not taken yet.
        before: the one before the last that was taken.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self.left = list(words)
        self.before = self._latest = ""

    def __next__(self) -> str:
        if not self.left:
            raise StopIteration
        self.before, self._latest = self._latest, self.left.pop(0)
        return self._latest

    @property
    def coming(self) -> str:
        """The next word; empty: there is none."""
        return self.left[0] if self.left else ""


def split_line(line: str, magic: str) -> list[str]:
    """Split a line as a shell would, but keep quotes inside a word: nets["G"] is a name."""
    lexer = shlex.shlex(line, posix=False, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if word.startswith("#"):
                break
            words.append(_unquoted(word))
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {quoted(line)}") from None
    return words


def _unquoted(word: str) -> str:
    quoted = len(word) > 1 and word[0] == word[-1] and word[0] in "'\""
    return word[1:-1] if quoted else word

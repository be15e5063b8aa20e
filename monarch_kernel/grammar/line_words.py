"""The words of an unfinished ``%mesh`` line, as a shell splits them, with the position of the last one."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

_WORD = re.compile(r"""(?:[^\s'"\\]|\\.|\\$|'[^']*(?:'|$)|"(?:[^"\\]|\\.)*\\?(?:"|$))+""")


class Typed(NamedTuple):
    """The words up to the cursor."""

    before: list[str]
    """The finished words, without quotes."""
    raw: str
    """The word at the cursor as typed; empty after a space."""

    @property
    def word(self) -> str:
        """The word at the cursor, without quotes."""
        return unquoted(self.raw)


def typed(text: str) -> Typed:
    """Split a text that ends at the cursor."""
    words = list(_WORD.finditer(text))
    raw = words.pop()[0] if words and words[-1].end() == len(text) else ""
    return Typed([unquoted(each[0]) for each in words], raw)


def without_comment(text: str) -> str:
    """Return a line without the comment at its end: a word that begins with ``#``, and what follows it."""
    at = next((word.start() for word in _WORD.finditer(text) if word[0].startswith("#")), len(text))
    return text[:at]


def unquoted(raw: str) -> str:
    """Return a word without its quotes; the last one may be missing."""
    for closing in ("", "'", '"', "\\"):
        try:
            return "".join(shlex.split(raw + closing))
        except ValueError:
            continue
    return raw


def rest_of_word(raw: str, after: str, argument: bool) -> int:
    """Return how many characters of a word follow the cursor.

    Args:
        raw: the word up to the cursor, as typed.
        after: the text after the cursor.
        argument: whether it is an argument of a command, which may be a path.
    """
    if raw[:1] in ("'", '"'):
        return after.partition("\n")[0].find(raw[0]) + 1
    found = re.match(r"[\w\-./]*" if argument else r"[\w\-]*", after) if raw else None
    return found.end() if found is not None else 0

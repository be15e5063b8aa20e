"""Options of a magic line."""

from __future__ import annotations

import re

_MARKS = str.maketrans("", "", ":=")


class BadLine(ValueError):
    """The line of a magic is wrong; the text says how."""


def options_of(line: str, known: str) -> tuple[dict[str, str], str]:
    """Return the leading options of a line, and the rest as typed.

    Args:
        line: the line of the magic.
        known: letters of the options; a colon follows those with a number, an equals sign those with a word.

    Raises:
        BadLine: an option is unknown, or lacks its value.
    """
    options: dict[str, str] = {}
    rest = line.strip()
    while match := re.match(r"-(\w)\s*", rest):
        letter, rest = match[1], rest[match.end() :]
        if letter not in known:
            raise BadLine(f"unknown option -{letter}; expected one of -{', -'.join(known.translate(_MARKS))}")
        options[letter] = ""
        if f"{letter}:" in known or f"{letter}=" in known:
            value, _, rest = rest.partition(" ")
            if f"{letter}:" in known and not value.isdigit():
                raise BadLine(f"-{letter}: expected a number, got {value!r}")
            options[letter], rest = value, rest.strip()
    return options, rest

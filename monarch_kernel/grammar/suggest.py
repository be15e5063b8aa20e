"""Suggestions for mistyped names."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


def most_similar(word: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar to a word; empty if none is similar."""
    names = list(dict.fromkeys(known))
    # Letters in another order are the most frequent slip, and a prefix is a good guess however short it is.
    close = [each for each in names if sorted(each) == sorted(word)] or get_close_matches(word, names, 1)
    close = close or [each for each in names if word and each.startswith(word)]
    return close[0] if close else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'NAME'?`` for the most similar known name; empty if none is similar."""
    guess = most_similar(word, known)
    return f"; did you mean {guess!r}?" if guess else ""


def own_names(shell: Any) -> list[str]:
    """Return the variables that cells of the notebook have defined."""
    hidden = shell.user_ns_hidden
    return [name for name, value in list(shell.user_ns.items()) if hidden.get(name, hidden) is not value]

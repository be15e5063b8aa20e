"""Paths that complete what is typed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

_MOST = 500
"""Paths that are offered."""
_SPECIAL = re.compile(r"([\s'\"\\$&;|<>(){}*?\[\]#!`])")


def paths(raw: str, word: str, fits: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return the folders and files that begin with a word, written as the user began it.

    Args:
        raw: the word as typed, perhaps with an opening quote.
        word: the same without quotes.
        fits: whether a file is offered, by its name; folders always are.
    """
    folder, last = os.path.split(word)
    try:
        with os.scandir(os.path.expanduser(folder) or ".") as entries:
            found = sorted((each.name, _is_folder(each)) for each in entries if each.name.startswith(last))
    except OSError:
        return []
    shown = [each for each in found if (each[1] or fits(each[0])) and (last or not each[0].startswith("."))]
    return [_written(raw, os.path.join(folder, name), is_folder) for name, is_folder in shown[:_MOST]]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _written(raw: str, path: str, is_folder: bool) -> str:
    path += "/" if is_folder else ""
    quote = raw[:1]
    if quote not in ("'", '"'):
        return _SPECIAL.sub(r"\\\1", path)
    # A folder is not the end of the word.
    return f"{quote}{path}{'' if is_folder else quote}"

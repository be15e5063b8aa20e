"""Which files the debugger of the notebook leaves alone: those of the kernel itself."""

from __future__ import annotations

import os
from collections.abc import Iterable


def patterns_of(files: Iterable[str], roots: Iterable[str]) -> list[str]:
    """Return a pattern for each package that files are of, and for each other file its path.

    The debugger compares each new file with all patterns, again after each change of breakpoints, so that a thousand
    of them take half a second of the next cell.

    Args:
        files: paths of modules.
        roots: folders that packages are in, such as those of ``sys.path``.
    """
    places = sorted({os.path.join(root, "") for root in roots if root}, key=len, reverse=True)
    return list(dict.fromkeys(_pattern(file, places) for file in files))


def _pattern(file: str, places: list[str]) -> str:
    root = next((place for place in places if file.startswith(place)), None)
    package, inside, _ = file[len(root) :].partition(os.sep) if root else ("", "", "")
    return os.path.join(root, package, "**") if root and inside else file

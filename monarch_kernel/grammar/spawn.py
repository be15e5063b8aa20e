"""The first line of a ``%%mesh spawn`` cell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from monarch_kernel.grammar.header import HeaderError

_ORDER = re.compile(
    r"spawn\s+(?P<name>[^\s(\[]+)\s*(?:\((?P<arguments>.*)\))?\s*(?:--on[\s=]+(?P<place>[^-].*?))?\s*(?P<new>--new)?\s*"
)
SPAWN_OPTIONS = tuple(re.findall(r"--\w+", _ORDER.pattern))
_USAGE = "write %%mesh spawn NAME, %%mesh spawn NAME(ARGUMENTS) or %%mesh spawn NAME --on MESH[SLICE]"


@dataclass
class SpawnLine:
    """The parsed first line of a ``%%mesh spawn`` cell."""

    name: str
    arguments: str
    """The text between the parentheses."""
    place: str
    """The mesh and an optional slice; empty for the mesh in use."""
    new: bool
    """Whether to stop live actors of that name and spawn new ones."""


def parse_spawn(line: str) -> SpawnLine | None:
    """Parse the first line of a cell; None if it spawns no actors.

    Raises:
        HeaderError: it starts with spawn, and the rest is invalid.
    """
    text = line.strip()
    if not re.match(r"spawn\s+[^-\[]", text):
        return None
    match = _ORDER.fullmatch(text)
    if match is None:
        raise HeaderError(f"cannot parse {text!r}; {_USAGE}")
    if not match["name"].isidentifier():
        raise HeaderError(f"invalid name {match['name']!r} for actors: must be a Python identifier; {_USAGE}")
    return SpawnLine(match["name"], match["arguments"] or "", (match["place"] or "").strip(), bool(match["new"]))

"""Short forms of ``%mesh`` lines: ``--help`` anywhere, and a plain number for the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import PARSERS

HELP = ("--help", "-h", "-?", "?")


def asks_for_help(words: list[str]) -> bool:
    """Return whether a line only asks for help: ``%mesh --help`` or ``%mesh up --help``."""
    if words and words[0] in HELP:
        return True
    if len(words) < 2 or words[0] not in PARSERS:
        return False
    after = words[1:]
    if words[0] == "run":
        # Options after the script belong to the script.
        after = after[1:3] if after[0] == "--on" else after[:2] if after[0].startswith("--on=") else after[:1]
    return any(word in HELP for word in after)


def help_words(words: list[str]) -> list[str]:
    """Return the arguments of ``%mesh help`` for such a line."""
    return [word for word in words[:2] if word not in HELP][:1]


def axis_of(sizes: Mapping[str, int], host_axes: int, number: str) -> str:
    """Return the axis that a plain number means: the only one of the ranks on a host.

    Args:
        sizes: the sizes of the axes of the mesh.
        host_axes: how many of them are of hosts.
        number: as typed.
    """
    labels = list(sizes)[host_axes:]
    if len(labels) != 1:
        axes = " or ".join(f"{label}={number}" for label in sizes)
        raise Usage(f"%mesh resize {number}: this mesh has several axes; write {axes}")
    return labels[0]

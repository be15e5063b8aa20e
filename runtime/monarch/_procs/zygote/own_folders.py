"""Where ranks of other hosts look for packages: in the folders of the program, and in those of their own Python."""

from __future__ import annotations

from collections.abc import Sequence

OWN_FOLDERS = "MONARCH_OWN_FOLDERS"
"""The environment variable of other hosts: ``first`` or ``last``."""
_FOLDERS = ("site-packages", "dist-packages")


def with_own_folders(path: Sequence[str], here: Sequence[str], when: str) -> list[str]:
    """Return the ``sys.path`` of a rank.

    Args:
        path: that of the program.
        here: that of the Python of this host.
        when: ``first`` if packages of this Python count before those of the program's folders, which may exist here
            too; ``last`` if after; empty for the program's alone.
    """
    if not when:
        return [*path]
    own = [each for each in here if each.rstrip("/").endswith(_FOLDERS)]
    places = [place for place, each in enumerate(path) if each.rstrip("/").endswith(_FOLDERS)]
    # The working folder and the standard library come before all packages.
    at = places[0] if places and when == "first" else len(path)
    return list(dict.fromkeys([*path[:at], *own, *path[at:]]))

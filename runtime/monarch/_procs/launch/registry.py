"""Launchers by name: those of this package, and plug-ins by the entry point group ``monarch.launchers``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast

from monarch._procs.launch.interface import Launcher
from monarch.exceptions import ArgumentError

GROUP = "monarch.launchers"
"""The entry point group of plug-ins. Each names a function ``make(where, count, options) -> Launcher``."""
Make = Callable[[str, int, Mapping[str, Any]], Launcher]
"""Makes a launcher of the text after ``NAME:``, the number of hosts (0 if not given), and options by name."""
_OWN = {
    "kubernetes": "monarch._procs.launch.kubernetes",
    "process": "monarch._procs.launch.process",
    "ray": "monarch._procs.launch.ray",
    "slurm": "monarch._procs.launch.slurm",
    "ssh": "monarch._procs.launch.ssh",
}


def launcher_names() -> list[str]:
    """Return the names of all launchers."""
    return sorted({*_OWN, *(each.name for each in entry_points(group=GROUP))})


def make_launcher(where: str, count: int = 0, options: Mapping[str, Any] | None = None) -> Launcher:
    """Return the launcher of a text such as ``ssh:node1,node2`` or ``slurm``.

    Args:
        where: the name of a launcher, and what it takes after a colon.
        count: the number of hosts; 0 if not given.
        options: arguments of the launcher by name.

    Raises:
        ArgumentError: the launcher does not exist, or does not take these arguments.
    """
    name, _, rest = where.partition(":")
    home = _OWN.get(name)
    if home is not None:
        make = cast(Make, import_module(home).make)
    else:
        plugins = [each for each in entry_points(group=GROUP) if each.name == name]
        if not plugins:
            raise ArgumentError(f"no launcher is named {name!r}; expected one of {', '.join(launcher_names())}")
        make = cast(Make, plugins[0].load())
    try:
        return make(rest, count, dict(options or {}))
    except TypeError as error:
        # A keyword that the launcher does not have.
        raise ArgumentError(f"launcher {name!r}: {error}") from error


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Return options of a launcher from texts such as ``partition=gpu``; values are JSON where they can be read so.

    Raises:
        ArgumentError: a text has no name or no value.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"expected NAME=VALUE, such as partition=gpu, got {pair!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options

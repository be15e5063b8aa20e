"""Launchers by name: those of this package, and plug-ins by the entry point group ``monarch.launchers``."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, cast, get_type_hints

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
            raise ArgumentError(f"unknown launcher {name!r}; expected one of {', '.join(launcher_names())}")
        make = cast(Make, plugins[0].load())
    try:
        return make(rest, count, dict(options or {}))
    except TypeError as error:
        raise ArgumentError(_unknown_option(name, make, options or {}) or f"launcher {name!r}: {error}") from error


def _unknown_option(name: str, make: Make, options: Mapping[str, Any]) -> str:
    """Describe an option that a launcher does not have; empty if it has all of them, or does not tell."""
    try:
        known = [*inspect.signature(get_type_hints(make)["return"]).parameters]
    except (KeyError, NameError, TypeError, ValueError):
        return ""
    for option in options:
        if option not in known:
            similar = difflib.get_close_matches(option, known, 1)
            advice = f"; did you mean {similar[0]!r}?" if similar else ""
            return f"launcher {name!r} has no option {option!r}{advice}"
    return ""


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

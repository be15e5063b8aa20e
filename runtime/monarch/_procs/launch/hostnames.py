"""Names of hosts: lists such as ``node[01-04],gpu7``, and host files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from monarch.exceptions import ArgumentError

_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_MOST = 10_000


@dataclass(frozen=True)
class HostEntry:
    """A host that ssh can reach.

    Attributes:
        name: as ssh takes it: an alias of its configuration, ``user@host``, or ``ssh://user@host:port``.
        python: its Python; empty for the default.
    """

    name: str
    python: str = ""


def expand_names(text: str) -> list[str]:
    """Return the names of a list such as ``node[01-03,7],login``.

    Raises:
        ArgumentError: it cannot be read.
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        names += _expand(part.strip())
        if len(names) > _MOST:
            raise ArgumentError(f"{text!r} names more than {_MOST} hosts")
    return [name for name in names if name]


def _expand(text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    if match is None:
        if "[" in text and "://" not in text:
            raise ArgumentError(f"cannot parse the host names {text!r}; expected a list such as node[01-03],login")
        return [text]
    names: list[str] = []
    for item in match[2].split(","):
        first, dash, last = item.partition("-")
        if not first or (dash and (not last or int(last) < int(first) or int(last) - int(first) > _MOST)):
            raise ArgumentError(f"cannot parse the host names {text!r}; expected a range such as node[01-03]")
        for number in range(int(first), int(last or first) + 1):
            names += [f"{match[1]}{number:0{len(first)}d}{rest}" for rest in _expand(match[3])]
    return names


def read_hostfile(path: str) -> list[HostEntry]:
    """Return the hosts of a file: a name in each line, ``python=PATH`` after it if wanted, comments after ``#``.

    Other words, such as ``slots=8`` of MPI's host files, are ignored.

    Raises:
        ArgumentError: the file cannot be read, or names no host.
    """
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].split() for line in file]
    except OSError as error:
        raise ArgumentError(f"cannot read the host file {path!r}: {error.strerror}") from error
    entries: list[HostEntry] = []
    for words in lines:
        if words:
            options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
            entries += [HostEntry(name, options.get("python", "")) for name in expand_names(words[0])]
    if not entries:
        raise ArgumentError(f"the host file {path!r} lists no hosts")
    return entries


def check_hosts(entries: Sequence[HostEntry]) -> None:
    """Check that each host is named once, and that no name can be taken for an option of ssh.

    Raises:
        ArgumentError: it is not so.
    """
    names = [entry.name for entry in entries]
    for name in names:
        if not name or name.startswith("-") or any(char.isspace() for char in name):
            raise ArgumentError(f"{name!r} is not a valid host name")
    if len({*names}) < len(names):
        raise ArgumentError(f"host {max(names, key=names.count)!r} appears twice")

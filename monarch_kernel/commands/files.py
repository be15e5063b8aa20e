"""``%mesh get`` and ``%mesh put``: files of the ranks come here, and files from here go to each host."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from monarch._kernel_api import (
    ActorMesh,
    FoundFile,
    HostsAsked,
    ask,
    ask_hosts,
    find_files,
    host_here,
    member_at,
    new_key,
    read_piece,
    write_piece,
)
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes

_PIECE = 8 << 20
"""Bytes of one message."""
_AT_ONCE = 4
"""Pieces on their way: each begins at another host."""
_PATIENCE = 120.0
"""Seconds for a rank to read or write a piece."""
_SHOWN = 8
"""Files that are listed."""


class Files:
    """The commands.

    Args:
        meshes: the meshes of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes) -> None:
        self._meshes = meshes

    def commands(self) -> dict[str, Callable[[list[str]], None]]:
        """Return the commands by name."""
        return {"get": self.get, "put": self.put}

    def get(self, words: list[str]) -> None:
        """Copy files of the ranks to this machine."""
        arguments = parse("get", words)
        mesh = self._meshes.get(None)
        with naming_deaths(mesh):
            found = _distinct(mesh, arguments.path)
            if not found:
                raise Usage(f"%mesh get: no file on any rank matches {arguments.path!r}; give a path on the ranks")
            written: list[tuple[str, int]] = []
            for rank, file in found:
                target = Path(arguments.target) / f"rank-{rank}" / file.name
                _fetch(member_at(mesh.cells, rank), file, target)
                written.append((str(target), file.size))
        _list("copied here", written)

    def put(self, words: list[str]) -> None:
        """Copy a file or a folder to each host."""
        arguments = parse("put", words)
        source = Path(arguments.path).expanduser()
        files = list(_files_below(source))
        if not files:
            raise Usage(f"%mesh put: found no files at {arguments.path!r} on this machine")
        mesh = self._meshes.get(None)
        target = arguments.target or "."
        written: list[tuple[str, int]] = []
        with naming_deaths(mesh):
            hosts = _first_ranks(mesh)
            for path, name in files:
                size = path.stat().st_size
                send_file(hosts, path, f"{target.rstrip('/')}/{name}")
                written.append((f"{target.rstrip('/')}/{name}", size))
        _list(f"copied to {len(hosts)} host{'s' if len(hosts) > 1 else ''}", written)


def _distinct(mesh: Mesh, pattern: str) -> list[tuple[int, FoundFile]]:
    """Return each file once, with the lowest rank that has it."""
    count = len(mesh.cells)
    calls = [
        ask(member_at(mesh.cells, rank), find_files, pattern, {"rank": rank, "world_size": count})
        for rank in range(count)
    ]
    seen: set[tuple[str, str]] = set()
    found: list[tuple[int, FoundFile]] = []
    for rank, call in enumerate(calls):
        for file in call.get(_PATIENCE)[0]:
            if (file.host, file.path) not in seen:
                seen.add((file.host, file.path))
                found.append((rank, file))
    return found


def _first_ranks(mesh: Mesh) -> list[ActorMesh]:
    """Return one rank of each host."""
    first: dict[str, int] = {}
    for rank, host in ask(mesh.cells, host_here).get(_PATIENCE).items():
        first.setdefault(host, rank)
    return [member_at(mesh.cells, rank) for rank in first.values()]


def _fetch(place: ActorMesh, file: FoundFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with open(part, "wb") as out:
        while True:
            (piece,) = ask(place, read_piece, file.path, out.tell(), _PIECE).get(_PATIENCE).values()
            out.write(piece)
            if len(piece) < _PIECE:
                break
    os.replace(part, target)


def send_file(hosts: Sequence[ActorMesh], path: Path, target: str) -> None:
    """Write a file on some hosts, which pass its pieces on to one another.

    Args:
        hosts: one rank of each.
        path: the path of the file here.
        target: its path there.
    """
    asked: deque[HostsAsked] = deque()
    with open(path, "rb") as file:
        offset, piece, following = 0, file.read(_PIECE), file.read(_PIECE)
        while following:
            asked.append(ask_hosts(hosts, write_piece, target, offset, piece, False, new_key()))
            if len(asked) >= _AT_ONCE:
                asked.popleft().wait(_PATIENCE)
            offset, piece, following = offset + len(piece), following, file.read(_PIECE)
        for each in asked:
            each.wait(_PATIENCE)
        # It has its name from then on.
        ask_hosts(hosts, write_piece, target, offset, piece, True, new_key()).wait(_PATIENCE)


def _files_below(source: Path) -> Iterator[tuple[Path, str]]:
    """Return files and their names: of a folder those below it, with its own name first."""
    if source.is_file():
        yield source, source.name
    elif source.is_dir():
        base = source.resolve()
        for path in sorted(base.rglob("*")):
            if path.is_file():
                yield path, str(path.relative_to(base.parent))


def _list(what: str, files: list[tuple[str, int]]) -> None:
    total = sum(size for _, size in files)
    amount = f"{total / 1e6:.1f} MB" if total >= 1e5 else f"{total / 1e3:.1f} kB"
    print(f"{what}: {len(files)} file{'s' if len(files) > 1 else ''}, {amount}")
    for name, _ in files[:_SHOWN]:
        print(f"  {name}")
    if len(files) > _SHOWN:
        print(f"  and {len(files) - _SHOWN} more")

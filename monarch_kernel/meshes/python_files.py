"""The Python files of the notebook's working directory on the hosts of a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from monarch._kernel_api import (
    ActorMesh,
    Future,
    ask,
    ask_hosts,
    code_files,
    count_text,
    keep_code,
    lacking,
    member_at,
    new_key,
    read_code,
    use_code,
)
from monarch.exceptions import SupervisionError

T = TypeVar("T")
_PATIENCE = 60.0
"""Seconds for ranks to answer; one inside a C call that holds the interpreter does not."""
_PIECE = 16 << 20
"""Bytes of files in one message."""


@dataclass(frozen=True)
class Synced:
    """The result of a copy.

    Attributes:
        count: the number of Python files of the folder.
        names: the files that some host lacked.
        hosts: the number of hosts that lacked files.
        imported: modules of these files that ranks had imported before.
        whose: the hosts that were asked, for a sentence.
    """

    count: int = 0
    names: list[str] = field(default_factory=list[str])
    hosts: int = 0
    imported: list[str] = field(default_factory=list[str])
    whose: str = "all hosts already have"

    def text(self) -> str:
        """Describe it for the notebook."""
        if not self.names:
            return f"{self.whose} the {count_text(self.count, 'Python file')} of {os.getcwd()}"
        some = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
        lines = [f"copied to {count_text(self.hosts, 'host')}: {some}"]
        lines += [
            f"{name} was already imported, so the old version is in use; %mesh reload {name} loads the new one"
            for name in self.imported
        ]
        return "\n".join(lines)


class Code:
    """The copies of one mesh. ``sync`` is for the main thread, which alone writes its attributes.

    Args:
        cells: the namespaces of its ranks.
    """

    def __init__(self, cells: ActorMesh) -> None:
        self._cells = cells
        self._sent: dict[str, str] | None = None
        self._processes: dict[int, int] = {}

    def sync(self, processes: dict[int, int], dead: Sequence[int], again: bool = False) -> Synced:
        """Copy what the hosts of living ranks lack.

        Args:
            processes: how often each rank was replaced: new processes look for the copies too.
            dead: the dead ranks.
            again: ask the hosts even if nothing has changed here, and look into a folder that had too many files.

        Raises:
            ArgumentError: the folder has too many Python files.
            MonarchError: a rank has died or does not answer.
        """
        folder = os.getcwd()
        files = code_files(folder, again)
        if not again and files == self._sent and processes == self._processes:
            return Synced(len(files))
        by_host: dict[str, tuple[int, list[str]]] = {}
        for rank, answer in self._ask(dead, lambda view: ask(view, lacking, folder, files)):
            by_host.setdefault(answer.host, (rank, answer.names))
        lacking_alike: dict[tuple[str, ...], list[int]] = {}
        for rank, names in by_host.values():
            lacking_alike.setdefault(tuple(names), []).append(rank)
        for names, ranks in lacking_alike.items():
            self._copy(ranks, folder, list(names))
        used = self._ask(dead, lambda view: ask(view, use_code, folder, files))
        imported = {name for _, each in used for name in each}
        names = sorted({name for _, missing in by_host.values() for name in missing})
        modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in names}
        self._sent, self._processes = files, processes
        hosts = sum(bool(missing) for _, missing in by_host.values())
        living = "the hosts of the live ranks already have"
        return Synced(len(files), names, hosts, sorted(imported & modules), *([living] if dead else []))

    def _ask(self, dead: Sequence[int], question: Callable[[ActorMesh], Future[dict[int, T]]]) -> list[tuple[int, T]]:
        """Return the answers of the living ranks, each with its rank."""
        if not dead:
            return [*question(self._cells).get(_PATIENCE).items()]
        living = [rank for rank in range(len(self._cells)) if rank not in dead]
        if not living:
            raise SupervisionError("no rank is alive to take Python files")
        asked = {rank: question(member_at(self._cells, rank)) for rank in living}
        return [(rank, answer) for rank, each in asked.items() for answer in each.get(_PATIENCE).values()]

    def join(self, rank: int) -> None:
        """Let a new process, perhaps on a new host, import the files; from any thread.

        Raises:
            ArgumentError: the folder has too many Python files.
            MonarchError: the rank has died or does not answer.
        """
        folder, place = os.getcwd(), member_at(self._cells, rank)
        files = code_files(folder)
        for answer in ask(place, lacking, folder, files).get(_PATIENCE).values():
            self._copy([rank], folder, answer.names)
        ask(place, use_code, folder, files).get(_PATIENCE)

    def _copy(self, ranks: list[int], folder: str, names: list[str]) -> None:
        """Send files to some hosts, each once: the hosts pass them on."""
        piece: dict[str, bytes] = {}
        hosts = [member_at(self._cells, rank) for rank in ranks]
        for name, content in read_code(folder, names).items():
            piece[name] = content
            if sum(map(len, piece.values())) > _PIECE:
                ask_hosts(hosts, keep_code, piece, new_key()).wait(_PATIENCE)
                piece = {}
        if piece:
            ask_hosts(hosts, keep_code, piece, new_key()).wait(_PATIENCE)

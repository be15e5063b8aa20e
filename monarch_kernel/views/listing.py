"""The list of meshes in the Meshes panel: of this notebook, of other kernels, and detached ones."""

from __future__ import annotations

import threading
import traceback

from monarch._kernel_api import records, spawn_thread, state_of, telemetry_of
from monarch.exceptions import MonarchError
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes
from monarch_kernel.views.others import Counts, Others, counts
from monarch_kernel.views.outlet import Speaker
from monarch_kernel.views.protocol import VERSION, FromKernel, MeshSummary
from monarch_kernel.views.protocol import Meshes as MeshList

EVERY_S = 1.0
"""Seconds between two looks at the meshes of this notebook."""
_RECORDS_EVERY = 5
"""Looks between two looks at the records of detached meshes, which are files."""


class MeshListing:
    """Tells panels which meshes there are, while there are panels. Thread-safe.

    Args:
        meshes: the meshes of the notebook.
        others: the meshes of other kernels.
    """

    def __init__(self, meshes: NotebookMeshes, others: Others) -> None:
        self._meshes = meshes
        self._others = others
        self._lock = threading.Lock()
        self._told: dict[Speaker, MeshList | None] = {}
        """The list that each panel has. Guarded by ``_lock``, as ``_running`` is."""
        self._running = False
        self._wake = threading.Event()
        self._detached: list[MeshSummary] = []
        """Own thread only."""

    def open(self, speaker: Speaker) -> None:
        """Tell a panel the list, now and at each change."""
        with self._lock:
            self._told[speaker] = None
            starts, self._running = not self._running, True
        self._wake.set()
        if starts:
            spawn_thread("monarch-mesh-list", self._run)

    def close(self, speaker: Speaker) -> None:
        """Tell a panel nothing more."""
        with self._lock:
            self._told.pop(speaker, None)
        self._wake.set()

    def tell(self, message: FromKernel) -> bool:
        """Tell all panels something else; return whether there are any."""
        with self._lock:
            speakers = list(self._told)
        for speaker in speakers:
            speaker.tell(message)
        return bool(speakers)

    def changed(self) -> None:
        """Look now: a cell has ended."""
        self._wake.set()

    def _run(self) -> None:
        looks = 0
        while True:
            self._wake.clear()
            with self._lock:
                self._running = bool(self._told)
                if not self._running:
                    return
            try:
                self._look(looks % _RECORDS_EVERY == 0)
            except Exception:
                # A mesh or a record that goes meanwhile, or a bug: the next look may succeed.
                traceback.print_exc()
            looks += 1
            self._wake.wait(EVERY_S)

    def _look(self, records_too: bool) -> None:
        # The own meshes first: other kernels and records take a while.
        self._tell(self._all())
        self._others.look()
        if records_too:
            self._detached = _detached(self._others)
        self._tell(self._all())

    def _all(self) -> MeshList:
        own = list(self._meshes.by_name.values())
        names = {mesh.name for mesh in own}
        shown = [_summary(mesh, mesh.name == self._meshes.used) for mesh in own]
        detached = [each for each in self._detached if each.name not in names]
        return MeshList(VERSION, [*shown, *detached, *self._others.summaries()])

    def _tell(self, listed: MeshList) -> None:
        with self._lock:
            behind = [speaker for speaker, told in self._told.items() if told != listed]
            self._told.update(dict.fromkeys(behind, listed))
        for speaker in behind:
            speaker.tell(listed)


def _summary(mesh: Mesh, current: bool) -> MeshSummary:
    uid = state_of(mesh.procs).procs.uid
    try:
        found = telemetry_of(mesh.procs).read(counts)
    except MonarchError:
        found = Counts()
    return MeshSummary(uid, mesh.name, len(mesh.procs), found.failed, found.running, current, paused=found.paused)


def _detached(others: Others) -> list[MeshSummary]:
    """Return the detached meshes of this user that live, without those that another kernel of this server shows."""
    found: list[MeshSummary] = []
    for record, state in records():
        if record is not None and record.alive() and not others.has(record.user, record.name):
            taken = bool(record.user)
            owner = f"process {record.user}" if taken else state
            uid = f"{record.pid}-{record.start}"
            found.append(MeshSummary(uid, record.name, 0, 0, 0, detached=True, owner=owner, taken=taken))
    return found

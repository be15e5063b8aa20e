"""``%mesh interrupt``: what runs on ranks is interrupted, as Stop does, but on some ranks only."""

from __future__ import annotations

from collections.abc import Callable

from monarch._kernel_api import Ending, describe_ranks, is_gather, open_node, split_proc, state_of
from monarch_kernel.calls.running import PendingCall, RunningCalls
from monarch_kernel.cells.stopping import Stopping
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.grammar.parsers import parse
from monarch_kernel.grammar.ranks import ranks_in_words
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.registry import NotebookMeshes


class _OnRanks(RunningCalls):
    """The calls of a mesh that have not ended, on some of its ranks."""

    def __init__(self, mesh: Mesh, ranks: set[int]) -> None:
        uid = state_of(mesh.procs).procs.uid
        calls = [each for each in list(open_node().ports.gathers.values()) if is_gather(each) and each.actor]
        mine = [each for each in calls if any(split_proc(peer.proc)[0] == uid for peer in each.waits_for())]
        super().__init__("", mine, frozenset({state_of(mesh.cells).key}))
        self._ranks = ranks

    def tasks(self) -> dict[int, PendingCall]:
        return {number: task for number, task in super().tasks().items() if task.rank in self._ranks}


class Interrupting:
    """The command that interrupts ranks.

    Args:
        meshes: the meshes of the notebook.
        stopping: the Stops of the notebook.
    """

    def __init__(self, meshes: NotebookMeshes, stopping: Stopping) -> None:
        self._meshes = meshes
        self._stopping = stopping

    def interrupt(self, words: list[str]) -> None:
        """Interrupt what runs on ranks."""
        parsed: list[str] = parse("interrupt", words).words
        mesh = self._meshes.get(parsed.pop(0) if parsed and parsed[0].isidentifier() else None)
        ranks = ranks_in_words("interrupt", " ".join(parsed), len(mesh.procs)) if parsed else range(len(mesh.procs))
        print(self.stop(mesh, set(ranks)))

    def stop(self, mesh: Mesh, ranks: set[int], say: Callable[[str], object] = print) -> str:
        """Interrupt what runs on ranks, free them from collectives, and describe how it ended.

        Raises:
            Usage: nothing runs there.
        """
        run = _OnRanks(mesh, ranks)
        running = sorted({task.rank for task in run.tasks().values()})
        if not running:
            raise Usage(f"nothing is running on {describe_ranks(sorted(ranks))} of mesh {mesh.name!r}")
        stopped = self._stopping.stop_by_hand(run, say)
        mesh.check_groups(stopped.cut or bool(stopped.ranks(Ending.LEFT)), stopped.generation)
        return stopped.text()

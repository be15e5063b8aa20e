"""How each rank of a cell was stopped, and the sentences about it."""

from __future__ import annotations

from collections.abc import Collection

from monarch._kernel_api import Activity, CellError, Ending, Freed, ThreadState, describe_ranks

_IN_COLLECTIVE = (
    "was waiting in a collective (aborted; its tensors may be incomplete)",
    "were waiting in a collective (aborted; its tensors may be incomplete)",
)
_CONNECTING = "was waiting for a connection (connection closed)", "were waiting for a connection (connection closed)"
_REPLACED = (
    "replaced by a new process (ignored interrupts); its variables and actor state are lost",
    "replaced by new processes (ignored interrupts); their variables and actor state are lost",
)
"""Of one rank, and of several."""
_OF_SEVERAL: dict[str, str] = {one: several for one, several in (_REPLACED, _IN_COLLECTIVE, _CONNECTING)}


class StopReport:
    """How each rank was stopped, by its rank in the mesh.

    Args:
        endings: how the call ended, by rank.
        left: what each rank that still runs is doing.
        doomed: processes to replace.
    """

    def __init__(self, endings: dict[int, Ending], left: dict[int, str], doomed: list[str]) -> None:
        self._endings = endings
        self._freed: dict[int, Freed] = {}
        """The operations that freed ranks were waiting in."""
        self.left = left
        """The activity of each rank that still runs."""
        self.doomed = doomed
        self.cleaning: set[int] = set()
        """Ranks that still run and clean up."""
        self.notes: list[str] = []
        """Other calls that were stopped or continue."""
        self.died: dict[int, str] = {}
        """How ranks died of the interrupt, or before it."""
        self.waited: dict[int, str] = {}
        """The calls that ranks which had not begun were waiting for."""
        self.generation = 0
        """The newest generation of process groups that a rank reported before it was freed."""
        self.cut = False
        """Whether process groups were aborted; a rank that was in something else stays there."""
        self.timeout: float | None = None
        """The timeout that ran out, if that was the reason."""
        self.stuck = ""
        """Why the cell waited; empty if that is unknown."""
        self.apart = ""
        """In which models the ranks differ now; empty for none."""
        self.errors: dict[int, CellError] = {}
        """Errors from before the stop, by rank."""

    def note_freed(self, rank: int, freed: Freed) -> None:
        """Record that a rank was freed, unless something else ended it."""
        if self._endings.get(rank) in (Ending.INTERRUPTED, Ending.FREED):
            self._endings[rank] = Ending.INTERRUPTED if freed is Freed.NOTHING else Ending.FREED
            self._freed[rank] = freed

    def add(self, other: StopReport) -> None:
        """Add another stop of the same cell."""
        self._endings.update(other._endings)
        self._freed.update(other._freed)
        self.died.update(other.died)
        self.left.update(other.left)
        self.notes = list(dict.fromkeys([*self.notes, *other.notes]))
        self.stuck = self.stuck or other.stuck

    def end_also(self, freed: list[int]) -> None:
        """Note that the cell has ended on all ranks since; these were freed from a collective because of others."""
        for rank in self.ranks(Ending.LEFT):
            self._endings[rank] = Ending.INTERRUPTED
        self.left = {}
        others = [rank for rank in freed if rank not in self._endings]
        if others:
            self.notes.append(f"{describe_ranks(others)} waited for {_them(self._endings)} in a collective")

    def ranks(self, ending: Ending) -> list[int]:
        """Return the ranks with this ending."""
        return sorted(rank for rank, each in self._endings.items() if each is ending)

    def text(self) -> str:
        """Describe how each rank was stopped."""
        groups: dict[str, list[int]] = {}
        for rank, ending in sorted(self._endings.items(), key=lambda each: (each[1].value, each[0])):
            groups.setdefault(self._meaning(rank, ending), []).append(rank)
        parts = [
            f"{describe_ranks(ranks)}: {_plural(text) if len(ranks) > 1 else text}" for text, ranks in groups.items()
        ]
        head = f"stopped after {self.timeout:g} s" if self.timeout is not None else "stopped"
        if self._endings and all(each is Ending.LEFT for each in self._endings.values()):
            head = "not stopped yet"
        text = f"{head}: " + "; ".join([*(parts or ["nothing was running"]), *self.notes])
        return "\n".join(filter(None, [text, self.stuck, self.apart]))

    def outcome(self) -> str:
        """Describe in one line what became of the cell."""
        if not self.left:
            return (
                f"cell interrupted on {describe_ranks(sorted(self._endings))}" if self._endings else "cell interrupted"
            )
        left = describe_ranks(sorted(self.left))
        return f"the notebook no longer waits for the cell, which is still running on {left}"

    def _meaning(self, rank: int, ending: Ending) -> str:
        if ending is Ending.RESTARTED:
            return _REPLACED[0]
        if ending is Ending.LEFT:
            return self.left[rank]
        if rank in self.died:
            return f"{self.died[rank]} during the stop; variables are lost; %mesh heal starts new processes"
        if rank in self.waited:
            return self.waited[rank]
        if self._freed.get(rank) is Freed.COLLECTIVE:
            return _IN_COLLECTIVE[0]
        if self._freed.get(rank) is Freed.CONNECTION:
            return _CONNECTING[0]
        return "interrupted"


def _them(ranks: Collection[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _plural(text: str) -> str:
    """Return what a line says of several ranks."""
    return _OF_SEVERAL.get(text, text)


def activity_of_left(activity: Activity, thread_state: ThreadState | None, pid: int) -> str:
    """Describe what a rank that still runs is doing.

    Args:
        activity: as its stop knows it.
        thread_state: the thread state of the thread that runs the cell; None if the rank has not told.
        pid: the pid of the rank; 0 if it is unknown.
    """
    where = (
        f" ({thread_state.call} at line {thread_state.line})"
        if thread_state is not None and thread_state.call and thread_state.line
        else ""
    )
    if activity is Activity.CLEANING and thread_state is not None:
        what = "in its except or finally code" if thread_state.handles else "running, past its except code"
        at = f" at {thread_state.place}" if thread_state.place else ""
        return f"still {what}{at}; Stop again to abort it"
    if activity is Activity.PYTHON:
        return "still running; ignored each interrupt"
    if activity is Activity.WAITING:
        return f"waiting for a lock, a socket or another thread{where}, which interrupts cannot end"
    if activity is Activity.SUSPENDED:
        return f"suspended by a signal such as SIGSTOP; stops when resumed (kill -CONT {pid})"
    if activity is Activity.DEVICE:
        return "waiting in the OS kernel for a disk or device; stops when that wait ends"
    if activity is Activity.UNKNOWN:
        return "unresponsive, as is its host agent"
    if activity is Activity.SILENT:
        return "still inside a C call that holds the GIL; stops when it returns"
    return f"still inside a C call{where}; stops when it returns"

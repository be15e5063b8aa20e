"""Whether the kernel killed processes for lack of memory: it sends SIGKILL, and gives no reason."""

from __future__ import annotations

from contextlib import suppress

_COUNTS = "/proc/vmstat"


class OomWatch:
    """Counts kills of the OOM killer since the last check; on the whole machine, all containers."""

    def __init__(self, counts: str = _COUNTS) -> None:
        self._counts = counts
        self._seen = self._count()

    def _count(self) -> int:
        with suppress(OSError, ValueError), open(self._counts) as file:
            for line in file:
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
        return 0

    def has_struck(self) -> bool:
        """Return whether it has killed a process since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

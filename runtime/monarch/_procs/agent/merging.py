"""Messages of many hosts on their way to the program: one agent gathers them briefly, and sends equal output once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from monarch._procs.session_folder import host_of
from monarch._wire.messages import Dead, Merged, MergedOutput, Output, Ready, Received, Reports, Taken, decode, encode

WAIT = 0.05
"""Seconds for which a message waits for those of other hosts."""
_PIECE = 1 << 20
"""Bytes that are sent at once."""

_Key: TypeAlias = tuple[str, str, str, int, tuple[tuple[str, bytes], ...]]


def is_urgent(message: Any) -> bool:
    """Return whether a message does not wait for those of other hosts. An expected death is no news."""
    return not isinstance(message, (Output, Reports, Ready, Received)) and not (
        isinstance(message, Dead) and message.expected
    )


class OutputMerge:
    """Output of ranks, in the order of each rank; equal output of several ranks once."""

    def __init__(self) -> None:
        self._groups: list[tuple[_Key, dict[tuple[int, ...], list[str]]]] = []
        """Output, and the ranks that printed it by their offsets."""
        self._newest: dict[_Key, int] = {}
        """Where the newest group of some output is."""
        self._last: dict[str, int] = {}
        """By proc, where its newest output is: later output of it follows."""

    def add(self, output: Output) -> None:
        """Add output of a rank, after all that was added of it before."""
        pieces = tuple((stream, data) for stream, _, data in output.pieces)
        key = output.actor, output.method, output.caller, output.port, pieces
        place = self._newest.get(key, -1)
        if place <= self._last.get(output.src, -1):
            place = self._newest[key] = len(self._groups)
            self._groups.append((key, {}))
        self._last[output.src] = place
        self._groups[place][1].setdefault(tuple(offset for _, offset, _ in output.pieces), []).append(output.src)

    def take(self) -> list[MergedOutput]:
        """Take out all output."""
        groups = self._groups
        self._groups, self._newest, self._last = [], {}, {}
        return [
            MergedOutput(*key[:4], list(key[4]), [(list(offsets), procs) for offsets, procs in members.items()])
            for key, members in groups
        ]


def outputs_of(merged: MergedOutput) -> Iterator[Output]:
    """Yield the output of each rank again."""
    for offsets, procs in merged.members:
        pieces = [(stream, offset, data) for (stream, data), offset in zip(merged.pieces, offsets, strict=True)]
        for proc in procs:
            yield Output(proc, merged.actor, merged.method, merged.caller, merged.port, pieces)


class Merging:
    """The messages that an agent merges for others and itself, until the program has taken them.

    Args:
        proc: id of the agent.
        later: runs a function after some seconds.
        count: returns the next number for a message of this agent to the program.
        post: sends frames to a process.
    """

    def __init__(
        self,
        proc: str,
        later: Callable[[float, Callable[[], None]], None],
        count: Callable[[], int],
        post: Callable[[str, list[Any]], object],
    ) -> None:
        self._proc = proc
        self._later = later
        self._count = count
        self._post = post
        self._dst = ""
        """The program that gets what waits."""
        self._outputs = OutputMerge()
        self._others: list[tuple[str, int, bytes]] = []
        self._size = 0
        self._counts = False
        """Whether somebody keeps something of what waits until it is taken."""
        self._waits = False
        """Whether the end of the wait is arranged."""
        self._numbers: dict[str, int] = {}
        """By agent, the number of its newest message that waits."""
        self._sent: deque[tuple[int, dict[str, int]]] = deque()
        """Numbers of messages that have not been taken, with the newest numbers of other agents in each."""
        self.before_deaths: Callable[[str], None] = lambda dst: None
        """Sends answers that wait for those of other hosts: a rank may have answered before it died. Set once."""

    def add(self, src: str, dst: str, number: int, body: bytes) -> None:
        """Take a message of an agent, as in Upward."""
        if dst != self._dst:
            self.flush()
            self._dst = dst
        message = decode(body) if body else None
        if isinstance(message, Dead) and not message.expected:
            self.before_deaths(dst)
        if isinstance(message, Output):
            self._outputs.add(message)
        elif body:
            self._others.append((host_of(src), number, body))
        if number:
            self._counts = True
            if src != self._proc:
                self._numbers[src] = number
        # An empty one counts too, so that it is confirmed.
        self._size += len(body) + 1
        if self._size > _PIECE or (message is not None and is_urgent(message)):
            self.flush()
        elif not self._waits:
            self._waits = True
            self._later(WAIT, self._due)

    def _due(self) -> None:
        self._waits = False
        self.flush()

    def flush(self) -> None:
        """Send what waits."""
        if not self._size:
            return
        others, numbers, number = self._others, self._numbers, self._count() if self._counts else 0
        self._others, self._numbers, self._size, self._counts = [], {}, 0, False
        if numbers:
            self._sent.append((number, numbers))
        self._post(self._dst, [encode(Merged(self._proc, number, self._outputs.take(), others))])

    def taken(self, number: int) -> None:
        """Tell other agents which of their messages have reached the program, as it has messages up to this number."""
        newest: dict[str, int] = {}
        while self._sent and self._sent[0][0] <= number:
            newest.update(self._sent.popleft()[1])
        for agent, last in newest.items():
            self._post(agent, [encode(Taken(self._proc, last))])

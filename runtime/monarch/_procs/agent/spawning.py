"""The agent's zygotes: which one forks a request, with which share of cores and GPUs for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from monarch._core.causes import NotStarted
from monarch._core.roster import split_proc
from monarch._procs.agent.children import Children
from monarch._procs.agent.cpu_shares import affinity_plan, threads_plan
from monarch._procs.agent.gpu_shares import GpuShares, variables
from monarch._procs.agent.zygotes import Forked, ForkFailed, RankSpec, Succeeded, Zygote, ZygoteGone, ZygoteReady
from monarch._procs.os.gpus import visible_gpus
from monarch._procs.os.orphans import can_mark
from monarch._procs.zygote.load_time import needs_cold_zygote
from monarch._wire.descriptors import AGENT_NEED, RESERVE, limit_of, remedy, reserve
from monarch._wire.messages import Dead, Spawn
from monarch.config import ISOLATE_GPUS, is_on

_SPARE_AFTER = 0.2
"""Seconds until a zygote forks a spare: not while the ranks of a first mesh may be requested."""
_COLD = 3
"""How many zygotes with an environment of their own are kept for reuse; each has torch in its memory."""


class _Request(NamedTuple):
    """A request to a zygote."""

    spawn: Spawn
    zygote: Zygote
    ranks: list[RankSpec]
    fds: list[tuple[int, int]]
    again: bool = False
    """Whether another zygote was asked before, and died."""


def lack_of_descriptors(count: int) -> str:
    """Return why an agent cannot start so many procs; empty if it can."""
    need, free = AGENT_NEED * count, reserve.free() - RESERVE
    if need <= free:
        return ""
    return (
        f"the host agent needs {need} more file descriptors for {count} "
        f"processes, but only {max(0, free)} of its {limit_of()} are free; raise the limit there before the "
        f"agent starts: {remedy(limit_of() - free + need)}"
    )


class Forks:
    """Forks under way.

    Args:
        preload: modules that a zygote imports before it forks.
        later: modules that the usual zygote's successor imports.
        folder: session folder.
        controller: its pid and start time, so that the last process can clean up after it.
        died: called for ranks that could not be started.
        call_later: schedules a function after so many seconds.
        zygote: the usual one, if it already exists.
    """

    def __init__(
        self,
        preload: list[str],
        later: list[str],
        folder: str,
        controller: tuple[int, int],
        died: Callable[[Dead], None],
        call_later: Callable[[float, Callable[[], None]], None],
        zygote: Zygote | None = None,
    ) -> None:
        self._preload = preload
        self._later = later
        self._folder = folder
        self._controller = controller
        self._died = died
        self._zygotes: dict[tuple[tuple[str, str | None], ...], Zygote] = {}
        self._waiting: dict[int, _Request] = {}
        self._token = 0
        self._call_later = call_later
        self._spare: Zygote | None = None
        """Replaces the usual zygote if it dies. Without a pid, it is being forked."""
        self._spare_token = 0
        self.gpus = GpuShares()
        # The usual one warms up before the first request.
        if zygote is None:
            self._zygote({})
        else:
            self._zygotes[()] = zygote

    def _zygote(self, env: dict[str, str | None]) -> Zygote:
        key = tuple(sorted(env.items()))
        zygote = self._zygotes.pop(key, None)
        if zygote is None:
            self._make_room()
            zygote = Zygote(
                preload=self._preload,
                env=env or None,
                session_dir=self._folder,
                controller=self._controller,
                later=[] if env else self._later,
            )
        # In order of use.
        self._zygotes[key] = zygote
        return zygote

    def _make_room(self) -> None:
        """End the least recently used zygote with an environment of its own, if there are many."""
        busy = {id(request.zygote) for request in self._waiting.values()}
        idle = [key for key, zygote in self._zygotes.items() if key and id(zygote) not in busy]
        if len(self._zygotes) > _COLD and idle:
            self._zygotes.pop(idle[0]).close()

    def spawn(self, spawn: Spawn, fds: list[tuple[int, int]]) -> None:
        """Fork the ranks of a request."""
        zygote = self._zygote(needs_cold_zygote(spawn.env))
        count = spawn.count
        cores = sorted(os.sched_getaffinity(0))
        shares = spawn.binds or (list(affinity_plan(count, cores)) if count <= len(cores) else [None] * count)
        ranks: list[RankSpec] = []
        for proc, place in zip(spawn.procs, spawn.places, strict=True):
            index = place % count
            env = {**spawn.base_env, **self._gpus_for(spawn, index), **spawn.env}
            share = shares[index]
            ranks.append(
                RankSpec(
                    env=env,
                    affinity=share,
                    threads=len(share) if share else threads_plan(count, cores),
                    config=_with_place(spawn.config, proc, place, self._folder),
                    title=f"{spawn.title}[{place}]"[:15],
                    path=spawn.path,
                    cwd=spawn.cwd,
                    # Linux shares its time between sessions first. With many busy threads in one, others can starve.
                    # Without a marker, what a rank leaves behind is found by the session that it shares with its agent.
                    leads=can_mark(),
                )
            )
        self._token += 1
        self._waiting[self._token] = _Request(spawn, zygote, ranks, fds)
        zygote.fork(self._token, spawn.entry, ranks, fds)

    def _gpus_for(self, spawn: Spawn, index: int) -> dict[str, str]:
        """Return the environment variables for the GPUs of a rank; none if the user has chosen them."""
        names = visible_gpus({key: value for key, value in (os.environ | spawn.base_env).items() if value is not None})
        if not names or "CUDA_VISIBLE_DEVICES" in spawn.env:
            return {}
        order = self.gpus.order(split_proc(spawn.procs[0])[0], spawn.title, names, spawn.count)
        return variables(order, names, index, is_on((spawn.base_env | spawn.env).get(ISOLATE_GPUS.variable)))

    def busy(self) -> bool:
        """Return whether forks are under way, so that unknown pids may end."""
        return bool(self._waiting or (self._spare is not None and not self._spare.pid))

    def filenos(self) -> list[int]:
        """Return the descriptors to poll."""
        return [zygote.fileno() for zygote in self._zygotes.values()]

    def wants_write(self, fd: int) -> bool:
        """Return whether a zygote has not taken all of a request yet."""
        return any(zygote.fileno() == fd and zygote.wants_write() for zygote in self._zygotes.values())

    def ended(self, pid: int, status: int) -> bool:
        """Return whether an ended child process was a zygote in use, or the spare.

        Those of earlier are not remembered: once they have ended, ranks may get their pids.
        """
        for zygote in self._zygotes.values():
            if zygote.pid == pid:
                zygote.note_exit(os.waitstatus_to_exitcode(status))
                return True
        if self._spare is None or self._spare.pid != pid:
            return False
        self._drop_spare()
        self._call_later(_SPARE_AFTER, self._have_spare)
        return True

    def _have_spare(self) -> None:
        """Have the usual zygote fork a spare, unless it has one."""
        zygote = self._zygotes.get(())
        if zygote is not None and self._spare is None:
            self._token += 1
            self._spare_token = self._token
            self._spare = zygote.spare(self._token)

    def _drop_spare(self) -> None:
        """End the spare; one that is being forked ends by itself, as its socket is closed."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def _succeed(self) -> None:
        """Replace the usual zygote, which has died, by its spare or by a new one, which takes an import."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.pid:
            self._zygotes[()] = spare
            self._call_later(_SPARE_AFTER, self._have_spare)
        elif spare is not None:
            spare.close()

    def work(self, children: Children) -> None:
        """Handle the messages of the zygotes."""
        for key, zygote in list(self._zygotes.items()):
            if zygote.wants_write():
                with suppress(OSError):
                    zygote.flush()
            lost: list[tuple[int, _Request]] = []
            for event in zygote.receive():
                if isinstance(event, Succeeded):
                    # The existing one has imported less.
                    self._drop_spare()
                    self._call_later(_SPARE_AFTER, self._have_spare)
                elif isinstance(event, (Forked, ForkFailed)) and event.token not in self._waiting:
                    self._spare_forked(children, event)
                elif isinstance(event, Forked):
                    spawn = self._waiting.pop(event.token).spawn
                    for proc, pid in zip(spawn.procs, event.pids, strict=True):
                        self._note(children.started(proc, pid))
                elif isinstance(event, ForkFailed):
                    request = self._waiting.pop(event.token)
                    if event.lost and not key and not request.again:
                        lost.append((event.token, request))
                    else:
                        self._failed(children, request.spawn, event.reason, event.pids)
                elif isinstance(event, ZygoteGone):
                    zygote.close()
                    self._zygotes.pop(key, None)
                    if not key:
                        self._succeed()
                    for token, request in lost:
                        self._repeat(children, token, request, event.reason)
                else:
                    assert isinstance(event, ZygoteReady)
                    if not key:
                        self._call_later(_SPARE_AFTER, self._have_spare)

    def _repeat(self, children: Children, token: int, request: _Request, reason: str) -> None:
        """Ask the spare once for what killed the zygote."""
        zygote = self._zygotes.get(())
        if zygote is None:
            self._failed(children, request.spawn, reason, [])
            return
        self._waiting[token] = _Request(request.spawn, zygote, request.ranks, request.fds, again=True)
        zygote.fork(token, request.spawn.entry, request.ranks, request.fds)

    def _spare_forked(self, children: Children, event: Forked | ForkFailed) -> None:
        spare = self._spare if event.token == self._spare_token else None
        # One that has ended by now has been reaped as an unknown process.
        ended = [pid for pid in event.pids if children.take_early(pid)]
        if spare is not None and isinstance(event, Forked) and not ended:
            (spare.pid,) = event.pids
            return
        # It is no longer needed, or could not be forked: its socket has no other end.
        if spare is not None:
            spare.close()
            self._spare = None
        if ended:
            self._call_later(_SPARE_AFTER, self._have_spare)

    def _failed(self, children: Children, spawn: Spawn, reason: str, pids: list[int]) -> None:
        for proc, pid in zip(spawn.procs, pids, strict=False):
            child = children.by_proc.get(proc)
            if child is not None:
                child.kill(NotStarted(reason))
            self._note(children.started(proc, pid))
        for proc in spawn.procs[len(pids) :]:
            self._note(children.failed(proc, NotStarted(reason)))

    def _note(self, dead: Dead | None) -> None:
        if dead is not None:
            self._died(dead)

    def close(self) -> None:
        """End the zygotes."""
        self._drop_spare()
        for zygote in self._zygotes.values():
            zygote.close()


def _with_place(config: bytes, proc: str, place: int, folder: str) -> bytes:
    """Return the config of one rank: its proc id, place and folder before the common part."""
    return b"\0".join([proc.encode(), str(place).encode(), folder.encode(), config])

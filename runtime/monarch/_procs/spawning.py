"""The agent's zygotes: which one forks a request, with which share of cores and GPUs for each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from monarch._procs.children import Children
from monarch._procs.gpus import visible_gpus
from monarch._procs.shares import affinity_plan, needs_cold_zygote, threads_plan
from monarch._procs.zygotes import Failed, Forked, Gone, RankSpec, Ready, Succeeded, Zygote
from monarch._wire.messages import Dead, Spawn

_COLD = 3
"""Zygotes with an environment of their own that are kept for another use; each has torch in its memory."""


class Forks:
    """Forks under way.

    Args:
        preload: modules that a zygote imports before it forks.
        later: modules that the usual zygote's successor imports.
        folder: session folder.
        controller: its pid and start time, for the last one to clean up after.
        died: told of ranks that could not be started.
    """

    def __init__(
        self,
        preload: list[str],
        later: list[str],
        folder: str,
        controller: tuple[int, int],
        died: Callable[[Dead], None],
    ) -> None:
        self._preload = preload
        self._later = later
        self._folder = folder
        self._controller = controller
        self._died = died
        self._zygotes: dict[tuple[tuple[str, str | None], ...], Zygote] = {}
        self._waiting: dict[int, tuple[Spawn, Zygote]] = {}
        self._ended: set[int] = set()
        self._token = 0
        # The usual one warms up while nobody has asked yet.
        self._zygote({})

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
        # Kept in the order of use.
        self._zygotes[key] = zygote
        return zygote

    def _make_room(self) -> None:
        """Ends the zygote with an environment of its own that was not used for longest, if there are many."""
        busy = {id(zygote) for _, zygote in self._waiting.values()}
        idle = [key for key, zygote in self._zygotes.items() if key and id(zygote) not in busy]
        if len(self._zygotes) > _COLD and idle:
            zygote = self._zygotes.pop(idle[0])
            self._ended.add(zygote.pid)
            zygote.close()

    def spawn(self, spawn: Spawn, fds: list[tuple[int, int]]) -> None:
        """Has the ranks of a request forked."""
        zygote = self._zygote(needs_cold_zygote(spawn.env))
        count = spawn.count
        cores = sorted(os.sched_getaffinity(0))
        shares = spawn.binds or (list(affinity_plan(count, cores)) if count <= len(cores) else [None] * count)
        gpus = visible_gpus()
        ranks: list[RankSpec] = []
        for proc, place in zip(spawn.procs, spawn.places, strict=True):
            index = place % count
            env = {**spawn.base_env, **spawn.env}
            if gpus:
                env.setdefault("CUDA_VISIBLE_DEVICES", gpus[index % len(gpus)])
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
                )
            )
        self._token += 1
        self._waiting[self._token] = (spawn, zygote)
        zygote.fork(self._token, spawn.entry, ranks, fds)

    def busy(self) -> bool:
        """Whether forks are under way, so that pids may be met that are not known yet."""
        return bool(self._waiting)

    def filenos(self) -> list[int]:
        """What to poll."""
        return [zygote.fileno() for zygote in self._zygotes.values()]

    def wants_write(self, fd: int) -> bool:
        """Whether a zygote has not taken all of a request yet."""
        return any(zygote.fileno() == fd and zygote.wants_write() for zygote in self._zygotes.values())

    def ended(self, pid: int, status: int) -> bool:
        """Whether a child process that has ended was a zygote."""
        for zygote in self._zygotes.values():
            if zygote.pid == pid:
                zygote.note_exit(os.waitstatus_to_exitcode(status))
                return True
        return pid in self._ended

    def work(self, children: Children) -> None:
        """Takes what the zygotes have to say."""
        for key, zygote in list(self._zygotes.items()):
            if zygote.wants_write():
                with suppress(OSError):
                    zygote.flush()
            before = zygote.pid
            for event in zygote.receive():
                if isinstance(event, Succeeded):
                    self._ended.add(before)
                elif isinstance(event, Forked):
                    spawn, _ = self._waiting.pop(event.token)
                    for proc, pid in zip(spawn.procs, event.pids, strict=True):
                        self._note(children.started(proc, pid))
                elif isinstance(event, Failed):
                    spawn, _ = self._waiting.pop(event.token)
                    self._failed(children, spawn, event.reason, event.pids)
                elif isinstance(event, Gone):
                    self._ended.add(zygote.pid)
                    zygote.close()
                    self._zygotes.pop(key, None)
                    for token, (spawn, its) in list(self._waiting.items()):
                        if its is zygote:
                            del self._waiting[token]
                            self._failed(children, spawn, f"the process that was to fork it died: {event.reason}", [])
                else:
                    assert isinstance(event, Ready)

    def _failed(self, children: Children, spawn: Spawn, reason: str, pids: list[int]) -> None:
        for proc, pid in zip(spawn.procs, pids, strict=False):
            child = children.by_proc.get(proc)
            if child is not None:
                child.kill(f"could not be started: {reason}")
            self._note(children.started(proc, pid))
        for proc in spawn.procs[len(pids) :]:
            self._note(children.failed(proc, f"could not be started: {reason}"))

    def _note(self, dead: Dead | None) -> None:
        if dead is not None:
            self._died(dead)

    def close(self) -> None:
        """Ends the zygotes."""
        for zygote in self._zygotes.values():
            zygote.close()


def _with_place(config: bytes, proc: str, place: int, folder: str) -> bytes:
    """The config of one rank: its proc id, place and folder in front of what is common to all."""
    return b"\0".join([proc.encode(), str(place).encode(), folder.encode(), config])

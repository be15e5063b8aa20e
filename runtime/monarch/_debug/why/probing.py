"""The service of a rank that tells what its running calls do. Nothing runs for it while nobody asks."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

from monarch._actors.mailbox import Mailbox
from monarch._actors.pausing.gate import gate
from monarch._actors.pausing.tasks import awaiting, task_of
from monarch._actors.table import actors_of
from monarch._core.diagnosis.facts import FORMING, Doing, Entered, Kind, RankFacts, Target
from monarch._core.position import Frame
from monarch._core.roster import split_proc
from monarch._debug.frames import described, users_frames
from monarch._debug.why.child_places import child_places
from monarch._debug.why.threads import ThreadActivity, collective_beside, look_at
from monarch._groups.convening import ensure_world
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch._node.future import Future
from monarch._node.services.registry import service
from monarch._procs.os.blocked import cpu_of_family
from monarch._procs.os.children import family_runs
from monarch._python.frames import frame_of
from monarch._supervision.freeing import thread_of
from monarch._telemetry.sampler import still
from monarch._wire.messages import Call

_GET: CodeType = Future[Any].get.__code__
_ENSURE: CodeType = ensure_world.__code__
_ORDER = "take locks in the same order in all threads"
_FRAMES = 4
"""Most frames of a call that are told."""
_DEPTH = 60
_BY_THREADS = frozenset({Kind.THREAD, Kind.EVENT, Kind.QUEUE, Kind.LOCK})
"""Kinds of waits that another thread of the rank ends."""
_BY_CHILDREN = frozenset({Kind.CHILD, Kind.PIPE, Kind.QUEUE, Kind.LOCK, Kind.EVENT, Kind.SOCKET})
"""Kinds of waits that a child process may end."""
_FORGET = 30.0
"""Seconds without a look after which the last one is too old to compare with."""
_LASTING = 1.0
"""Seconds of a wait from which on torch's record of collectives is read, which takes up to 0.1 s."""
_RECENT = 0.2
"""Least seconds between two looks that are compared."""


class _Memory:
    """The results of the last look. Guarded by ``lock``, which is held for single operations only."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.first: dict[tuple[int, int, str], tuple[object, float]] = {}
        """By thread, task and actor: what it did, and when that was first seen."""
        self.cpu = 0.0, 0.0
        """When CPU time was last read, and what it was."""
        self.cores = -1.0
        self.ran: tuple[bool, bool] = False, False
        """Whether a child process ran or a disk was written, at the look before and at the last one."""
        self.recorded: tuple[object, Entered | None] = None, None
        """The last wait for a Work, and what torch has recorded of it."""


_memory = _Memory()


@service("why.facts", "probe")
def facts() -> RankFacts:
    """Service: return what the running calls of this rank do."""
    node = current_node()
    cores = _cores()
    doings = [doing for mailbox in list(actors_of(node).here.values()) for doing in _doings(mailbox, node.rank, cores)]
    return RankFacts(node.rank, tuple(doings), tuple(_counts()), split_proc(node.proc)[0])


def _doings(mailbox: Mailbox, rank: int, cores: float) -> Iterator[Doing]:
    tasks = list(mailbox.turns.tasks.items())
    loop = mailbox.executor.loop
    running = asyncio.current_task(loop) if loop is not None else None
    ident = thread_of(mailbox)
    for task, call in tasks:
        if task is running:
            yield _of_thread(mailbox, call, rank, ident, cores)
        else:
            yield _of_task(mailbox, call, task, ident, cores)
    call = mailbox.running
    if call is not None and not tasks:
        yield _of_thread(mailbox, call, rank, ident, cores)


def _of_thread(mailbox: Mailbox, call: Call, rank: int, ident: int, cores: float) -> Doing:
    paused = gate.paused_in(ident)
    if paused is not None:
        stop = gate.stop
        look = ThreadActivity(Kind.PAUSED, stop.text if stop is not None else "")
        return _doing(mailbox, call, ident, look, _described(users_frames(paused)), cores)
    frame = frame_of(ident)
    future = _awaited(frame)
    if future is not None and _forms(frame):
        look = ThreadActivity(Kind.COLLECTIVE, "", _forming())
        return _doing(mailbox, call, ident, look, _described(users_frames(frame)), cores)
    if future is not None:
        look = ThreadActivity(Kind.FUTURE, future.label)
        return _doing(mailbox, call, ident, look, _described(users_frames(frame)), cores, 0, [future])
    task = task_of(frame)
    if task is not None:
        frames, name = awaiting(task)
        callers = [*frames, *users_frames(frame)]
        return _doing(mailbox, call, ident, *_or_beside(ThreadActivity(Kind.ASYNC, name), callers, ident, rank), cores)
    look = look_at(ident, rank)
    if look.kind in _BY_THREADS:
        return _doing(mailbox, call, ident, *_or_beside(look, users_frames(frame_of(ident)), ident, rank), cores)
    if look.kind is Kind.SLEEP or look.kind is Kind.PYTHON:
        # It may have continued meanwhile.
        frame = frame_of(ident)
    return _doing(mailbox, call, ident, look, _described(users_frames(frame)), cores)


def _or_beside(
    look: ThreadActivity, frames: list[FrameType], ident: int, rank: int
) -> tuple[ThreadActivity, tuple[Frame, ...]]:
    """Return the collective that another thread is in, which may be what a thread waits for, or else that wait."""
    found = collective_beside(ident, rank)
    if found is None:
        return look, _described(frames)
    return found[0], _described([*found[1], *frames])


def _of_task(mailbox: Mailbox, call: Call, task: asyncio.Task[Any], ident: int, cores: float) -> Doing:
    frames, name = awaiting(task)
    awaits = mailbox.awaits
    futures = awaits.waited() if awaits is not None and mailbox.turns.call is call else []
    look = ThreadActivity(Kind.FUTURE, futures[0].label) if futures else ThreadActivity(Kind.ASYNC, name)
    return _doing(mailbox, call, ident, look, _described(frames), cores, id(task), futures)


def _doing(
    mailbox: Mailbox,
    call: Call,
    ident: int,
    look: ThreadActivity,
    frames: tuple[Frame, ...],
    cores: float,
    task: int = 0,
    futures: Iterable[Future[Any]] = (),
) -> Doing:
    entered = look.entered
    what = (id(call), look.kind, frames[:1], entered and (entered.operation, entered.group, entered.number))
    seconds = _seconds((ident, task, mailbox.key), what, look)
    if look.kind is Kind.PAUSED:
        seconds = max(0.0, time.time() - gate.since)
    elif mailbox.running is call:
        # Nothing lasts longer than the call.
        seconds = min(seconds, max(0.0, time.monotonic() - mailbox.since))
    if entered is not None and look.is_work and seconds >= _LASTING:
        entered = _recorded(what, entered)
    title = (
        "" if _is_cell(mailbox) else f"{mailbox.spec.name if mailbox.spec is not None else mailbox.key}.{call.method}()"
    )
    targets = tuple(_targets(futures))
    advice = look.advice or (_ORDER if look.is_deadlock else "")
    # Such as item() of a tensor waits for the GPU in C.
    issued = tuple(_issued()) if look.kind in (Kind.GPU, Kind.C_CODE) else ()
    children = child_places() if look.kind in _BY_CHILDREN else ()
    return Doing(
        look.kind, look.what, frames, seconds, cores, mailbox.key, title, entered, targets, advice, look.is_deadlock,
        issued, children, look.holders,
    )  # fmt: skip


def _issued() -> list[Entered]:
    if "monarch._tensors.collectives.nccl" not in sys.modules:
        return []
    from monarch._tensors.collectives.nccl import issued

    return issued()


def _recorded(what: object, entered: Entered) -> Entered:
    """Return what torch has recorded of a wait for a Work, read once for each wait."""
    from monarch._tensors.collectives.recorded import awaited

    with _memory.lock:
        known, found = _memory.recorded
    if known != what or found is None:
        found = awaited(entered)
        with _memory.lock:
            _memory.recorded = what, found
    return found


def _is_cell(mailbox: Mailbox) -> bool:
    """Return whether an actor runs the cells of a notebook."""
    return mailbox.spec is None or mailbox.spec.cls.__module__.startswith("monarch.")


def _seconds(key: tuple[int, int, str], what: object, look: ThreadActivity) -> float:
    """Return how long a call has certainly done the same."""
    now = time.monotonic()
    with _memory.lock:
        before, first = _memory.first.get(key, (None, now))
        if before != what:
            first = now
        if len(_memory.first) > 1000:
            _memory.first.clear()
        _memory.first[key] = what, first
    # A thread that has not run since then is still in the same wait.
    unmoved = still.get(key[0], math.inf) if look.kind is not Kind.ASYNC else math.inf
    return max(0.0, now - min(first, unmoved))


def _targets(futures: Iterable[Future[Any]]) -> Iterator[Target]:
    for future in futures:
        actor: Any = getattr(future, "actor", "")
        waits_for: Any = getattr(future, "waits_for", None)
        for peer in waits_for() if waits_for is not None and type(actor) is str else ():
            uid, rank = split_proc(peer.proc)
            yield Target(uid, rank, actor)


def _awaited(frame: FrameType | None) -> Future[Any] | None:
    """Return the future whose ``get`` a thread is in."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_code is _GET:
            found: Any = frame.f_locals.get("self")
            return found
        frame = frame.f_back
    return None


def _forms(frame: FrameType | None) -> bool:
    """Return whether a thread waits for the default group to be formed."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code is _ENSURE:
            return True
        frame = frame.f_back
    return False


def _forming() -> Entered:
    members = range(local_rendezvous().procs().region().nelements)
    return Entered(FORMING, FORMING, tuple(members), True, 0)


def _described(frames: list[FrameType]) -> tuple[Frame, ...]:
    # Libraries generate code as well, which has no file.
    with_file = [frame for frame in frames if not frame.f_code.co_filename.startswith(("<string>", "<frozen"))]
    return tuple(described(frame) for frame in (with_file or frames)[:_FRAMES])


def _cores() -> float:
    """Return the CPU cores that this process and its children have used since the last look; negative if unknown.

    It is at least one if a child process runs or a disk is written now, or was at the last look: between two compilers,
    none does.
    """
    now, used, runs = time.monotonic(), cpu_of_family(), family_runs()
    with _memory.lock:
        begun, before = _memory.cpu
        if now - begun >= _RECENT:
            _memory.cores = (used - before) / (now - begun) if 0 < now - begun < _FORGET else -1.0
            _memory.cpu = now, used
            _memory.ran = _memory.ran[1], runs
        return max(_memory.cores, 1.0) if runs or any(_memory.ran) else _memory.cores


def _counts() -> list[tuple[str, int]]:
    if "monarch._tensors.collectives.world" not in sys.modules:
        return []
    from monarch._tensors.collectives.world import counts

    return [(name, number) for name, (_, number) in counts().items()]

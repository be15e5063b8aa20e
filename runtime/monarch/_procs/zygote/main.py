"""The zygote: imports modules, then forks ranks on request.

Run as ``python -m monarch._procs.zygote.main <fd>`` by the host agent, with one end of a SOCK_SEQPACKET pair. It has no
thread, no ZeroMQ context and no CUDA state, because a fork copies none of these in a usable form.

A request goes to one fork, the fork helper, which forks the ranks, tells the agent their pids, and ends; with that the
ranks become children of the agent, which gets their exit statuses. A rank begins once the agent has been told of all
ranks of its request; if the helper fails, its ranks end by themselves. So the death of the zygote at any time neither
ends a rank nor leaves an unknown one.

When there was no request for a while, a fork of it imports more and takes its place; see ``successor``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Container
from pathlib import Path

import msgspec

from monarch._procs.os import posix
from monarch._procs.os.gpus import has_touched_gpus
from monarch._procs.os.orphans import end_orphans_in_time, is_tracker, unmark
from monarch._procs.session_folder import remove_folder, sweep
from monarch._procs.zygote import fork as forks
from monarch._procs.zygote import successor as succession
from monarch._wire.accepting import tolerate_full_table

# The kernel allows 253 descriptors in a message.
FDS_A_PACKET = 250
MORE, LAST = b"+", b"."
_PACKET = 1 << 16
# A controller that is killed together with its agent may be the second to die.
_CONTROLLER_GRACE = 1.0
# Others that were killed with it; cleaners wait for each other, too.
_LAST_DEATHS = 0.3
_SPARE = "monarch-spare"
"""Name of a spare zygote, see ``stand_by``."""
_IDLE = 0.5
"""Idle seconds until a successor is prepared."""


class Setup(msgspec.Struct, tag=True):
    """The first message to a zygote."""

    agent: int
    """Pid of the host agent."""
    controller: tuple[int, int]
    """Pid and start time of the controller; zeros if it is on another host."""
    session_dir: str
    preload: list[str]
    restore: dict[str, str | None]
    """Variables set for the imports only, and their values after that; None for unset."""
    later: list[str] = []
    """Modules that a successor imports when there is time."""
    title: str = "monarch-zygote"
    """Name in ``ps`` and ``top``."""


class ForkRequest(msgspec.Struct, tag=True):
    """Fork a rank for each of ``ranks``. Descriptors that come with it: this text, then two for each rank."""

    token: int
    entry: str
    ranks: list[forks.RankSpec]


class ZygoteReady(msgspec.Struct, tag=True, frozen=True):
    """The imports are done; requests are answered from now on."""

    problems: list[str]
    """Modules that raised during import, with tracebacks, and leftover threads."""
    fit: bool = True
    """Whether its forks are fully functional: it has neither threads nor GPUs open."""


class Succeeded(msgspec.Struct, tag=True, frozen=True):
    """Another process is the zygote now, as a child of the agent; the previous one has ended."""

    pid: int


class Forked(msgspec.Struct, tag=True, frozen=True):
    """The ranks of a request exist; they are, or will be in a moment, children of the agent."""

    token: int
    pids: list[int]


class ForkFailed(msgspec.Struct, tag=True, frozen=True):
    """A request failed. The ranks in ``pids`` had been forked; they end without running their entry."""

    token: int
    reason: str
    pids: list[int]
    lost: bool = False
    """Whether the zygote died without an answer: then none of its ranks has begun, nor will."""


_decoder = msgspec.msgpack.Decoder(Setup | ForkRequest)


def main(fd: int) -> int:
    """Serve the agent at the other end of ``fd`` until it closes its end."""
    # First of all: until the imports are done, nobody checks the socket for its end.
    posix.set_pdeathsig(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # sys.path begins with the folder that `-m` was run in, the root, where there is nothing to import.
    if sys.path and sys.path[0] in ("", os.sep):
        del sys.path[0]
    agent = socket.socket(fileno=fd)
    received = _receive(agent)
    if received is None or not isinstance(received[0], Setup):
        return 1
    setup = received[0]
    _close_all(received[1])

    def end(*_: object) -> None:
        if os.getppid() != setup.agent:
            _farewell(setup)
        os._exit(1)

    # From here on there is a session to clean up after, which takes code.
    signal.signal(signal.SIGTERM, end)
    posix.set_pdeathsig(signal.SIGTERM)
    if os.getppid() != setup.agent:
        end()
    posix.set_comm(setup.title)
    during = {key: os.environ[key] for key in setup.restore if key in os.environ}
    ready = _preload(setup)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    posix.set_pdeathsig(0)
    if not _send(agent, ready):
        _farewell(setup)
        return 0
    _reign(agent, setup, during)
    _farewell(setup)
    return 0


def _reign(agent: socket.socket, setup: Setup, during: dict[str, str]) -> None:
    """Serve until the agent has closed its end, in this process or in a successor, which returns from here too."""
    later, successor = setup.later, None
    while True:
        watched = [agent.fileno(), *([successor.done] if successor is not None else [])]
        ready, _, _ = select.select(watched, [], [], _IDLE if later else None)
        if agent.fileno() in ready:
            received = _receive(agent)
            if received is None:
                return
            request, fds = received
            if isinstance(request, ForkRequest):
                _serve(agent, setup.agent, request, fds)
            _close_all(fds)
        elif successor is not None and ready:
            if successor.hand_over():
                os._exit(0)
            successor = None
        elif not ready and (turn := succession.take_turn()) is not None:
            pid, modules, later = os.getpid(), later, []
            successor = succession.begin(modules, during, setup.title, turn)
            if os.getpid() != pid and not _send(agent, Succeeded(os.getpid())):
                return


def stand_by(config: bytes) -> int:
    """Entry point of a spare zygote, which is forked like a rank: it serves from its first request.

    Its standard output is the socket to the agent.

    Args:
        config: its Setup.
    """
    setup = _decoder.decode(config)
    assert isinstance(setup, Setup)
    posix.set_pdeathsig(0)
    unmark()
    agent = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    gc.disable()
    # Even if it is never used: with the agent dead, it may be the last one to clean up.
    select.select([agent], [], [])
    posix.set_comm(setup.title)
    _reign(agent, setup, {})
    _farewell(setup)
    return 0


def _preload(setup: Setup) -> ZygoteReady:
    """Import what the ranks will need, and prepare memory for sharing with them."""
    problems: list[str] = []
    # While ranks wait for the imports, a tenth of their time would go into collections, which find next to nothing.
    gc.disable()
    for name in setup.preload:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing and (name == missing or name.startswith(missing + ".")):
                # Not installed: the ranks do without, or report it when they need it.
                continue
            problems.append(f"import of {name} failed\n{traceback.format_exc().rstrip()}")
    for key, value in setup.restore.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    touched = has_touched_gpus()
    if (threads := posix.thread_count()) > 1:
        problems.append(f"the zygote has {threads} threads after its imports, and forks keep only one of them")
    if touched:
        problems.append("an import has initialized CUDA, so forked ranks cannot use the GPUs")
    for problem in problems:
        print(problem, file=sys.stderr, flush=True)
    # Ranks inherit it, and would each take milliseconds.
    tolerate_full_table()
    # A collection in a rank would write to every object, and a write unshares its page.
    gc.freeze()
    return ZygoteReady(problems, fit=threads == 1 and not touched)


def _serve(agent: socket.socket, agent_pid: int, request: ForkRequest, fds: list[int]) -> None:
    if len(fds) != 2 * len(request.ranks):
        # The kernel drops descriptors at the limit of open files.
        reason = f"{len(fds)} of {2 * len(request.ranks)} descriptors arrived; the open file limit may be too low"
        _send(agent, ForkFailed(request.token, reason, []))
        return
    try:
        fork_helper = os.fork()
    except OSError as error:
        _send(agent, ForkFailed(request.token, f"cannot fork: {error}", []))
        return
    if fork_helper == 0:
        status = 1
        try:
            _make_ranks(agent, agent_pid, request, fds)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(fork_helper, 0)
    if status != 0:
        code = os.waitstatus_to_exitcode(status)
        _send(agent, ForkFailed(request.token, f"the process that forks the ranks exited with code {code}", []))


def _make_ranks(agent: socket.socket, agent_pid: int, request: ForkRequest, fds: list[int]) -> None:
    """In the fork helper: fork the ranks, tell the agent, then release them."""
    reader, writer = os.pipe()
    origin = forks.ForkOrigin(agent_pid, os.getpid(), reader)
    pids: list[int] = []
    for rank, spec in enumerate(request.ranks):
        try:
            pid = os.fork()
        except OSError as error:
            done = f"cannot fork: {error}; {len(pids)} of {len(request.ranks)} ranks had been forked"
            _send(agent, ForkFailed(request.token, done, pids))
            return
        if pid == 0:
            # Its descriptor is closed with the others, and may be another file's when the object goes.
            agent.detach()
            forks.run_rank(origin, spec, request.entry, fds[2 * rank], fds[2 * rank + 1])
        pids.append(pid)
    # The agent is told first: it may get a rank's exit status as soon as this process has ended.
    if _send(agent, Forked(request.token, pids)):
        os.write(writer, bytes(len(pids)))


def _receive(agent: socket.socket) -> tuple[Setup | ForkRequest, list[int]] | None:
    """Return the next request and its descriptors; None when the agent has closed its end."""
    fds: list[int] = []
    while True:
        try:
            kind, more, _, _ = socket.recv_fds(agent, _PACKET, FDS_A_PACKET, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None
        fds += more
        if not kind:
            _close_all(fds)
            return None
        if kind == LAST:
            break
    text = fds.pop(0)
    try:
        return _decoder.decode(os.pread(text, os.fstat(text).st_size, 0)), fds
    finally:
        os.close(text)


def _send(agent: socket.socket, report: ZygoteReady | Succeeded | Forked | ForkFailed) -> bool:
    """Send to the agent; return whether it was still there."""
    try:
        agent.send(msgspec.msgpack.encode(report))
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _farewell(setup: Setup) -> None:
    """Clean up after a dead agent, and remove the session's folder if the controller has died too."""
    if not posix.await_new_parent(setup.agent, timeout=5.0):
        return
    # Spares clean up too. If two killed each other at this point, nobody would remove the folder.
    _end_session({setup.title, _SPARE})
    end_orphans_in_time()
    pid, start_time = setup.controller
    if setup.session_dir and not (pid and posix.outlives(pid, start_time, _CONTROLLER_GRACE)):
        with contextlib.suppress(OSError):
            # The group of a fork server, which may have been killed with them.
            sweep(Path(setup.session_dir).parent)
        remove_folder(setup.session_dir)
    # They end now by themselves, except those that are suspended.
    _end_session(())
    if setup.session_dir:
        base = Path(setup.session_dir).parent
        with contextlib.suppress(OSError):
            # Those killed with the agent may have been about to end at the first look.
            sweep(base, _LAST_DEATHS)
            base.rmdir()


def _end_session(spared: Container[str]) -> None:
    """Kill the ranks and their descendants, except those in a session of their own, and wait for their ends.

    Args:
        spared: titles of processes that continue.
    """
    own, session = os.getpid(), os.getsid(0)
    alive = True
    while alive:
        alive = False
        for name in os.listdir("/proc"):
            try:
                pid = int(name) if name.isdigit() else own
                if pid != own and os.getsid(pid) == session and not (is_tracker(pid) or _title_of(pid) in spared):
                    os.kill(pid, signal.SIGKILL)
                    alive = alive or posix.proc_start_time(pid) is not None
            except (ProcessLookupError, PermissionError):
                continue


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


if __name__ == "__main__":
    # Import it again by name, so that its classes do not exist twice.
    sys.exit(importlib.import_module("monarch._procs.zygote.main").main(int(sys.argv[1])))

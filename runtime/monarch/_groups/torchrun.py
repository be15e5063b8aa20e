"""Programs written for torchrun, run in ranks with the environment that torchrun would give them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import secrets
import sys
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from monarch._actors.running import current
from monarch._core.roster import Procs
from monarch._groups.breaking import retire_elsewhere
from monarch._groups.default_group import own_group
from monarch._groups.rendezvous import local_rendezvous
from monarch._node.current import current_node
from monarch._node.services.asking import ask_proc
from monarch._node.services.registry import service
from monarch._procs.os.helpers import as_helper
from monarch._procs.rank.exit_functions import at_end_of_program
from monarch._procs.rank.text_streams import restore
from monarch._python.sources import keep_source
from monarch.exceptions import ArgumentError, GroupError


class Meeting(NamedTuple):
    """The rendezvous of a program's ranks."""

    ranks: list[int]
    """Participating base ranks of the mesh; the first one is rank 0 of the program."""
    address: str
    port: int
    served: bool
    """Whether a store is already served there; otherwise rank 0 of the program makes one."""


class Script(NamedTuple):
    """A program to run."""

    path: str
    """Its file, or ``-m`` for a module."""
    arguments: list[str]
    source: str | None = None
    """Its text; None if it is read from the file."""


# The first rank


@service("torchrun.serve_meeting", "threaded")
def serve_meeting(clients: int) -> tuple[str, int]:
    """Service: serve a store for a program at a free port, and return its address for other hosts."""
    from monarch._tensors.collectives.interfaces import LOOPBACK
    from monarch._tensors.collectives.store import serve_store

    config = current_node().config
    assert config is not None
    address = config.addresses[current_node().rank // config.procs.per_host] if config.addresses else LOOPBACK
    store, port = serve_store(address, clients)
    _served[port] = store
    return address, port


@service("torchrun.serves", "quick")
def serves(port: int) -> bool:
    """Service: return whether this process serves a store at a port."""
    return port in _served


_served: dict[int, Any] = {}
"""Stores by port, which live as long as the process. Only added to, in single operations."""


def arrange(procs: Procs, ranks: Sequence[int]) -> Meeting:
    """Make the first of some ranks serve a store for them."""
    address, port = ask_proc(procs.proc(ranks[0]), serve_meeting, len(ranks)).get()
    return Meeting(list(ranks), address, port, True)


# All ranks


def variables_of(meeting: Meeting) -> dict[str, str]:
    """Return the environment that torchrun would give a program in this rank."""
    from monarch._tensors.collectives.world import JoinInfo, torchrun_variables

    node = current_node()
    config = node.config
    if config is None or node.rank not in meeting.ranks:
        raise GroupError("this process is not one of the ranks of the program")
    per_host = config.procs.per_host
    here = [rank for rank in meeting.ranks if rank // per_host == node.rank // per_host]
    rank, local = meeting.ranks.index(node.rank), here.index(node.rank)
    size, at = len(meeting.ranks), meeting.address
    place = JoinInfo(rank, size, local, len(here), at, meeting.port, at, "cpu")
    variables = torchrun_variables(place)
    if meeting.served:
        variables.update(
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
            TORCHELASTIC_RUN_ID=f"{meeting.address}:{meeting.port}",
        )
    return variables


@service("torchrun.set_variables", "threaded")
def set_variables(meeting: Meeting) -> None:
    """Service: set the environment, for programs that make their own process group."""
    from monarch._tensors.collectives.interfaces import choose_interface

    choose_interface(meeting.address)
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID"):
        os.environ.pop(name, None)
    os.environ.update(variables_of(meeting))


_orders: dict[str, tuple[Script, Meeting]] = {}
"""Programs by token. Each is put by the receiving thread and taken once, in single operations."""


@service("torchrun.take_order", "quick")
def take_order(token: str, script: Script, meeting: Meeting) -> None:
    """Service: store a program until ``run_order`` runs it."""
    _orders[token] = (Script(*script), Meeting(*meeting))


def run_order(token: str) -> None:
    """Run the program stored under a token."""
    run_script(*_orders.pop(token))


def new_token() -> str:
    """Return a name for an order."""
    return secrets.token_hex(4)


def run_script(script: Script, meeting: Meeting) -> None:
    """Run a program as ``__main__``, as torchrun would, in this thread.

    Its changes of the environment, ``sys.argv``, ``sys.path`` and standard descriptors are undone, its own functions of
    ``atexit`` run at its end, and a process group that it leaves ends.

    Raises:
        RuntimeError: the program exited with a nonzero code. Its other errors are raised as they are.
    """
    own = local_rendezvous()
    if own.has_default:
        own.leave()
        retire_elsewhere(own.generation)
    # Like torchrun, which does not bind processes to cores.
    with as_helper(), own_group(), _setting(script), _own_groups(), at_end_of_program():
        set_variables(meeting)
        try:
            if script.path == "-m":
                runpy.run_module(script.arguments[0], run_name="__main__", alter_sys=True)
            elif script.source is None:
                runpy.run_path(script.path, run_name="__main__")
            else:
                _run_source(script.path, script.source)
        except SystemExit as end:
            if end.code not in (None, 0):
                how = f"exited with code {end.code}" if isinstance(end.code, int) else f"exited: {end.code}"
                raise RuntimeError(f"{_title(script)} {how}") from None
        finally:
            restore()


def _run_source(path: str, source: str) -> None:
    """Run the source of a file that only the controller has, under its name."""
    keep_source(path, source)
    module = types.ModuleType("__main__")
    module.__file__ = path
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _setting(script: Script) -> Generator[None]:
    environment, arguments, path = dict(os.environ), sys.argv[:], sys.path[:]
    if script.path == "-m":
        spec = importlib.util.find_spec(script.arguments[0])
        sys.argv[:] = [spec.origin if spec and spec.origin else "-m", *script.arguments[1:]]
    else:
        sys.argv[:] = [script.path, *script.arguments]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script.path)))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = arguments, path
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)


@contextlib.contextmanager
def _own_groups() -> Generator[None]:
    """End the groups that a program leaves; its variables live until the call has ended, if it fails."""
    from monarch._tensors.collectives.program_groups import ProgramGroups

    config = current_node().config
    groups = ProgramGroups(config.addresses if config is not None else ())
    try:
        yield
    except BaseException:
        groups.cut()
        raise
    finally:
        _after_call(groups.release)
        groups.end()


def _after_call(action: Callable[[], None]) -> None:
    here = current.get()
    if here is not None:
        here[0].executor.post(action)


def _title(script: Script) -> str:
    return f"python -m {script.arguments[0]}" if script.path == "-m" else script.path


def script_of(words: Sequence[str], read: bool) -> Script:
    """Parse a command line: ``script.py ARGS`` or ``-m module ARGS``.

    Args:
        words: the command line.
        read: whether to read the file here, for ranks that may not see it.

    Raises:
        ArgumentError: the script is missing or unreadable.
    """
    if not words or (words[0] == "-m" and len(words) < 2):
        raise ArgumentError("expected a script and its arguments, as in train.py --steps 10, or -m and a module")
    if words[0] == "-m" or not read:
        return Script(words[0], list(words[1:]))
    path = os.path.abspath(words[0])
    try:
        with open(path, encoding="utf-8") as file:
            return Script(path, list(words[1:]), file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"cannot read script {words[0]!r}: {error}") from None

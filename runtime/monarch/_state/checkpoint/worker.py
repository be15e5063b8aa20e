"""The checkpoint worker of a rank: copy a state in the order of messages, and write it in the background."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from monarch._actors.ports import Port, answer
from monarch._node.current import current_node
from monarch._node.remote_errors import pack_failure
from monarch._node.services.registry import function_of, service
from monarch._procs.os.helpers import be_helper
from monarch._python.threads import spawn_thread
from monarch._state.contract import call_method
from monarch._state.ended import has_ended, note_end
from monarch._tensors.checkpoints.versions import NewVersion, find_version
from monarch._wire import messages as m
from monarch._wire.pickling import dumps
from monarch.exceptions import DeviceMeshError, MonarchError

if TYPE_CHECKING:
    from monarch._node.node import Node
    from monarch._tensors.checkpoints.files import StateCopy, WholePlan


class _Saving:
    """One checkpoint in one rank."""

    def __init__(self, conductor: str, copy: StateCopy) -> None:
        self.conductor = conductor
        self.copy = copy
        self.version: NewVersion | None = None
        """In the first rank: the parts of all ranks."""
        self.whole: WholePlan | None = None


class _Savings:
    """The part of a node with its unfinished checkpoints.

    Args:
        node: the node of this process.
    """

    def __init__(self, node: Node) -> None:
        self.open: dict[str, _Saving] = {}
        """By the token of the checkpoint; single operations only, which are atomic."""
        # Without its coordinator a checkpoint cannot end.
        node.events.proc_died.subscribe(self._died)

    def _died(self, proc: str) -> None:
        for token, saving in list(self.open.items()):
            if saving.conductor == proc:
                abandon(token)


def _open() -> dict[str, _Saving]:
    return current_node().part(_Savings).open


# In the actor


@service("checkpoint.stage", "actor")
def stage(actor: Any, conductor: str, token: str, state: str, args: tuple[Any, ...]) -> Any:
    """Copy the state of an actor, keep it until ``abandon`` unless that came first, and return its top-level names.

    Args:
        actor: the actor.
        conductor: proc id of the coordinator.
        token: the token of the checkpoint.
        state: a method of the actor, or a function as ``module:name`` that gets the actor.
        args: more arguments.
    """
    value = _call(actor, state, *args)
    if inspect.isawaitable(value):
        return _stage_awaited(value, conductor, token)
    return _keep(value, conductor, token)


async def _stage_awaited(state: Awaitable[Any], conductor: str, token: str) -> list[str]:
    return _keep(await state, conductor, token)


def _keep(state: Any, conductor: str, token: str) -> list[str]:
    from monarch._tensors.checkpoints.files import StateCopy

    _open()[token] = _Saving(conductor, StateCopy(state))
    peer = current_node().peers.known.get(conductor)
    if has_ended(token) or (peer is not None and peer.dead is not None):
        # The end, or the death of the coordinator, came while the actor was busy.
        abandon(token)
    return [str(key) for key in state]


@service("checkpoint.load", "actor")
def load(actor: Any, folder: str, state: str, load: str) -> Any:
    """Read a version into the state that a method of an actor returns, and pass it to another method."""
    from monarch._tensors.checkpoints.restores import Version

    version = Version(folder)
    template = _call(actor, state)
    if inspect.isawaitable(template):
        return _load_awaited(actor, version, template, load)
    version.load(template)
    return _call(actor, load, template)


async def _load_awaited(actor: Any, version: Any, template: Awaitable[Any], load: str) -> None:
    found = await template
    version.load(found)
    done = _call(actor, load, found)
    if inspect.isawaitable(done):
        await done


def _call(actor: Any, method: str, *args: Any) -> Any:
    if "." in method:
        return function_of(method)(actor, *args)
    return call_method(actor, method, *args)


# Beside the actor


@service("checkpoint.step", "quick")
def step(port: Port[Any], place: int, token: str, name: str, *args: Any) -> None:
    """Service: run a step in a thread, and answer when it is done.

    Args:
        port: for the answer.
        place: position of this rank, for the answer.
        token: the token of the checkpoint.
        name: the name of the step.
        args: its arguments.
    """

    def run() -> None:
        be_helper()
        try:
            status, (body, buffers) = m.RESULT, dumps(_STEPS[name](token, *args))
        except BaseException as error:
            status, body, buffers = m.ERROR, pack_failure(error, isinstance(error, MonarchError)), []
        answer(port, status, body, buffers, place)

    spawn_thread("monarch-checkpoint", run)


def _plan(token: str, by_content: bool, rank: int) -> bytes:
    copy = _saving(token).copy
    if by_content:
        copy.key_by_content(rank)
    return copy.local_plan()


def _begin(token: str, path: str, plans: list[bytes]) -> tuple[str, list[bytes]]:
    from monarch._tensors.checkpoints.files import WholePlan

    saving = _saving(token)
    saving.whole = WholePlan(plans)
    saving.version = NewVersion(path, token)
    if token not in _open():
        saving.version.abandon()
    return saving.version.folder, saving.whole.plans


def _write(token: str, folder: str, plan: bytes) -> bytes:
    return _saving(token).copy.write(plan, folder)


def _finish(token: str, results: list[bytes], keep: int) -> str:
    saving = _saving(token)
    assert saving.version is not None and saving.whole is not None
    saving.whole.finish(results, saving.version.folder)
    return saving.version.commit(keep)


def _find(token: str, path: str, version: str | int | None) -> str:
    return find_version(path, version)


def _give_up(token: str) -> None:
    saving = _open().pop(token, None)
    if saving is not None:
        saving.copy.abandoned = True
        if saving.version is not None:
            saving.version.abandon()


_STEPS: dict[str, Callable[..., Any]] = {
    "plan": _plan, "begin": _begin, "write": _write, "finish": _finish, "find": _find, "give up": _give_up,
}  # fmt: skip


def _saving(token: str) -> _Saving:
    saving = _open().get(token)
    if saving is None:
        raise DeviceMeshError(
            "the checkpoint was abandoned, or this rank has been replaced since its state was copied; save it again"
        )
    return saving


@service("checkpoint.abandon", "quick")
def abandon(token: str) -> None:
    """Service: end a checkpoint: release the copy and remove incomplete files."""
    note_end(token)
    if token in _open():
        # Removal may be slow, and this thread receives messages.
        spawn_thread("monarch-checkpoint", _give_up, token)


@service("checkpoint.still_open", "quick")
def still_open() -> int:
    """Service: return the number of checkpoints with a copy here."""
    return len(_open())

"""Tensors on their way to another mesh: the sender keeps a copy in a buffer, which the receiver reads.

So a sender does not wait, and ranks of two meshes need no process group of their own.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.kinds import is_dict
from monarch._core.roster import split_proc
from monarch._engine.issuing.encoding import Template
from monarch._engine.issuing.failures import LOST, OpFailure
from monarch._engine.rank.operations.rank_local import on_stream, plain
from monarch._engine.rank.operations.table import OPERATIONS
from monarch._engine.rank.shards.making import wrap
from monarch._node.current import current_node
from monarch._state.rdma.buffer import RDMABuffer
from monarch._wire.messages import Dead
from monarch.exceptions import DeviceMeshError, GroupError, TransferError

_WAIT_S = 600.0
"""Seconds to wait for the sender, which runs its ops first."""
_HALTED = "halted"
_UNSENT = "a rank of the source mesh died before all of its ranks had sent the tensor; move it again"


class SourceFailedError(Exception):
    """The value has failed on the rank that should send it.

    Attributes:
        failure: why.
    """

    def __init__(self, failure: OpFailure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class SourceHaltedError(GroupError):
    """The rank that should send a value waits for the program to tell what has failed; the op runs again later."""


class _Export(NamedTuple):
    """A value that other ranks read.

    Attributes:
        tensor: a contiguous copy.
        buffer: its memory for other processes; None for no elements.
        takers: how many ranks read it; each removes one.
        target: uid of their mesh of processes.
    """

    tensor: torch.Tensor
    buffer: RDMABuffer | None
    takers: list[int]
    target: str


class _Refusal(NamedTuple):
    """A value that does not come.

    Attributes:
        failure: why.
        takers: how many ranks have not asked yet; each removes one.
    """

    failure: OpFailure
    takers: list[int]


class _Exports:
    """The values that this process sends. Used by the threads of the executor and of the mover."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, _Export] = {}
        """By reference. Lock: ``_lock``."""
        self._waiting: dict[int, list[Any]] = {}
        """Ports of those that want a value that is not there yet. Lock: ``_lock``."""
        self._halted = False
        """Whether the executor waits for the program. Lock: ``_lock``."""
        self._is_incomplete = False
        """Whether a rank of this mesh has died since the last recovery, so that ops may not come. Lock: ``_lock``."""
        self.failed: dict[int, OpFailure] = {}
        """The failures of the executor, which alone writes it."""
        self._refused: dict[int, _Refusal] = {}
        """Why values do not come, until all have asked: the program may have dropped them. Lock: ``_lock``."""
        self.lost_before = 0
        """The first reference since a rank of this mesh has died: ops with older ones do not come any more. Lock:
        ``_lock``."""
        self.lost_sources: frozenset[str] = frozenset()
        """Meshes with dead ranks, which continue after they are healed. Thread of the executor only."""

    def put(self, number: int, tensor: torch.Tensor, takers: int, target: str) -> None:
        """Keep the present value of a tensor for some ranks of a mesh."""
        if not takers:
            return
        copied = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        buffer = RDMABuffer(copied.view(-1).view(torch.uint8)) if copied.numel() else None
        if copied.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        with self._lock:
            self._ready[number] = _Export(copied, buffer, [takers], target)
            ports = self._waiting.pop(number, [])
        for port in ports:
            port.send(buffer)

    def want(self, number: int, port: Any) -> None:
        """Send the buffer of a value to a port, now or later, or the reason that the value has no buffer."""
        with self._lock:
            found = self._ready.get(number)
            failure = self._refusal(number) or self.failed.get(number)
            halted = self._halted or self._is_incomplete
            if found is None and failure is None and not halted and number >= self.lost_before:
                self._waiting.setdefault(number, []).append(port)
                return
        if found is not None:
            port.send(found.buffer)
        elif failure is None and number < self.lost_before:
            port.send(_lost(_UNSENT))
        else:
            port.send(failure if failure is not None else _HALTED)

    def refuse(self, number: int, failure: OpFailure, takers: int) -> None:
        """Note that a value does not come, until some ranks have asked for it or are told otherwise."""
        if takers:
            with self._lock:
                self._refused[number] = _Refusal(failure, [takers])

    def _refusal(self, number: int) -> OpFailure | None:
        """Return why a value does not come, with the lock."""
        found = self._refused.get(number)
        if found is None:
            return None
        found.takers[0] -= 1
        if not found.takers[0]:
            del self._refused[number]
        return found.failure

    def fail(self, number: int, failure: OpFailure) -> None:
        """Tell the ranks that wait for a value that it has failed; the executor has noted that already."""
        with self._lock:
            ports = self._waiting.pop(number, [])
        for port in ports:
            port.send(failure)

    def here(self, number: int) -> torch.Tensor | None:
        """Return a value that this process sends to itself.

        Raises:
            SourceFailedError: it has failed.
        """
        with self._lock:
            found = self._ready.get(number)
            failure = self._refusal(number)
        if failure is not None:
            raise SourceFailedError(failure)
        if found is None:
            return None
        self.taken(number)
        return found.tensor if number not in self._ready else found.tensor.clone()

    def taken(self, number: int) -> None:
        """Note that a rank has read a value."""
        with self._lock:
            found = self._ready.get(number)
            if found is None:
                return
            found.takers[0] -= 1
            if found.takers[0]:
                return
            del self._ready[number]
        if found.buffer is not None:
            found.buffer.drop()

    def drop(self, numbers: list[int]) -> None:
        """Drop values that no rank reads any more."""
        for number in numbers:
            with self._lock:
                found = self._ready.pop(number, None)
                self._refused.pop(number, None)
            if found is not None and found.buffer is not None:
                found.buffer.drop()

    def unsend(self, target: str, before: int) -> None:
        """Forget values that a mesh has not read, since a rank of it has died.

        Args:
            target: uid of the mesh, which has cancelled the ops that wait there.
            before: the first reference that it may still read.
        """
        with self._lock:
            found = {at: each for at, each in self._ready.items() if each.target == target and at < before}
            for number, each in found.items():
                del self._ready[number]
                # For an op that another thread of the program has issued meanwhile.
                failure = _lost("a rank of the target mesh died before all of its ranks had read it; move it again")
                self._refused[number] = _Refusal(failure, each.takers)
        for each in found.values():
            if each.buffer is not None:
                each.buffer.drop()

    def lose_before(self, before: int) -> None:
        """Note that ops with older references do not come any more, and tell the ranks that wait for their values."""
        with self._lock:
            self.lost_before = before
            lost = [port for number in list(self._waiting) if number < before for port in self._waiting.pop(number)]
        for port in lost:
            port.send(_lost(_UNSENT))

    def halt(self, halted: bool) -> None:
        """Tell the ranks that wait that the executor has halted."""
        with self._lock:
            self._halted = halted
        if halted:
            self._free_waiting()

    def lose_member(self, lost: bool) -> None:
        """Note that a rank of this mesh has died, or that the mesh is whole again.

        The program sends no ops to the others then, so those who wait for values of these ops would wait in vain.
        """
        with self._lock:
            self._is_incomplete = lost
        if lost:
            self._free_waiting()

    def _free_waiting(self) -> None:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for ports in waiting:
            for port in ports:
                port.send(_HALTED)

    def count(self) -> int:
        """Return how many values wait to be read."""
        return len(self._ready)


exports = _Exports()
"""Of this process."""


def _lost(text: str) -> OpFailure:
    rank = current_node().rank
    return OpFailure("to_mesh", 0, (rank,), LOST, f"the value is missing: {text}", "")


class Mover(Actor):
    """Answers ranks of other meshes while the executor of this rank computes."""

    monarch_unstopped = frozenset({"want", "taken"})
    """Calls that a Stop of the notebook leaves alone."""
    monarch_titles = dict.fromkeys(("__init__", "want", "taken"), "to_mesh()")
    """Names of its calls, for errors."""

    def monarch_of_program(self) -> int:
        """Return how many tensors are lost with the program: it has none of its own. See reattach.py."""
        return 0

    @endpoint(explicit_response_port=True)
    def want(self, port: Any, number: int) -> None:
        """Send the buffer of a value as soon as it is there; None for a value without elements."""
        exports.want(number, port)

    @endpoint
    def taken(self, number: int) -> None:
        """Note that a rank has read a value."""
        exports.taken(number)


def _send(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> list[Any]:
    tensor, takers, stream, target = args
    with on_stream(mesh, stream):
        exports.put(values[0], plain(tensor), takers.get(current_node().rank, 0), target)
    return [None]


def _unsend(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> None:
    exports.unsend(*values)


def _receive(mesh: Any, op: Any, tensors: Any, values: Any, args: Any, kwargs: Any) -> Any:
    uid, sources, movers, stream = args
    number, shape, dtype, sharded = values
    rank = current_node().rank
    source = sources[rank]
    if is_dict(shape):
        shape = shape[rank]
    with on_stream(mesh, stream):
        value = exports.here(number) if movers[source] is None else None
        if value is None:
            value = _read(number, uid, movers[source], torch.empty(shape, dtype=dtype, device=mesh.device_type))
    if sharded is None:
        return value
    placements, whole = sharded
    return wrap(value, mesh, placements, whole)


def _read(number: int, uid: str, mover: Any, value: torch.Tensor) -> torch.Tensor:
    if mover is None:
        raise SourceFailedError(_lost("this rank has no copy of the tensor, since its own send did not run"))
    try:
        answer = mover.want.call_one(number).get(_WAIT_S)
        if answer == _HALTED:
            if uid in exports.lost_sources:
                raise SourceFailedError(_lost("ranks of the source mesh died; heal that mesh first"))
            raise SourceHaltedError("the source rank is blocked on other ranks of its mesh")
        if isinstance(answer, OpFailure):
            raise SourceFailedError(answer)
        if answer is not None:
            answer.read_into(value.view(-1).view(torch.uint8)).get()
    except (SourceHaltedError, SourceFailedError):
        raise
    except TransferError as error:
        raise SourceFailedError(_lost(f"the transfer from the source rank failed: {error}")) from error
    except DeviceMeshError as error:
        # Its other lines advise what the program may have done by now.
        reason = str(error).partition("\n")[0]
        text = f"the source rank died: {reason}; heal its mesh, then move the tensor again"
        raise SourceFailedError(_lost(text)) from error
    mover.taken.broadcast(number)
    return value


SEND = "send"
"""Kind of the op that gives a value to ranks of another mesh."""
UNSEND = "unsend"
"""Kind of the op that forgets what a mesh has not read before it was healed."""


def takers_of(template: Template) -> int:
    """Return how many ranks read what an op of this kind sends from this rank."""
    takers = template.args[1]
    return int(takers.get(current_node().rank, 0))


def on_death(dead: Dead, _: list[str]) -> None:
    """Handle the death of another rank of this mesh, in the receiving thread."""
    node = current_node()
    if node.config is not None and split_proc(dead.proc)[0] == node.config.procs.uid:
        node.lanes.post("tensors", lambda: exports.lose_member(True))


OPERATIONS[SEND] = _send
OPERATIONS[UNSEND] = _unsend
OPERATIONS["to_mesh"] = _receive

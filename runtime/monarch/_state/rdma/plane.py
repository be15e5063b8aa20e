"""The transfers of one process: its shared memory, and the transports to shared memory of other processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar

from monarch._actors.running import ActorLike, current
from monarch._node.current import current_node
from monarch._node.node import Node
from monarch._node.services.asking import ask_proc
from monarch._node.services.registry import service
from monarch._procs.os.posix import allow_reading_by
from monarch._procs.session_folder import host_of
from monarch._session.session import session_of
from monarch._tensors.memory.registry import MemoryReference, Registry
from monarch._tensors.memory.views import Memory
from monarch._tensors.transports.attach import Attach
from monarch._tensors.transports.base import Move, Transport, check_spans
from monarch._tensors.transports.cuda_ipc import CudaIpc, open_handle_of, segment_of
from monarch._tensors.transports.nixl import Nixl
from monarch._tensors.transports.same_process import SameProcess
from monarch._tensors.transports.stream import StreamTransport
from monarch._tensors.transports.stream_server import StreamServer
from monarch.exceptions import ArgumentError, CallTimeoutError, MonarchError, TransferError

P = ParamSpec("P")
R = TypeVar("R")
VARIABLE = "MONARCH_RDMA_TRANSPORTS"
"""Environment variable with the names of the allowed transports, separated by commas; if unset, all of them."""
_ORDER = ("local", "attach", "cuda_ipc", "nixl", "stream")
"""Best first."""


class Plane:
    """The transfers of one process; a part of its node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.registry = Registry()
        self._lock = threading.Lock()
        self._server: StreamServer | None = None
        """Lock: ``_lock``."""
        self._nixl = Nixl(node.proc, self.registry, self._ask_exposed)
        self._stream = StreamTransport(node.hosts.secret, self._find_stream)
        ways: list[Transport] = [
            SameProcess(node.proc, self.registry),
            Attach(node.host),
            CudaIpc(node.host),
            self._nixl,
            self._stream,
        ]
        self._transports = {way.name: way for way in ways}
        self._mailboxes: dict[int, ActorLike] = {}
        """The actors that have shared memory, by the key of that memory. Single operations only."""
        self._chosen: dict[tuple[str, str, bytes, str], Transport] = {}
        """The transports in use, by ``_kind_of`` a transfer. Single operations only."""
        node.events.closing.subscribe(self._close)
        node.events.proc_died.subscribe(self._forget)

    # Memory of this process

    def share(self, memory: Memory, forever: bool = False) -> MemoryReference:
        """Share memory with other processes until it is dropped or, unless ``forever``, the running actor ends."""
        node = self._node
        _let_others_read(node)
        remote = self.registry.add(memory, node.proc, _title(node), open_handle_of(memory))
        here = current.get()
        if here is not None and not forever:
            mailbox = self._mailboxes[remote.key] = here[0]
            mailbox.at_end[f"buffer {remote.key}"] = lambda: self.drop(remote.key)
        return remote

    def share_all(self, memories: Iterable[Memory]) -> list[MemoryReference]:
        """Share several, or none if one of them cannot be shared, or if the caller is interrupted."""
        shared: list[MemoryReference] = []
        try:
            for memory in memories:
                shared.append(self.share(memory))
        except BaseException:
            for each in shared:
                self.drop(each.key)
            raise
        return shared

    def drop(self, key: int) -> bool:
        """Stop sharing memory; return whether it was shared."""
        shared = self.registry.drop(key)
        if shared:
            self._nixl.hide(key)
        mailbox = self._mailboxes.pop(key, None)
        if mailbox is not None:
            mailbox.at_end.pop(f"buffer {key}", None)
        return shared

    def stream_address(self) -> tuple[str, int]:
        """Return the TCP address at which this process serves its shared memory."""
        with self._lock:
            if self._server is None:
                self._server = StreamServer(self.registry, self._node.hosts.secret, _own_address(self._node))
            return self._server.address

    def expose(self, keys: list[int]) -> tuple[str, bytes] | None:
        """Return the data by which NIXL agents of other processes reach shared memory."""
        return self._nixl.expose(keys)

    # Memory of other processes

    def transport_to(self, remote: MemoryReference, local_device: str) -> Transport:
        """Return the best transport between this process and a piece of memory.

        Raises:
            TransferError: no transport works between them.
        """
        key = _kind_of(remote, local_device)
        chosen = self._chosen.get(key)
        if chosen is None:
            against: list[str] = []
            for name in _allowed():
                why_not = self._transports[name].reason_against(remote, local_device)
                if not why_not:
                    chosen = self._chosen[key] = self._transports[name]
                    break
                against.append(f"{name}: {why_not}")
            else:
                raise TransferError(f"no transport reaches {remote.title}: {'; '.join(against)}", mesh=remote.proc)
        return chosen

    def known_transport(self, remote: MemoryReference, local_device: str) -> str:
        """Return the name of the transport that is already in use, or an empty string."""
        chosen = self._chosen.get(_kind_of(remote, local_device))
        return chosen.name if chosen is not None else ""

    def reasons(self, remote: MemoryReference, local_device: str) -> list[tuple[str, str]]:
        """Return the transports, best first, up to the first usable one, each with the reason against it."""
        reasons: list[tuple[str, str]] = []
        for name in _allowed():
            reasons.append((name, self._transports[name].reason_against(remote, local_device)))
            if not reasons[-1][1]:
                break
        return reasons

    def move(self, moves: Sequence[Move], writing: bool, timeout: float) -> None:
        """Move bytes from or to memory of any processes, together for each process."""
        for each in moves:
            check_spans(each)
        together: dict[tuple[str, str, bytes, str], list[Move]] = {}
        for each in moves:
            together.setdefault(_kind_of(each.remote, each.local.device), []).append(each)
        for several in together.values():
            remote, local, _ = several[0]
            self._check_alive(remote)
            self.transport_to(remote, local.device).move(several, writing, timeout)

    def _check_alive(self, remote: MemoryReference) -> None:
        peer = self._node.peers.known.get(remote.proc)
        if peer is not None and peer.dead is not None:
            raise TransferError(
                f"{remote.title}, the owner of the buffer, {peer.dead.reason}. Nothing was written", mesh=remote.proc
            )

    def _find_stream(self, remote: MemoryReference, timeout: float) -> tuple[str, int]:
        host, port = self._ask(remote, timeout, stream_address)
        return str(host), int(port)

    def _ask_exposed(self, remote: MemoryReference, keys: list[int], timeout: float) -> tuple[str, bytes] | None:
        return self._ask(remote, timeout, expose, keys)

    def _ask(
        self, remote: MemoryReference, timeout: float, service: Callable[P, R], *args: P.args, **named: P.kwargs
    ) -> R:
        try:
            return ask_proc(remote.proc, service, *args, **named).get(timeout)
        except CallTimeoutError:
            why = f"did not answer for {timeout:g} s"
        except TransferError:
            raise
        except MonarchError as error:
            self._check_alive(remote)
            why = f"cannot be reached: {error}"
        raise TransferError(f"{remote.title} {why}. Nothing was written", mesh=remote.proc)

    def _forget(self, proc: str) -> None:
        """Drop the state of a dead process. In the receiving thread."""
        # Other threads choose transports meanwhile.
        for key in list(self._chosen):
            if key[0] == proc:
                self._chosen.pop(key, None)
        # NIXL waits for a lock that others hold while they register memory.
        self._node.lanes.post("transfers", lambda: self._release(proc))

    def _release(self, proc: str) -> None:
        for transport in self._transports.values():
            transport.forget(proc)

    def _close(self) -> None:
        self.registry.clear()
        if self._server is not None:
            self._server.close()
        self._stream.close()
        self._nixl.close()


def plane() -> Plane:
    """Return the transfers of this process."""
    return current_node().part(Plane)


@service("rdma.stream_address", "threaded")
def stream_address() -> tuple[str, int]:
    """Service: return the TCP address at which this process serves its shared memory."""
    return plane().stream_address()


@service("rdma.expose", "threaded")
def expose(keys: list[int]) -> tuple[str, bytes] | None:
    """Service: return the data by which NIXL agents reach shared memory."""
    return plane().expose(keys)


@service("rdma.drop", "threaded")
def drop(key: int) -> bool:
    """Service: stop sharing memory; return whether it was shared."""
    return plane().drop(key)


def _allowed() -> list[str]:
    text = os.environ.get(VARIABLE, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in _ORDER]
    if unknown:
        raise ArgumentError(f"{VARIABLE}: unknown transport {unknown[0]!r}; expected any of {', '.join(_ORDER)}")
    return [name for name in _ORDER if not names or name in names]


def _kind_of(remote: MemoryReference, local_device: str) -> tuple[str, str, bytes, str]:
    """Return the properties that decide the transport: owner, device, segment of GPU memory, local device.

    The driver may map one segment of a process and refuse another.
    """
    return remote.proc, remote.device, segment_of(remote), local_device


def _title(node: Node) -> str:
    config = node.config
    return f"rank {node.rank} of {config.procs.name}" if config is not None else "the program"


def _own_address(node: Node) -> str:
    config = node.config
    if config is not None and config.addresses:
        return config.addresses[node.rank // config.procs.per_host] or "0.0.0.0"
    session = session_of(node)
    return (session.own_address() if session is not None else "") or "127.0.0.1"


def _let_others_read(node: Node) -> None:
    """Allow processes of the session to read the memory of this one, where the kernel allows only ancestors."""
    if node.config is None:
        allow_reading_by(os.getpid())
        return
    agent = os.getppid()
    if host_of(node.root) == node.host:
        # The agent is a child of the program, which may read as well.
        allow_reading_by(_parent_of(agent) or agent)
    else:
        allow_reading_by(agent)


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0

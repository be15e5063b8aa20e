"""Asking processes for what they answer at once, whatever their actors do, and sending them signals."""

from __future__ import annotations

from typing import Any

from monarch._actors.actormesh import ActorMesh
from monarch._actors.future import Future
from monarch._actors.gather import Gather
from monarch._actors.process import get_runtime
from monarch._core.extent import Extent
from monarch._wire import messages as m
from monarch._wire.pickling import dumps


def ask(mesh: ActorMesh, service: str, *args: Any) -> Future[dict[int, Any]]:
    """Asks the processes of a mesh of actors; the result has what each answered, by position."""
    runtime = mesh._runtime
    targets = mesh._members_at()

    def finish(_: Gather[Any], values: list[Any]) -> dict[int, Any]:
        return dict(enumerate(values))

    gather: Gather[Any] = Gather(runtime, targets.peers, targets.shape.region.extent, mesh._name, service, finish)
    frame = m.encode(m.Ask(runtime.proc, gather.port, targets.shape.packed, service, dumps(args)[0]))
    for peer in targets.peers:
        peer.send(frame)
    gather.check()
    return gather


def ask_proc(proc: str, service: str, *args: Any) -> Future[Any]:
    """Asks one process; the result is what it answers, or its error."""
    runtime = get_runtime()
    gather: Gather[Any] = Gather(runtime, [runtime.peer(proc)], Extent((), ()), proc, "", lambda _, values: values[0])
    gather.targets[0].send(m.encode(m.Ask(runtime.proc, gather.port, b"", service, dumps(args)[0])))
    gather.check()
    return gather


def send_signal(mesh: ActorMesh, number: int) -> None:
    """Sends a signal to the processes of a mesh of actors."""
    runtime = mesh._runtime
    hosts: dict[str, list[str]] = {}
    for peer in mesh._members_at().peers:
        hosts.setdefault(peer.host, []).append(peer.proc)
    for host, procs in hosts.items():
        runtime.to_agent(host, m.Signal(runtime.proc, procs, number))

"""Asking processes for what they answer at once, whatever their actors do, and sending them signals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from monarch._core.shapes.extent import Extent
from monarch._node.current import current_node
from monarch._node.future import Future
from monarch._node.gather import Gather
from monarch._node.node_like import NodeLike
from monarch._node.remote_errors import unpack_failure
from monarch._procs.session_folder import host_of
from monarch._wire import messages as m
from monarch._wire.pickling import dumps
from monarch._wire.plain import loads_plain


def ask_proc(proc: str, service: str, *args: Any) -> Future[Any]:
    """Asks one process; the result is what it answers, or its error."""
    node = current_node()
    gather: Gather[Any] = Gather(node, [node.peers.get(proc)], Extent((), ()), proc, "", lambda _, values: values[0])
    gather.targets[0].send(m.encode(m.Ask(node.proc, gather.port, b"", service, dumps(args)[0])))
    gather.check()
    return gather


class Answers:
    """Asks some processes for a service, and has what each answers as it comes, however many of them are silent.

    Args:
        node: of this process.
        procs: whom to ask.
        service: its name.
        args: for it.
        heard: told of each answer, in the thread that received it; an error is a Failure.
        plain: whether arguments and answers are plain values, as those of agents are.
    """

    def __init__(
        self,
        node: NodeLike,
        procs: Sequence[str],
        service: str,
        args: tuple[Any, ...],
        heard: Callable[[str, Any], None] = lambda proc, answer: None,
        plain: bool = False,
    ) -> None:
        self._node = node
        self._heard = heard
        self._load = m.unpack if plain else loads_plain
        self._port = node.ports.open(self)
        body = m.pack(*args) if plain else dumps(args)[0]
        frame = m.encode(m.Ask(node.proc, self._port, b"", service, body))
        for proc in procs:
            peer = node.peers.get(proc)
            if peer.dead is None:
                peer.send(frame)

    def reply(self, reply: m.Reply, _: Any) -> None:
        """One has answered."""
        answer = self._load(reply.body) if reply.status == m.RESULT else unpack_failure(reply.body)
        self._heard(reply.src, answer)

    def close(self) -> None:
        """Takes no more answers."""
        self._node.ports.close(self._port)


def send_signal(node: NodeLike, procs: Iterable[str], number: int) -> None:
    """Sends a signal to some processes, in one message for each host."""
    hosts: dict[str, list[str]] = {}
    for proc in procs:
        hosts.setdefault(host_of(proc), []).append(proc)
    for host, members in hosts.items():
        node.peers.to_agent(host, m.Signal(node.proc, members, number))

"""The loop of a host agent."""

from __future__ import annotations

import os
import socket

import zmq

from monarch._procs.agent.poll_loop import PollLoop


def test_action_runs_when_a_full_socket_takes_more() -> None:
    """Else a zygote with a full queue gets the rest of a request only when it says something itself."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    loop, seen = PollLoop(), list[str]()
    with ours, theirs:
        try:
            while True:
                ours.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        loop.watch(ours.fileno(), lambda: seen.append("writable"), writable=True)
        loop.later(0.0, lambda: seen.append("full"))
        loop.step()
        assert seen == ["full"]
        theirs.recv(1 << 22)
        loop.step()
        assert seen == ["full", "writable"]


def test_action_of_a_dropped_source_does_not_run() -> None:
    loop, seen = PollLoop(), list[int]()
    pairs = [os.pipe() for _ in range(2)]
    readers = [reader for reader, _ in pairs]

    def act(own: int, other: int) -> None:
        seen.append(own)
        loop.unwatch(other)

    loop.watch(readers[0], lambda: act(readers[0], readers[1]))
    loop.watch(readers[1], lambda: act(readers[1], readers[0]))
    for _, writer in pairs:
        os.write(writer, b"x")
    loop.step()
    assert len(seen) == 1 and loop.watches(seen[0])
    for each in pairs:
        os.close(each[0])
        os.close(each[1])


def test_sockets_and_descriptors_are_watched_together() -> None:
    loop, seen = PollLoop(), list[str]()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind("inproc://poll-loop")
    push.connect("inproc://poll-loop")
    push.send(b"x")
    loop.watch(pull, lambda: seen.append(pull.recv().decode()))
    loop.step()
    assert seen == ["x"]
    context.destroy(0)


def test_timers_run_when_they_are_due_and_later_ones_next() -> None:
    loop, seen = PollLoop(), list[int]()

    def again() -> None:
        seen.append(1)
        loop.later(0.0, lambda: seen.append(3))

    loop.later(60.0, lambda: seen.append(4))
    loop.later(0.0, again)
    loop.later(0.0, lambda: seen.append(2))
    while len(seen) < 2:
        loop.step()
    assert seen == [1, 2]
    loop.step()
    assert seen == [1, 2, 3]

"""Socket options that are used for each message, compared with pyzmq's own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from monarch._wire.options import TimeLimit, pending_in


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context = zmq.Context()
    receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    receiver.bind("inproc://pair")
    sender.connect("inproc://pair")
    yield receiver, sender
    context.destroy(0)


def test_events_match_pyzmq(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    receiver, sender = pair
    pending = pending_in(receiver)
    assert not pending()
    sender.send(b"one")
    sender.send(b"two")
    for _ in range(2):
        assert pending() and receiver.get(zmq.EVENTS) == zmq.POLLIN
        receiver.recv()
    assert not pending() and not receiver.get(zmq.EVENTS)


def test_receive_ends_after_its_timeout(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    receiver, sender = pair
    limit = TimeLimit(receiver)
    limit.set(50)
    assert receiver.get(zmq.RCVTIMEO) == 50
    begun = time.monotonic()
    with pytest.raises(zmq.Again):
        receiver.recv()
    assert time.monotonic() - begun >= 0.045
    limit.set(-1)
    assert receiver.get(zmq.RCVTIMEO) == -1
    sender.send(b"late")
    assert receiver.recv() == b"late"


def test_errors_match_pyzmq(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    receiver, _ = pair
    limit = TimeLimit(receiver)
    with pytest.raises(zmq.ZMQError):
        limit.set(-2)

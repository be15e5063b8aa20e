"""Socket options that are used for each message, compared with pyzmq's own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from monarch._wire.options import QuickOptions


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
    options = QuickOptions(receiver)
    assert options.has_no_events()
    sender.send(b"one")
    sender.send(b"two")
    for _ in range(2):
        assert not options.has_no_events() and receiver.get(zmq.EVENTS) == zmq.POLLIN
        receiver.recv()
    assert options.has_no_events() and not receiver.get(zmq.EVENTS)


def test_receive_ends_after_its_timeout(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    receiver, sender = pair
    options = QuickOptions(receiver)
    options.set_receive_timeout(50)
    assert receiver.get(zmq.RCVTIMEO) == 50
    begun = time.monotonic()
    with pytest.raises(zmq.Again):
        receiver.recv()
    assert time.monotonic() - begun >= 0.045
    options.set_receive_timeout(-1)
    assert receiver.get(zmq.RCVTIMEO) == -1
    sender.send(b"late")
    assert receiver.recv() == b"late"


def test_errors_match_pyzmq(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]) -> None:
    receiver, _ = pair
    options = QuickOptions(receiver)
    with pytest.raises(zmq.ZMQError):
        options.set_receive_timeout(-2)

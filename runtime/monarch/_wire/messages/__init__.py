"""The messages of the control plane: typed, versioned, one MessagePack array each.

A message is one frame. Large buffers that go to another host follow it as frames of their own, and so does the content
of a Route, Cast or Batch; ``frames`` says how many. The first message on every connection is a Hello with the version;
docs/wire-protocol.md is the reference, and a change here that an older peer would misread raises VERSION.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from monarch._wire.messages.base import Message, PackedBulk
from monarch._wire.messages.calls import Ask, Call, Create, Halt, Probe
from monarch._wire.messages.connections import Bye, Hello, Hosts, Listen, Listening, Refused
from monarch._wire.messages.output import Level, Output, OutputCredit, Report, Reports
from monarch._wire.messages.processes import Ready, Signal, Spawn, Stop
from monarch._wire.messages.replies import ERROR, FAILED, NOWHERE, RESULT, STOPPED, Credit, Failure, Release, Reply
from monarch._wire.messages.routes import Batch, Cast, Down, Ordered, Received, Route, Split
from monarch._wire.messages.spreads import Answers, Folded, Spread
from monarch._wire.messages.supervision import INTERNAL, Dead, Fault, Parted, Watch
from monarch._wire.messages.uplinks import Merged, MergedOutput, Relayed, Taken, Uplink, Upward
from monarch.exceptions import ProtocolError

__all__ = [
    "ERROR",
    "FAILED",
    "INTERNAL",
    "NOWHERE",
    "RESULT",
    "SPAWN_HEAD",
    "STOPPED",
    "UNREADABLE",
    "VERSION",
    "Answers",
    "AnyMessage",
    "Ask",
    "Batch",
    "Bye",
    "Call",
    "Cast",
    "Create",
    "Credit",
    "Dead",
    "Down",
    "Failure",
    "Fault",
    "Folded",
    "Halt",
    "Hello",
    "Hosts",
    "Level",
    "Listen",
    "Listening",
    "Merged",
    "MergedOutput",
    "Message",
    "Ordered",
    "Output",
    "OutputCredit",
    "PackedBulk",
    "Parted",
    "Probe",
    "Ready",
    "Received",
    "Refused",
    "Relayed",
    "Release",
    "Reply",
    "Report",
    "Reports",
    "Route",
    "Signal",
    "Spawn",
    "Split",
    "Spread",
    "Stop",
    "Taken",
    "Uplink",
    "Upward",
    "Watch",
    "decode",
    "decode_raw",
    "encode",
    "pack",
    "unpack",
]

VERSION = 7

AnyMessage: TypeAlias = (
    Hello
    | Refused
    | Call
    | Create
    | Halt
    | Reply
    | Credit
    | Release
    | Output
    | OutputCredit
    | Ready
    | Watch
    | Dead
    | Fault
    | Probe
    | Spawn
    | Stop
    | Route
    | Cast
    | Batch
    | Hosts
    | Listen
    | Listening
    | Level
    | Ask
    | Signal
    | Split
    | Parted
    | Report
    | Reports
    | Ordered
    | Spread
    | Answers
    | Folded
    | Received
    | Uplink
    | Relayed
    | Down
    | Upward
    | Merged
    | Taken
    | Bye
)

encode = msgspec.msgpack.Encoder().encode
SPAWN_HEAD = encode(Spawn("", [], "", b"", [], {}, {}, [], 0, "", [], ""))[:2]
"""The first bytes of each Spawn."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of decoding: a ValueError for text that is not UTF-8, a RecursionError for deeply nested values."""
decode_raw = msgspec.msgpack.Decoder(AnyMessage).decode
"""Decode the message of a frame; one of UNREADABLE if it is not one of this version."""


def decode(frame: bytes | memoryview) -> AnyMessage:
    """Decode the message of a frame; ProtocolError if it is not one of this version."""
    try:
        return decode_raw(frame)
    except UNREADABLE as error:
        text = f"invalid control message of {len(frame)} bytes for protocol version {VERSION}: {error}"
        raise ProtocolError(text) from None


def pack(value: object) -> bytes:
    """Pack plain values, such as a region, to bytes."""
    return encode(value)


_unpack = msgspec.msgpack.Decoder().decode


def unpack(data: bytes) -> Any:
    """Return the values that ``pack`` packed, tuples as lists."""
    return _unpack(data)

"""The messages of the control plane: typed, versioned, one MessagePack array each.

A message is one frame. Large buffers that go to another host follow it as frames of their own, and so does the content
of a Route, Cast or Batch; ``frames`` says how many. The first message on every connection is a Hello with the version;
docs/wire-protocol.md is the reference, and a change here that an older peer would misread raises VERSION.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from monarch._core.causes import Cause, CellRef
from monarch._core.text.causes import describe
from monarch.exceptions import ProtocolError

VERSION = 7

PackedBulk: TypeAlias = tuple[str, int, int, int, list[tuple[int, int]]]
"""Shared memory that holds the large buffers of a message: owner, its pid, fd, segment, offset and length of each."""

RESULT = 0
"""Status of a Reply: its body is the pickled value."""
ERROR = 1
"""Status of a Reply: its body is a packed Failure."""
FAILED = 2
"""Status of a Reply: its body is the pickled value of a failed call, such as a cell with its error."""
STOPPED = 3
"""Status of a Reply: the same, of a call that was ended from outside, by an interrupt or because of other ranks."""
NOWHERE = -1
"""In place of a rank in a Reply: its sender is not in the addressed view, so ``src`` identifies it."""
INTERNAL = "@internal"
"""In place of an actor in a Fault: a process could not handle a message, and nobody waits for an answer to it."""


class _Message(msgspec.Struct, array_like=True, gc=False):
    pass


class Failure(msgspec.Struct, array_like=True):
    """An exception on the wire: the body of a Reply or a Fault."""

    kind: str
    """Qualified name of its class."""
    text: str
    """Its message."""
    where: str
    """The line of user code that raised it, or an empty string."""
    trace: str
    """Its traceback: frames of user code, with ours folded."""
    pickled: bytes | None
    """The exception itself, if it can be pickled and unpickled."""
    own: bool
    """Whether it is an error of Monarch, to be raised unchanged, rather than of the endpoint."""
    freed: bool = False
    """Whether it only says that the call was freed from a collective because of an error elsewhere."""


class Hello(_Message, tag=0):
    """First message on a connection: the sender and its version."""

    version: int
    proc: str
    pid: int


class Refused(_Message, tag=1):
    """Answer to a Hello of another version, and to Hosts with a token, which it repeats, of a program not served."""

    version: int
    proc: str
    reason: str
    token: str = ""


class Call(_Message, tag=2):
    """A message to an actor, the same to all addressed members."""

    src: str
    """Proc that sent it."""
    actor: str
    """Key of the actor mesh; ``@`` is the proc itself."""
    method: str
    port: int
    """Port of the answer at the sender; 0 if nobody waits for one."""
    view: bytes
    """The packed region that was addressed; each receiver finds its own place in it."""
    sender: str
    """Key of the sending actor, empty for a program."""
    flags: int
    body: bytes
    bulk: PackedBulk | None = None
    frames: int = 0
    cost: int = 1
    """Its cost in the sender's window, returned when it is finished."""


class Create(_Message, tag=21):
    """Creates an actor in a proc."""

    src: str
    actor: str
    port: int
    view: bytes
    body: bytes
    """The pickled spec of the actor."""
    bulk: PackedBulk | None = None
    frames: int = 0


class Halt(_Message, tag=22):
    """Stops an actor once it has handled earlier messages; with an empty key, all actors and the proc."""

    src: str
    actor: str
    port: int
    view: bytes
    reason: str
    drain: float | None = None
    """Seconds for earlier messages; None for the receiver's own limit."""


class Reply(_Message, tag=3):
    """A value, or an error, for a port."""

    src: str
    port: int
    rank: int
    """Position of the answering actor in the addressed view, or NOWHERE."""
    status: int
    done: int
    """Cost of messages from the receiver that the sender has finished: returns credit."""
    body: bytes
    bulk: PackedBulk | None = None
    frames: int = 0


class Credit(_Message, tag=4):
    """Cost of messages from the receiver that have been finished, when no Reply reports it."""

    src: str
    done: int


class Release(_Message, tag=5):
    """Shared memory that this proc no longer uses."""

    src: str
    segments: list[int]


class Output(_Message, tag=6):
    """Output of a rank: stream, offset in it and bytes of each piece, and the call that was running."""

    src: str
    actor: str
    method: str
    caller: str
    port: int
    pieces: list[tuple[str, int, bytes]]


class OutputCredit(_Message, tag=30):
    """Output of the receiver was taken: it may send as much more."""

    src: str
    count: int
    """Bytes, and 512 more for each line."""


class Ready(_Message, tag=7):
    """A rank is listening."""

    src: str
    pid: int


class Watch(_Message, tag=8):
    """Asks an agent to report the death of a proc."""

    src: str
    proc: str


class Dead(_Message, tag=9):
    """A proc has ended, or never existed."""

    proc: str
    cause: Cause
    expected: bool
    tails: list[tuple[str, int, bytes]]
    """The end of its output: stream, offset, bytes."""
    when: float = 0.0
    """Seconds since the epoch when its agent learned of it; 0 if unknown."""
    at: CellRef | None = None
    """The line of the notebook cell that it ran; None if none."""
    since: int = 0
    """Offset in stderr at which its last cell began; 0 if it ran none."""
    quiet: float = 0.0
    """Seconds from its last output to stderr to its end; 0 if unknown."""

    @property
    def reason(self) -> str:
        """Return the predicate, as in ``exited with code 3 at cell [2] line 1``."""
        return describe(self.cause, self.at)


class Fault(_Message, tag=10):
    """Reports to the owner that an actor failed, when no answer could."""

    src: str
    actor: str
    """Key of the actor, or INTERNAL."""
    rank: int
    body: bytes
    """A packed Failure."""


class Probe(_Message, tag=11):
    """See monarch._core.deadlock."""

    dst: str
    body: tuple[Any, ...]


class Spawn(_Message, tag=12):
    """Asks an agent for procs. They belong to ``src`` and end with it."""

    src: str
    procs: list[str]
    """None for those of the Cast that carries it, whose ids tell their places."""
    entry: str
    config: bytes
    """Common to all; a rank finds its own place by its proc id."""
    places: list[int]
    """Base rank of each proc in its mesh."""
    env: dict[str, str | None]
    """Variables that the user set."""
    base_env: dict[str, str | None]
    """How the environment of the program differs from the agent's."""
    binds: list[list[int] | None]
    """Cores of each proc of the host; empty to let the agent share them out."""
    count: int
    """Number of procs of the mesh on the host; these may be some of them."""
    title: str
    path: list[str]
    cwd: str


class Stop(_Message, tag=13):
    """Tells an agent that these procs are about to end, and to kill those still alive after ``grace`` seconds."""

    src: str
    procs: list[str]
    grace: float


class Route(_Message, tag=14):
    """Carries the ``frames`` that follow to a proc on another host."""

    dst: str
    frames: int


class Cast(_Message, tag=15):
    """Carries the ``frames`` that follow to many procs of one host; with a port, their replies come as one Batch."""

    src: str
    procs: list[str]
    port: int
    frames: int


class Batch(_Message, tag=16):
    """Replies that an agent gathered; ``parts`` says how many of the following frames each has."""

    src: str
    parts: list[int]
    frames: int


class Ordered(_Message, tag=31):
    """Carries the ``frames`` that follow to an agent, which handles the messages of ``src`` in the order of their
    numbers: they come by different ways."""

    src: str
    number: int
    frames: int


class Spread(_Message, tag=32):
    """Carries the ``frames`` that follow to procs of many hosts, from agent to agent; like a Cast for each host.

    The agent that gets it serves the first host and passes it on to the others.
    """

    src: str
    port: int
    """Port whose replies are gathered; 0 for none."""
    via: str
    """The agent that folds the replies; empty if they go to ``src``."""
    fan: int
    """The most agents that each agent passes it on to; 0 to pass it to all others, and to fold their replies."""
    hosts: bytes
    """Packed, so that it can be sent again as it is: of each host, its id and the procs."""
    numbers: list[int]
    """Of each host, the number of this message as in Ordered, or 0 for any order."""
    heard: list[tuple[int, list[int]]]
    """By the place of a host in ``hosts``, the numbers of its Answers that have arrived."""
    frames: int


class Answers(_Message, tag=33):
    """Replies of the ranks of a host to a Spread, for the agent that folds them; ``parts`` as in Batch."""

    src: str
    dst: str
    """The caller."""
    port: int
    number: int
    """Counts those of this agent for the caller, who acknowledges it in a later Spread."""
    last: bool
    """Whether no rank of the host owes a reply any more."""
    parts: list[int]
    frames: int
    received: int = 0
    """As in Received, which is not sent then; 0 if unknown."""


class Folded(_Message, tag=34):
    """Replies of many hosts, equal ones once; others follow as ``frames``, with ``parts`` as in Batch."""

    src: str
    port: int
    hosts: list[tuple[str, int, int]]
    """Of each Answers in it: the host, ``number`` and ``received``."""
    groups: list[tuple[int, int, bytes, list[int]]]
    """``status``, ``done`` and ``body`` of equal replies, and the positions of the ranks: ranges, of each its begin and
    its end."""
    parts: list[int]
    frames: int


class Received(_Message, tag=35):
    """An agent has all messages to it up to this number."""

    src: str
    number: int


class Uplink(_Message, tag=36):
    """Tells an agent how its output, reports and news of starts reach the program."""

    src: str
    via: str
    """The agent that merges them with those of others, which may be the receiver; empty to send them straight."""
    hangs: bool = False
    """Whether all other messages go by it as well, both ways, once the receiver has said so by Hung."""
    turn: int = 0
    """Counts those of the receiver."""


class Hung(_Message, tag=40):
    """The program may close its connection to an agent, which holds on to another one; or must open it again."""

    src: str
    via: str
    """The agent of the Uplink; empty if the connection to it is lost, and the program must open its own."""
    turn: int
    """Of the newest Uplink."""


class Down(_Message, tag=41):
    """Carries the ``frames`` that follow to the agent of another host, by an agent that it holds on to."""

    host: str
    frames: int


class Upward(_Message, tag=37):
    """Carries a message for the program: to the agent that merges it with those of other hosts, or straight."""

    src: str
    dst: str
    """The program."""
    number: int
    """Counts those of this agent, which keeps them until they are taken; 0 for one that it does not keep."""
    body: bytes
    """An encoded message, of which more may follow as ``frames``; empty to ask only what has been taken."""
    frames: int = 0


class MergedOutput(msgspec.Struct, array_like=True, gc=False):
    """Equal output of some ranks, as in Output."""

    actor: str
    method: str
    caller: str
    port: int
    pieces: list[tuple[str, bytes]]
    """Stream and bytes."""
    members: list[tuple[list[int], list[str]]]
    """Proc ids, by the offsets of the pieces in their streams."""


class Merged(_Message, tag=38):
    """Messages of many hosts for the program, equal output once."""

    src: str
    number: int
    """As in Upward, counted with those."""
    outputs: list[MergedOutput]
    others: list[tuple[str, int, bytes]]
    """Host, ``number`` and ``body`` as in Upward."""


class Taken(_Message, tag=39):
    """Messages of the receiver up to this number, as in Upward and Merged, have reached the program."""

    src: str
    number: int


class Hosts(_Message, tag=17):
    """Where the hosts of a session listen for each other, for an agent: address and public key by host id.

    The controller has an entry of its own, by its proc id.
    """

    hosts: dict[str, tuple[str, str]]
    token: str = ""
    """Correlation token, echoed in the Listening reply; empty for none."""


class Listen(_Message, tag=19):
    """Asks an agent to listen on tcp too, because other hosts have joined; answered by Listening."""

    src: str
    address: str
    """As in ``tcp://127.0.0.1``, without the port."""
    allowed: list[str]
    """Public keys that may connect."""


class Listening(_Message, tag=20):
    """Where an agent listens: for its owner, and for other agents."""

    src: str
    owner_address: str
    peer_address: str
    public: str
    token: str = ""


class Level(_Message, tag=23):
    """The minimum level of log records that a rank writes."""

    src: str
    level: int


class Ask(_Message, tag=24):
    """Asks a process for a named service, whatever its actors do; answered by a Reply."""

    src: str
    port: int
    view: bytes
    service: str
    body: bytes


class Signal(_Message, tag=25):
    """Makes an agent send a signal to procs; without any, asks it which messages have arrived."""

    src: str
    procs: list[str]
    number: int


class Split(_Message, tag=26):
    """Carries a message with large frames in pieces; ``parts`` says how many of the following frames each has."""

    parts: list[int]
    frames: int


class Parted(_Message, tag=27):
    """The connection between two hosts broke: from the agent of one to the program."""

    src: str
    host: str
    """The host of the sender."""
    other: str
    harmless: bool = False
    """Whether nothing between ranks of the two was on it, so that nothing is lost and it may be made again."""


class Report(_Message, tag=28):
    """The state of a rank and what it has logged: to its agent, or what it has logged to an owner on its host."""

    src: str
    state: bytes
    """Its packed RankReport; empty if that has not changed."""
    more: list[bytes]
    """Packed Metrics and Progress."""
    urgent: bool = False
    """Whether an answer follows, so that the agent sends it on at once."""


class Reports(_Message, tag=29):
    """Reports that an agent gathered for the owner of the ranks: the newest state of each, and all that they logged."""

    src: str
    now: float
    """Seconds since the epoch on the clock of the host."""
    parts: list[tuple[str, bytes, list[bytes]]]
    """As in Report."""


class Bye(_Message, tag=18):
    """The owner of an agent ends it, and all of its procs."""

    src: str


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
    | Hung
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

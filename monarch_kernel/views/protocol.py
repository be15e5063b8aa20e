"""The messages between the kernel and its views in the browser: JSON objects whose ``kind`` names the struct.

``labextension/src/protocol.ts`` is generated from this file by ``python -m monarch_kernel.views.typescript``; a test
compares them. The same messages go over the comm of a MeshView widget, and over the comm ``monarch.meshes`` of the
Meshes panel. A view asks first (``Open``); the kernel answers with a ``Snapshot``, and then sends a ``Patch`` when
something has changed: at most 10 a second for a mesh, fewer for large ones. Times are seconds since the epoch on the
kernel's clock; ``now`` tells a view how far its own clock differs.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

TARGET = "monarch.meshes"
"""Name of the comm target of the Meshes panel."""
VERSION = 2
"""Raised by a change that an older front end would misread."""
DISPLAY = "data-monarch-display"
"""Attribute of the picture of a mesh with its display id: a page updates pictures that it finds in a saved notebook."""
SPAN_SECONDS = 60
"""A view forgets spans that ended longer ago than this."""
ALIVE_SECONDS = 30
"""How often a view says that it still shows a mesh."""
MOST_SPANS = 4096
"""Of the spans that have ended, a view keeps this many with the latest ends."""

State: TypeAlias = Literal[
    "starting",
    "idle",
    "running",
    "collective",
    "blocked",
    "paused",
    "unresponsive",
    "failed",
    "restarted",
    "stopped",
]
Action: TypeAlias = Literal["interrupt", "pause", "resume", "heal", "kill", "stacks"]


class _Struct(msgspec.Struct, omit_defaults=True, frozen=True):
    pass


# Rows of a view.


class MeshRow(_Struct, frozen=True):
    """A mesh as a whole."""

    uid: str
    name: str
    labels: list[str]
    """Axes, outermost first."""
    sizes: list[int]
    """Ranks along each axis."""
    hosts: list[str]
    """Host of each rank."""
    started: float
    ended: float = 0.0
    """0 while it lives."""
    reason: str = ""
    """Why it ended."""
    actions: list[Action] = []
    """Actions that this kernel offers for its ranks."""


class RankRow(_Struct, frozen=True):
    """The state of a rank. A missing field has its default."""

    rank: int
    state: State
    since: float
    """When it came into this state."""
    call: str = ""
    """Title of the oldest call that it runs or has queued, as in ``cell [3]``; empty if idle."""
    place: str = ""
    """Innermost line of user code, as in ``cell [3] line 5``."""
    reason: str = ""
    """Why it failed or is silent."""
    collective: str = ""
    """As in ``all_reduce #12``."""
    queue: int = 0
    pid: int = 0
    device: str = ""
    restarts: int = 0
    load: float = 0.0
    """Utilization of its GPU, or else the share of one core, from 0 to 1."""
    rss: int = 0
    """Resident bytes."""
    gpu_memory: int = 0
    tensors: dict[str, int] = {}
    """Bytes by owner."""


class CallRow(_Struct, frozen=True):
    """A cell or call."""

    call: int
    title: str
    cell: int
    """Number of the notebook cell; 0 if none."""
    ranks: list[int]
    left: list[int]
    """Ranks that have not answered."""
    started: float
    ended: float = 0.0
    errors: dict[str, str] = {}
    """By rank, the first line of its error; those that were only stopped have none here."""
    stopped: list[int] = []
    """Ranks that were ended from outside: by an interrupt, or because other ranks had failed."""
    waits: str = ""
    """Why its ranks wait, for long; empty if they do not, or it is not known."""


class SpanRow(_Struct, frozen=True):
    """Time that a rank spent in one state, for the timeline."""

    rank: int
    state: State
    begin: float
    end: float = 0.0
    """0 if it lasts."""
    title: str = ""


class Points(_Struct, frozen=True):
    """Values of a metric on a rank, and the place of the first one: the view drops what it has from there on."""

    name: str
    rank: int
    """-1 for the notebook."""
    steps: list[int]
    values: list[float | None]
    """null stands for NaN and infinities."""
    at: int = 0
    """How many points the view keeps before these."""


class BarRow(_Struct, frozen=True):
    """Progress of the ranks in one piece of work."""

    bar: str
    unit: str
    ranks: list[int]
    """Those that take part, in order; none for all ranks of the mesh."""
    done: list[float]
    """Of each of the ranks; one value if they work on it together."""
    total: list[float]
    """Of each of the ranks; one value if it is the same for all. Not positive if unknown."""
    left: list[int]
    """The ranks that continue."""
    started: float
    ended: float = 0.0
    """When the last rank ended; 0 while one continues."""
    together: bool = False
    """Whether it is work of the mesh as a whole, or of some ranks of it, instead of that of each rank."""


class TensorRow(_Struct, frozen=True):
    """A tensor of a pinned rank."""

    name: str
    shape: list[int]
    dtype: str
    device: str
    norm: float | None = None
    """null if it was not computed or is not finite."""
    nans: int = 0


class LogLine(_Struct, frozen=True):
    """A line of output; ranks with equal lines share one."""

    ranks: list[int]
    stream: str
    """``stdout`` or ``stderr``."""
    text: str
    cell: int = 0


class MeshSummary(_Struct, frozen=True):
    """A mesh in the list of the Meshes panel."""

    uid: str
    name: str
    ranks: int
    """0 if unknown."""
    failed: int
    running: int
    current: bool = False
    """Whether cells without ``--mesh`` go to it."""
    detached: bool = False
    """Whether it outlives its notebook, and this one could attach it."""
    owner: str = ""
    """The kernel of a mesh that is not this notebook's, as a person would name it, or the state of a detached one;
    empty for this one's."""
    paused: int = 0
    taken: bool = False
    """Whether the process that ``owner`` names has attached a detached mesh, so that no other can."""


class CellTarget(_Struct, frozen=True):
    """The ranks that a ``%%mesh`` cell addresses."""

    cell: str
    """Id of the cell."""
    mesh: str
    ranks: str
    """As in ``0-3``; ``all`` for the whole mesh."""
    error: str = ""
    """Why the line addresses no ranks, and what to write instead."""


# From the kernel.


class Snapshot(_Struct, frozen=True, tag_field="kind", tag="snapshot"):
    """Everything of a mesh; replaces what the view has."""

    now: float
    number: int
    """Number of the newest event that it shows."""
    mesh: MeshRow
    ranks: list[RankRow]
    calls: list[CallRow]
    spans: list[SpanRow]
    points: list[Points]
    bars: list[BarRow]


class Patch(_Struct, frozen=True, tag_field="kind", tag="patch"):
    """The changes since the event ``after``. Rows replace those of the same rank, call, span or bar; points say where
    they go. A view whose newest event is not ``after`` asks again with ``Open``. If the mesh has got another shape,
    the kernel sends a Snapshot instead."""

    uid: str
    now: float
    after: int
    number: int
    mesh: MeshRow | None = None
    ranks: list[RankRow] = []
    calls: list[CallRow] = []
    spans: list[SpanRow] = []
    """A span is identified by its rank and begin."""
    points: list[Points] = []
    bars: list[BarRow] = []
    dropped_calls: list[int] = []
    """Calls that the view forgets."""
    dropped_bars: list[str] = []
    """Bars that the view forgets."""


class Gone(_Struct, frozen=True, tag_field="kind", tag="gone"):
    """Answer to a message about a mesh that this kernel does not have, or from a page of another version."""

    uid: str
    reason: str


class Heard(_Struct, frozen=True, tag_field="kind", tag="heard"):
    """Answer to Alive, of a kernel that answers while a cell runs too: a view that misses it says so."""

    uid: str


class Details(_Struct, frozen=True, tag_field="kind", tag="details"):
    """A pinned rank, about once a second."""

    uid: str
    rank: int
    stack: list[str]
    """Lines of its main thread's stack, outermost first; empty if the rank does not answer."""
    lines: list[LogLine]
    """Its last lines of output."""
    tensors: list[TensorRow]
    note: str = ""
    """Why something is missing."""


class Taken(_Struct, frozen=True, tag_field="kind", tag="taken"):
    """Says that an action has begun. It comes late where messages of pages wait for the running cell."""

    id: int


class Done(_Struct, frozen=True, tag_field="kind", tag="done"):
    """An action has ended."""

    id: int
    ok: bool
    text: str
    """Its effect, or the reason of its failure."""


class Meshes(_Struct, frozen=True, tag_field="kind", tag="meshes"):
    """The meshes of this notebook, and others that it could attach; for the panel, whenever they change."""

    version: int
    meshes: list[MeshSummary]


class Logs(_Struct, frozen=True, tag_field="kind", tag="logs"):
    """Answer to ``ReadLogs``."""

    uid: str
    lines: list[LogLine]
    more: bool
    """Whether there are older lines that match."""


class Targets(_Struct, frozen=True, tag_field="kind", tag="targets"):
    """Answer to ``ReadTargets``."""

    targets: list[CellTarget]


class CellOutputs(_Struct, frozen=True):
    """The output so far of a notebook cell that runs, or has run not long ago."""

    cell: str
    """Id of the cell."""
    request: str
    """Id of the message that runs it: the parent of its further messages."""
    number: int
    """Its execution count."""
    outputs: list[dict[str, Any]]
    """As in a notebook file; displays with an id have ``transient`` too."""
    ended: bool = False


class Outputs(_Struct, frozen=True, tag_field="kind", tag="outputs"):
    """Answer to ``ReadOutputs``."""

    cells: list[CellOutputs]


class PromptOver(_Struct, frozen=True, tag_field="kind", tag="prompt_over"):
    """A question of a cell needs no answer any more: its input box goes."""

    request: str
    """Id of the message that runs the cell."""
    question: str
    """Id of the message that asked."""


# From a view.


class Open(_Struct, frozen=True, tag_field="kind", tag="open"):
    """Asks for a Snapshot, and for a Patch at each change from then on. A widget shows one mesh and leaves ``uid``
    empty."""

    version: int
    uid: str = ""
    view: str = ""
    """Differs between the views that share a comm, as those of two pages with the same widget do; the same in Alive,
    Close and Pin."""


class Close(_Struct, frozen=True, tag_field="kind", tag="close"):
    """Ends the patches of a mesh, unless another view behind the same comm shows it."""

    uid: str = ""
    view: str = ""


class Alive(_Struct, frozen=True, tag_field="kind", tag="alive"):
    """Says that a view still shows a mesh; the kernel ends the patches of one that says nothing, as after its page was
    closed. It is an ``Open`` if they have ended."""

    uid: str = ""
    view: str = ""


class Pin(_Struct, frozen=True, tag_field="kind", tag="pin"):
    """Asks for the Details of a rank from now on, and for those of no other; of none with -1."""

    rank: int
    uid: str = ""
    norms: bool = False
    """Whether to compute the norms of tensors above 64 MiB too."""
    view: str = ""


class Act(_Struct, frozen=True, tag_field="kind", tag="act"):
    """Asks for an action; answered by Taken at once, and by Done at its end."""

    id: int
    action: Action
    ranks: list[int]
    """Empty for all."""
    uid: str = ""


class ReadLogs(_Struct, frozen=True, tag_field="kind", tag="read_logs"):
    """Asks for the newest lines of output that match."""

    ranks: list[int]
    """Empty for all."""
    text: str
    """Part of the line, in any case; empty for all."""
    stream: str
    """Empty for both."""
    most: int
    uid: str = ""


class ReadTargets(_Struct, frozen=True, tag_field="kind", tag="read_targets"):
    """Asks which ranks cells address."""

    cells: list[str]
    """Ids of cells."""
    lines: list[str]
    """Their first lines."""


class ListMeshes(_Struct, frozen=True, tag_field="kind", tag="list_meshes"):
    """Asks for Meshes, now and at each change."""

    version: int


class ReadOutputs(_Struct, frozen=True, tag_field="kind", tag="read_outputs"):
    """Asks for the output of the last cells, for a page that was not open all the time, or has not started them."""

    request: str = ""
    """Id of the message that runs a cell, for that of this one; empty for all."""


FromKernel: TypeAlias = (
    Snapshot | Patch | Gone | Heard | Details | Taken | Done | Meshes | Logs | Targets | Outputs | PromptOver
)
FromView: TypeAlias = Open | Close | Alive | Pin | Act | ReadLogs | ReadTargets | ListMeshes | ReadOutputs

decode = msgspec.json.Decoder(FromView).decode

"""Starts, signals and ends of ranks."""

from __future__ import annotations

from monarch._wire.messages.base import Message


class Spawn(Message, tag=12):
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


class Ready(Message, tag=7):
    """A rank is listening."""

    src: str
    pid: int


class Stop(Message, tag=13):
    """Tells an agent that these procs are about to end, and to kill those still alive after ``grace`` seconds."""

    src: str
    procs: list[str]
    grace: float


class Signal(Message, tag=25):
    """Makes an agent send a signal to procs; without any, asks it which messages have arrived."""

    src: str
    procs: list[str]
    number: int

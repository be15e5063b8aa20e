"""The kernel of a notebook, as the rooms of this package use it: ipykernel's, and what ours adds to that."""

from __future__ import annotations

from contextvars import Context
from threading import Event
from typing import Any, Protocol, cast


class Publisher(Protocol):
    """The sender of messages to all front ends."""

    @property
    def session(self) -> Any:
        """Signs and sends messages."""
        ...

    @property
    def iopub_socket(self) -> Any:
        """For messages to all front ends."""
        ...


class Kernel(Publisher, Protocol):
    """A kernel of ipykernel; ``compat`` uses its private names."""

    @property
    def stdin_socket(self) -> Any:
        """For questions to the front end of a cell."""
        ...

    @property
    def shell_stream(self) -> Any:
        """For replies to requests on the shell channel."""
        ...

    @property
    def comm_manager(self) -> Any:
        """Knows the comms."""
        ...

    @property
    def shell(self) -> Any:
        """IPython's shell, which runs the cells."""
        ...

    def get_parent(self, channel: str) -> dict[str, Any]:
        """Return the message of a channel that this thread handles, or an empty one."""
        ...


class OwnKernel(Kernel, Protocol):
    """The kernel of this package."""

    @property
    def running(self) -> Any:
        """The request that the notebook's thread runs; None if it is idle."""
        ...

    @property
    def context(self) -> Context:
        """Of the running cell."""
        ...

    @property
    def ending(self) -> Event:
        """Set once front ends end the kernel."""
        ...

    @property
    def stopped_await(self) -> bool:
        """Whether a Ctrl-C stopped the last cell at an await."""
        ...

    @property
    def serves_terminal(self) -> bool:
        """Whether a front end with a prompt was seen."""
        ...

    @property
    def lane(self) -> Any:
        """The way of messages of views around the running cell; a ``Lane`` of the room of views."""
        ...

    def say_busy(self) -> None:
        """Tell front ends that the running cell continues."""
        ...


def kernel_of(shell: Any) -> Kernel | None:
    """Return the kernel of a shell; None in a terminal."""
    return getattr(shell, "kernel", None)


def own_kernel(kernel: Kernel | None) -> OwnKernel | None:
    """Return a kernel as one of this package; None for another's, and without one."""
    is_own = getattr(kernel, "implementation", "") == "monarch"
    return cast("OwnKernel", kernel) if is_own else None


def request_of(kernel: Kernel | None) -> dict[str, Any]:
    """Return the request of the cell that this thread runs; an empty one in a terminal."""
    return (kernel.get_parent("shell") if kernel is not None else None) or {}

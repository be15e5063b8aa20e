"""A way to the views behind one comm: messages are written once, as JSON, and sent from any thread."""

from __future__ import annotations

import json
from typing import Any, Protocol

import msgspec

from monarch_kernel.compat import publish_packed
from monarch_kernel.kernel_like import Kernel
from monarch_kernel.views.protocol import FromKernel

_encode = msgspec.json.Encoder().encode


class Speaker(Protocol):
    """A way to the views behind one comm. Nothing waits for a front end."""

    comm: str
    """Id of the comm."""

    def send(self, message: bytes) -> None:
        """Send a message, written as JSON."""
        ...

    def tell(self, message: FromKernel) -> None:
        """Send a message."""
        ...


class Outlet:
    """A comm of the kernel's own session.

    Args:
        kernel: ipykernel's kernel.
        comm: id of the comm.
        custom: whether it is the comm of a widget, whose messages of other kinds are the widget's own.
    """

    def __init__(self, kernel: Kernel, comm: str, custom: bool = False) -> None:
        self._kernel = kernel
        self.comm = comm
        head = f'{{"comm_id":{json.dumps(comm)},"data":'
        self._head = (head + ('{"method":"custom","content":' if custom else "")).encode()
        self._tail = b"}}" if custom else b"}"

    def send(self, message: bytes) -> None:
        """Send a message, written as JSON. It goes into the queue of the kernel's output, and has no cell."""
        publish_packed(self._kernel, "comm_msg", self._head + message + self._tail, f"comm-{self.comm}")

    def tell(self, message: FromKernel) -> None:
        """Send a message."""
        self.send(_encode(message))


class WidgetOutlet:
    """The comm of a widget outside ipykernel, as in marimo and in Colab's shell.

    Args:
        widget: an ipywidgets widget.
    """

    def __init__(self, widget: Any) -> None:
        self._widget = widget
        self.comm: str = widget.model_id

    def send(self, message: bytes) -> None:
        """Send a message, written as JSON."""
        self._widget.send(msgspec.json.decode(message))

    def tell(self, message: FromKernel) -> None:
        """Send a message."""
        self._widget.send(msgspec.to_builtins(message))

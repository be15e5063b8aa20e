"""A front end for the tests of views: it opens comms of a notebook's kernel, and keeps what they say."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from kernels import Cell, Notebook
from monarch_kernel.views.protocol import TARGET, VERSION, FromKernel, Gone, Snapshot
from pages import Page


class Comm:
    """One comm: that of a panel, or of a widget."""

    def __init__(self, front: Front, name: str, custom: bool) -> None:
        self.front = front
        self.name = name
        self.custom = custom
        self.messages: list[Any] = []
        self.page = Page()

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message of a view."""
        message = {"kind": kind, **fields}
        self.front.send("comm_msg", comm_id=self.name, data=self._data(message))

    def _data(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"method": "custom", "content": message} if self.custom else message

    def take(self, data: dict[str, Any]) -> None:
        """Take what the kernel says."""
        if self.custom and data.get("method") != "custom":
            return
        message = msgspec.convert(data["content"] if self.custom else data, FromKernel)
        self.messages.append(message)
        self.page.take(message)

    def of(self, kind: type) -> list[Any]:
        """Return its messages of a kind."""
        return [each for each in self.messages if isinstance(each, kind)]

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Take messages until something is so."""
        self.front.notebook.take(condition, what or f"the comm, after {self.messages[-2:]}")

    def open(self, uid: str = "") -> None:
        """Ask for a mesh, and await it."""
        before = len(self.messages)
        self.say("open", version=VERSION, uid=uid)
        self.until(lambda: any(isinstance(each, (Snapshot, Gone)) for each in self.messages[before:]))


class Front:
    """A front end of a notebook's kernel."""

    def __init__(self, notebook: Notebook) -> None:
        self.notebook = notebook
        self.comms: dict[str, Comm] = {}
        self.statuses: list[tuple[str, str]] = []
        """States of the kernel in order, each with the kind of its parent."""
        # The notebook keeps only what belongs to its cells.
        self._shown, notebook._shown = notebook._shown, self._take

    def _take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "comm_msg" and content["comm_id"] in self.comms:
            self.comms[content["comm_id"]].take(content["data"])
        if message["msg_type"] == "status":
            self.statuses.append((content["execution_state"], message["parent_header"].get("msg_type", "")))
        self._shown(message)

    def send(self, kind: str, **content: Any) -> str:
        """Send a message on the shell channel, without a subshell; return its id."""
        message = self.notebook.client.session.msg(kind, content, metadata={"version": "1.0.0"})
        self.notebook.client.shell_channel.send(message)
        return message["header"]["msg_id"]

    def states(self) -> dict[str, Any]:
        """Ask for the states of all widgets, as a page does that opens."""
        name, found = uuid.uuid4().hex, dict[str, Any]()
        control = self.comms[name] = Comm(self, name, True)
        control.take = lambda data: found.update(data.get("states") or {})
        self.send("comm_open", comm_id=name, target_name="jupyter.widget.control", data={})
        self.send("comm_msg", comm_id=name, data={"method": "request_states"})
        self.notebook.take(lambda: found, "the states of widgets")
        return found

    def panel(self) -> Comm:
        """Open the comm of the Meshes panel."""
        name = uuid.uuid4().hex
        comm = self.comms[name] = Comm(self, name, False)
        self.send("comm_open", comm_id=name, target_name=TARGET, data={})
        return comm

    def widget(self, cell: Cell) -> Comm:
        """Return the comm of the widget that a cell has shown."""
        mime = "application/vnd.jupyter.widget-view+json"
        (name,) = {each[mime]["model_id"] for each in cell.bundles if mime in each}
        comm = self.comms.setdefault(name, Comm(self, name, True))
        return comm

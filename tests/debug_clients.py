"""A front end's debugger: requests and events of the Debug Adapter Protocol, over the channels of a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels import Notebook

RANKS = 1 << 30
"""Smallest number of a thread of a rank."""


class Debugger:
    """A debug session with a kernel."""

    def __init__(self, notebook: Notebook, client: str = "vscode") -> None:
        self.notebook = notebook
        self.seq = 0
        self.seen = len(notebook.events)
        self.paths: set[str] = set()
        """Files that may have breakpoints."""
        notebook.run("1").ok()
        self.capabilities = self.request(
            "initialize", clientID=client, clientName=client, adapterID="", pathFormat="path", linesStartAt1=True,
            columnsStartAt1=True, supportsVariableType=True,
        )  # fmt: skip
        self.request("attach")

    def reply(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the whole reply."""
        self.seq += 1
        content = {"type": "request", "seq": self.seq, "command": command, "arguments": arguments}
        return self.notebook.control("debug_request", **content)

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request that succeeds, and return the body of the reply."""
        reply = self.reply(command, **arguments)
        assert reply.get("success"), (command, reply)
        return reply.get("body") or {}

    def refused(self, command: str, **arguments: Any) -> str:
        """Send a request that fails, and return the reason."""
        reply = self.reply(command, **arguments)
        assert reply["success"] is False, (command, reply)
        return reply["message"]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the bodies of events since the session began."""
        return [each["body"] for each in self.notebook.events[self.seen :] if each["event"] == name]

    def await_events(self, name: str, wanted: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
        """Wait until the events of a name are as wanted."""
        self.notebook.take(lambda: wanted(self.events(name)), f"waiting for {name}: {self.events(name)}")
        return self.events(name)

    def stopped(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many stops have been told in all, and return the new ones by rank."""
        return self.await_events("stopped", lambda found: len(found) >= count)[:count]

    def break_in(self, code: str, *lines: int | dict[str, Any]) -> list[dict[str, Any]]:
        """Set breakpoints in a cell, as a click in its gutter does."""
        self.path = self.request("dumpCell", code=code)["sourcePath"]
        return self.break_at(self.path, *lines)

    def break_at(self, path: str, *lines: int | dict[str, Any]) -> list[dict[str, Any]]:
        """Set breakpoints in a file."""
        self.paths.add(path)
        points = [{"line": each} if isinstance(each, int) else each for each in lines]
        arguments = {"source": {"path": path}, "breakpoints": points, "sourceModified": False}
        return self.request("setBreakpoints", **arguments)["breakpoints"]

    def ranks(self) -> dict[int, int]:
        """Return the threads of the ranks of meshes, by rank."""
        threads = self.request("threads")["threads"]
        return {each["monarch"]["rank"]: each["id"] for each in threads if each["id"] >= RANKS}

    def stack(self, thread: int) -> list[dict[str, Any]]:
        """Return the frames of a thread."""
        return self.request("stackTrace", threadId=thread)["stackFrames"]

    def lines(self, thread: int) -> list[tuple[str, int]]:
        """Return function and line of the frames of a thread."""
        return [(each["name"], each["line"]) for each in self.stack(thread)]

    def scope(self, thread: int, name: str = "Locals", frame: int = 0) -> int:
        """Return the number of the variables of a frame."""
        scopes = self.request("scopes", frameId=self.stack(thread)[frame]["id"])["scopes"]
        return next(each["variablesReference"] for each in scopes if each["name"] == name)

    def variables(self, number: int, **options: int | str) -> dict[str, dict[str, Any]]:
        """Return the parts of a value by name."""
        found = self.request("variables", variablesReference=number, **options)["variables"]
        return {each["name"]: each for each in found}

    def locals(self, thread: int, frame: int = 0) -> dict[str, dict[str, Any]]:
        """Return the local variables of a frame."""
        return self.variables(self.scope(thread, frame=frame))

    def evaluate(self, thread: int, code: str, frame: int = 0, context: str = "repl") -> dict[str, Any]:
        """Evaluate code in a frame."""
        at = self.stack(thread)[frame]["id"]
        return self.request("evaluate", expression=code, frameId=at, context=context)

    def forget(self) -> None:
        """Remove all breakpoints and forget the events so far, as a new session would, which costs a second of CPU."""
        for path in sorted(self.paths):
            self.break_at(path)
        self.paths.clear()
        self.request("setExceptionBreakpoints", filters=[])
        self.request("setFunctionBreakpoints", breakpoints=[])
        self.seen = len(self.notebook.events)

    def end(self) -> None:
        """End the session."""
        self.request("disconnect", restart=False, terminateDebuggee=False)

"""The debugger of VS Code's notebooks: its requests in its own order, with its arguments and its hidden code."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from debug_clients import RANKS, Debugger
from kernels import Notebook

pytest.importorskip("debugpy")
pytestmark = pytest.mark.slow

PLAIN = "base = 10\nbase"
CELL = """%%mesh [0:2]
def work(n):
    total = 0
    for i in range(n):
        total += i
    return total
text = "a" * 30_000
y = work(rank + 5)
rank * 0"""
VERSION = "import builtins\nimport ipykernel\nbuiltins.print(ipykernel.__version__)"
THREAD = "import debugpy\ndebugpy.debug_this_thread()"
REMOVE = """import os
_EDITOR_files = FILES
for file in _EDITOR_files:
    try:
        os.remove(file)
    except:
        pass
del _EDITOR_files"""
DESCRIBE = """def _EDITOR_describe(is_debugging, value):
    import json as _EDITOR_json
    found = {"type": type(value).__name__, "count": len(value), "text": "it's \\"quoted\\""}
    text = _EDITOR_json.dumps(found)
    return text if is_debugging else print(text)
"""
FORGET = "try:\n    del _EDITOR_describe\nexcept:\n    pass\n"
"""A value is described in three requests: a definition, a call of it, and the end of the definition."""


class CodeDebugger(Debugger):
    """A debug session of VS Code for one cell of a notebook.

    Args:
        notebook: its kernel.
        cells: of the notebook.
        debugged: the number of the cell that is debugged.
        lines: breakpoints, by the number of a cell.
    """

    def __init__(self, notebook: Notebook, cells: list[str], debugged: int, lines: dict[int, list[int]]) -> None:
        self.notebook = notebook
        self.cells = cells
        self.debugged = debugged
        self.seq = 0
        self.seen = len(notebook.events)
        self.files: dict[int, str] = {}
        # It refuses to debug if this is not all that the code prints.
        assert int(notebook.hidden(VERSION).stream().partition(".")[0]) >= 6
        self.capabilities = self.request(
            "initialize", clientID="vscode", clientName="Visual Studio Code", adapterID="Python Kernel Debug Adapter",
            pathFormat="path", linesStartAt1=True, columnsStartAt1=True, supportsVariableType=True,
            supportsVariablePaging=True, supportsRunInTerminalRequest=True, locale="en",
            supportsProgressReporting=True, supportsInvalidatedEvent=True, supportsMemoryReferences=True,
            supportsArgsCanBeInterpretedByShell=True, supportsMemoryEvent=True, supportsStartDebuggingRequest=True,
        )  # fmt: skip
        # It lets go on what an earlier page has left.
        for thread in self.request("debugInfo")["stoppedThreads"]:
            self.request("continue", threadId=thread)
        self.request(
            "attach", type="Python Kernel Debug Adapter", name="book.ipynb", request="attach", justMyCode=True,
            __mode="cell", __cellIndex=debugged, __notebookUri="file:///work/book.ipynb", __sessionId="1",
        )  # fmt: skip
        self.await_events("initialized", len)
        for number, some in lines.items():
            self.set_lines(number, *some)
        self.request("setFunctionBreakpoints", breakpoints=[])
        filters = [each["filter"] for each in self.capabilities["exceptionBreakpointFilters"] if each.get("default")]
        self.request("setExceptionBreakpoints", filters=filters, filterOptions=[])
        self.configured()

    def reply(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request; one without arguments has no such field."""
        self.seq += 1
        content: dict[str, Any] = {"type": "request", "seq": self.seq, "command": command}
        return self.notebook.control("debug_request", **content, **({"arguments": arguments} if arguments else {}))

    def set_lines(self, number: int, *lines: int) -> None:
        """Set breakpoints in a cell, by its number."""
        self.dump(number)
        source = {"name": "book.ipynb", "path": self.files[number]}
        points = [{"line": line} for line in lines]
        answers = self.request(
            "setBreakpoints", source=source, lines=[*lines], breakpoints=points, sourceModified=False
        )
        assert all(each["verified"] for each in answers["breakpoints"]), answers

    def dump(self, number: int) -> None:
        self.files[number] = self.request("dumpCell", code=self.cells[number])["sourcePath"]

    def configured(self) -> None:
        """Do what precedes the run of the cell, and run it."""
        self.notebook.hidden(THREAD).ok()
        for number in range(len(self.cells)):
            self.dump(number)
        self.cell = self.notebook.send(self.cells[self.debugged])
        self.request("configurationDone")
        self.request("threads")

    def look(self, stop: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
        """Ask what a stop leads to; return the frames, and the local variables of the innermost."""
        thread = stop["threadId"]
        assert thread in {each["id"] for each in self.request("threads")["threads"]}
        first = self.request("stackTrace", threadId=thread, startFrame=0, levels=1)
        rest = self.request("stackTrace", threadId=thread, startFrame=1, levels=19)
        frames = [*first["stackFrames"], *rest["stackFrames"]]
        assert len(frames) == first["totalFrames"]
        scopes = self.request("scopes", frameId=frames[0]["id"])["scopes"]
        return frames, self.variables(scopes[0]["variablesReference"])

    def describe(self, frame: int, name: str) -> dict[str, Any]:
        """Describe a value as the list of variables does while a frame is shown."""
        options: dict[str, Any] = {"frameId": frame, "context": "repl", "format": {"rawString": True}}
        self.request("evaluate", expression=DESCRIBE, **options)
        try:
            answer = self.request("evaluate", expression=f"_EDITOR_describe(True, {name})", **options)
            return json.loads(answer["result"])
        finally:
            self.request("evaluate", expression=FORGET, **options)

    def close(self) -> None:
        """End the session, as after the end of the cell: some versions say so twice, and the files are removed."""
        self.request("disconnect", restart=False)
        self.request("disconnect", restart=False, terminateDebuggee=False)
        code = REMOVE.replace("FILES", repr(list(self.files.values())))
        assert self.notebook.hidden(code).ok().text.strip() == ""
        assert not any(os.path.exists(file) for file in self.files.values())


@pytest.fixture(scope="module")
def started(notebook: Notebook) -> Notebook:
    """The notebook, whose debugger was started once: its process goes on for as long as the kernel."""
    Debugger(notebook).end()
    return notebook


def ranks_of(stops: list[dict[str, Any]]) -> list[int]:
    return sorted(each["monarch"]["rank"] for each in stops)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_session_of_a_cell_from_its_start_to_its_end(started: Notebook, mode: str) -> None:
    notebook = started
    notebook.run(f"%mesh auto {mode}").ok()
    try:
        # Twice: the files of the first session are gone, and the breakpoints in the notebook stay.
        for _ in range(2):
            session = CodeDebugger(notebook, [PLAIN, CELL], 1, {1: [5]})
            stops = session.stopped(2)
            assert ranks_of(stops) == [0, 1] and all(each["threadId"] >= RANKS for each in stops)
            for stop in stops:
                rank = stop["monarch"]["rank"]
                frames, local = session.look(stop)
                assert [(each["name"], each["line"]) for each in frames] == [("work", 5), ("<module>", 8)]
                assert {each["source"]["path"] for each in frames} == {session.files[1]}
                assert (local["n"]["value"], local["total"]["value"]) == (str(rank + 5), "0")
                hover = session.request("evaluate", expression="n", frameId=frames[0]["id"], context="hover")
                assert hover["result"] == str(rank + 5)
                described = session.describe(frames[1]["id"], "text")
                assert described == {"type": "str", "count": 30_000, "text": 'it\'s "quoted"'}
            one, other = (each["threadId"] for each in stops)
            session.request("next", threadId=one, granularity="statement")
            step = session.stopped(3)[-1]
            assert (step["reason"], step["threadId"]) == ("step", one)
            assert session.lines(one)[0] == ("work", 4) and session.lines(other)[0] == ("work", 5)
            session.set_lines(1)
            session.request("continue", threadId=other)
            assert session.cell.wait().ok().shown.splitlines()[-1] == "[ranks 0-1] 0"
            session.close()
    finally:
        notebook.interrupt()
        notebook.run("%mesh auto off").ok()


def test_plain_cell_in_automatic_mode_stops_on_ranks(started: Notebook) -> None:
    started.run("%mesh auto on [0:2]").ok()
    try:
        code = "first = rank + 1\nsecond = first * 2\nrank * 0"
        session = CodeDebugger(started, [code], 0, {0: [2]})
        stops = session.stopped(2)
        assert ranks_of(stops) == [0, 1]
        frames, local = session.look(stops[0])
        assert [(each["name"], each["line"]) for each in frames] == [("<module>", 2)]
        assert frames[0]["source"]["path"] == session.files[0]
        assert local["first"]["value"] == str(stops[0]["monarch"]["rank"] + 1)
        session.set_lines(0)
        session.request("continue", threadId=stops[0]["threadId"])
        assert session.cell.wait().ok().shown.splitlines()[-1] == "[ranks 0-1] 0"
        session.close()
    finally:
        started.interrupt()
        started.run("%mesh auto off").ok()


def test_run_by_line_steps_and_its_stop_lets_all_ranks_go_on(started: Notebook) -> None:
    # It sets a breakpoint in the first line that is no comment, here the header.
    session = CodeDebugger(started, [CELL], 0, {0: [1]})
    first, same = session.stopped(2)
    assert session.lines(first["threadId"]) == session.lines(same["threadId"]) == [("<module>", 2)]
    # A second stop at the same place looks like the first one again, and so it steps on.
    lines: list[int] = []
    for count in (3, 4):
        session.request("stepIn", threadId=same["threadId"])
        assert session.stopped(count)[-1]["threadId"] == same["threadId"]
        lines.append(session.lines(same["threadId"])[0][1])
    assert lines == [7, 8] and session.lines(first["threadId"]) == [("<module>", 2)]
    late = started.send("pass", cell_id="", store_history=False)
    session.request("disconnect", restart=False)
    assert session.cell.wait().ok().shown == "[ranks 0-1] 0"
    late.wait().ok()


def test_large_values_come_in_pages_of_named_and_indexed_parts(started: Notebook) -> None:
    code = "%%mesh [0]\nweights = torch.arange(6.0).reshape(3, 2)\nmany = list(range(250))\nnone = rank * 0\nnone"
    session = CodeDebugger(started, [code], 0, {0: [5]})
    _, local = session.look(session.stopped(1)[0])
    weights, many = local["weights"], local["many"]
    assert (weights["indexedVariables"], many["indexedVariables"], many["namedVariables"]) == (3, 250, 0)
    number = weights["variablesReference"]
    named = session.variables(number, filter="named")
    assert {"shape", "dtype"} <= named.keys() and not any(name.startswith("[") for name in named)
    indexed = session.variables(number, filter="indexed", start=0, count=3)
    assert list(indexed) == ["[0]", "[1]", "[2]"]
    page = session.variables(many["variablesReference"], filter="indexed", start=200, count=50)
    assert list(page) == [str(number) for number in range(200, 250)] and page["249"]["value"] == "249"
    session.set_lines(0)
    session.request("disconnect", restart=False)
    session.cell.wait().ok()

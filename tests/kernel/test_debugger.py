"""Requests of a debugger: breakpoints in cells on ranks are refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kernels import Notebook


def breakpoints(notebook: Notebook, code: str, lines: list[int]) -> list[dict[str, Any]]:
    """Set breakpoints in a cell as JupyterLab does, and return the answers."""
    dumped = notebook.control("debug_request", type="request", seq=1, command="dumpCell", arguments={"code": code})
    path = dumped["body"]["sourcePath"]
    arguments = {"source": {"path": path}, "breakpoints": [{"line": line} for line in lines], "sourceModified": False}
    request = {"type": "request", "seq": 2, "command": "setBreakpoints", "arguments": arguments}
    reply = notebook.control("debug_request", **request)
    assert reply["success"] and reply["request_seq"] == 2 and reply["command"] == "setBreakpoints"
    return reply["body"]["breakpoints"]


@pytest.mark.slow
def test_breakpoints_on_ranks_are_not_verified(own: Callable[..., Notebook]) -> None:
    pytest.importorskip("debugpy")
    # Its debugger goes on for as long as the kernel.
    notebook = own()
    hello = {"clientID": "test", "adapterID": "", "pathFormat": "path", "linesStartAt1": True, "columnsStartAt1": True}
    start = {"type": "request", "seq": 0}
    assert notebook.control("debug_request", command="initialize", arguments=hello, **start)["success"]
    notebook.control("debug_request", command="attach", arguments={}, **start)
    try:
        for code in ("%%mesh\nx = 1\ny = 2", "%%mesh spawn a\nx = 1\ny = 2", "\n%%time\n%%mesh [0]\nx = 1"):
            found = breakpoints(notebook, code, [2, 3])
            assert [(each["verified"], each["line"]) for each in found] == [(False, 2), (False, 3)]
            assert all("runs on ranks" in each["message"] and "%mesh pull" in each["message"] for each in found)
        assert [each["verified"] for each in breakpoints(notebook, "x = 1\ny = 2", [1])] == [True]
    finally:
        notebook.control("debug_request", command="disconnect", arguments={}, **start)
    assert notebook.run("1").ok().shown == "1"

"""The debugger of a front end, with the ranks as threads: breakpoints, stacks, variables, steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from debug_clients import RANKS, Debugger
from dialogs import said
from kernels import ALL, Cell, Notebook
from leaks import wait_until
from monarch_kernel.dap.filters import patterns_of

pytest.importorskip("debugpy")

CELL = """%%mesh [0:2]
def work(n):
    total = 0
    for i in range(n):
        total += i
    return total
x = rank + 5
y = work(x)
rank * 0"""
TREE = """%%mesh [1:2]
import torch
class Thing:
    def __init__(self):
        self.size = 3
        self.parts = {"a": [1, 2], "b": (3,)}
    @property
    def computed(self):
        raise RuntimeError("code of a property has run")
def look():
    thing = Thing()
    weights = torch.ones(2, 3)
    many = list(range(1000))
    text = "word"
    _hidden = 1
    return thing, weights, many, text
look()
None"""


@pytest.fixture(scope="module")
def started(notebook: Notebook) -> Notebook:
    """The notebook, whose debugger was started once: its process goes on for as long as the kernel."""
    Debugger(notebook).end()
    return notebook


@pytest.fixture(scope="module")
def shared(started: Notebook) -> Iterator[list[Debugger]]:
    """The session that tests share, if there is one now."""
    sessions: list[Debugger] = []
    yield sessions
    for session in sessions:
        session.end()


@pytest.fixture
def debugger(started: Notebook, shared: list[Debugger]) -> Iterator[Debugger]:
    session = shared.pop() if shared else Debugger(started)
    yield session
    started.interrupt()
    started.run("%mesh interrupt")
    session.forget()
    shared.append(session)


@pytest.fixture
def detached(started: Notebook, shared: list[Debugger]) -> Notebook:
    """The notebook, without a debugger."""
    while shared:
        shared.pop().end()
    return started


def at_line(debugger: Debugger, code: str, *lines: int | dict[str, Any], stops: int = 1) -> tuple[Cell, dict[int, int]]:
    """Run a cell with breakpoints until ranks have stopped; return it and the threads of these, by rank."""
    before = len(debugger.events("stopped"))
    assert all(each["verified"] for each in debugger.break_in(code, *lines))
    cell = debugger.notebook.send(code)
    ids = {each["threadId"] for each in debugger.stopped(before + stops)[before:]}
    return cell, {rank: thread for rank, thread in debugger.ranks().items() if thread in ids}


def finish(debugger: Debugger, cell: Cell, threads: dict[int, int]) -> Cell:
    """Remove the breakpoints, and let the ranks go on to the end of a cell."""
    debugger.break_at(debugger.path)
    debugger.request("continue", threadId=min(threads.values()))
    return cell.wait().ok()


def test_breakpoint_in_a_cell_stops_its_ranks(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, CELL, 5, stops=2)
    assert threads.keys() == {0, 1}
    for stop in debugger.events("stopped"):
        assert (stop["reason"], stop["allThreadsStopped"]) == ("breakpoint", False)
    for rank in (0, 1):
        frames = debugger.stack(threads[rank])
        assert [(each["name"], each["line"]) for each in frames] == [("work", 5), ("<module>", 8)]
        assert frames[0]["source"]["path"] == debugger.path
        found = debugger.locals(threads[rank])
        assert (found["n"]["value"], found["total"]["value"], found["n"]["type"]) == (str(rank + 5), "0", "int")
        assert debugger.evaluate(threads[rank], "n * 2")["result"] == str(2 * (rank + 5))
        assert debugger.evaluate(threads[rank], "x", frame=1)["result"] == str(rank + 5)
    assert finish(debugger, cell, threads).shown == "[ranks 0-1] 0"


def test_files_of_packages_are_skipped_by_one_pattern_each(started: Notebook) -> None:
    roots = ["/lib/python3.11", "/lib/python3.11/site-packages", "", "/work"]
    files = ["a/b.py", "a/c/d.py", "site-packages/e/f.py", "site-packages/g.py", "h.py"]
    found = patterns_of([*(f"/lib/python3.11/{file}" for file in files), "/other/i.py"], roots)
    start = "/lib/python3.11/"
    assert found == [
        f"{start}a/**", f"{start}site-packages/e/**", f"{start}site-packages/g.py", f"{start}h.py", "/other/i.py"
    ]  # fmt: skip
    # There were about a thousand, which made the first cell after a change of breakpoints wait for half a second.
    assert started.run("len(get_ipython().kernel.debugger.kernel_modules) < 400").ok().shown == "True"


def test_threads_are_those_of_the_notebook_and_the_ranks(debugger: Debugger) -> None:
    threads = debugger.request("threads")["threads"]
    assert [each["name"] for each in threads if each["id"] >= RANKS] == [f"rank {rank} of mesh mesh" for rank in ALL]
    assert any(each["name"] == "MainThread" for each in threads)


def test_steps_are_of_one_rank(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, CELL, 8, stops=2)
    one = threads[1]

    def stepped(command: str) -> list[tuple[str, int]]:
        count = len(debugger.events("stopped"))
        debugger.request(command, threadId=one)
        last = debugger.stopped(count + 1)[-1]
        assert (last["threadId"], last["reason"]) == (one, "step")
        return debugger.lines(one)

    assert stepped("stepIn") == [("work", 3), ("<module>", 8)]
    assert stepped("next") == [("work", 4), ("<module>", 8)]
    assert stepped("stepOut") == [("<module>", 8)] or debugger.lines(one) == [("<module>", 9)]
    assert debugger.lines(threads[0]) == [("<module>", 8)]
    finish(debugger, cell, threads)


def test_continue_is_for_all_ranks_unless_one_is_meant(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, CELL, 8, stops=2)
    debugger.request("continue", threadId=threads[0], singleThread=True)
    debugger.await_events("continued", lambda found: any(each["threadId"] == threads[0] for each in found))
    assert debugger.lines(threads[1]) == [("<module>", 8)]
    assert debugger.lines(threads[0]) == []
    finish(debugger, cell, {1: threads[1]})


def test_variables_show_their_parts_and_run_no_code(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, TREE, 16)
    found = debugger.locals(threads[1])
    assert set(found) == {"thing", "weights", "many", "text", "_hidden"}
    assert found["text"]["value"] == "'word'" and found["text"]["variablesReference"] == 0
    thing = debugger.variables(found["thing"]["variablesReference"])
    assert set(thing) == {"size", "parts"}
    parts = debugger.variables(thing["parts"]["variablesReference"])
    assert list(parts) == ["'a'", "'b'"]
    first = debugger.variables(parts["'a'"]["variablesReference"])
    assert [each["value"] for each in first.values()] == ["1", "2"]
    assert first["1"]["evaluateName"] == "thing.parts['a'][1]"
    assert debugger.evaluate(threads[1], first["1"]["evaluateName"])["result"] == "2"
    assert "float32[2, 3]" in found["weights"]["value"]
    weights = debugger.variables(found["weights"]["variablesReference"])
    assert weights["shape"]["value"] == "(2, 3)"
    assert weights["device"]["value"] == "device(type='cpu')"
    assert found["many"]["indexedVariables"] == 1000
    page = debugger.variables(found["many"]["variablesReference"], start=990, count=5)
    assert list(page) == ["990", "991", "992", "993", "994"]
    assert "500 more" in debugger.variables(found["many"]["variablesReference"])["…"]["value"]
    assert "rank" in debugger.variables(debugger.scope(threads[1], "Globals"))
    finish(debugger, cell, threads)


def test_variables_can_be_changed(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, TREE.replace("look()\nNone", "look()[3]"), 16)
    one = threads[1]
    scope = debugger.scope(one)
    debugger.request("setVariable", variablesReference=scope, name="text", value="'changed' + str(len(many))")
    thing = debugger.variables(scope)["thing"]["variablesReference"]
    debugger.request("setVariable", variablesReference=thing, name="size", value="7")
    weights = debugger.variables(scope)["weights"]["variablesReference"]
    debugger.request("setVariable", variablesReference=weights, name="[0]", value="torch.zeros(3)")
    frame = debugger.stack(one)[0]["id"]
    debugger.request("setExpression", frameId=frame, expression="thing.parts['b']", value="many[:2]")
    result = debugger.evaluate(one, "thing.size, thing.parts['b'], weights.sum().item()")["result"]
    assert result == "(7, [0, 1], 3.0)"
    assert "NameError" in debugger.refused("setVariable", variablesReference=scope, name="text", value="missing")
    assert "no local variable" in debugger.refused("setVariable", variablesReference=scope, name="other", value="1")
    assert finish(debugger, cell, threads).shown == "[rank 1] 'changed1000'"


def test_console_runs_statements(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, CELL.replace("rank * 0", "y"), 6, stops=2)
    assert debugger.evaluate(threads[1], "total = 100\nextra = 1")["result"] == ""
    assert debugger.evaluate(threads[1], "total")["result"] == "100"
    frame = debugger.stack(threads[1])[0]["id"]
    assert "ZeroDivisionError" in debugger.refused("evaluate", expression="1 / 0", frameId=frame, context="repl")
    assert "SyntaxError" in debugger.refused("evaluate", expression="a = 1", frameId=frame, context="watch")
    assert "would wait for other ranks" in debugger.refused("evaluate", expression="dist.barrier()", frameId=frame)
    found = debugger.request("completions", text="tot", line=1, column=4, frameId=frame)["targets"]
    assert "total" in [each["label"] for each in found]
    value = debugger.evaluate(threads[1], "{'k': [1, 2]}")
    assert list(debugger.variables(value["variablesReference"])) == ["'k'"]
    shown = finish(debugger, cell, threads).shown
    assert "rank 0" in shown and "100" in shown


def test_conditions_hits_and_messages(debugger: Debugger) -> None:
    points = [
        {"line": 5, "condition": "rank == 1 and i > 1", "hitCondition": ">= 2"},
        {"line": 6, "logMessage": "total {total}"},
    ]
    cell, threads = at_line(debugger, CELL, *points)
    assert threads.keys() == {1}
    assert debugger.evaluate(threads[1], "i")["result"] == "3"
    # Rank 0 has printed its message by then, and rank 1 comes to it without the breakpoint.
    assert finish(debugger, cell, threads).said() == {"total 10": {0}}


def test_wrong_breakpoints_say_why(debugger: Debugger) -> None:
    found = debugger.break_in(CELL, {"line": 5, "condition": "i >"}, {"line": 5, "hitCondition": "often"}, 40, 1)
    assert [each["verified"] for each in found] == [False, False, False, True]
    assert "is not an expression" in found[0]["message"]
    assert "expected a number of hits" in found[1]["message"]
    assert "no code" in found[2]["message"]
    assert found[3]["line"] == 2


def test_exceptions_stop_where_they_are_raised(debugger: Debugger) -> None:
    filters = {each["filter"] for each in debugger.capabilities["exceptionBreakpointFilters"]}
    assert {"raised", "uncaught"} <= filters
    debugger.request("setExceptionBreakpoints", filters=["raised"])
    code = (
        "%%mesh [0:1]\ndef f(n):\n    return 1 / n\ntry:\n    f(0)\nexcept ZeroDivisionError:\n    caught = 1\ncaught"
    )
    cell, threads = at_line(debugger, code)
    assert debugger.events("stopped")[0]["reason"] == "exception"
    assert debugger.lines(threads[0])[0] == ("f", 3)
    info = debugger.request("exceptionInfo", threadId=threads[0])
    assert (info["exceptionId"], info["description"]) == ("ZeroDivisionError", "division by zero")
    assert "Traceback" in info["details"]["stackTrace"]
    assert finish(debugger, cell, threads).shown == "[rank 0] 1"
    debugger.request("setExceptionBreakpoints", filters=[])


def test_uncaught_exceptions_stop_before_the_call_has_failed(debugger: Debugger) -> None:
    debugger.request("setExceptionBreakpoints", filters=["uncaught"])
    code = "%%mesh [0:2]\ndef f(n):\n    a = n\n    return 1 / n\ntry:\n    f(0)\nexcept Exception:\n    pass\nf(rank)"
    cell, threads = at_line(debugger, code)
    assert threads.keys() == {0}
    assert debugger.lines(threads[0])[0] == ("f", 4)
    assert debugger.locals(threads[0])["a"]["value"] == "0"
    debugger.request("setExceptionBreakpoints", filters=[])
    debugger.request("continue", threadId=threads[0])
    assert cell.wait().status == "error"
    assert "ZeroDivisionError" in cell.text


def test_pause_stops_running_ranks(debugger: Debugger) -> None:
    notebook = debugger.notebook
    cell = notebook.send("%%mesh\nimport time\ngoes_on = True\nprint('runs')\nwhile goes_on:\n    time.sleep(0.01)")
    cell.until(lambda: cell.said().get("runs") == ALL)
    threads = debugger.ranks()
    debugger.request("pause", threadId=threads[2])
    stop = debugger.stopped(1)[0]
    assert (stop["threadId"], stop["reason"]) == (threads[2], "pause")
    assert debugger.lines(threads[2])[0][1] in (5, 6)
    # The main thread only waits for the ranks: they are meant.
    main = next(each["id"] for each in debugger.request("threads")["threads"] if each["name"] == "MainThread")
    debugger.request("pause", threadId=main)
    debugger.stopped(4)
    for thread in threads.values():
        debugger.evaluate(thread, "goes_on = False")
    debugger.request("continue", threadId=threads[0])
    cell.wait().ok()


def test_others_are_shown_as_paused_meanwhile(debugger: Debugger) -> None:
    code = "%%mesh\nimport time\nif rank == 1:\n    x = 1\nfor i in range(400):\n    time.sleep(0.01)"
    cell, _ = at_line(debugger, code, 4, stops=4)
    stops = {each["threadId"]: each for each in debugger.events("stopped")}
    by_rank = debugger.ranks()
    assert stops[by_rank[1]]["reason"] == "breakpoint"
    assert all(stops[by_rank[rank]]["reason"] == "pause" for rank in (0, 2, 3))
    assert all(stops[by_rank[rank]]["preserveFocusHint"] for rank in (0, 2, 3))
    names = {each["id"]: each["name"] for each in debugger.request("threads")["threads"]}
    assert names[by_rank[0]] == "rank 0 of mesh mesh (paused meanwhile)"
    assert "i" in debugger.locals(by_rank[0])
    assert "continue that rank first" in debugger.refused("next", threadId=by_rank[0])
    debugger.notebook.interrupt()
    assert cell.wait().status == "error"


def test_files_stop_ranks_and_the_notebook(debugger: Debugger, tmp_path: Path) -> None:
    module = tmp_path / "bridge_module.py"
    module.write_text("def twice(n):\n    result = n * 2\n    return result\n")
    notebook = debugger.notebook
    notebook.run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})").ok()
    debugger.break_at(str(module), 3)
    code = (
        f"%%mesh [0:1]\nimport sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport bridge_module\nbridge_module.twice(4)"
    )
    cell = notebook.send(code)
    thread = debugger.stopped(1)[0]["threadId"]
    frames = debugger.stack(thread)
    assert (frames[0]["name"], frames[0]["line"], frames[0]["source"]["path"]) == ("twice", 3, str(module))
    debugger.request("continue", threadId=thread)
    assert cell.wait().ok().shown == "[rank 0] 8"
    cell = notebook.send("import bridge_module\nbridge_module.twice(5)")
    stop = debugger.stopped(2)[-1]
    assert stop["threadId"] < RANKS
    assert debugger.stack(stop["threadId"])[0]["name"] == "twice"
    assert debugger.locals(stop["threadId"])["result"]["value"] == "10"
    debugger.break_at(str(module))
    debugger.request("continue", threadId=stop["threadId"])
    assert cell.wait().ok().shown == "10"


def test_plain_cells_stop_the_notebook_and_not_the_ranks(debugger: Debugger) -> None:
    code = "a = 1\nb = a + 1\nb"
    found = debugger.break_in(code, 2)
    assert found[0]["verified"]
    cell = debugger.notebook.send(code)
    stop = debugger.stopped(1)[0]
    assert stop["threadId"] < RANKS
    assert debugger.stack(stop["threadId"])[0]["line"] == 2
    assert debugger.locals(stop["threadId"])["a"]["value"] == "1"
    # The ranks live on meanwhile, and answer.
    assert debugger.lines(debugger.ranks()[0]) == []
    debugger.break_at(debugger.path)
    debugger.request("continue", threadId=stop["threadId"])
    assert cell.wait().ok().shown == "2"
    assert debugger.notebook.mesh("rank * 0").ok().shown == "[ranks 0-3] 0"


def test_breakpoints_of_verbs_and_of_the_front_end_agree(debugger: Debugger) -> None:
    notebook = debugger.notebook
    notebook.run("%mesh break work on [1:2]").ok()
    try:
        cell, threads = at_line(debugger, CELL, 6, stops=2)
        assert (debugger.lines(threads[1])[0], debugger.lines(threads[0])[0]) == (("work", 3), ("work", 6))
        finish(debugger, cell, threads)
    finally:
        notebook.run("%mesh clear").ok()


def test_disconnect_frees_the_ranks(detached: Notebook) -> None:
    debugger = Debugger(detached)
    cell, _ = at_line(debugger, CELL, 5, stops=2)
    debugger.end()
    assert cell.wait().ok().shown == "[ranks 0-1] 0"
    assert detached.run(CELL).ok().shown == "[ranks 0-1] 0"
    traced = detached.mesh("import sys\nsys.gettrace() is None").ok()
    assert traced.shown == "[ranks 0-3] True"


def test_stop_ends_a_cell_at_a_breakpoint(debugger: Debugger) -> None:
    cell, _ = at_line(debugger, CELL, 5, stops=2)
    debugger.notebook.interrupt()
    assert cell.wait().status == "error"
    assert "stopped" in cell.text
    debugger.break_at(debugger.path)
    assert debugger.notebook.run(CELL).ok().shown == "[ranks 0-1] 0"


def test_info_lists_what_a_new_page_needs(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, CELL, 5, stops=2)
    info = debugger.request("debugInfo")
    assert info["isStarted"]
    assert {"source": debugger.path, "breakpoints": [{"line": 5}]} in info["breakpoints"]
    assert sorted(info["stoppedThreads"]) == sorted(threads.values())
    finish(debugger, cell, threads)


def test_source_of_a_cell_can_be_read(debugger: Debugger) -> None:
    # Without dumpCell: the cell has run before the debugger began.
    notebook = debugger.notebook
    notebook.run("%%mesh [0:1]\ndef late(n):\n    m = n + 1\n    return m").ok()
    debugger.request("setFunctionBreakpoints", breakpoints=[{"name": "late"}])
    cell = notebook.send("%%mesh [0:1]\nlate(3)")
    thread = debugger.stopped(1)[0]["threadId"]
    source = debugger.stack(thread)[0]["source"]
    assert debugger.request("source", source=source, sourceReference=0)["content"].startswith("%%mesh [0:1]\ndef late")
    debugger.request("setFunctionBreakpoints", breakpoints=[])
    debugger.request("continue", threadId=thread)
    assert cell.wait().ok().shown == "[rank 0] 4"


def test_rich_values_and_copies_to_globals(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, TREE, 16)
    frame = debugger.stack(threads[1])[0]["id"]
    shown = debugger.request("richInspectVariables", variableName="weights", frameId=frame)["data"]
    assert "float32[2, 3]" in shown["text/plain"]
    names = {"srcVariableName": "text", "dstVariableName": "copied_text", "srcFrameId": frame}
    debugger.request("copyToGlobals", **names)
    finish(debugger, cell, threads)
    assert debugger.notebook.mesh("copied_text", "[1:2]").ok().shown == "[rank 1] 'word'"


def test_inspection_is_of_the_notebook_or_of_automatic_ranks(debugger: Debugger) -> None:
    notebook = debugger.notebook
    notebook.run("of_notebook = 1").ok()
    notebook.mesh("of_ranks = [rank, 2]").ok()

    def names() -> set[str]:
        return {each["name"] for each in debugger.request("inspectVariables")["variables"]}

    assert "of_notebook" in names() and "of_ranks" not in names()
    notebook.run("%mesh auto on mesh[1:3]").ok()
    try:
        body = debugger.request("inspectVariables")
        assert body["monarch"] == {"mesh": "mesh", "rank": 1}
        found = {each["name"]: each for each in body["variables"]}
        assert found["of_ranks"]["value"] == "[1, 2]" and "of_notebook" not in found
        assert list(debugger.variables(found["of_ranks"]["variablesReference"])) == ["0", "1"]
        assert "1" in debugger.request("richInspectVariables", variableName="of_ranks")["data"]["text/plain"]
    finally:
        notebook.run("%mesh auto off").ok()


def test_breakpoints_bind_in_automatic_mode(debugger: Debugger) -> None:
    notebook = debugger.notebook
    notebook.run("%mesh auto on mesh[0:1]").ok()
    try:
        cell, threads = at_line(debugger, "v = rank + 1\nw = v * 2\nw", 2)
        assert debugger.lines(threads[0]) == [("<module>", 2)]
        assert finish(debugger, cell, threads).shown.endswith("[rank 0] 2")
    finally:
        notebook.run("%mesh auto off").ok()


def test_breakpoints_bind_in_actors(debugger: Debugger) -> None:
    notebook = debugger.notebook
    code = """%%mesh spawn adders
from monarch.actor import Actor, endpoint
class Adder(Actor):
    @endpoint
    def add(self, n):
        m = n + 1
        return m"""
    assert all(each["verified"] for each in debugger.break_in(code, 7))
    notebook.run(code).ok()
    cell = notebook.send("adders.add.call(4).get()")
    stops = debugger.stopped(4)
    for stop in stops:
        assert debugger.lines(stop["threadId"]) == [("add", 7)]
        assert debugger.stack(stop["threadId"])[0]["source"]["path"] == debugger.path
    finish(debugger, cell, {0: stops[0]["threadId"]})
    notebook.run("adders.stop().get(); del adders").ok()


@pytest.mark.slow
def test_healed_ranks_have_the_breakpoints(own: Callable[..., Notebook]) -> None:
    notebook = own()
    notebook.run("%mesh up --procs 2").ok()
    debugger = Debugger(notebook)
    assert all(each["verified"] for each in debugger.break_in(CELL, 5))
    pid = int(notebook.mesh("import os\nos.getpid()", "[1:2]").ok().shown.partition("] ")[2])
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: 1 not in debugger.ranks())
    notebook.run("%mesh heal").ok()
    cell = notebook.send(CELL)
    stops = debugger.stopped(2)
    threads = debugger.ranks()
    assert {each["threadId"] for each in stops} == {threads[0], threads[1]}
    finish(debugger, cell, threads)


@pytest.mark.slow
def test_death_of_a_rank_at_a_breakpoint_strands_nobody(own: Callable[..., Notebook]) -> None:
    notebook = own()
    notebook.run("%mesh up --procs 3").ok()
    debugger = Debugger(notebook)
    code = CELL.replace("[0:2]", "").replace("rank * 0", "dist.barrier()")
    cell, threads = at_line(debugger, code, 5, stops=3)
    pid = int(debugger.evaluate(threads[2], "__import__('os').getpid()")["result"])
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: 2 not in debugger.ranks())
    debugger.break_at(debugger.path)
    debugger.request("continue", threadId=threads[0])
    assert cell.wait().status == "error"
    assert "rank 2" in cell.text
    notebook.run("%mesh heal").ok()
    assert notebook.mesh("rank * 0").ok().shown == "[ranks 0-2] 0"


def test_one_rank_at_a_time_is_shown_in_jupyterlab(detached: Notebook) -> None:
    debugger = Debugger(detached, "jupyterlab")
    try:
        cell, _ = at_line(debugger, CELL, 8)
        threads = debugger.ranks()
        focus = debugger.events("stopped")[0]["threadId"]
        rank, other = next((rank, threads[rank]) for rank in (0, 1) if threads[rank] != focus)
        assert wait_until(lambda: debugger.lines(other) == [(f"rank {rank}: <module>", 8)])
        assert [each["threadId"] for each in debugger.events("stopped")] == [focus]
        # An extension of the protocol.
        debugger.request("monarch/show", threadId=other)
        assert [each["threadId"] for each in debugger.stopped(2)] == [focus, other]
        debugger.request("next", threadId=other)
        assert debugger.stopped(3)[-1]["threadId"] == other
        # JupyterLab forgets the thread before it lets it go on.
        debugger.request("continue", threadId=1)
        assert cell.wait().ok().shown == "[ranks 0-1] 0"
    finally:
        debugger.end()


def test_the_next_rank_is_shown_when_one_has_gone_on(detached: Notebook) -> None:
    debugger = Debugger(detached, "jupyterlab")
    try:
        cell, _ = at_line(debugger, CELL, 8)
        threads = debugger.ranks()
        focus = debugger.events("stopped")[0]["threadId"]
        rank, other = next((rank, threads[rank]) for rank in (0, 1) if threads[rank] != focus)
        assert wait_until(lambda: debugger.lines(other) == [(f"rank {rank}: <module>", 8)])
        debugger.request("continue", threadId=focus, singleThread=True)
        assert debugger.stopped(2)[-1]["threadId"] == other
        debugger.request("continue", threadId=1)
        assert cell.wait().ok().shown == "[ranks 0-1] 0"
    finally:
        debugger.end()


def test_no_prompt_beside_the_debugger(debugger: Debugger) -> None:
    cell, threads = at_line(debugger, CELL, 5, stops=2)
    assert not debugger.notebook.client.stdin_channel.msg_ready()
    assert "paused" not in cell.text
    finish(debugger, cell, threads)


def test_ranks_without_a_session_have_no_breakpoints(detached: Notebook) -> None:
    assert said(detached, "%mesh breaks") == "mesh 'mesh' has no breakpoints\n"
    code = "from monarch._actors.pausing.gate import gate\nimport sys\nlen(gate.points.now), len(gate.points.others)"
    assert detached.mesh(code).ok().shown == "[ranks 0-3] (0, 0)"
    assert detached.mesh("'debugpy' in sys.modules").ok().shown == "[ranks 0-3] False"


@pytest.mark.slow
def test_death_of_the_kernel_at_a_breakpoint_ends_its_ranks(own: Callable[..., Notebook]) -> None:
    notebook = own()
    notebook.run("%mesh up --procs 2").ok()
    debugger = Debugger(notebook)
    _, threads = at_line(debugger, CELL, 5, stops=2)
    pids = [int(debugger.evaluate(each, "__import__('os').getpid()")["result"]) for each in threads.values()]
    notebook.close(now=True)
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))

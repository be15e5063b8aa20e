"""The kernel is ready before its magics are, and nothing that a front end or a configuration does shows it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from kernels import GUARD, Notebook
from leaks import Kit, wait_until
from monarch_kernel.views.protocol import TARGET

GATE = """
import os, sys, time

# Else ipykernel has no pipe over stderr.
os.environ.pop("PYTEST_CURRENT_TEST", None)

class Gate:
    def find_spec(self, name, path=None, target=None):
        if name == "monarch_kernel.magics.mesh":
            gate = os.environ["GATE"]
            open(gate + ".reached", "w").close()
            while not os.path.exists(gate):
                time.sleep(0.01)
            if os.path.getsize(gate):
                raise ImportError(open(gate).read())

sys.meta_path.insert(0, Gate())
"""
"""Keeps a kernel from importing its magics until a file exists, whose text is the reason why it cannot."""


class EarlyNotebook(Notebook):
    """A notebook that waits for the first answer of its kernel only: while the magics load, there is no second one."""

    def _await_ready(self) -> None:
        asked = self.client.kernel_info()
        assert self.client.get_shell_msg(timeout=GUARD)["parent_header"]["msg_id"] == asked


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(GATE)
    return tmp_path / "gate"


@pytest.fixture
def early(leaks: Kit, spec: str, gate: Path) -> Iterator[EarlyNotebook]:
    with open(gate.parent / "log", "w") as log:
        book = EarlyNotebook(log=log, GATE=str(gate), PYTHONPATH=str(gate.parent))
    yield book
    book.close(now=True)


def test_kernel_is_ready_before_its_magics(early: EarlyNotebook, gate: Path) -> None:
    first = [early.send(code) for code in ("%mesh help", "%%mesh --here\n1", *["1"] * 98)]
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    gate.touch()
    # More come as the first ones are let through.
    cells = [*first, *(early.send("1") for _ in range(900))]
    early.take(lambda: all(cell.reply for cell in cells), "the magics to load")
    assert {cell.status for cell in [first[0], *first[2:]]} == {"ok"}
    assert [cell.reply["execution_count"] for cell in cells] == list(range(1, 1001)), "cells have passed others"


@pytest.mark.parametrize("waits", ["time.sleep(50)", "await asyncio.sleep(50)"])
def test_stop_reaches_one_cell_that_waits_for_the_magics(early: EarlyNotebook, gate: Path, waits: str) -> None:
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    silent = early.send("import asyncio, time; time.sleep(0.3)", silent=True)
    stopped, *others = early.send(waits), early.send("time.sleep(0.3)"), early.send("await asyncio.sleep(0.3)")
    stops = itertools.count()
    # Of many, one comes when the kernel has the cells.
    assert wait_until(lambda: early.interrupt() or next(stops) > 20)
    gate.touch()
    early.take(lambda: all(each.reply for each in (silent, stopped, *others)), "the cells that wait")
    assert [each.status for each in (silent, stopped, *others)] == ["ok", "error", "ok", "ok"]


def test_stop_is_not_kept_for_cells_of_later(early: EarlyNotebook, gate: Path) -> None:
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    cell, stops = early.send("x = 1"), itertools.count()
    assert wait_until(lambda: early.interrupt() or next(stops) > 20)
    gate.touch()
    # On a slow machine it takes long enough to hear the Stop.
    assert cell.wait().status in ("ok", "error")
    early.run("import time; time.sleep(0.2)").ok()


def test_shutdown_on_the_shell_channel_comes_after_its_cells(early: EarlyNotebook, gate: Path, tmp_path: Path) -> None:
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    early.send(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    early.client.shell_channel.send(early.client.session.msg("shutdown_request", {"restart": False}))
    gate.touch()
    assert wait_until(lambda: not early.manager.is_alive()) and (tmp_path / "ran").exists()


def test_control_channel_waits_for_the_magics(early: EarlyNotebook, gate: Path) -> None:
    session = early.client.session
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    request = {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}
    messages = [
        session.msg("debug_request", request),
        session.msg("complete_request", {"code": "%mesh co", "cursor_pos": 8}),
    ]
    for message in messages:
        early.client.control_channel.send(message)
    gate.touch()
    replies = [early.client.get_control_msg(timeout=GUARD) for _ in messages]
    assert [each["parent_header"]["msg_id"] for each in replies] == [each["header"]["msg_id"] for each in messages]
    assert "config" in replies[1]["content"]["matches"]
    assert early.run("get_ipython().kernel._session is not None").ok().shown == "True"
    # The adapter of the debugger ends with a kernel that ends by itself; after a kill it may take a while.
    early.client.shutdown()
    assert wait_until(lambda: not early.manager.is_alive())


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.15, 0.3, 0.5, 0.8])
def test_early_shutdown_leaves_nothing(early: EarlyNotebook, gate: Path, seconds: float) -> None:
    gate.touch()
    provisioner: Any = early.manager.provisioner
    # Any moment of the load and of the start of the session that follows.
    time.sleep(seconds)
    early.client.shutdown()
    assert early.client.get_control_msg(timeout=GUARD)["content"]["status"] == "ok"
    assert wait_until(lambda: not early.manager.is_alive())
    # An agent that was just starting may still remove it.
    assert wait_until(lambda: not [*Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"*/s*-{provisioner.pid}-*")], 5.0)


def test_shutdown_does_not_wait_for_the_magics(early: EarlyNotebook, gate: Path) -> None:
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    request = {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}
    for kind, content in (("debug_request", request), ("shutdown_request", {"restart": False})):
        early.client.control_channel.send(early.client.session.msg(kind, content))
    assert early.client.get_control_msg(timeout=GUARD)["msg_type"] == "shutdown_reply"
    gate.touch()
    assert wait_until(lambda: not early.manager.is_alive())


def test_kernel_without_its_magics_ends_with_the_reason(early: EarlyNotebook, gate: Path) -> None:
    early.send("1 + 1")
    (gate.parent / "reason").write_text("no such magics")
    (gate.parent / "reason").replace(gate)
    assert wait_until(lambda: not early.manager.is_alive()), "no cell would be answered"
    assert "ImportError: no such magics" in (gate.parent / "log").read_text()


def test_first_message_of_a_panel_finds_its_target(early: EarlyNotebook, gate: Path) -> None:
    assert wait_until(lambda: Path(f"{gate}.reached").exists())
    content = {"comm_id": "one", "target_name": TARGET, "data": {}}
    early.client.shell_channel.send(early.client.session.msg("comm_open", content))
    cell = early.send("1 + 1")
    gate.touch()
    cell.wait().ok()
    assert early.run("'one' in get_ipython().kernel.lane.comms").ok().shown == "True"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startup/first.py", "get_ipython().run_line_magic('mesh', 'config timeout=7')"),
        ("startup/first.ipy", "%mesh config timeout=7"),
        ("ipython_kernel_config.py", "c.IPKernelApp.exec_lines = ['%mesh config timeout=7']"),
        (
            "ipython_kernel_config.py",
            "c.IPKernelApp.exec_lines = ['%load_ext monarch_kernel', '%mesh config timeout=7']",
        ),
        (
            "ipython_kernel_config.py",
            "c.IPKernelApp.extensions = ['monarch_kernel']; c.IPKernelApp.exec_lines = ['%mesh config timeout=7']",
        ),
    ],
)
def test_code_of_a_configuration_finds_the_magics(
    own: Callable[..., Notebook], tmp_path: Path, name: str, text: str
) -> None:
    file = tmp_path / "profile_default" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    book = own(IPYTHONDIR=str(tmp_path))
    assert "7" in book.run("%mesh config timeout").ok().shown


def test_aggressive_reset_keeps_the_modules_of_the_magics(early: EarlyNotebook, gate: Path) -> None:
    gate.touch()
    early.run("%reset -f --aggressive").ok()
    assert early.run("import sys; 'monarch_kernel.magics.mesh' in sys.modules").ok().shown == "True"


EMBEDDED = """
import sys
from ipykernel.kernelapp import IPKernelApp
from monarch_kernel.kernel import MonarchKernel

app = IPKernelApp.instance(kernel_class=MonarchKernel)
app.initialize(["-f", sys.argv[1]])
app.shell.run_line_magic("mesh", "config timeout=7")
print("set", app.shell.run_line_magic("mesh", "config timeout"), file=sys.__stdout__, flush=True)
"""


def test_program_uses_the_magics_before_its_kernel_starts(spec: str, leaks: Kit, tmp_path: Path) -> None:
    command = [sys.executable, "-c", EMBEDDED, str(tmp_path / "kernel.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUARD)
    assert "\nset" in done.stdout, done.stderr


IN_THREAD = """
import asyncio, sys, threading
from ipykernel.kernelapp import IPKernelApp
from monarch_kernel.kernel import MonarchKernel

def serve():
    asyncio.set_event_loop(asyncio.new_event_loop())
    app = IPKernelApp.instance(kernel_class=MonarchKernel)
    app.initialize(["-f", sys.argv[1]])
    app.start()

threading.Thread(target=serve, daemon=True).start()
sys.stdin.read()
"""


def test_kernel_in_a_thread_loads_its_magics(spec: str, leaks: Kit, tmp_path: Path) -> None:
    file, _ = write_connection_file(str(tmp_path / "kernel.json"))
    program = subprocess.Popen(
        [sys.executable, "-c", IN_THREAD, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = BlockingKernelClient(connection_file=file)
    client.load_connection_file()
    client.start_channels()
    try:
        asked = client.execute("%mesh help")
        assert client.get_shell_msg(timeout=GUARD)["parent_header"]["msg_id"] == asked
    finally:
        client.stop_channels()
        program.communicate(timeout=GUARD)

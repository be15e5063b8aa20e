"""Views of a real kernel, by the messages that a front end sends: they answer while a cell runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dialogs import Dialog
from fronts import Comm, Front
from kernels import Cell, Notebook
from monarch_kernel.views.details import short_stack
from monarch_kernel.views.protocol import (
    VERSION,
    Details,
    Done,
    Gone,
    Heard,
    Logs,
    Meshes,
    Outputs,
    Patch,
    Snapshot,
    Taken,
    Targets,
)
from monarch_kernel.views.shown import MOST_CLIENTS

BUSY = "import time\nwhile not stop_now:\n    time.sleep(0.02)"
"""A cell that runs until another cell, an interrupt or a kill ends it."""
INDENTED = BUSY.replace("\n", "\n    ")


@pytest.fixture(scope="module")
def book(spec: str) -> Iterator[Notebook]:
    notebook = Notebook()
    try:
        notebook.run("%mesh up --procs 4").ok()
        notebook.mesh("stop_now = False").ok()
        yield notebook
    finally:
        notebook.close()


@pytest.fixture
def front(book: Notebook) -> Iterator[Front]:
    shown = book._shown
    front = Front(book)
    yield front
    for comm in front.comms.values():
        if not comm.custom:
            front.send("comm_close", comm_id=comm.name, data={})
    book._shown = shown


def uid_of(panel: Comm) -> str:
    """Return the mesh that the panel lists first."""
    panel.say("list_meshes", version=1)
    panel.until(lambda: panel.of(Meshes))
    return panel.of(Meshes)[0].meshes[0].uid


def test_a_mesh_as_last_expression_is_a_widget_and_a_picture(book: Notebook, front: Front) -> None:
    cell = book.run("mesh").ok()
    view, picture = cell.bundles
    assert "application/vnd.jupyter.widget-view+json" in view
    assert "\n4 ranks: " in picture["text/plain"] and "monarch-static" in picture["text/html"]
    widget = front.widget(cell)
    widget.open()
    widget.until(lambda: [row.state for row in widget.page.ranks.values()] == ["idle"] * 4)
    assert widget.page.mesh.actions == ["interrupt", "pause", "resume", "heal", "kill", "stacks"]


def test_page_is_answered_before_the_notebook_has_shown_a_widget(own: Callable[..., Notebook]) -> None:
    page = Front(own())
    name, answers = "control", list[Any]()
    page.comms[name] = control = Comm(page, name, True)
    control.take = lambda data: answers.append(data)
    page.send("comm_open", comm_id=name, target_name="jupyter.widget.control", data={})
    page.send("comm_msg", comm_id=name, data={"method": "request_states"})
    page.notebook.take(lambda: answers, "the states of widgets, of which there are none")
    assert answers[0]["states"] == {}


def test_a_slice_has_a_widget_and_a_picture_of_its_own(book: Notebook, front: Front) -> None:
    cell = book.run("mesh.slice(procs=slice(1, 3))").ok()
    picture = cell.bundles[1]["text/plain"]
    assert picture.startswith("mesh 'mesh[1:3]': procs=2\n") and "\n2 ranks: " in picture
    assert front.widget(cell).name != front.widget(book.run("mesh").ok()).name
    (state,) = [each for each in front.states().values() if each["state"].get("ranks") == [1, 2]]
    assert state["model_name"] == "AnyModel"


def test_the_same_mesh_shown_again_has_the_same_widget(book: Notebook, front: Front) -> None:
    assert front.widget(book.run("mesh").ok()).name == front.widget(book.run("%mesh view").ok()).name


def test_each_client_has_its_own_widget(own: Callable[..., Notebook]) -> None:
    # VS Code knows no widgets from before its window was opened; other front ends restore them.
    book = own()
    book.run("%mesh up --procs 1").ok()
    kind = "application/vnd.jupyter.widget-view+json"
    names: list[str] = []
    for client in range(MOST_CLIENTS + 1):
        book.client.session.session = f"client-{client}"
        first, again = (book.run("mesh").ok() for _ in range(2))
        assert first.bundles[0][kind]["model_id"] == again.bundles[0][kind]["model_id"]
        assert len(first.contents("comm_open")) >= 1 and not again.contents("comm_open")
        names.append(first.bundles[0][kind]["model_id"])
    assert len(set(names)) == len(names)
    assert [each["comm_id"] for each in first.contents("comm_close")][:1] == names[:1]


def test_a_widget_follows_a_cell_while_it_runs(book: Notebook, front: Front) -> None:
    widget = front.widget(book.run("mesh").ok())
    cell = book.send(f"%%mesh\n{BUSY}")
    cell.until(lambda: any(each["msg_type"] == "execute_input" for each in cell.messages))
    widget.open()
    # Ranks report what they do; the kernel looks at its calls at another time.
    widget.until(lambda: all(row.state == "running" for row in widget.page.ranks.values()))
    widget.until(lambda: any(call.left == [0, 1, 2, 3] for call in widget.page.calls.values()))
    assert not cell.reply
    widget.say("act", id=1, action="interrupt", ranks=[])
    cell.wait()
    widget.until(lambda: widget.of(Done))
    assert widget.of(Done)[0].ok and "stopped" in widget.of(Done)[0].text
    widget.until(lambda: all(row.state == "idle" for row in widget.page.ranks.values()))
    assert widget.of(Patch)


def test_a_view_is_told_that_it_was_heard_while_a_cell_runs(book: Notebook, front: Front) -> None:
    widget = front.widget(book.run("mesh").ok())
    widget.open()
    widget.until(lambda: widget.page.ranks)
    cell = book.send(f"%%mesh\n{BUSY}")
    cell.until(lambda: any(each["msg_type"] == "execute_input" for each in cell.messages))
    widget.say("alive")
    widget.until(lambda: widget.of(Heard))
    assert not cell.reply
    book.interrupt()
    cell.wait()


def test_views_of_two_pages_end_one_by_one(book: Notebook, front: Front) -> None:
    widget = front.widget(book.run("mesh").ok())
    for page in ("one", "two"):
        widget.say("open", version=VERSION, view=page)
        widget.say("pin", rank=0 if page == "one" else 3, view=page)
    # Both have the details of their ranks.
    widget.until(lambda: {each.rank for each in widget.of(Details)} == {0, 3})
    widget.say("close", view="one")
    seen = len(widget.messages)
    book.run("%%mesh [1]\nlater = 1").ok()
    widget.until(lambda: any(isinstance(each, (Patch, Snapshot)) for each in widget.messages[seen:]))
    before = len(widget.of(Details))
    widget.until(lambda: len(widget.of(Details)) > before + 1)
    assert {each.rank for each in widget.of(Details)[before:]} == {3}
    widget.say("close", view="two")
    widget.say("act", id=5, action="stacks", ranks=[0])
    widget.until(lambda: widget.of(Done))
    assert widget.of(Taken)[0].id == widget.of(Done)[0].id == 5

    def is_quiet(number: int) -> bool:
        """Return whether a cell is not told of before the answer that was asked for after it."""
        seen = len(widget.messages)
        book.run("%%mesh [1]\nlater = 2").ok()
        widget.say("act", id=number, action="stacks", ranks=[0])
        widget.until(lambda: any(done.id == number for done in widget.of(Done)))
        return not any(isinstance(each, (Patch, Snapshot, Details)) for each in widget.messages[seen:])

    # One look at the rank may still be under way.
    assert any(is_quiet(number) for number in range(6, 10))


def test_closed_box_of_an_earlier_question_answers_nothing(book: Notebook, front: Front) -> None:
    widget = front.widget(book.run("mesh").ok())
    widget.open()
    dialog = Dialog(book, "%%mesh [0:2]\nfor step in range(3):\n    breakpoint()\n    x = step")
    assert dialog.prompt() == "(mesh ranks 0-1) "
    assert "x = step" in dialog.ask("n")
    widget.say("act", id=1, action="resume", ranks=[])
    assert dialog.prompt() == "(mesh ranks 0-1) "
    dialog.shown()
    # VS Code closes the box of the question before, and answers that with nothing, which would repeat the step.
    dialog.answer("")
    assert dialog.ask("x") == "ranks 0-1: 0\n"
    dialog.answer("c")
    dialog.prompt()
    dialog.answer("c")
    dialog.cell.wait().ok()
    assert not book.client.stdin_channel.msg_ready()


def test_an_interrupt_of_one_rank_ends_its_cell(book: Notebook, front: Front) -> None:
    panel = front.panel()
    uid = uid_of(panel)
    cell = book.send(f"%%mesh [0:2]\n{BUSY}")
    panel.open(uid)
    panel.until(lambda: panel.page.ranks[1].state == "running")
    panel.say("act", id=7, action="interrupt", ranks=[1], uid=uid)
    panel.until(lambda: panel.of(Done))
    done = panel.of(Done)[0]
    assert (done.id, done.ok) == (7, True) and "rank 1:" in done.text
    panel.until(lambda: panel.page.ranks[1].state == "idle")
    assert panel.page.ranks[0].state == "running" and not cell.reply
    panel.say("act", id=8, action="interrupt", ranks=[0], uid=uid)
    cell.wait()
    # As after a Stop.
    assert cell.reply["ename"] == "KeyboardInterrupt"
    said, *places = cell.stream("stderr").splitlines()
    assert said == "stopped: ranks 0-1: interrupted" and places and all(" at cell [" in each for each in places)


def test_an_interrupt_of_one_rank_frees_those_that_wait_for_it(book: Notebook, front: Front) -> None:
    panel = front.panel()
    uid = uid_of(panel)
    panel.open(uid)
    body = f"if rank == 1:\n    {INDENTED}\ndist.all_reduce(torch.ones(1))"
    cell = book.send(f"%%mesh\nimport torch, torch.distributed as dist\n{body}")
    panel.until(lambda: [row.state for row in panel.page.ranks.values()].count("collective") == 3)
    panel.say("act", id=1, action="interrupt", ranks=[1], uid=uid)
    cell.wait()
    assert cell.reply["ename"] == "KeyboardInterrupt"
    assert "rank 1: interrupted; ranks 0,2-3 waited for it in a collective" in cell.stream("stderr")


def test_ranks_that_wait_for_an_interrupted_one_have_not_failed(book: Notebook, front: Front, tmp_path: Path) -> None:
    panel = front.panel()
    uid = uid_of(panel)
    panel.open(uid)
    go = tmp_path / "go"
    body = "try:\n    if rank == 1:\n        time.sleep(100)\n    dist.barrier()\nfinally:\n    if rank == 1:\n"
    body += f"        while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    cell = book.send(f"%%mesh\nimport os, time, torch.distributed as dist\n{body}")
    panel.until(lambda: [row.state for row in panel.page.ranks.values()].count("collective") == 3)
    panel.say("act", id=1, action="interrupt", ranks=[1], uid=uid)
    # The others have ended; rank 1 still cleans up.
    panel.until(lambda: [call for call in panel.page.calls.values() if call.left == [1]])
    assert [call.errors for call in panel.page.calls.values() if call.left == [1]] == [{}]
    go.touch()
    cell.wait()
    assert "ranks 0,2-3 waited for it in a collective" in cell.stream("stderr")
    assert "failed" not in cell.stream("stderr")


def test_a_rank_that_raises_is_the_only_one_that_has_failed(book: Notebook, front: Front) -> None:
    panel = front.panel()
    panel.open(uid_of(panel))
    body = "if rank == 1: raise ValueError('bad batch')\ndist.all_reduce(torch.ones(1))"
    book.run(f"%%mesh\nimport torch, torch.distributed as dist\n{body}")
    panel.until(lambda: [call for call in panel.page.calls.values() if call.ended and "1" in call.errors])
    call = next(call for call in panel.page.calls.values() if "1" in call.errors)
    assert list(call.errors) == ["1"] and call.stopped == [0, 2, 3]


def test_an_action_that_is_not_possible_says_why(front: Front) -> None:
    panel = front.panel()
    uid = uid_of(panel)
    for number, (action, ranks) in enumerate([("interrupt", []), ("resume", []), ("kill", [9])]):
        panel.say("act", id=number, action=action, ranks=ranks, uid=uid)
    panel.until(lambda: len(panel.of(Done)) == 3)
    texts = {done.id: done.text for done in panel.of(Done)}
    assert {done.id for done in panel.of(Done) if done.ok} == {1}
    assert "nothing is running on ranks 0-3" in texts[0] and "no rank of" in texts[1] and "no rank 9" in texts[2]


def busy(book: Notebook, panel: Comm, uid: str) -> Cell:
    """Starts a cell on all ranks; returns when the page shows that it runs, and no cell before it."""
    panel.open(uid)
    for state, code in (("idle", ""), ("running", f"%%mesh\n{BUSY}")):
        cell = book.send(code)
        panel.until(lambda state=state: {row.state for row in panel.page.ranks.values()} == {state})
    return cell


def test_buttons_pause_ranks_and_let_them_go_on(book: Notebook, front: Front) -> None:
    panel = front.panel()
    uid = uid_of(panel)
    cell = busy(book, panel, uid)
    panel.say("act", id=1, action="pause", ranks=[1], uid=uid)
    panel.until(lambda: panel.page.ranks[1].state == "paused")
    panel.until(lambda: panel.page.ranks[1].load == 0)
    panel.say("list_meshes", version=1)
    panel.until(lambda: panel.of(Meshes)[-1].meshes[0].paused == 1)
    assert panel.page.ranks[0].state == "running" and "cell [" in panel.page.ranks[1].place
    panel.say("act", id=2, action="resume", ranks=[1], uid=uid)
    panel.until(lambda: panel.page.ranks[1].state == "running")
    assert [done.ok for done in panel.of(Done)] == [True, True]
    book.interrupt()
    cell.wait()


def test_stacks_are_read_while_a_cell_runs(book: Notebook, front: Front) -> None:
    panel = front.panel()
    uid = uid_of(panel)
    cell = busy(book, panel, uid)
    panel.say("act", id=1, action="stacks", ranks=[], uid=uid)
    panel.until(lambda: panel.of(Done))
    assert "ranks 0-3:" in panel.of(Done)[0].text and "cell [" in panel.of(Done)[0].text
    book.interrupt()
    cell.wait()


def test_a_pinned_rank_shows_stack_lines_and_tensors(book: Notebook, front: Front) -> None:
    book.mesh(
        "import torch\nweights = torch.tensor([3.0, 4.0, float('nan')][: 2 + rank // 3])\nprint('said', rank)"
    ).ok()
    panel = front.panel()
    uid = uid_of(panel)
    cell = busy(book, panel, uid)
    panel.say("pin", rank=2, uid=uid)
    panel.until(lambda: panel.of(Details))
    details = panel.of(Details)[0]
    # The innermost frame is the cell's, not that of the wait in which a rank can be interrupted.
    assert details.stack[-1].startswith("cell ["), details.stack
    assert [line.text for line in details.lines][-1:] == ["said 2"]
    (tensor,) = [each for each in details.tensors if each.name == "weights"]
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.norm, tensor.nans) == ([2], "float32", "cpu", 5.0, 0)
    panel.say("pin", rank=3, uid=uid)
    panel.until(lambda: panel.of(Details)[-1].rank == 3)
    (tensor,) = [each for each in panel.of(Details)[-1].tensors if each.name == "weights"]
    assert (tensor.norm, tensor.nans) == (None, 1)
    book.interrupt()
    cell.wait()


def test_logs_are_filtered_by_rank_text_and_stream(book: Notebook, front: Front) -> None:
    book.mesh("import sys\nprint('Alpha', rank)\nprint('beta', rank, file=sys.stderr)").ok()
    panel = front.panel()
    uid = uid_of(panel)
    filters = [{"text": "ALPHA"}, {"stream": "stderr"}, {"ranks": [1], "text": "a"}, {"text": "alpha", "most": 1}]
    for each in filters:
        panel.say("read_logs", **{"uid": uid, "ranks": [], "text": "", "stream": "", "most": 4, **each})
    panel.until(lambda: len(panel.of(Logs)) == 4)
    alpha, errors, of_one, newest = panel.of(Logs)
    assert {line.text for line in alpha.lines} == {f"Alpha {rank}" for rank in range(4)}
    assert {(line.text, line.stream) for line in errors.lines} == {(f"beta {rank}", "stderr") for rank in range(4)}
    assert {"Alpha 1", "beta 1"} <= {line.text for line in of_one.lines}
    assert len(newest.lines) == 1 and newest.more


def test_cells_say_which_ranks_they_address(front: Front) -> None:
    panel = front.panel()
    lines = ["%%mesh", "%%mesh [0:2]", "%%mesh none[1]", "%%mesh [9]", "%%mesh --timeout 10 [0:2]", "%%mesh mess"]
    panel.say("read_targets", cells=list("abcdef"), lines=lines)
    panel.until(lambda: panel.of(Targets))
    targets = {each.cell: (each.mesh, each.ranks, each.error) for each in panel.of(Targets)[0].targets}
    assert targets["a"] == ("mesh", "all", "") and targets["b"] == ("mesh", "0-1", "")
    assert targets["c"] == ("", "", "no mesh named 'none'; running: mesh") and "no rank 9" in targets["d"][2]
    assert targets["e"][2].endswith("write %%mesh [0:2] --timeout 10") and targets["f"][2].endswith("mean 'mesh'?")


def test_cells_inside_actors_say_their_ranks_and_defaults_count(book: Notebook, front: Front) -> None:
    book.run("%%mesh spawn lone\nimport monarch\nclass Lone(monarch.Actor): pass").ok()
    book.run("%mesh config ranks=[1:3]").ok()
    panel = front.panel()
    panel.say("read_targets", cells=list("ab"), lines=["%%mesh lone[1]", "%%mesh"])
    panel.until(lambda: panel.of(Targets))
    book.run("%mesh config --reset ranks").ok()
    targets = panel.of(Targets)[0].targets
    assert [(each.mesh, each.ranks, each.error) for each in targets] == [("lone", "1", ""), ("mesh", "1-2", "")]


def test_cells_that_spawn_actors_say_their_ranks(front: Front) -> None:
    panel = front.panel()
    lines = ["%%mesh spawn aa", "%%mesh spawn aa(1, x=[2]) --on mesh[0:2] --new", "%%mesh spawn 1a", "%%mesh --help"]
    panel.say("read_targets", cells=list("abcd"), lines=lines)
    panel.until(lambda: panel.of(Targets))
    found = [(each.mesh, each.ranks) for each in panel.of(Targets)[0].targets]
    assert found == [("mesh", "all"), ("mesh", "0-1"), ("", ""), ("", "")]
    assert "invalid name '1a'" in panel.of(Targets)[0].targets[2].error and not panel.of(Targets)[0].targets[3].error


def test_page_of_another_version_and_unknown_meshes_are_refused(front: Front) -> None:
    panel = front.panel()
    panel.say("open", version=99, uid=uid_of(panel))
    panel.say("open", version=VERSION, uid="nothing")
    panel.say("nonsense")
    panel.until(lambda: len(panel.of(Gone)) == 3)
    assert "version 99" in panel.of(Gone)[0].reason and "does not have" in panel.of(Gone)[1].reason


def test_two_panels_see_the_same_and_one_may_close(book: Notebook, front: Front) -> None:
    first, second = front.panel(), front.panel()
    uid = uid_of(first)
    for panel in (first, second):
        panel.open(uid)
    book.mesh("x = 1").ok()
    for panel in (first, second):
        panel.until(lambda panel=panel: any(call.ended for call in panel.page.calls.values()))
    first.say("close", uid=uid)
    book.mesh("x = 2").ok()
    second.until(lambda: second.page.number > first.page.number)
    assert first.page.ranks.keys() == second.page.ranks.keys()


def test_late_page_gets_what_a_running_cell_has_shown(book: Notebook, front: Front) -> None:
    widget = front.widget(book.run("mesh").ok())
    cell = book.send("import time\nprint('so far')\nwait_here = True\nwhile wait_here: time.sleep(0.02)")
    cell.until(lambda: "so far" in cell.stream())
    # As a page that has just been opened.
    asked = front.send("kernel_info_request")
    answers: list[str] = []
    keep, book._replied = book._replied, lambda message: answers.append(message["parent_header"]["msg_id"])
    book.take(lambda: asked in answers, "kernel_info while a cell runs")
    book._replied = keep

    def shows_busy() -> bool:
        # Answers and states come on different channels.
        return front.statuses[-1] == ("busy", "execute_request")

    book.take(shows_busy, "the state after kernel_info")
    assert widget.name in front.states()
    book.take(shows_busy, "the state after the states of widgets")
    panel = front.panel()
    panel.say("read_outputs")
    panel.until(lambda: panel.of(Outputs))
    (running,) = [each for each in panel.of(Outputs)[0].cells if not each.ended]
    assert running.outputs == [{"output_type": "stream", "name": "stdout", "text": "so far\n"}]
    assert running.request in book.cells
    book.interrupt()
    cell.wait()


def test_a_killed_rank_is_seen_and_healed(own: Callable[..., Notebook]) -> None:
    book = own()
    front = Front(book)
    book.run("%mesh up --procs 2").ok()
    widget = front.widget(book.run("mesh").ok())
    widget.open()
    cell = book.mesh("import os\nif rank == 1: os._exit(3)")
    assert cell.status == "error"
    widget.until(lambda: widget.page.ranks[1].state == "failed")
    assert "code 3" in widget.page.ranks[1].reason
    widget.say("act", id=1, action="heal", ranks=[])
    widget.until(lambda: widget.of(Done))
    assert widget.of(Done)[0].ok, widget.of(Done)[0].text
    widget.until(lambda: widget.page.ranks[1].state in ("restarted", "idle"))
    widget.say("act", id=2, action="kill", ranks=[0])
    widget.until(lambda: len(widget.of(Done)) == 2)
    assert "killed rank 0" in widget.of(Done)[1].text
    assert all(isinstance(each, (Snapshot, Patch, Heard, Taken, Done)) for each in widget.messages)


def test_showing_a_mesh_a_thousand_times_leaks_nothing(book: Notebook, front: Front) -> None:
    widget = front.widget(book.run("mesh").ok())
    widget.open()
    book.run(
        "import monarch_kernel.views.shown as shown, ipywidgets\n"
        "magics = get_ipython().magics_manager.registry['MeshMagics']\n"
        "count = lambda: (len(ipywidgets.widgets.widget._instances),"
        " len(magics.views.feeds.open_meshes()), len(magics.shown._pictures))\n"
        "before = count()"
    ).ok()
    for _ in range(30):
        book.run("for _ in range(34): display(mesh)", cell_id="same").ok()
    assert book.run("(count()[1], count()[2] - before[2], count()[0] - before[0])").ok().shown == "(1, 1, 0)"


def test_stacks_name_packages_without_their_folders() -> None:
    lines = [
        "cell [3]:4 in <module>",
        f"{threading.__file__}:629 in wait",
        f"{pytest.__file__}:1 in x",
        "/me/run.py:3 in f",
    ]
    short = ["cell [3]:4 in <module>", "threading.py:629 in wait", "pytest/__init__.py:1 in x", "/me/run.py:3 in f"]
    assert short_stack(lines) == short

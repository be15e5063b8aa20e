"""The meshes of other kernels of the same Jupyter server, in the Meshes panel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fronts import Comm, Front
from kernels import Notebook
from monarch_kernel.views.protocol import Done, Meshes, MeshSummary

pytestmark = pytest.mark.slow

BUSY = "import time\nwhile not stop_now:\n    time.sleep(0.02)"


def foreign(panel: Comm) -> list[MeshSummary]:
    """Return the meshes of other kernels in the newest list."""
    lists = panel.of(Meshes)
    return [mesh for mesh in lists[-1].meshes if mesh.owner] if lists else []


def test_the_panel_shows_the_mesh_of_another_kernel_live(own: Callable[..., Notebook]) -> None:
    # The names of their notebooks come from the server.
    far = own(JPY_SESSION_NAME="lab/far.ipynb")
    near = own(JPY_SESSION_NAME="near.ipynb")
    far.run("%mesh up trainers --procs 2").ok()
    far.mesh("stop_now = False").ok()
    panel = Front(near).panel()
    panel.say("list_meshes", version=1)
    panel.until(lambda: foreign(panel))
    (shown,) = foreign(panel)
    assert (shown.name, shown.ranks, shown.owner, shown.current) == ("trainers", 2, "far.ipynb", False)

    panel.open(shown.uid)
    assert panel.page.mesh.actions == [] and len(panel.page.ranks) == 2
    cell = far.send(f"%%mesh\n{BUSY}")
    panel.until(lambda: [row.state for row in panel.page.ranks.values()] == ["running"] * 2)
    panel.until(lambda: foreign(panel)[0].running == 2)
    panel.say("act", id=1, action="interrupt", ranks=[], uid=shown.uid)
    panel.until(lambda: panel.of(Done))
    assert not panel.of(Done)[0].ok and not cell.reply
    far.interrupt()
    cell.wait()
    panel.until(lambda: [row.state for row in panel.page.ranks.values()] == ["idle"] * 2)

    far.run("%mesh down").ok()
    panel.until(lambda: panel.page.mesh.ended and not foreign(panel))
    assert "stopped" in panel.page.mesh.reason


def test_the_mesh_of_a_killed_kernel_is_shown_as_ended(own: Callable[..., Notebook]) -> None:
    # Both have this process as their server, since kernels with an environment of their own are not forked.
    far, near = own(JPY_SESSION_NAME="far.ipynb"), own(JPY_SESSION_NAME="near.ipynb")
    far.run("%mesh up --procs 1").ok()
    panel = Front(near).panel()
    panel.say("list_meshes", version=1)
    panel.until(lambda: foreign(panel))
    panel.open(foreign(panel)[0].uid)
    far.close(now=True)
    panel.until(lambda: panel.page.mesh.ended and not foreign(panel))
    assert "ended" in panel.page.mesh.reason


def test_programs_and_kernels_of_other_servers_are_not_shown(own: Callable[..., Notebook]) -> None:
    far, near = own(), own()
    servers = [each.run("import os\nos.environ['JPY_PARENT_PID']").ok().shown for each in (far, near)]
    assert servers[0] == servers[1]
    far.run("from monarch._kernel_api import Caption, set_caption\nset_caption(Caption('far.ipynb', '1'))").ok()
    far.run("%mesh up --procs 1").ok()
    near.run("%mesh up --procs 1").ok()
    panel = Front(near).panel()
    panel.say("list_meshes", version=1)
    # The list comes again when the mesh has a call, after another look at the programs.
    panel.until(lambda: panel.of(Meshes))
    near.mesh("x = 1").ok()
    near.run("%mesh up b --procs 1").ok()
    panel.until(lambda: len(panel.of(Meshes)[-1].meshes) == 2)
    assert not foreign(panel)

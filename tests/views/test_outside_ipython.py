"""``MeshView`` in a program without IPython, as marimo runs its cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

VIEW = """
from monarch.actor import this_host, shutdown_context
from monarch_kernel.views.protocol import VERSION
from monarch_kernel.views.widget import MeshView

procs = this_host().spawn_procs(per_host={"gpus": 2})
view = MeshView(procs)
sent = []
view.send = lambda content, buffers=None: sent.append(content)
view._on_custom(view, {"kind": "open", "version": VERSION, "uid": view.uid}, [])
print("first", sent[0]["kind"], [row["rank"] for row in sent[0]["ranks"]], sent[0]["mesh"].get("actions", []))
view.close()
shutdown_context().get(timeout=30)
"""


def test_view_works_without_ipython(program: Callable[..., Any]) -> None:
    assert "first snapshot [0, 1] []" in program(VIEW).ok()

"""Why the ranks of a mesh wait: asked at any time, by a program or the notebook."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from monarch._core.diagnosis.explanation import Explanation
from monarch._core.diagnosis.facts import RankFacts
from monarch._core.diagnosis.findings import diagnose
from monarch._core.roster import split_proc
from monarch._core.text.why import describe_diagnosis
from monarch._debug.why.inquiry import Inquiry, procs_beyond
from monarch._meshes.inside import node_of, region_of, state_of
from monarch._meshes.mesh_like import ProcMeshLike
from monarch._node.node import Node
from monarch._node.services.registry import service

PATIENCE = 2.0
"""Seconds for all ranks to answer."""
_PAUSE = 0.3
"""Seconds between two looks, which tell code that waits from code that runs."""
_HOPS = 3
"""How far waits for actors are followed to ranks of other meshes."""


@service("asking_why.why", "local")
def why(mesh: ProcMeshLike) -> Explanation:
    """Return why the ranks of a mesh wait."""
    procs = state_of(mesh).procs
    return explain(node_of(mesh), [procs.proc(rank) for rank in region_of(mesh).base_ranks()])


def explain(node: Node, procs: Sequence[str]) -> Explanation:
    """Return why processes wait, together with those that they wait for.

    Args:
        node: the node of this process.
        procs: processes of ranks.
    """
    inquiry = _Waited(node)
    inquiry.ask(procs)
    time.sleep(_PAUSE)
    asked = list(procs)
    found = inquiry.ask(procs)
    for _ in range(_HOPS):
        more = procs_beyond(found, asked, node)
        if not more:
            break
        asked += more
        found += inquiry.ask(more)
    inquiry.close()
    diagnosis = diagnose(found)
    return Explanation(diagnosis.findings, diagnosis.others, describe_diagnosis(diagnosis, names_of(node, asked)))


def names_of(node: Node, procs: Sequence[str]) -> dict[str, str]:
    """Return the names of the meshes of processes, by uid."""
    return {uid: node.names.get(uid, uid) for uid in {split_proc(proc)[0] for proc in procs}}


class _Waited:
    """An inquiry that waits for its answers."""

    def __init__(self, node: Node) -> None:
        self._answered = threading.Event()
        self._inquiry = Inquiry(node, self._answered.set)
        self.close = self._inquiry.close

    def ask(self, procs: Sequence[str]) -> list[RankFacts]:
        """Return what processes do; those that do not answer in time are silent."""
        self._answered.clear()
        self._inquiry.ask(procs)
        if not self._inquiry.done:
            self._answered.wait(PATIENCE)
        return self._inquiry.facts(procs)

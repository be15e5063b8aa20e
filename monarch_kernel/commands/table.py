"""``%mesh``: a table of the meshes and their ranks, for a terminal and for a notebook."""

from __future__ import annotations

import html

from monarch._kernel_api import (
    ActorMesh,
    Liveness,
    Point,
    Vitals,
    current_node,
    html_table,
    state_of,
    text_table,
)
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.meshes.activity import Busy, busy_ranks, dead_text, vitals_of
from monarch_kernel.meshes.detached import DetachedRecipe
from monarch_kernel.meshes.mesh import Mesh

_MOST = 40
"""Rows of a table."""
_ALWAYS = ("rank", "pid", "memory", "state")
_NOTHING = ("", "cpu", 0)
"""Values of a column that says nothing."""


def bundle_of(meshes: list[Mesh], calls: CallRecord, used: str | None) -> dict[str, str]:
    """Return the tables of meshes as a MIME bundle."""
    texts: list[str] = []
    pages: list[str] = []
    for mesh in meshes:
        mesh.look()
        headers, rows = table_of(mesh, calls)
        title = _title(mesh, mesh.name == used)
        actors = [_actors_text(each) for each in mesh.users_actors()]
        texts.append("\n".join([title, text_table(headers, rows, _MOST), *actors]))
        below = "".join(f"<div style='opacity:.8'>{html.escape(each)}</div>" for each in actors)
        pages.append(f"<div style='margin-bottom:1em'>{html_table(headers, rows, _MOST, title=title)}{below}</div>")
    return {"text/plain": "\n\n".join(texts), "text/html": "".join(pages)}


def _title(mesh: Mesh, used: bool) -> str:
    sizes = ", ".join(f"{label}={size}" for label, size in mesh.procs.sizes.items())
    about = [text for text, shown in (("cells run on it", used), ("collectives checked", mesh.checked)) if shown]
    return f"mesh {mesh.name!r}: {sizes}" + (f" ({', '.join(about)})" if about else "")


def _actors_text(actors: ActorMesh) -> str:
    return f"actors {state_of(actors).name!r}: {state_of(actors).cls.__name__} on {len(actors)} ranks"


def table_of(mesh: Mesh, calls: CallRecord) -> tuple[list[str], list[list[object]]]:
    """Return the headers and rows of a mesh, without columns that say nothing."""
    rows = _rows(mesh, calls)
    headers = [name for name in rows[0] if name in _ALWAYS or _says_something([row[name] for row in rows], name)]
    return headers, [[row[name] for name in headers] for row in rows]


def _says_something(values: list[object], name: str) -> bool:
    if name == "host":
        return len(set(values)) > 1
    return any(value not in _NOTHING for value in values)


def _busy_text(busy: Busy, known: Vitals | None) -> str:
    return busy.text(known.place, known.is_paused) if known is not None else busy.text()


def _rows(mesh: Mesh, calls: CallRecord) -> list[dict[str, object]]:
    procs, extent = state_of(mesh.procs).procs, mesh.procs.extent
    vitals, busy = vitals_of(mesh), busy_ranks(mesh, calls)
    # The only axis has the same numbers as the ranks.
    labels = extent.labels if len(extent.labels) > 1 else ()
    rows: list[dict[str, object]] = []
    for rank in range(len(mesh.procs)):
        point, known = Point(rank, extent), vitals.get(rank)
        silence = current_node().find_part(Liveness)
        silent = silence.text(procs.proc(rank)) if silence is not None else ""
        # A cell of an earlier notebook, or a definition on a new rank, is no call of this one.
        whose = ", for an earlier notebook" if isinstance(mesh.recipe, DetachedRecipe) else ""
        earlier = f"running at {known.place}{whose}" if known is not None and known.place else "idle"
        leaving = mesh.hosts.leaving_text(procs.host(rank))
        running = _busy_text(busy[rank], known) if rank in busy else earlier
        rows.append(
            {
                "rank": rank,
                **{label: point[label] for label in labels},
                "host": current_node().hosts.name_of(procs.host(rank)),
                "pid": known.pid if known is not None else None,
                "device": known.device if known is not None else "",
                "memory": _size(known.memory) if known is not None else "",
                "GPU memory": _size(known.gpu_memory) if known is not None and known.gpu_memory else "",
                "restarts": mesh.replaced.counts.get(rank, 0),
                "state": dead_text(mesh, rank) or ", ".join(filter(None, [silent, running, leaving])),
            }
        )
    return rows


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"

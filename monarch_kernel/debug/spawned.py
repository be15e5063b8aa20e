"""The ranks of all meshes that this notebook has spawned."""

from __future__ import annotations

from monarch._kernel_api import current_node, has_node, meshes_of, split_proc


def uids() -> list[str]:
    """Return the uids of the meshes that run."""
    if not has_node():
        return []
    return [uid for uid, state in list(meshes_of(current_node()).own_procs.items()) if state.stopped is None]


def procs_of(uid: str) -> list[str]:
    """Return the live processes of a mesh, by rank."""
    state = meshes_of(current_node()).own_procs.get(uid)
    if state is None:
        return []
    named = [state.procs.proc(rank) for rank in range(state.procs.region().nelements)]
    return [proc for proc in named if current_node().peers.get(proc).dead is None]


def all_procs() -> list[str]:
    """Return the live processes of all meshes."""
    return [proc for uid in uids() for proc in procs_of(uid)]


def mesh_name(proc: str) -> str:
    """Return the name of the mesh of a process."""
    uid = split_proc(proc)[0]
    state = meshes_of(current_node()).own_procs.get(uid)
    return state.procs.name if state is not None else uid


def title(proc: str) -> str:
    """Return a rank as a front end shows it among its threads."""
    return f"rank {split_proc(proc)[1]} of mesh {mesh_name(proc)}"


def extra(proc: str) -> dict[str, str | int]:
    """Return what this kernel adds to messages about a rank."""
    return {"mesh": mesh_name(proc), "rank": split_proc(proc)[1]}

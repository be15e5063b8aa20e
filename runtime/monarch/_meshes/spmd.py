"""SPMD programs on meshes: their environment, and an actor that runs them."""

from __future__ import annotations

from collections.abc import Sequence

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._groups.torchrun import (
    Meeting,
    arrange,
    run_script,
    script_of,
    serve_meeting,
    serves,
    set_variables,
)
from monarch._meshes.context import context
from monarch._meshes.inside import check_procs, node_of, region_of, state_of
from monarch._meshes.procs.proc_mesh import ProcMesh
from monarch._node.future import in_thread
from monarch._node.services.asking import ask_proc


def setup_torch_elastic_env(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: bool | None = None,
) -> None:
    """Give the processes of a mesh the environment that torchrun gives its workers.

    Afterwards, ``torch.distributed.init_process_group()`` in an endpoint needs no arguments. Without an address and a
    port, the first process serves the rendezvous store on a free port.

    Args:
        proc_mesh: the mesh, or a slice of one: its first process is rank 0.
        master_addr: address at which rank 0 creates the store instead; requires a port.
        master_port: port of the store.
        use_ipaddr: ignored: the address is always one that the other hosts can reach.

    Raises:
        ValueError: only one of address and port is given.
        DeviceMeshError: processes have died.
    """
    if (master_addr is None) != (master_port is None):
        raise ValueError("expected both master_addr and master_port, or neither")
    procs, ranks = state_of(proc_mesh).procs, list(region_of(proc_mesh).base_ranks())
    check_procs(proc_mesh, "setup_torch_elastic_env")
    if master_addr is not None and master_port is not None:
        meeting = Meeting(ranks, master_addr, int(master_port), False)
    else:
        meeting = arrange(procs, ranks)
    answers = [ask_proc(procs.proc(rank), set_variables, meeting) for rank in ranks]
    for answer in answers:
        answer.get()


async def setup_torch_elastic_env_async(
    proc_mesh: ProcMesh,
    master_addr: str | None = None,
    master_port: int | None = None,
    use_ipaddr: bool | None = None,
) -> None:
    """Await the result of ``setup_torch_elastic_env``."""
    await in_thread(
        node_of(proc_mesh),
        "setup_torch_elastic_env",
        lambda: setup_torch_elastic_env(proc_mesh, master_addr, master_port, use_ipaddr),
    )


class SPMDActor(Actor):
    """Runs programs that were written for torchrun, unchanged, one rank in each actor of the mesh.

    ``host, port = actors.slice(gpus=0).get_host_port.call_one().get()``, then
    ``actors.main.call(host, port, ["train.py", "--steps", "10"]).get()``.
    """

    @endpoint
    def get_host_port(self, use_ipaddr: bool | None = None) -> tuple[str, int]:
        """Serve a rendezvous store in the first actor and return its address.

        Args:
            use_ipaddr: ignored: the address is always one that the other hosts can reach.
        """
        return serve_meeting(len(context().actor_instance.proc_mesh))

    @endpoint
    def setup_env(self, master_addr: str, master_port: int) -> None:
        """Set the environment; see ``setup_torch_elastic_env``."""
        set_variables(self._meeting(master_addr, master_port))

    @endpoint
    def main(self, master_addr: str, master_port: int, script_args: Sequence[str]) -> bool:
        """Run ``script.py ARGS`` or ``-m module ARGS`` as ``__main__``; return True if it succeeds.

        Raises:
            ArgumentError: ``script_args`` has no script; a ValueError.
            RuntimeError: the program exited with a nonzero code. Its other errors are raised as they are.
        """
        run_script(script_of(script_args, read=False), self._meeting(master_addr, master_port))
        return True

    def _meeting(self, address: str, port: int) -> Meeting:
        mesh = context().actor_instance.proc_mesh
        ranks = list(region_of(mesh).base_ranks())
        first = state_of(mesh).procs.proc(ranks[0])
        return Meeting(ranks, address, int(port), bool(ask_proc(first, serves, int(port)).get()))

"""A published fault-tolerant program survives kills, during its calls and between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PUBLISHED = """
import monarch
from monarch.exceptions import DeviceMeshError

def resilient_execution(mesh, data_loader):
    chk_point = 0
    for i, batch in enumerate(data_loader):
        try:
            # Attempt to execute the distributed operation
            result = perform_heavy_computation(mesh, batch)
            chk_point = i
        except DeviceMeshError as e:
            print(f"Node failure detected at step {i}: {e}")
            new_mesh = monarch.heal_mesh(mesh)
            print("Mesh healed. Resuming computation...")
            mesh = new_mesh
            # Re-run the failed batch
            result = perform_heavy_computation(mesh, batch)
        seen.append(list(result.values()))
    return "Job Complete"

def perform_heavy_computation(mesh, batch):
    return mesh.execute(lambda x: x * 2, batch)
"""
# What the text leaves out: a mesh, batches, and somebody who kills.
AROUND = """
import os, signal, sys, threading
import torch
from monarch.actor import Actor, endpoint, this_host

seen = []

class Pids(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

class Slow:
    '''A batch that takes its time, and during which a rank of the mesh dies.'''
    def __init__(self, path, number):
        self.path, self.number = path, number

    def __mul__(self, by):
        import time
        if not os.path.exists(self.path):
            open(f"{self.path}.{os.getpid()}", "w").close()
            while not os.path.exists(self.path):
                time.sleep(0.01)
        return self.number * by

def kill_while_it_works(path, pids):
    while not all(os.path.exists(f"{path}.{pid}") for pid in pids):
        pass
    os.kill(pids[2], signal.SIGKILL)
    open(path, "w").close()

def main():
    folder = sys.argv[1]
    mesh = this_host().spawn_procs({"gpus": 4})
    pids = mesh.spawn("pids", Pids)
    first = list(pids.pid.call().get().values())

    def batches():
        yield torch.tensor(1)
        path = os.path.join(folder, "now")
        threading.Thread(target=kill_while_it_works, args=(path, first)).start()
        yield Slow(path, 2)
        # Between two calls, where nobody waits for it.
        os.kill(list(pids.pid.call().get().values())[0], signal.SIGKILL)
        yield torch.tensor(3)
        yield torch.tensor(4)

    print(resilient_execution(mesh, batches()))
    print(*[[int(each) for each in values] for values in seen])
    last = list(pids.pid.call().get().values())
    print("kept", sum(a == b for a, b in zip(first, last)))

if __name__ == "__main__":
    main()
"""


def test_resilient_program_completes_its_job(program: Callable[..., Any], tmp_path: Any) -> None:
    ran = program(PUBLISHED + AROUND, str(tmp_path))
    out = ran.ok()
    assert out.count("Node failure detected at step") == out.count("Mesh healed.") == 2, out
    assert "Node failure detected at step 1" in out and "Node failure detected at step 2" in out
    assert "rank 2" in out and "SIGKILL" in out and "rank 0" in out
    assert "Job Complete\n" in out and "kept 2" in out
    assert "[2, 2, 2, 2] [4, 4, 4, 4] [6, 6, 6, 6] [8, 8, 8, 8]" in out

"""NCCL connects when a group is made: a stand-in for its backend, since it needs GPUs. The real one: tests/gpu."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import json
import torch
import torch.distributed as dist
from monarch._tensors.collectives import made_groups, nccl

class Backend:
    fails = False
    def eager_connect_single_device(self, device):
        seen["connected"].append(str(device))
        if self.fails:
            raise dist.DistBackendError("NCCL error in: accept failed")

seen, backend = {"connected": []}, Backend()
nccl.nccl_backends = lambda groups: [backend]
made_groups.observe_groups()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen["before"] = len(seen["connected"])
made_groups.connect_with(3)
dist.new_group([0])
backend.fails = True
try:
    dist.new_group([0])
except RuntimeError as error:
    seen["error"] = str(error)
backend.fails = False
seen["known"] = len(dist.distributed_c10d._world.pg_map)
group = dist.new_group([0])
value = torch.ones(1)
dist.all_reduce(value, group=group)
made_groups.connect_with(None)
dist.new_group([0])
dist.destroy_process_group()
print(json.dumps(seen))
"""


WAITS = """
import json, socket, threading
import torch
import torch.distributed as dist
from monarch._tensors.collectives import made_groups, nccl

listening = threading.Event()

class Backend:
    def eager_connect_single_device(self, device):
        with socket.create_server(("127.0.0.1", 0)) as server:
            listening.set()
            server.accept()

def free():
    assert listening.wait(60)
    while not nccl.free_connecting():
        pass

nccl.nccl_backends = lambda groups: [Backend()]
made_groups.observe_groups()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
# A socket that listened before is left alone.
other = socket.create_server(("127.0.0.1", 0))
made_groups.connect_with(0)
thread = threading.Thread(target=free)
thread.start()
try:
    dist.new_group([0])
except OSError as error:
    print(error.strerror)
thread.join()
assert nccl.free_connecting() == 0
with socket.create_connection(other.getsockname()):
    print(len(dist.distributed_c10d._world.pg_map))
"""


def test_a_rank_that_connects_to_others_is_freed() -> None:
    found = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=120, check=False)
    assert (found.stdout.split("\n")[:2], found.stderr) == (["Invalid argument", "1"], "")


def test_nccl_connects_with_the_group_and_failure_leaves_none() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout)
    assert seen == {
        "before": 0,
        "connected": ["cuda:3"] * 3,
        "error": "NCCL error in: accept failed",
        # The default one, and the first of the others.
        "known": 2,
    }

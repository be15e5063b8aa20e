"""Timeouts of NCCL that this package watches, with a stand-in for its backend. The real one: tests/gpu."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import datetime, json, time
import torch.distributed as dist
from monarch._tensors import torch_compat
from monarch._tensors.collectives import recorded, timeouts

class ProcessGroupNCCL:
    class options:
        _timeout = datetime.timedelta(seconds=7)
    def _set_default_timeout(self, timeout):
        self.options._timeout = timeout
    def _get_sequence_number_for_group(self):
        return 3

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
nccl, group, usual = ProcessGroupNCCL(), dist.group.WORLD, torch_compat.backend_of
torch_compat.backend_of = lambda group, device: nccl if device == "cuda" else usual(group, device)
seen = {"is held": timeouts.hold_timeout(group), "timeout": nccl.options._timeout.days}
held = {each.device: seconds for each, seconds in timeouts.held_groups().items()}
seen["held"] = held["cuda"]

def oldest(*states):
    entries = [
        {"profiling_name": f"nccl:{name}", "process_group": [group.group_name, ""], "pg_id": 0, "record_id": number,
         "retired": retired, "state": state, "time_created_ns": int((time.time() - 60 + number) * 1e9)}
        for number, (name, retired, state) in enumerate(states)
    ]
    # torch may tell of each twice.
    recorded.recorded_collectives = lambda: [json.dumps({"entries": entries})] * 2
    found = timeouts.unended(timeouts.UntimedBackend(group, "cuda"))
    return found and [found.operation, round(found.seconds)]

seen["no record"] = oldest()
seen["all ended"] = oldest(("all_reduce", True, "completed"), ("send 0->1", False, "completed"))
seen["waits"] = oldest(("reduce", True, "completed"), ("broadcast", False, "started"), ("barrier", False, "scheduled"))
timeouts.let_go(timeouts.UntimedBackend(group, "cuda"))
seen["left to NCCL"] = nccl.options._timeout.total_seconds()
print(json.dumps(seen))
"""


def test_nccl_timeouts_are_held_and_oldest_collective_is_found() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "is held": True,
        "timeout": 365,
        "held": 7.0,
        "no record": None,
        "all ended": ["", 0],
        "waits": ["broadcast", 59],
        "left to NCCL": 7.0,
    }

"""An ordinary training that is slow at times, and whether a running cell takes it for stuck: it should never.

Four ranks train in a cell of a real kernel: one rank is slower than the others, one evaluates for seconds, workers load
data, rank 0 writes a checkpoint and all write one together, inductor compiles on all ranks, and one rank builds a C++
extension of torch. All that the line below the cell says is noted; an alarm is a finding that ranks wait for one that
computes nothing, or are stuck.

    python benchmarks/false_alarms.py --minutes 15

It prints each alarm with its time and the part of the round, and ends with 1 if there was one.
"""

from __future__ import annotations

import argparse
import sys
import time
from queue import Empty
from typing import Any

from jupyter_client.manager import KernelManager

PROGRAM = """import os, shutil, tempfile, time
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.cpp_extension import load_inline

begun, rounds = time.monotonic(), 0

def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until: torch.ones(200, 200) @ torch.ones(200, 200)

class Data(Dataset):
    def __len__(self): return 320
    def __getitem__(self, i):
        busy(0.002)
        return torch.full((256,), float(i) / 320)

def part(name):
    print(f'{time.monotonic() - begun:.0f} s: {name}', flush=True)

shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared, src=0)
folder = shared[0]
own = tempfile.mkdtemp()
os.environ.update(TORCHINDUCTOR_CACHE_DIR=own + '/inductor', TORCH_EXTENSIONS_DIR=own + '/extensions')
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    part('training with a slow rank')
    for batch in DataLoader(Data(), 32, num_workers=rounds % 2, multiprocessing_context='fork' if rounds % 2 else None):
        optimizer.zero_grad()
        (model(batch) - batch).square().mean().backward()
        if rank == rounds % 4: busy(0.5)
        optimizer.step()
    part('evaluation on one rank')
    if rank == (rounds + 1) % 4: busy(5)
    dist.barrier()
    part('checkpoint of one rank')
    if rank == 0:
        with open(f'{folder}/model.pt', 'wb') as file:
            torch.save({'model': model.state_dict(), 'moments': torch.randn(60_000_000)}, file)
            os.fsync(file.fileno())
    dist.barrier()
    part('checkpoint of all ranks')
    dcp.save({'model': model.state_dict()}, checkpoint_id=f'{folder}/{rounds}')
    part('compiling by inductor')
    torch._dynamo.reset()
    def attention(q, n=rounds):
        for i in range(6): q = torch.softmax(q @ q.T / (n + i + 2), -1) @ q.sin() + q.cos() * (n + i)
        return q.sum()
    torch.compile(attention)(torch.randn(64, 32, requires_grad=True)).backward()
    dist.barrier()
    part('building C++ on one rank')
    if rank == 2:
        source = f'torch::Tensor added(torch::Tensor x) {{ return x + {rounds}; }}'
        assert load_inline(f'added{rounds}', source, functions='added').added(torch.ones(1)).item() == rounds + 1
    ends = torch.tensor([float(time.monotonic() - begun > SECONDS)])
    dist.broadcast(ends, src=0)
    rounds += 1
    if ends.item(): break
    for name in os.listdir(folder): shutil.rmtree(f'{folder}/{name}', ignore_errors=True)
shutil.rmtree(own)
if rank == 0: shutil.rmtree(folder)
rounds"""
"""Of a cell; SECONDS is replaced."""
_ALARMS = ("waiting: ", "stuck: ")
_MARK = "monarch_waiting"
_UP_S = 120.0


def program(seconds: float) -> str:
    """Return the cell, which ends after the round in which these seconds are over."""
    return "%%mesh\n" + PROGRAM.replace("SECONDS", str(seconds))


def alarms_in(content: dict[str, Any]) -> str:
    """Return the alarm in a display of a running cell; empty if there is none."""
    text = str(content.get("data", {}).get("text/plain", ""))
    lines = text.splitlines() if _MARK in content.get("metadata", {}) else []
    return text if any(line.startswith(_ALARMS) for line in lines) else ""


def main() -> int:
    """Run the training, and return the exit code."""
    parser = argparse.ArgumentParser(description="Whether an ordinary training raises alarms.")
    parser.add_argument("--minutes", type=float, default=15.0)
    seconds = parser.parse_args().minutes * 60
    manager = KernelManager(kernel_name="monarch")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=_UP_S)
        client.execute_interactive("%mesh up --procs 4", timeout=_UP_S)
        found = _watch(client, _run(client, program(seconds)), seconds * 3 + 600)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
    print(f"{len(found)} alarms" if found else "no alarm")
    return 1 if found else 0


def _run(client: Any, code: str) -> str:
    """Run a cell as a notebook does, which gets the line below a running cell as a display; return its request."""
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = client.session.msg("execute_request", content)
    message["metadata"]["cellId"] = message["header"]["msg_id"]
    client.shell_channel.send(message)
    return str(message["header"]["msg_id"])


def _watch(client: Any, request: str, patience: float) -> list[str]:
    """Print what a cell shows until it has ended, and return the alarms."""
    found: list[str] = []
    begun = time.monotonic()
    while time.monotonic() - begun < patience:
        try:
            message = client.get_iopub_msg(timeout=1.0)
        except Empty:
            continue
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != request:
            continue
        if kind == "status" and content["execution_state"] == "idle":
            return found
        alarm = alarms_in(content) if kind in ("display_data", "update_display_data") else ""
        if alarm and alarm not in found:
            found.append(alarm)
            print(f"ALARM after {time.monotonic() - begun:.0f} s:\n{alarm}", flush=True)
        elif kind == "stream":
            print(content["text"], end="", flush=True)
        elif kind == "error":
            print("\n".join(content["traceback"]), flush=True)
    raise TimeoutError(f"the training has not ended after {patience:.0f} s")


if __name__ == "__main__":
    sys.exit(main())

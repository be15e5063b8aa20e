"""Programs of users: the actor part of a blog's example, and a first tour of the API."""

from __future__ import annotations

import ast
from typing import Any

import pytest

# As published, but for what the text leaves out: the definition of the actor.
BLOG = '''
import os
import torch
from monarch.actor import Actor, current_rank, endpoint, proc_mesh

WORLD_SIZE = 2

class DDPActor(Actor):
    """Trains a small model on each rank, the gradients averaged over gloo."""

    def __init__(self):
        self.rank = current_rank().rank
        self.step = 0

    def _log(self, text):
        print(f"{self.rank=} {text}")

    @endpoint
    async def setup(self):
        import torch.distributed as dist
        dist.init_process_group("gloo", rank=self.rank, world_size=WORLD_SIZE)
        torch.manual_seed(0)
        self.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._log("Initializing torch distributed")

    @endpoint
    async def demo_basic(self):
        self._log("Running basic DDP example")
        self._step()
        self._log("Finished running basic DDP example")

    @endpoint
    async def train_step(self):
        loss = self._step()
        self.step += 1
        norm = sum(float(p.grad.norm()) ** 2 for p in self.model.parameters()) ** 0.5
        return {"loss": loss, "grad_norm": norm, "throughput": 1.0}

    def _step(self):
        self.optimizer.zero_grad()
        torch.manual_seed(self.rank)
        loss = torch.nn.functional.mse_loss(self.model(torch.randn(20, 10)), torch.zeros(20, 5))
        loss.backward()
        self.optimizer.step()
        return float(loss)

    @endpoint
    async def get_system_info(self):
        return {"rank": self.rank, "process_id": os.getpid(), "device_name": "cpu", "gpu_memory_allocated": 0}

    @endpoint
    async def cleanup(self):
        torch.distributed.destroy_process_group()

# Spawn a process mesh
local_proc_mesh = await proc_mesh(
    gpus=WORLD_SIZE,
    env={
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "%PORT%",
    },
)
# Spawn our actor mesh on top of the process mesh
ddp_actor = await local_proc_mesh.spawn("ddp_actor", DDPActor)
await ddp_actor.setup.call()
await ddp_actor.demo_basic.call()

ddp_actors = ddp_actor
print("Gathering system info from all ranks...")
system_info = await ddp_actors.get_system_info.call()
print("\\n SYSTEM INFORMATION ACROSS ALL RANKS:")
print("=" * 60)
for point, rank_info in system_info:
    print(f"Rank {rank_info['rank']}: PID={rank_info['process_id']}, "
          f"Device={rank_info['device_name']}, "
          f"GPU Memory={rank_info['gpu_memory_allocated']/1e6:.1f}MB")
print(f"\\nFound {len(system_info)} ranks in the mesh")
all_rank_info = [value for point, value in system_info]
print(f"Total GPU memory across all ranks: {sum(info['gpu_memory_allocated'] for info in all_rank_info)/1e6:.1f}MB")

print("Running training steps...")
for step in range(3):
    print(f"\\n--- Step {step + 1} ---")
    step_results = await ddp_actors.train_step.call()
    all_results = [value for point, value in step_results]
    losses = [result['loss'] for result in all_results]
    grad_norms = [result['grad_norm'] for result in all_results]
    throughputs = [result['throughput'] for result in all_results]
    print(f"Losses across ranks: {[f'{l:.4f}' for l in losses]}")
    print(f"Gradient norms: {[f'{g:.4f}' for g in grad_norms]}")
    print(f"Avg throughput: {sum(throughputs)/len(throughputs):.1f} samples/sec")
await ddp_actors.cleanup.call()
await local_proc_mesh.stop()
'''

NOTEBOOK = """
import ast, asyncio, inspect, sys
# Cells are compiled so that they may await, and run on the loop that the notebook kernel has.
async def main(source):
    code = compile(source, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(code, sys.modules["__main__"].__dict__)
    if inspect.iscoroutine(result):
        await result
asyncio.run(main(open(sys.argv[1]).read()))
"""


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_blog_training_runs_unchanged(program: Any, tmp_path: Any) -> None:
    source = tmp_path / "blog.py"
    source.write_text(BLOG.replace("%PORT%", str(free_port())))
    out = program(NOTEBOOK, str(source)).ok()
    for rank in range(2):
        assert f"self.rank={rank} Running basic DDP example" in out
        assert f"self.rank={rank} Finished running basic DDP example" in out
    assert "Found 2 ranks in the mesh" in out and "Total GPU memory across all ranks: 0.0MB" in out
    norms = [ast.literal_eval(line.partition(": ")[2]) for line in out.splitlines() if line.startswith("Gradient")]
    assert len(norms) == 3 and all(first == second for first, second in norms), "gradients are averaged"


TOUR = """
import asyncio
from monarch.actor import Actor, ValueMesh, context, current_rank, current_size, endpoint, this_host, this_proc

class Counter(Actor):
    def __init__(self, start):
        self.value = start

    @endpoint
    def bump(self, by=1):
        self.value += by

    @endpoint
    def read(self):
        return self.value

class Pong(Actor):
    @endpoint
    def hit(self, n):
        return n + 1

class Ping(Actor):
    def __init__(self, pong):
        self.pong = pong
        # Each rank plays with the one of its own place.
        self.partner = pong.slice(**dict(current_rank()))

    @endpoint
    def rally(self, n):
        for _ in range(3):
            n = self.partner.hit.call_one(n).get()
        return n

class Manager(Actor):
    @endpoint
    def hire(self, count):
        self.team = this_host().spawn_procs(per_host={"workers": count}).spawn("team", Counter, 10)
        return self.team

class Trainer(Actor):
    @endpoint
    def setup(self, port):
        import torch.distributed as dist
        rank, world = current_rank().rank, len(context().actor_instance.proc_mesh)
        dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=world)

    @endpoint
    def all_reduce(self):
        import torch, torch.distributed as dist
        x = torch.tensor([current_rank().rank + 1.0])
        dist.all_reduce(x)
        return x.item()

    def __cleanup__(self, error):
        import torch.distributed as dist
        dist.destroy_process_group()

def main(port):
    procs = this_host().spawn_procs(per_host={"gpus": 4})
    counters = procs.spawn("counters", Counter, 0)
    counters.bump.broadcast()
    counters.slice(gpus=slice(0, 2)).bump.call(by=5).get()
    values = counters.read.call().get()
    assert isinstance(values, ValueMesh)
    print([value for _, value in values], values.item(gpus=3))
    print(counters.slice(gpus=3).read.call_one().get(), counters.read.choose().get() in (1, 6))
    print(sorted(answer.get() for answer in counters.read.stream()))

    grid = procs.split(gpus=("rows", "columns"), rows=2)
    pong = grid.spawn("pong", Pong)
    ping = grid.spawn("ping", Ping, pong)
    print(list(ping.rally.call(0).get().values()), ping.sizes)

    team = this_proc().spawn("manager", Manager).hire.call_one(2).get()
    print(list(team.read.call().get().values()))

    async def with_asyncio():
        first, second = await asyncio.gather(counters.read.call(), team.read.call())
        return len(first), len(second)

    print(asyncio.run(with_asyncio()))

    trainers = procs.spawn("trainers", Trainer)
    trainers.setup.call(port).get()
    print(list(trainers.all_reduce.call().get().values()))
    trainers.stop().get()
    procs.stop().get()

if __name__ == "__main__":
    import sys
    main(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_tour_of_the_api_runs(program: Any) -> None:
    assert program(TOUR, str(free_port())).ok().splitlines() == [
        "[6, 6, 1, 1] 1",
        "1 True",
        "[1, 1, 6, 6]",
        "[3, 3, 3, 3] {'rows': 2, 'columns': 2}",
        "[10, 10]",
        "(4, 2)",
        "[10.0, 10.0, 10.0, 10.0]",
    ]

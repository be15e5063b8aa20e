"""The tensor plane between hosts: real agents over tcp and CURVE, and ranks that meet at their addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

GROUPS = """
import os, signal
import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint
from monarch.distributed import group
from monarch.exceptions import SupervisionError
from monarch.spmd import setup_torch_elastic_env
from monarch.testing import local_hosts

class Member(Actor):
    @endpoint
    def total(self, *axes):
        here = torch.tensor([float(current_rank().rank)])
        dist.all_reduce(here, group=group(*axes))
        return here.item()
    @endpoint
    def by_itself(self):
        dist.init_process_group()
        found = dist.get_rank(), dist.get_world_size(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]
        dist.destroy_process_group()
        return found
    @endpoint
    def wait(self, absent):
        given = group()
        if current_rank().rank != absent:
            dist.all_reduce(torch.ones(1), group=given)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

def values(future):
    return list(future.get(60).values())

if __name__ == "__main__":
    with local_hosts(2) as hosts:
        mesh = hosts.spawn_procs({"gpus": 2})
        members = mesh.spawn("members", Member)
        print(values(members.total.call()), values(members.total.call("hosts")), values(members.total.call("gpus")))
        other = hosts.spawn_procs({"gpus": 2})
        alone = other.spawn("alone", Member)
        setup_torch_elastic_env(other)
        print(values(alone.by_itself.call()))
        try:
            members.wait.call(3).get(10)
        except SupervisionError as error:
            print("rank 3" in str(error))
        # On the other host, where nobody saw it die.
        print(members.slice(hosts=0).total.call().exception(10) is not None)
"""

BUFFERS = """
import os, signal, time
import torch
from monarch.actor import Actor, current_rank, endpoint, supervise, this_host
from monarch.distributed import Part, copy_state
from monarch.rdma import RDMABuffer
from monarch.testing import local_hosts

class Owner(Actor):
    @endpoint
    def make(self):
        self.tensor = torch.arange(1_000_000, dtype=torch.float32)
        return RDMABuffer(self.tensor)
    @endpoint
    def first(self):
        return self.tensor[:3].tolist()
    @endpoint
    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

class Reader(Actor):
    @endpoint
    def read(self, buffer):
        found = torch.zeros(1_000_000)
        buffer.read_into(found).get()
        buffer.part(4, 8).write_from(torch.tensor([-1.0, -2.0])).get()
        return found[-1].item(), buffer.backend, buffer.transports()
    @endpoint
    def fail(self, buffer):
        try:
            buffer.read_into(torch.zeros(1_000_000)).get()
        except Exception as error:
            return type(error).__name__
    @endpoint
    def hold(self, rows, columns):
        self.state = {"w": torch.zeros(rows, columns)}
    def weights(self):
        return self.state
    def rows(self):
        count = len(self.state["w"])
        return {"w": Part(self.state["w"], (current_rank().rank * count, 0))}
    @endpoint
    def total(self):
        return self.state["w"].sum().item()

def values(future):
    return list(future.get(60).values())

if __name__ == "__main__":
    with local_hosts(2) as hosts:
        mesh = hosts.spawn_procs({"gpus": 2}, env=ENV)
        owners = mesh.spawn("owners", Owner)
        readers = mesh.spawn("readers", Reader)
        buffer = owners.slice(hosts=0, gpus=0).make.call_one().get()
        last, backend, reasons = readers.slice(hosts=1, gpus=0).read.call_one(buffer).get()
        print(last, backend, reasons["attach"], owners.slice(hosts=0, gpus=0).first.call_one().get())
        print(readers.slice(hosts=0, gpus=1).read.call_one(buffer).get()[1])
        here = torch.zeros(1_000_000)
        buffer.read_into(here).get()
        print(here[1].item())
        # A state goes to four ranks on two hosts, each of which gets its bytes once.
        readers.hold.call(3000, 500).get()
        state = {"w": torch.arange(1_500_000, dtype=torch.float32).view(3000, 500)}
        report = copy_state(state, readers.weights).get()
        right = set(values(readers.total.call())) == {state["w"].sum().item()}
        print(right, sorted(report.bytes_between_hosts.values()))
        readers.hold.call(750, 500).get()
        report = copy_state(state, readers.rows).get()
        print(report.bytes, sorted(report.bytes_between_hosts.values()))
        reader, kinds, begun = readers.slice(hosts=1, gpus=0), {None}, time.monotonic()
        # Calls to those that live go on, since somebody deals with the death.
        with supervise(mesh):
            owners.slice(hosts=0, gpus=0).die.broadcast()
            while kinds == {None} and time.monotonic() - begun < 30:
                kinds.add(reader.fail.call_one(buffer).get(30))
            kinds.update(reader.fail.call_one(buffer).get(30) for _ in range(20))
        print(kinds - {None})
"""


def test_groups_work_across_hosts(program: Callable[..., Any]) -> None:
    lines = program(GROUPS, timeout=110).ok().splitlines()
    assert lines[0] == "[6.0, 6.0, 6.0, 6.0] [2.0, 4.0, 2.0, 4.0] [1.0, 1.0, 5.0, 5.0]"
    assert lines[1] == "[(0, 4, '0', '0'), (1, 4, '1', '0'), (2, 4, '0', '1'), (3, 4, '1', '1')]"
    assert lines[2:] == ["True", "True"]


@pytest.mark.parametrize("transport", ["stream", "nixl"])
def test_buffers_and_states_work_across_hosts(program: Callable[..., Any], transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl")
    env = {"MONARCH_RDMA_TRANSPORTS": f"local,attach,{transport}"}
    lines = program(BUFFERS.replace("ENV", repr(env)), timeout=110, **env).ok().splitlines()
    assert lines[0] == f"999999.0 {transport} the owner is on another host [0.0, -1.0, -2.0]"
    assert lines[1:3] == ["attach", "-1.0"]
    assert lines[3] == "True [6000000, 6000000]"
    assert lines[4] == "6000000 [3000000, 3000000]"
    assert lines[5] == "{'TransferError'}"

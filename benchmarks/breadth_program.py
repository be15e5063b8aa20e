"""One run of breadth.py: real host agents on this machine. Prints figures as JSON.

python breadth_program.py calls HOSTS ROUNDS      seconds and processor seconds of each call here, and messages
python breadth_program.py lines HOSTS ROUNDS      the same, of calls that print a line on each rank
python breadth_program.py idle HOSTS SECONDS      processor seconds of a second without calls, and connections here
python breadth_program.py files HOSTS MEGABYTES   bytes sent by this process, and seconds
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from monarch._kernel_api import ActorMesh, member_at
from monarch._node.current import current_node
from monarch._wire import messages as m
from monarch.actor import Actor, HostMesh, endpoint
from monarch.testing import local_hosts
from monarch_kernel.commands.files import send_file

_SENT = 200
"""Where ``tcpi_bytes_sent`` is in the tcp_info of Linux."""


class Bench(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value

    @endpoint
    def print_line(self, value: int) -> int:
        print("line", value)
        return value

    @endpoint
    def move(self, folder: str) -> None:
        os.makedirs(folder)
        os.chdir(folder)


def sent() -> int:
    """Return the bytes that this process has sent by the tcp connections that it has now."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                continue
            with socket.socket(fileno=os.dup(int(fd))) as each:
                if each.family == socket.AF_INET:
                    info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("Q", info, _SENT)[0]
        except OSError:
            continue
    return total


def count_received() -> list[int]:
    """Count the answers and output that reach this process from now on, in the one item of the result."""
    count, handlers = [0], current_node().dispatch.handlers

    def counted(handler: Any) -> Any:
        def handle(message: Any, more: Any) -> None:
            count[0] += 1
            handler(message, more)

        return handle

    for kind in (m.Batch, m.Folded, m.Output, m.Merged):
        handlers[kind] = counted(handlers[kind])
    return count


def calls(hosts: HostMesh, rounds: int, printed: bool) -> dict[str, list[float]]:
    """Measure calls to one rank of each host, with all answers."""
    actors = hosts.spawn_procs({"gpus": 1}).spawn("bench", Bench)
    actors.echo.call(0).get(120)
    gateways = [each for each in current_node().hosts.gateways.values() if each.spreads is not None]
    deadline = time.monotonic() + 30
    while not all(each.arrived and each.settled < time.monotonic() for each in gateways):
        # Until messages go from host to host.
        if time.monotonic() > deadline:
            raise TimeoutError("some hosts have not said within 30 s that messages have arrived")
        time.sleep(0.05)
    call = actors.print_line.call if printed else actors.echo.call
    for _ in range(5):
        call(0).get(60)
    found: dict[str, list[float]] = {"wall": [], "cpu": []}
    received = count_received()
    for _ in range(rounds):
        begin, cpu = time.perf_counter(), time.process_time()
        call(1).get(60)
        found["wall"].append(time.perf_counter() - begin)
        found["cpu"].append(time.process_time() - cpu)
    found["messages"] = [received[0] / rounds]
    return found


def established() -> int:
    """Return the number of tcp connections of this process."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process().net_connections("tcp"))


def idle(hosts: HostMesh, count: int, seconds: int) -> dict[str, list[float]]:
    """Measure this process while no rank does anything."""
    actors = hosts.spawn_procs({"gpus": 1}).spawn("bench", Bench)
    actors.echo.call(0).get(120)
    before, least = time.monotonic(), established()
    while time.monotonic() < before + 5:
        # Until no more connections are closed.
        if established() < least:
            before, least = time.monotonic(), established()
        time.sleep(0.1)
    found: dict[str, list[float]] = {"cpu": [], "connections": [float(least)]}
    for _ in range(seconds):
        cpu = time.process_time()
        time.sleep(1)
        found["cpu"].append(time.process_time() - cpu)
    return found


def files(hosts: HostMesh, count: int, megabytes: int) -> dict[str, list[float]]:
    """Measure a file for all hosts."""
    actors = hosts.spawn_procs({"gpus": 1}).spawn("bench", Bench)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        piece = os.urandom(1 << 20)
        with open(source, "wb") as file:
            for _ in range(megabytes):
                file.write(piece)
        for place in range(count):
            actors.slice(hosts=place).move.call(f"{folder}/{place}").get(60)
        mesh: Any = actors
        places: list[ActorMesh] = [member_at(mesh, place) for place in range(count)]
        before, begin = sent(), time.perf_counter()
        send_file(places, source, "target")
        seconds, size = time.perf_counter() - begin, source.stat().st_size
        for place in range(count):
            if (Path(folder) / str(place) / "target").stat().st_size != size:
                raise RuntimeError(f"host {place} has not got the whole file")
        return {"bytes": [float(sent() - before)], "seconds": [seconds], "size": [float(size)]}


def main(what: str, count: int, amount: int) -> None:
    """Measure and print."""
    # Heartbeats as usual for an idle program, and time for the hosts where they are busy.
    with local_hosts(count, silence=None if what == "idle" else 60.0) as hosts:
        match what:
            case "files":
                found = files(hosts, count, amount)
            case "idle":
                found = idle(hosts, count, amount)
            case _:
                found = calls(hosts, amount, what == "lines")
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

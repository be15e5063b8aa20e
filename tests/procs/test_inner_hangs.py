"""Agents that relay others do nothing for a while, or lose their connections, but live: that costs no host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inner_hosts import COMMON

STOPS = (
    COMMON
    + """
from monarch._core.stop_ladder import Ending
from monarch._debug.pausing import ask_ranks
from monarch._debug.here import where_here
from monarch._meshes.inside import state_of
from monarch._node.services.asking import send_signal
from monarch._node.services.registry import request
from monarch_kernel.calls.record import CallRecord
from monarch_kernel.calls.running import RunningCalls
from monarch_kernel.calls.stop_run import stop_ranks

class Sleeper(Rank):
    @endpoint
    def sleep(self, place):
        Path(f"asleep {place} {os.getpid()}").touch()
        time.sleep(600)

def asleep(place, count):
    return lambda: len([*Path().glob(f"asleep {place} *")]) == count

if __name__ == "__main__":
    # Nobody counts as lost here: connections last, and an agent that does nothing is no reason.
    with local_hosts(9, silence=600.0) as hosts:
        agents = list(hosts.spawn_procs({"gpus": 1}).spawn("agents", Rank).agent.call().get(120).values())
        # Not on the host whose agent will do nothing, but on two hosts that it relays.
        meshes = [hosts.slice(hosts=slice(1, 9)).spawn_procs({"gpus": 1}) for _ in range(3)]
        sleepers = [each.spawn("sleepers", Sleeper) for each in meshes]
        until(lambda: relayed(9))
        calls = [each.sleep.call(place) for place, each in enumerate(sleepers)]
        for place in range(3):
            until(asleep(place, 8))
        os.kill(agents[0], signal.SIGSTOP)
        print(len(tree().parents))
        answers = ask_ranks(state_of(meshes[0]).procs, range(8), request(where_here))
        print({rank for rank, answer in answers.items() if isinstance(answer, str)})
        print(len(tree().parents))
        stopped = stop_ranks(RunningCalls("", [calls[0]]), CallRecord(current_node()))
        print(len(stopped.ranks(Ending.LEFT)))
        # The connections are now as before, so that all of the other two meshes goes by the agent again.
        os.kill(agents[0], signal.SIGCONT)
        until(lambda: relayed(9))
        os.kill(agents[0], signal.SIGSTOP)
        procs = state_of(meshes[1]).procs
        send_signal(current_node(), [procs.proc(rank) for rank in range(8)], signal.SIGTERM)
        try:
            calls[1].get(60)
        except SupervisionError as error:
            print("SIGTERM" in str(error))
        until(lambda: all(current_node().peers.get(procs.proc(rank)).dead is not None for rank in range(8)))
        os.kill(agents[0], signal.SIGCONT)
        until(lambda: relayed(9))
        os.kill(agents[0], signal.SIGSTOP)
        meshes[2].stop().get(60)
        print(lost())
        os.kill(agents[0], signal.SIGCONT)
"""
)


def test_stop_and_signals_pass_an_agent_that_hangs(program: Callable[..., Any]) -> None:
    done = program(STOPS, MONARCH_TREE_HOSTS="3", timeout=240)
    assert done.ok().splitlines() == ["6", "set()", "4", "0", "True", "[]"]


CUTS = (
    COMMON
    + """
import ctypes, random, socket

PIDFD_GETFD = 438

def cut(one, other):
    # Shuts the connections of two processes down, as a network does that forgets them.
    ends = {(each.laddr, each.raddr) for each in psutil.Process(other).net_connections("tcp")}
    pidfd, count = os.pidfd_open(one), 0
    for each in psutil.Process(one).net_connections("tcp"):
        if each.status == "ESTABLISHED" and (each.raddr, each.laddr) in ends:
            with socket.socket(fileno=ctypes.CDLL(None).syscall(PIDFD_GETFD, pidfd, each.fd, 0)) as end:
                end.shutdown(socket.SHUT_RDWR)
            count += 1
    os.close(pidfd)
    return count

if __name__ == "__main__":
    with local_hosts(9, silence=60.0) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        agents = dict(zip(current_node().hosts.known, ranks.agent.call().get(60).values()))
        until(lambda: relayed(9))
        ending, faults, answered = threading.Event(), [], [0, 0]
        def call(place, mesh):
            try:
                while not ending.is_set():
                    number = answered[place]
                    if set(mesh.echo.call(number).get(90).values()) != {number}:
                        faults.append(("echo", number))
                    if {len(each) for each in mesh.large.call(100_000).get(90).values()} != {100_000}:
                        faults.append(("large", number))
                    answered[place] += 1
            except BaseException as error:
                faults.append(repr(error))
        threads = [threading.Thread(target=call, args=each) for each in enumerate([ranks, ranks.slice(hosts=1)])]
        for thread in threads:
            thread.start()
        cuts = 0
        # Of each parent one host that it relays, and then the other one.
        for _ in range(2):
            pairs = {parent: child for child, parent in tree().parents.items()}
            assert len(pairs) == 3
            for parent, child in pairs.items():
                cuts += cut(agents[child], agents[parent]) > 0
                at = [*answered]
                until(lambda: all(now > before + 5 for now, before in zip(answered, at)) or faults)
        ending.set()
        for thread in threads:
            thread.join(90)
        print(cuts, faults, lost())
        until(lambda: relayed(9))
        print(set(ranks.echo.call(7).get(60).values()))
"""
)


def test_broken_connections_of_living_hosts_cost_no_host(program: Callable[..., Any]) -> None:
    done = program(CUTS, MONARCH_TREE_HOSTS="3", timeout=240)
    assert done.ok() == "6 [] []\n{7}\n"


FILES = (
    COMMON
    + """
from monarch._kernel_api import member_at
from monarch_kernel.commands.files import send_file

class Place(Rank):
    @endpoint
    def move(self, folder):
        os.makedirs(folder)
        os.chdir(folder)

if __name__ == "__main__":
    content = os.urandom(1 << 20) * 9
    Path("source").write_bytes(content)
    here = Path.cwd()
    with local_hosts(9, silence=600.0) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Place)
        agents = list(ranks.agent.call().get(60).values())
        for place in range(1, 3):
            ranks.slice(hosts=place).move.call(str(here / f"host{place}")).get(60)
        until(lambda: relayed(9))
        os.kill(agents[0], signal.SIGSTOP)
        send_file([member_at(ranks, place) for place in range(1, 3)], here / "source", "target")
        print([(here / f"host{place}/target").read_bytes() == content for place in range(1, 3)], lost())
        os.kill(agents[0], signal.SIGCONT)
"""
)


def test_files_reach_hosts_behind_an_agent_that_hangs(program: Callable[..., Any]) -> None:
    done = program(FILES, MONARCH_TREE_HOSTS="3", timeout=180)
    assert done.ok() == "[True, True] []\n"

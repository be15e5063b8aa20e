"""Messages to many hosts go from host to host, in their order, each once, and also if hosts die on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch._session.commands.files import write_piece

COMMON = """
import os, signal, threading, time
import psutil
from monarch._node.current import current_node
from monarch.actor import Actor, endpoint
from monarch.exceptions import SupervisionError
from monarch.testing import local_hosts

class Rank(Actor):
    def __init__(self):
        self.seen = []

    @endpoint
    def note(self, number, data=None):
        self.seen.append(number)

    @endpoint
    def noted(self):
        return list(self.seen)

    @endpoint
    def agent(self):
        process = psutil.Process()
        while process.name() != "monarch-agent":
            process = process.parent()
        return process.pid

    @endpoint
    def move(self, folder):
        os.makedirs(folder)
        os.chdir(folder)

    @endpoint
    def wait_for(self, path, at_once):
        while not os.path.exists(path) and os.getpid() not in at_once:
            time.sleep(0.01)
        return os.getpid()

    @endpoint
    def length(self, data):
        return len(data)

def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

def gateways():
    return current_node().hosts.gateways

def goes_from_host_to_host():
    now = time.monotonic()
    return all(each.arrived and each.settled < now for each in gateways().values() if each.spreads is not None)
"""

ORDER = (
    COMMON
    + """
if __name__ == "__main__":
    with local_hosts(8) as hosts:
        ranks = hosts.spawn_procs({"gpus": 2}).spawn("ranks", Rank)
        ranks.noted.call().get(60)
        until(goes_from_host_to_host)
        # Each host by ways of its own, of several hosts, and large ones by others still; from two threads.
        expected = {host: [] for host in range(8)}
        for number in range(120):
            if number % 3 == 0:
                ranks.note.broadcast(number)
                some = range(8)
            elif number % 3 == 1:
                some = range(number % 3, 8)
                ranks.slice(hosts=slice(some.start, 8)).note.broadcast(number)
            else:
                some = [number % 8]
                ranks.slice(hosts=some[0]).note.broadcast(number, b"x" * (number << 10))
            for host in some:
                expected[host].append(number)
            if number % 40 == 39:
                ranks.note.broadcast(-number, b"x" * (2 << 20))
                for host in range(8):
                    expected[host].append(-number)
        seen = ranks.noted.call().get(60)
        print(all(value == expected[index // 2] for index, value in enumerate(seen.values())))
        print(set(ranks.length.call(b"x" * (3 << 20)).get(60).values()) == {3 << 20})
        before = [each.last for each in gateways().values() if each.spreads is not None]
        print(len(before), min(before) > 50)
        until(lambda: not current_node().hosts.spreads._kept)
        print("nothing is kept")
"""
)


def test_messages_by_several_ways_arrive_once_and_in_order(program: Callable[..., Any]) -> None:
    done = program(ORDER, MONARCH_TREE_HOSTS="4", timeout=120)
    assert done.ok() == "True\nTrue\n8 True\nnothing is kept\n"


COUNTS = (
    COMMON
    + """
from monarch._meshes.procs import starting
from monarch._node.liveness import Liveness, here
from monarch._node.services.asking import ServiceAnswers
from monarch._node.services.registry import request
from monarch._wire import messages as m
from monarch._wire.links import Link

packed, sent = [], []
dumps, send = starting.dumps_whole, Link.send
starting.dumps_whole = lambda value: packed.append(1) or dumps(value)

def counted(link, frame, more=()):
    if link.address.startswith("tcp"):
        sent.extend(type(m.decode(each)).__name__ for each in (frame, *more[:1]))
    send(link, frame, more)

if __name__ == "__main__":
    with local_hosts(9) as hosts:
        procs = hosts.spawn_procs({"gpus": 2})
        print(len(packed))
        ranks = procs.spawn("ranks", Rank)
        pids = list(ranks.wait_for.call("/", []).get(60).values())
        until(goes_from_host_to_host)
        node = current_node()
        names = [peer.proc for peer in ranks._targets.peers]
        Link.send = counted
        # In the receiving thread, as each second.
        liveness, asked = node.part(Liveness), threading.Event()
        node.receive_loop.post(lambda: (liveness.ask(names, time.monotonic()), asked.set()))
        asked.wait(20)
        print(sent)
        until(lambda: not liveness.rounds and not any(map(liveness.asks, names)))
        sent.clear()
        heard = []
        asking = ServiceAnswers(node, names, request(here), lambda proc, answer: heard.append(proc))
        print(sent)
        until(lambda: sorted(heard) == sorted(names))
        asking.close()
        sent.clear()
        os.kill(pids[5], signal.SIGKILL)
        until(lambda: sent.count("Dead") > 2)
        print(sent.count("Dead"))
"""
)


def test_requests_to_all_ranks_leave_once_for_each_share(program: Callable[..., Any]) -> None:
    """Heartbeats, requests for services and news of deaths go by way of three of nine hosts."""
    done = program(COUNTS, MONARCH_TREE_HOSTS="3", timeout=120)
    assert done.ok() == f"1\n{['Spread', 'Ask'] * 3}\n{['Spread', 'Ask'] * 3}\n3\n"


STARTS = (
    COMMON
    + """
from collections import Counter
from monarch._meshes.inside import state_of
from monarch._session.session import session_of
from monarch._wire import messages as m
from monarch._wire.links import Link
from monarch.actor import heal_mesh

sent, send = [], Link.send

def counted(link, frame, more=()):
    if link.address.startswith("tcp"):
        sent.append(" ".join(type(m.decode(each)).__name__ for each in (frame, *more[:1])))
    send(link, frame, more)

def counts():
    kinds = Counter(sent)
    sent.clear()
    return sorted((kind, count) for kind, count in kinds.items() if kind != "Taken")

if __name__ == "__main__":
    with local_hosts(9) as hosts:
        first = hosts.spawn_procs({"gpus": 1}).spawn("first", Rank)
        agents = list(first.agent.call().get(60).values())
        until(goes_from_host_to_host)
        until(lambda: len(session_of(current_node())._uplinks._routes) == 9)
        Link.send = counted
        procs = hosts.spawn_procs({"gpus": 2})
        procs.initialized.get(60)
        print(counts())
        ranks = procs.spawn("ranks", Rank)
        pids = list(ranks.wait_for.call("/", []).get(60).values())
        print(len(set(pids)))
        os.kill(pids[9], signal.SIGKILL)
        peer = current_node().peers.get(ranks._targets.peers[9].proc)
        until(lambda: peer.dead is not None)
        sent.clear()
        heal_mesh(procs)
        print(sum(count for _, count in counts()) <= 14)
        healed = list(ranks.wait_for.call("/", []).get(60).values())
        print([place for place in range(18) if healed[place] != pids[place]])
        sent.clear()
        ranks.stop().get(60)
        print(counts())
        procs.stop().get(60)
        print(counts())
        # The first of the first share dies while it passes requests on, and answers.
        third = hosts.spawn_procs({"gpus": 2})
        os.kill(agents[0], signal.SIGKILL)
        peers = [current_node().peers.get(state_of(third).procs.proc(rank)) for rank in range(2, 18)]
        until(lambda: not any(peer.starting for peer in peers))
        print([peer.dead for peer in peers] == [None] * 16)
"""
)


def test_starts_heals_and_stops_leave_once_for_each_share(program: Callable[..., Any]) -> None:
    """Also if a host dies that passes them on, all others start their ranks."""
    done = program(STARTS, MONARCH_TREE_HOSTS="3", timeout=120)
    stopped = "[('Spread Halt', 3)]\n[('Spread Halt', 3), ('Spread Signal', 3), ('Spread Stop', 3)]\n"
    assert done.out == "[('Spread Spawn', 3)]\n18\nTrue\n[9]\n" + stopped + "True\n", done.err


DEATHS = (
    COMMON
    + """
from monarch.actor import supervise

if __name__ == "__main__":
    with local_hosts(9) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        agents = list(ranks.agent.call().get(60).values())
        pids = list(ranks.wait_for.call("/", []).get(60).values())
        until(goes_from_host_to_host)
        # The first host passes calls on to the next two. Its own rank has answered when it dies.
        # Without a supervisor, calls to all of a mesh fail if a rank dies.
        with supervise(ranks):
            call = ranks.wait_for.call("go", [pids[0]])
            until(lambda: call._replies[0] is not None)
            os.kill(agents[0], signal.SIGKILL)
            until(lambda: len([each for each in gateways().values() if each.closed.is_set()]) == 1)
            open("go", "w").close()
            print(list(call.get(60).values()) == pids)
            # Broadcasts go on while the first of the remaining hosts dies, again and again.
            sent = 0
            for first in range(1, 5):
                rest = ranks.slice(hosts=slice(first, 9))
                for number in range(100):
                    if number == 30:
                        os.kill(agents[first], signal.SIGKILL)
                    try:
                        rest.note.broadcast(sent)
                    except SupervisionError:
                        break
                    sent += 1
                until(lambda: len([each for each in gateways().values() if each.closed.is_set()]) == first + 1)
            rest = ranks.slice(hosts=slice(5, 9))
            print(set(rest.wait_for.call("go", []).get(60).values()) == set(pids[5:]))
            seen = list(rest.noted.call().get(60).values())
            print(sent > 120, [each == list(range(sent)) for each in seen])
"""
)


def test_death_of_a_host_on_the_way_costs_no_message(program: Callable[..., Any]) -> None:
    """A call is answered by all others; each broadcast arrives once, in order."""
    done = program(DEATHS, MONARCH_TREE_HOSTS="3", timeout=120)
    assert done.out == "True\nTrue\nTrue [True, True, True, True]\n", done.err


FILES = (
    COMMON
    + """
import socket, struct
from pathlib import Path
from monarch._kernel_api import ask_hosts, member_at, write_piece
from monarch_kernel.commands.files import send_file

def sent():
    # Bytes that this process has sent by tcp, as the kernel counts them.
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{fd}").startswith("socket"):
                with socket.socket(fileno=os.dup(int(fd))) as each:
                    if each.family == socket.AF_INET:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("Q", info, 200)[0]
        except OSError:
            pass
    return total

if __name__ == "__main__":
    here = Path.cwd()
    content = os.urandom(1 << 20) * 20 + b"end"
    (here / "source").write_bytes(content)
    with local_hosts(6) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        agents = list(ranks.agent.call().get(60).values())
        for place in range(6):
            ranks.slice(hosts=place).move.call(str(here / f"host{place}")).get(20)
        places = [member_at(ranks, place) for place in range(6)]
        before = sent()
        send_file(places, here / "source", "target")
        print(all((here / f"host{place}/target").read_bytes() == content for place in range(6)))
        print(1 <= (sent() - before) / len(content) < 1.5)
        # The host that gets the next message and passes it on hangs, and dies.
        first = (current_node().hosts.spreads._next_entry + 1) % 6
        os.kill(agents[first], signal.SIGSTOP)
        asked = ask_hosts(places, write_piece, "other", 0, content, True, "key")
        threading.Timer(0.5, os.kill, (agents[first], signal.SIGKILL)).start()
        try:
            asked.wait(60)
        except SupervisionError as error:
            print(list(error.ranks) == [first])
        others = [here / f"host{place}/other" for place in range(6) if place != first]
        print(all(each.read_bytes() == content for each in others))
"""
)


def test_piece_of_a_file_that_comes_again_changes_nothing(tmp_path: Path) -> None:
    """A host that is thought not to have a piece gets it again, also when the file has its name."""
    path = str(tmp_path / "file")
    pieces = [(path, 0, b"begin", False, "1"), (path, 5, b"end", True, "2")]
    for piece in [*pieces, pieces[1], pieces[0], pieces[1]]:
        assert write_piece(*piece) == path
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert Path(path).read_bytes() == b"beginend"
    # The same content once more is another request.
    write_piece(path, 0, b"new", True, "3")
    assert Path(path).read_bytes() == b"new"


def test_files_leave_the_program_once_and_reach_all_hosts(program: Callable[..., Any]) -> None:
    """The hosts pass them on; if one dies, the others get them from the program."""
    done = program(FILES, timeout=120)
    assert done.out == "True\nTrue\nTrue\nTrue\n", done.err

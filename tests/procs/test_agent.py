"""The host agent by itself: a process that gets wire messages, and whose ranks run tiny functions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from leaks import pids_named, processes, wait_until, zygotes
from monarch._node.remote_errors import unpack_failure
from monarch._procs import session_folder
from monarch._procs.agent.children import Children
from monarch._procs.agent.mishaps import AgentMishaps
from monarch._procs.agent.reply_batches import ReplyBatches
from monarch._procs.agent.request import AgentConfig
from monarch._procs.os.posix import proc_start_time
from monarch._procs.session_folder import ipc_address
from monarch._wire import messages as m
from monarch._wire.keys import KeyPair
from monarch._wire.links import Inbox, Link, make_context

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
M = TypeVar("M")
OWNER = "h/owner"


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """All processes of this run belong to these tests: no session of earlier ones is left."""
    if "monarch.actor" in sys.modules:
        sys.modules["monarch.actor"].shutdown_context().get(timeout=30)


def lives(pid: int) -> bool:
    return proc_start_time(pid) is not None


class Rig:
    """An agent, and the controller's socket."""

    def __init__(self, folder: str, listen: str = "", keys: KeyPair | None = None) -> None:
        # Dies with the agent: the end of a session waits a second for a controller that lives.
        self.controller = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        # A process that has just begun its program has no environment yet, by which ``processes`` knows it.
        self.before = {self.controller.pid, *processes()}
        self.folder = folder
        self.asked = 0
        self.context = make_context()
        self.inbox = Inbox(self.context, ipc_address(folder, OWNER))
        self.inbox.socket.set(zmq.RCVTIMEO, 20_000)
        self.seen: list[tuple[Any, list[bytes]]] = []
        own = self.controller.pid
        config = AgentConfig(
            "h",
            folder,
            OWNER,
            own,
            proc_start_time(own) or 0,
            [],
            listen,
            keys.public.decode() if keys else "",
        )
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "monarch._procs.agent.main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.msgpack.encode(config))
        self.process.stdin.close()
        self.listening: m.Listening | None = None
        if listen:
            assert self.process.stdout is not None
            self.listening = msgspec.json.decode(self.process.stdout.readline(), type=m.Listening)
        assert self.hear(m.Ready).src == "h/agent"
        self.link = Link(self.context, ipc_address(folder, "h/agent"), m.encode(m.Hello(m.VERSION, OWNER, own)))

    def send(self, message: m.AnyMessage, *more: bytes) -> None:
        self.link.send(m.encode(message), more)

    def hear(self, kind: type[M], which: Callable[[M], bool] = lambda _: True) -> M:
        return self.hear_all(kind, which)[0]

    def hear_all(self, kind: type[M], which: Callable[[M], bool] = lambda _: True) -> tuple[M, list[bytes]]:
        """Return the next message of a kind, with its frames; earlier messages are kept."""
        while True:
            for index, (message, frames) in enumerate(self.seen):
                if isinstance(message, kind) and which(message):
                    del self.seen[index]
                    return message, frames
            frames = self.inbox.socket.recv_multipart()
            self.seen.append((m.decode(frames[0]), frames[1:]))

    def spawn(self, procs: list[str], entry: str, config: str = "", owner: str = OWNER) -> None:
        self.send(
            m.Spawn(
                src=owner,
                procs=procs,
                entry=f"agent_entries:{entry}",
                config=config.encode(),
                places=list(range(len(procs))),
                env={},
                base_env={},
                binds=[],
                count=len(procs),
                title="test",
                path=[str(HERE), *sys.path],
                cwd=str(HERE),
            )
        )

    def dead(self, proc: str) -> m.Dead:
        return self.hear(m.Dead, lambda dead: dead.proc == proc)

    def processes(self) -> dict[int, str]:
        """Its own, and the agent's; a fork server may serve the other tests of this run."""
        return {pid: name for pid, name in processes().items() if pid not in self.before}

    def ranks(self) -> list[int]:
        """Pids of the agent's children that are ranks."""
        return [pid for pid, name in self.processes().items() if name.startswith("test[")]

    def there(self, procs: int) -> list[int]:
        """Wait until so many ranks run; return their pids."""
        assert wait_until(lambda: len(self.ranks()) == procs)
        return self.ranks()

    def says(self) -> str:
        """Return the agent's stderr."""
        self.errors.seek(0)
        return self.errors.read().decode()

    def is_well(self) -> None:
        """It still answers."""
        self.asked += 1
        proc = f"h/well{self.asked}.0"
        self.spawn([proc], "leave", "7")
        assert self.dead(proc).reason == "exited with code 7"

    def close(self) -> None:
        for each in (self.process, self.controller):
            each.kill()
            each.wait()
        assert self.process.stdout is not None and self.controller.stdin is not None
        self.controller.stdin.close()
        self.process.stdout.close()
        self.errors.close()
        self.link.close()
        self.inbox.close()
        self.context.term()


@pytest.fixture
def folder() -> Iterator[str]:
    made = session_folder.make_folder()
    yield made
    session_folder.remove_folder(made)


@pytest.fixture
def rig(folder: str) -> Iterator[Rig]:
    made = Rig(folder)
    yield made
    made.close()


# Ranks and their deaths


def test_exit_is_reported_with_code_and_last_words(rig: Rig) -> None:
    rig.spawn(["h/a.0", "h/a.1"], "leave", "3")
    for proc in ("h/a.0", "h/a.1"):
        dead = rig.dead(proc)
        assert (dead.reason, dead.expected) == ("exited with code 3", False)
        assert dead.tails == [("stderr", 0, b"last words\n")]


def test_crash_is_reported_with_its_signal(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "die")
    assert rig.dead("h/a.0").reason == "was killed by signal 11 (SIGSEGV)"


def test_kill_is_reported_immediately(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "wait")
    (pid,) = rig.there(1)
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert rig.dead("h/a.0").reason == "was killed by signal 9 (SIGKILL)"
    assert time.monotonic() - start < 0.5 + 0.5  # the law's bound, and slack for a loaded machine


LAST_PID = Path("/proc/sys/kernel/ns_last_pid")


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="the next pid cannot be chosen here")
def test_death_is_reported_of_rank_with_pid_of_an_earlier_zygote(rig: Rig) -> None:
    """Pids come again, within hours on a busy machine."""

    def spares() -> list[int]:
        return pids_named("monarch-spare", before=rig.before)

    rig.is_well()
    assert wait_until(spares)
    (spare,) = spares()
    os.kill(spare, signal.SIGKILL)
    assert wait_until(lambda: not lives(spare) and spares())
    for number in range(40):
        # The fork server starts a helper before a rank, and other programs start processes too.
        LAST_PID.write_text(str(spare - 1 - number % 4))
        rig.spawn([f"h/again{number}.0"], "wait")
        (pid,) = rig.there(1)
        os.kill(pid, signal.SIGKILL)
        rig.dead(f"h/again{number}.0")
        if pid == spare:
            return
    pytest.skip("no rank got the pid")


def test_missing_entry_point_is_named_in_the_death(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "missing")
    dead = rig.dead("h/a.0")
    assert dead.reason == "exited with code 1"
    assert b"cannot import rank entry point 'agent_entries:missing'" in dead.tails[0][2]
    rig.is_well()


def test_socket_of_dead_rank_is_removed(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "listen", OWNER)
    pid = rig.hear(m.Ready, lambda ready: ready.src == "h/a.0").pid
    assert Path(rig.folder, "a.0").exists()
    os.kill(pid, signal.SIGKILL)
    rig.dead("h/a.0")
    assert not Path(rig.folder, "a.0").exists()


def test_ranks_end_with_rank_that_owns_them(rig: Rig) -> None:
    """And their ranks too."""
    rig.spawn(["h/a.0"], "wait")
    (first,) = rig.there(1)
    rig.spawn(["h/b.0", "h/b.1"], "ignore", owner="h/a.0")
    rig.there(3)
    rig.spawn(["h/c.0"], "wait", owner="h/b.1")
    pids = rig.there(4)
    os.kill(first, signal.SIGKILL)
    assert wait_until(lambda: not any(lives(pid) for pid in pids), 2.0)
    rig.send(m.Watch(OWNER, "h/c.0"))
    assert rig.dead("h/c.0").reason == (
        "was killed because its owner, h/b.1, was killed because its owner, h/a.0, was killed by signal 9 (SIGKILL)"
    )


def test_ranks_of_dead_owner_are_killed(rig: Rig) -> None:
    """Its request comes after its death: nothing would ever end them."""
    rig.spawn(["h/a.0"], "leave", "0")
    rig.dead("h/a.0")
    rig.spawn(["h/b.0"], "wait", owner="h/a.0")
    rig.send(m.Watch(OWNER, "h/b.0"))
    assert "its owner" in rig.dead("h/b.0").reason
    assert wait_until(lambda: not rig.ranks())


def test_children_of_rank_end_with_it(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "with_children")
    assert wait_until(lambda: list(rig.processes().values()).count("sleep") == 3)
    (pid,) = rig.ranks()
    os.kill(pid, signal.SIGKILL)
    rig.dead("h/a.0")
    # Those of a group of their own, too.
    assert wait_until(lambda: "sleep" not in rig.processes().values())


# Watching


def test_watch_of_unknown_proc_is_answered(rig: Rig) -> None:
    rig.send(m.Watch(OWNER, "h/none.0"))
    assert rig.dead("h/none.0").reason == "was never started on this host"


def test_watch_of_dead_proc_is_answered(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "leave", "3")
    rig.dead("h/a.0")
    rig.send(m.Watch(OWNER, "h/a.0"))
    assert rig.dead("h/a.0").reason == "exited with code 3"


def test_watch_may_precede_the_spawn(rig: Rig) -> None:
    rig.send(m.Watch(OWNER, "h/a.0"))
    rig.spawn(["h/a.0"], "leave", "3")
    assert rig.dead("h/a.0").reason == "exited with code 3"


def test_watch_on_unknown_host_is_answered(rig: Rig) -> None:
    rig.send(m.Watch(OWNER, "elsewhere/a.0"))
    assert rig.dead("elsewhere/a.0").reason == "is on a host that is not in this session"


def test_rank_learns_of_death_of_another(rig: Rig) -> None:
    watcher = Inbox(rig.context, ipc_address(rig.folder, "h/watcher"))
    watcher.socket.set(zmq.RCVTIMEO, 20_000)
    rig.spawn(["h/a.0"], "wait")
    (pid,) = rig.there(1)
    rig.send(m.Watch("h/watcher", "h/a.0"))
    rig.send(m.Watch(OWNER, "h/none.0"))
    rig.dead("h/none.0")
    os.kill(pid, signal.SIGKILL)
    heard: list[Any] = []
    while not heard or not isinstance(heard[-1], m.Dead):
        heard.append(m.decode(watcher.socket.recv()))
    assert heard[-1].proc == "h/a.0"
    watcher.close()


# Stopping


def test_rank_ignoring_stop_is_killed_after_grace(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "ignore")
    rig.there(1)
    rig.send(m.Stop(OWNER, ["h/a.0", "h/none.0"], 0.1))
    dead = rig.dead("h/a.0")
    assert (dead.reason, dead.expected) == ("was killed because it did not stop within 0.1 s", True)


def test_rank_ending_within_grace_is_not_killed(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "wait")
    (pid,) = rig.there(1)
    rig.send(m.Stop(OWNER, ["h/a.0"], 60))
    rig.send(m.Watch(OWNER, "elsewhere/a.0"))
    rig.dead("elsewhere/a.0")
    os.kill(pid, signal.SIGTERM)
    dead = rig.dead("h/a.0")
    assert (dead.reason, dead.expected) == ("was killed by signal 15 (SIGTERM)", True)


def test_stop_may_overtake_the_fork(rig: Rig) -> None:
    """The rank is killed as soon as it exists."""
    rig.spawn(["h/a.0"], "ignore")
    rig.send(m.Stop(OWNER, ["h/a.0"], 0))
    assert rig.dead("h/a.0").expected
    assert wait_until(lambda: not rig.ranks())


def test_killed_zygote_is_replaced_and_ranks_live_on(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "wait")
    (pid,) = rig.there(1)
    (zygote,) = zygotes(rig.before)
    os.kill(zygote, signal.SIGKILL)
    # Requests meanwhile fail, with the reason; the next one has another zygote.
    rig.spawn(["h/b.0"], "leave", "7")
    assert rig.dead("h/b.0").reason.startswith(("could not be started: the ", "exited with code 7"))
    rig.is_well()
    assert lives(pid)


# Passing on


def test_cast_reaches_all_and_replies_come_as_batch(rig: Rig) -> None:
    """For a caller on another host, as one Batch; here it is the agent's own host, so each answers separately."""
    rig.spawn(["h/a.0", "h/a.1"], "listen", OWNER)
    for proc in ("h/a.0", "h/a.1"):
        rig.hear(m.Ready, lambda ready, proc=proc: ready.src == proc)
    call = m.encode(m.Call(OWNER, "actor", "method", 5, b"", "", 0, b""))
    rig.send(m.Cast(OWNER, ["h/a.0", "h/a.1", "h/none.0"], 0, 1), call)
    replies = [rig.hear(m.Reply) for _ in range(2)]
    assert sorted((reply.src, reply.port, reply.body) for reply in replies) == [
        ("h/a.0", 5, b"0 bulk"),
        ("h/a.1", 5, b"0 bulk"),
    ]


def test_buffers_of_cast_are_written_to_shared_memory_once(rig: Rig) -> None:
    rig.spawn(["h/a.0", "h/a.1"], "listen", OWNER)
    for proc in ("h/a.0", "h/a.1"):
        rig.hear(m.Ready, lambda ready, proc=proc: ready.src == proc)
    call = m.encode(m.Call(OWNER, "actor", "method", 5, b"", "", 0, b"", None, 1))
    rig.send(m.Cast(OWNER, ["h/a.0", "h/a.1"], 0, 2), call, b"x" * 60_000)
    assert [rig.hear(m.Reply).body for _ in range(2)] == [b"mapped"] * 2


def test_route_forwards_all_frames(rig: Rig) -> None:
    rig.spawn(["h/a.0"], "listen", OWNER)
    rig.hear(m.Ready, lambda ready: ready.src == "h/a.0")
    call = m.encode(m.Call(OWNER, "actor", "method", 6, b"", "", 0, b"", None, 2))
    rig.send(m.Route("h/a.0", 3), call, b"one", b"two")
    assert rig.hear(m.Reply).body == b"2 bulk"
    # To itself, it unpacks what is inside.
    rig.send(m.Route("h/agent", 1), m.encode(m.Watch(OWNER, "elsewhere/a.0")))
    rig.dead("elsewhere/a.0")


def test_invalid_frames_do_not_end_the_agent(rig: Rig) -> None:
    rig.link.send(b"garbage")
    rig.link.send(b"\x00" * 100, [b"more", b"and more"])
    rig.link.send(m.encode(m.Route("h/agent", 1)), [b"garbage"])
    rig.link.send(m.encode(m.Route("nowhere/x.0", 1)), [b"garbage"])
    rig.link.send(m.encode(m.Cast(OWNER, [], 1, 1)), [b"garbage"])
    rig.link.send(m.encode(m.Cast(OWNER, ["h/none.0"], 1, 2)), [b"garbage", b"x"])
    rig.link.send(m.encode(m.Route("h/agent", 0)))
    rig.link.send(m.encode(m.Release("h/x", [1, 2, 3])))
    rig.link.send(m.encode(m.Spawn("h/x", ["h/odd.0"], "none", b"", [], {}, {}, [], 1, "t", [], "")))
    rig.link.send(m.pack((12, "too few")))
    rig.is_well()
    assert rig.process.poll() is None


def test_invalid_frames_are_reported_seldom(rig: Rig) -> None:
    for _ in range(2_000):
        rig.link.send(b"garbage", [b"more"])
    rig.link.send(m.encode(m.Level("h/x", 3)))
    rig.is_well()
    said = rig.says().splitlines()
    assert len(said) == 5 and all("was dropped: ProtocolError" in line for line in said)
    assert "1,000 of this kind so far" in said[3] and "unexpected Level message" in said[4]
    faults = [rig.hear(m.Fault) for _ in said]
    assert {(fault.src, fault.actor) for fault in faults} == {("h/agent", m.INTERNAL)}
    texts = [msgspec.msgpack.decode(fault.body, type=m.Failure).text for fault in faults]
    assert [text in line for text, line in zip(texts, said, strict=True)] == [True] * 5


def test_invalid_spawn_is_a_death_of_its_procs(rig: Rig) -> None:
    rig.link.send(m.encode(m.Spawn(OWNER, ["h/odd.0", "h/odd.1"], "none", b"", [0], {}, {}, [], 1, "t", [], "")))
    for proc in ("h/odd.0", "h/odd.1"):
        reason = rig.dead(proc).reason
        assert reason == "could not be started: ProtocolError: a Spawn of 2 procs has 1 places"
    rig.is_well()


def test_call_that_cannot_be_forwarded_is_answered() -> None:
    told: list[tuple[str, Any]] = []
    mishaps = AgentMishaps("h/agent", Children(), lambda proc, message: told.append((proc, message)), lambda dead: None)
    call = m.encode(m.Call("x/c", "a", "b", 7, b"", "", 0, b""))
    mishaps.failed("x/c", [m.encode(m.Cast("x/c", ["h/p.0", "h/p.1"], 7, 1)), call], OSError(24, "Too many open files"))
    mishaps.failed("x/c", [m.encode(m.Route("h/p.2", 1)), call], OSError(24, "Too many open files"))
    assert [(proc, reply.src, reply.port, reply.rank, reply.status) for proc, reply in told] == [
        ("x/c", f"h/p.{rank}", 7, m.NOWHERE, m.ERROR) for rank in range(3)
    ]
    assert "could not forward a message to h/p.0: OSError: [Errno 24]" in unpack_failure(told[0][1].body).text


def test_peer_of_another_version_is_refused(rig: Rig) -> None:
    other = Inbox(rig.context, ipc_address(rig.folder, "h/other"))
    other.socket.set(zmq.RCVTIMEO, 20_000)
    link = Link(
        rig.context, ipc_address(rig.folder, "h/agent"), m.encode(m.Hello(m.VERSION + 1, "h/other", os.getpid()))
    )
    said = [m.decode(other.socket.recv()) for _ in range(2)]
    assert isinstance(said[0], m.Hello)
    refused = said[1]
    assert isinstance(refused, m.Refused)
    assert refused.version == m.VERSION
    assert f"version {m.VERSION}" in refused.reason
    assert f"{m.VERSION + 1}" in refused.reason
    link.close()
    other.close()
    rig.is_well()


# The end


@pytest.mark.parametrize("how", ["bye", "SIGTERM", "SIGKILL"])
def test_agent_ends_all_its_processes(rig: Rig, how: str) -> None:
    rig.spawn(["h/a.0", "h/a.1"], "with_children")
    assert wait_until(lambda: list(rig.processes().values()).count("sleep") == 6)
    if how == "bye":
        rig.send(m.Bye("h/somebody"))
        rig.is_well()
        rig.send(m.Bye(OWNER))
    else:
        rig.process.send_signal(signal.Signals[how])
    rig.process.wait(10)
    assert wait_until(lambda: not rig.processes()), rig.processes()
    assert Path(rig.folder).exists() == (how == "SIGKILL")


def test_agent_ends_with_its_owner(folder: str) -> None:
    """Also if that has died before, or its number is another process's by now."""
    for start in (lambda pid: proc_start_time(pid) or 0, lambda pid: 1):
        with subprocess.Popen(["sleep", "1000"]) as owner:
            config = AgentConfig("h", session_folder.make_folder(), "x/owner", owner.pid, start(owner.pid), [])
            with subprocess.Popen([sys.executable, "-m", "monarch._procs.agent.main"], stdin=subprocess.PIPE) as agent:
                assert agent.stdin is not None
                agent.stdin.write(msgspec.msgpack.encode(config))
                agent.stdin.close()
                if start(owner.pid) != 1:
                    assert wait_until(Path(config.folder, "agent").exists)
                    owner.kill()
                assert agent.wait(20) == 0
            owner.kill()
        assert not Path(config.folder).exists()


# Connections of strangers


def test_stranger_connecting_does_not_end_the_host(folder: str) -> None:
    """The connection of the owner counts, not that of any process that finds the port."""
    import socket

    keys, wrong = KeyPair.new(), KeyPair.new()
    rig = Rig(folder, "tcp://127.0.0.1", keys)
    assert rig.listening is not None
    try:
        address, public = rig.listening.owner_address, rig.listening.public.encode()
        hello = m.encode(m.Hello(m.VERSION, OWNER, os.getpid()))
        bye = m.encode(m.Bye(OWNER))

        def knock() -> None:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(data)
            for pair, server in ((wrong, public), (None, None), (keys, wrong.public)):
                link = Link(rig.context, address, hello, pair, server)
                link.send(bye)
                monitor = link._socket.get_monitor_socket(zmq.EVENT_ALL & ~zmq.EVENT_CONNECT_DELAYED)
                monitor.poll(2000)
                link._socket.disable_monitor()
                monitor.close(0)
                link.close()

        knock()
        rig.is_well()
        owner = Link(rig.context, address, hello, keys, public)
        owner.send(m.encode(m.Watch(OWNER, "elsewhere/a.0")))
        rig.dead("elsewhere/a.0")
        knock()
        rig.is_well()
        # The owner's own connection does count.
        owner.close()
        assert rig.process.wait(10) == 0
        assert not Path(folder).exists()
    finally:
        rig.close()


# What is gathered for a caller on another host


def test_gathering_ends_when_all_answered_or_died() -> None:
    reply_batches = ReplyBatches("h/agent")
    reply_batches.begin("x/c", 1, ["h/a", "h/b", "h/c"])
    assert reply_batches.add("x/c", 1, "h/a", [b"a"]) == []
    assert reply_batches.add("x/c", 1, "h/a", [b"again"]) is None
    assert reply_batches.add("x/c", 2, "h/a", [b"other port"]) is None
    assert reply_batches.add("x/c", 1, "h/b", [b"b", b"buffer"]) == []
    ((dst, port, batch),) = reply_batches.died("h/c")
    assert dst == "x/c" and port == 1
    assert m.decode(batch[0]) == m.Batch("h/agent", [1, 2], 3)
    assert batch[1:] == [b"a", b"b", b"buffer"]
    assert not reply_batches._open


def test_gathering_for_nobody_leaves_nothing() -> None:
    reply_batches = ReplyBatches("h/agent")
    reply_batches.begin("x/c", 1, [])
    reply_batches.begin("x/c", 2, ["h/a"])
    assert reply_batches.died("h/a") == [("x/c", 2, [])]
    reply_batches.begin("x/c", 3, ["h/a"])
    assert reply_batches.died("x/c") == []
    assert not reply_batches._open

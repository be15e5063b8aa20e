"""A minute of random deaths: every call is answered or fails, exactly once and in order, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest

from leaks import processes, zygotes
from monarch.actor import Actor, endpoint, shutdown_context, this_host
from monarch.exceptions import ActorError, DeadlockError, DeviceMeshError

SECONDS = float(os.environ.get("MONARCH_CHAOS_SECONDS", "5"))
HANG = 30.0
"""Seconds after which a call counts as lost. This is not a limit on its duration."""


class Node(Actor):
    """Keeps a ledger of what has reached it, by sender."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, list[int]] = {}
        self.done = 0

    @endpoint
    def take(self, sender: str, number: int) -> tuple[str, str, int, int]:
        """Return whether the number is later than those before it, and how often it came."""
        known = self.seen.setdefault(sender, [])
        fault = 0 if not known or known[-1] < number else 1
        known.append(number)
        return self.name, sender, number, fault

    @endpoint
    def big(self, sender: str, number: int, data: bytes) -> tuple[str, str, int, int]:
        known = self.seen.setdefault(sender, [])
        fault = 0 if not known or known[-1] < number else 1
        known.append(number)
        return self.name, sender, number, fault if len(data) == 300_000 else 2

    @endpoint
    def fail(self, sender: str, number: int) -> None:
        self.seen.setdefault(sender, []).append(number)
        raise ValueError(f"{sender} {number}")

    @endpoint
    def pass_on(self, other: Any, sender: str, number: int) -> list[Any]:
        """Call another mesh; the outcome of that is the answer."""
        try:
            return list(other.take.call(f"{sender}>{self.name}.{os.getpid()}", number).get(timeout=HANG).values())
        except (DeviceMeshError, ActorError, DeadlockError) as error:
            return [type(error).__name__]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Ledger:
    """The outcomes of each call."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sent: set[tuple[str, int]] = set()
        self.outcome: Counter[tuple[str, int]] = Counter()
        self.kinds: Counter[str] = Counter()
        self.wrong: list[str] = []

    def send(self, key: tuple[str, int]) -> None:
        with self.lock:
            self.sent.add(key)

    def end(self, key: tuple[str, int], kind: str) -> None:
        with self.lock:
            self.outcome[key] += 1
            self.kinds[kind] += 1

    def complain(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text)


class World:
    """The current meshes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.meshes: list[tuple[Any, Any]] = []
        self.count = 0

    def add(self, size: int) -> None:
        with self.lock:
            self.count += 1
            name = f"m{self.count}"
        procs = this_host().spawn_procs({"gpus": size}, name=name)
        node = procs.spawn(name, Node, name)
        with self.lock:
            self.meshes.append((procs, node))

    def draw(self, chance: random.Random) -> Any:
        with self.lock:
            return chance.choice(self.meshes)[1] if self.meshes else None

    def take_out(self, chance: random.Random) -> Any:
        with self.lock:
            return self.meshes.pop(chance.randrange(len(self.meshes))) if len(self.meshes) > 1 else None


def client(number: int, seed: int, world: World, ledger: Ledger, end: threading.Event) -> None:
    """Sends calls, several at a time, and records each outcome."""
    chance = random.Random(f"{seed}.{number}")
    step = 0
    while not end.is_set():
        flight: list[tuple[tuple[str, int], str, Any]] = []
        mesh = world.draw(chance)
        if mesh is None:
            time.sleep(0.01)
            continue
        for _ in range(chance.choice([1, 1, 5, 30])):
            step += 1
            key = (f"c{number}", step)
            kind = chance.choice(["take", "take", "take", "fail", "big", "pass_on", "slice"])
            ledger.send(key)
            try:
                if kind == "take":
                    future = mesh.take.call(*key)
                elif kind == "slice":
                    future = mesh.slice(gpus=chance.randrange(len(mesh))).take.call(*key)
                elif kind == "fail":
                    future = mesh.fail.call(*key)
                elif kind == "big":
                    future = mesh.big.call(*key, bytes(300_000))
                else:
                    other = world.draw(chance)
                    future = mesh.pass_on.call(other if other is not mesh else None, *key)
            except DeviceMeshError:
                ledger.end(key, "refused")
                time.sleep(0.002)
                continue
            except Exception as error:
                ledger.end(key, "odd")
                ledger.complain(f"{kind} {key} could not be sent: {error!r}")
                continue
            flight.append((key, kind, future))
        chance.shuffle(flight)
        for key, kind, future in flight:
            collect(key, kind, future, ledger)


def collect(key: tuple[str, int], kind: str, future: Any, ledger: Ledger) -> None:
    try:
        values = list(future.get(timeout=HANG).values())
    except DeviceMeshError as error:
        ledger.end(key, type(error).__name__)
        answered = [value for value in error.results.values() if value is not None] if error.results else []
        check(key, kind, answered, ledger)
    except ActorError as error:
        ledger.end(key, "ActorError")
        expected = kind == "fail" or (kind == "pass_on" and "NoneType" in str(error))
        if not expected:
            ledger.complain(f"{kind} {key}: {error}")
    except BaseException as error:
        ledger.end(key, type(error).__name__)
        ledger.complain(f"{kind} {key}: {error!r}")
    else:
        ledger.end(key, "answered")
        if kind == "fail":
            ledger.complain(f"{key} did not fail")
        check(key, kind, values, ledger)
    # The same outcome again, and no other.
    if not future.done:
        ledger.complain(f"{kind} {key} is not done after its outcome")


def check(key: tuple[str, int], kind: str, values: list[Any], ledger: Ledger) -> None:
    if kind == "pass_on":
        values = [one for value in values for one in value if not isinstance(one, str)]
        key = (f"{key[0]}>", key[1])
    for name, sender, number, fault in values:
        own = sender == key[0] if kind != "pass_on" else sender.startswith(key[0])
        if not own or number != key[1]:
            ledger.complain(f"{kind} {key} got the answer of {sender} {number} from {name}")
        if fault:
            ledger.complain(f"{kind} {key} reached {name} {'out of order' if fault == 1 else 'damaged'}")


def find(what: str, before: dict[int, str]) -> list[int]:
    ours = {pid: name for pid, name in processes().items() if pid not in before}
    if what == "rank":
        return sorted(pid for pid, name in ours.items() if "[" in name and name.startswith("m"))
    if what == "zygote":
        return zygotes(before)
    return sorted(pid for pid, name in ours.items() if name == f"monarch-{what}")


def disturb(
    seed: int, world: World, before: dict[int, str], ledger: Ledger, end: threading.Event, agents: bool
) -> Counter[str]:
    """Kills, stops and spawns processes."""
    chance = random.Random(f"{seed}.disturb")
    done: Counter[str] = Counter()
    while not end.wait(chance.random() * 0.3):
        what = chance.choice(["rank", "rank", "rank", "rank", "stop", "spawn", "other"])
        if what == "other":
            # Rarely: it loses everything, and a new zygote takes seconds.
            what = "agent" if agents and chance.random() < 0.2 else "zygote" if chance.random() < 0.4 else "rank"
        try:
            if what == "stop":
                taken = world.take_out(chance)
                if taken is not None:
                    stopping = taken[0].stop()
                    if chance.random() < 0.5:
                        stopping.get(timeout=HANG)
                world.add(chance.randint(1, 3))
            elif what == "spawn":
                taken = world.take_out(chance) if len(world.meshes) > 3 else None
                if taken is not None:
                    taken[0].stop()
                world.add(chance.randint(1, 3))
            else:
                pids = find(what, before)
                if pids:
                    os.kill(chance.choice(pids), chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV]))
            done[what] += 1
        except (ProcessLookupError, DeviceMeshError):
            done["missed"] += 1
        except BaseException as error:
            ledger.complain(f"{what}: {error!r}")
    return done


def chaos(seed: int, seconds: float, agents: bool, capfd: pytest.CaptureFixture[str]) -> None:
    shutdown_context().get(timeout=HANG)
    before = processes()
    world, ledger, end = World(), Ledger(), threading.Event()
    for size in (2, 3, 1):
        world.add(size)
    threads = [
        threading.Thread(target=client, args=(number, seed, world, ledger, end), name=f"client {number}", daemon=True)
        for number in range(4)
    ]
    done: list[Counter[str]] = []
    threads.append(
        threading.Thread(
            target=lambda: done.append(disturb(seed, world, before, ledger, end, agents)), name="disturb", daemon=True
        )
    )
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    end.set()
    for thread in threads:
        thread.join(2 * HANG)
    hanging = [thread.name for thread in threads if thread.is_alive()]
    # Afterwards a new mesh works as usual.
    fresh = this_host().spawn_procs({"gpus": 2}, name="fresh").spawn("fresh", Node, "fresh")
    after = list(fresh.take.call("after", 1).get(timeout=HANG).values())
    shutdown_context().get(timeout=HANG)
    out, _ = capfd.readouterr()
    report = f"seed {seed}: {dict(ledger.kinds)}, {dict(done[0]) if done else None}"
    assert not hanging, report
    assert not ledger.wrong, f"{report}\n" + "\n".join(ledger.wrong[:10])
    assert after == [("fresh", "after", 1, 0)] * 2
    lost = ledger.sent - ledger.outcome.keys()
    twice = [key for key, count in ledger.outcome.items() if count > 1]
    assert (lost, twice) == (set(), []), report
    # It was a test of something.
    assert ledger.kinds["answered"] > 20, report
    assert not out


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 2 + 200)
@pytest.mark.parametrize("seed", [int(os.environ.get("MONARCH_CHAOS_SEED", "1"))])
@pytest.mark.parametrize("agents", [False, True], ids=["ranks", "agents"])
def test_every_call_is_accounted_for(seed: int, agents: bool, capfd: pytest.CaptureFixture[str]) -> None:
    chaos(seed, SECONDS, agents, capfd)


@pytest.mark.timeout(150)
def test_every_call_is_accounted_for_in_short_run(capfd: pytest.CaptureFixture[str]) -> None:
    chaos(7, 2.5, False, capfd)

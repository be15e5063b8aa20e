"""Agents that relay others are killed and stopped during calls, output and starts: nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inner_hosts import COMMON
from leaks import processes, wait_until
from light import LIGHT

CONNECTIONS = (
    COMMON
    + """
if __name__ == "__main__":
    count = COUNT
    with local_hosts(count, silence=60.0) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        ranks.echo.call(0).get(120)
        heads = len(current_node().hosts.spreads.groups())
        until(lambda: relayed(count))
        until(lambda: connections() == 2 * heads)
        print(heads, set(ranks.echo.call(1).get(60).values()))
        # What is large goes straight; the connection for it is closed again.
        print({len(each) for each in ranks.slice(hosts=slice(1, 3)).large.call(2 << 20).get(60).values()})
        until(lambda: connections() == 2 * heads)
        # The end of a relayed host is noticed at once, and told once.
        before = time.monotonic()
        os.kill(ranks.slice(hosts=count - 1).agent.call_one().get(60), signal.SIGKILL)
        until(lambda: len(lost()) == 1)
        print(time.monotonic() - before < 5)
"""
)


def test_program_has_two_connections_for_each_group(program: Callable[..., Any]) -> None:
    done = program(CONNECTIONS.replace("COUNT", "16"), timeout=120)
    assert done.ok() == "4 {1}\n{2097152}\nTrue\n"


def test_connections_of_64_agents_are_16(program: Callable[..., Any]) -> None:
    done = program(CONNECTIONS.replace("COUNT", "64"), timeout=300)
    assert done.ok() == "8 {1}\n{2097152}\nTrue\n"


DEATHS = (
    COMMON
    + """
if __name__ == "__main__":
    sys.setswitchinterval(1e-6)
    # Four groups of four. Only the last two of each have ranks, so the others can die.
    with local_hosts(16) as hosts:
        all_ranks = hosts.spawn_procs({"gpus": 1}).spawn("all", Rank)
        agents = list(all_ranks.agent.call().get(60).values())
        hosts_of_ranks = [hosts.slice(hosts=slice(at + 2, at + 4)) for at in range(0, 16, 4)]
        meshes = [each.spawn_procs({"gpus": 1}).spawn("ranks", Rank) for each in hosts_of_ranks]
        talkers = [each.spawn_procs({"gpus": 1}).spawn("talkers", Rank) for each in hosts_of_ranks]
        all_ranks.stop().get(60)
        session = session_of(current_node())
        lines = {}
        def shown(line):
            for rank in line.ranks:
                lines.setdefault((line.source, rank), []).append(line.text)
        session.output.on_line = shown
        for mesh in meshes + talkers:
            mesh.echo.call(0).get(60)
        until(lambda: relayed(16))
        telling = [each.talk.call("stop") for each in talkers]
        ending, faults, answered = threading.Event(), [], [0] * 4
        def call(place):
            try:
                while not ending.is_set():
                    number = answered[place]
                    kind = number % 4
                    if kind == 0:
                        values = meshes[place].large.call(1 << 21 if number % 8 else 100_000).get(60).values()
                        right = {len(each) for each in values} <= {1 << 21, 100_000}
                    elif kind == 1:
                        right = list(meshes[place].slice(hosts=1).echo.call(number).get(60).values()) == [number]
                    else:
                        right = list(meshes[place].echo.call(number).get(60).values()) == [number] * 2
                    if not right:
                        faults.append(("call", place, number))
                    answered[place] += 1
            except BaseException as error:
                faults.append((place, answered[place], repr(error)))
        deaths = [0]
        def start():
            try:
                while not ending.is_set():
                    ranks = hosts_of_ranks[deaths[0] % 4].spawn_procs({"gpus": 1}).spawn("short", Rank)
                    ranks.echo.call(1).get(60)
                    try:
                        ranks.leave.call().get(60)
                        faults.append("a rank that has left has answered")
                    except SupervisionError as error:
                        if "exited with code 3" not in str(error):
                            faults.append(str(error))
                    deaths[0] += 1
            except BaseException as error:
                faults.append(("start", repr(error)))
        threads = [threading.Thread(target=call, args=(place,)) for place in range(4)]
        threads.append(threading.Thread(target=start))
        for thread in threads:
            thread.start()
        def progress():
            at = [*answered]
            until(lambda: all(now > before + 5 for now, before in zip(answered, at)) or faults)
        progress()
        # The first of a group, and the next one as soon as it is the first, while hosts move to it.
        os.kill(agents[0], signal.SIGKILL)
        until(lambda: len(lost()) == 1)
        os.kill(agents[1], signal.SIGKILL)
        progress()
        os.kill(agents[4], signal.SIGKILL)
        progress()
        os.kill(agents[12], signal.SIGSTOP)
        progress()
        until(lambda: len(lost()) == 4)
        os.kill(agents[12], signal.SIGCONT)
        os.kill(agents[5], signal.SIGKILL)
        progress()
        until(lambda: relayed(11))
        progress()
        at = deaths[0]
        until(lambda: deaths[0] > at or faults)
        ending.set()
        for thread in threads:
            thread.join(60)
        open("stop", "w").close()
        pids = [list(each.get(60).values()) for each in telling]
        print(faults, min(answered) > 20)
        for place, (mesh, told) in enumerate(zip(talkers, pids)):
            counts = [int(Path(f"told {pid}").read_text()) for pid in told]
            # Values that were logged just before the end come a moment later.
            def logged():
                steps = [[] for _ in counts]
                for entry in telemetry_of(mesh).events():
                    if isinstance(entry.event, Metrics):
                        steps[entry.event.rank] += entry.event.steps
                return steps
            until(lambda: all(len(steps) >= count for steps, count in zip(logged(), counts)))
            print([steps == list(range(count)) for steps, count in zip(logged(), counts)])
        expected = sorted(["line %d" % number for number in range(int(Path(f"told {pid}").read_text()))]
                          for told in pids for pid in told)
        def printed():
            return sorted(each for each in lines.values() if each[0].startswith("line"))
        until(lambda: sum(map(len, printed())) >= sum(map(len, expected)))
        print(printed() == expected)
        print({tuple(each) for each in lines.values() if not each[0].startswith("line")})
        print("ended", not psutil.pid_exists(agents[12]) or psutil.Process(agents[12]).status() == "zombie")
"""
)


def test_deaths_of_inner_agents_cost_nothing(program: Callable[..., Any]) -> None:
    done = program(DEATHS, MONARCH_TREE_HOSTS="2", timeout=240)
    expected = ["[] True", *["[True, True]"] * 4, "True", "{('last words',)}", "ended True"]
    assert done.ok().splitlines() == expected


KILLED = (
    COMMON
    + """
if __name__ == "__main__":
    with local_hosts(9) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        agents = list(ranks.agent.call().get(60).values())
        until(lambda: relayed(9) and connections() == 6)
        print(*agents, flush=True)
        time.sleep(600)
"""
)


@pytest.mark.parametrize("dying", [[], [0], [0, 3, 6], [1, 2]])
def test_killed_program_leaves_nothing_of_hosts_that_hang(tmp_path: Path, dying: list[int], warm: None) -> None:
    (tmp_path / "program.py").write_text(LIGHT + KILLED)
    before = processes()
    program = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MONARCH_TREE_HOSTS": "3"},
    )
    try:
        assert program.stdout is not None
        agents = [int(pid) for pid in program.stdout.readline().split()]
        for pid in [*(agents[place] for place in dying), program.pid]:
            os.kill(pid, signal.SIGKILL)
    finally:
        program.kill()
        program.communicate()
    assert wait_until(lambda: not processes().keys() - before.keys(), 20), processes().keys() - before.keys()


STOPPED = (
    COMMON
    + """
if __name__ == "__main__":
    with local_hosts(9, silence=2.0) as hosts:
        ranks = hosts.spawn_procs({"gpus": 1}).spawn("ranks", Rank)
        agents = list(ranks.agent.call().get(60).values())
        # At once, while the hosts still have connections of their own, which they use no more.
        until(lambda: relayed(9))
        print(*agents, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
"""
)


def test_hosts_of_a_stopped_program_end(tmp_path: Path, warm: None) -> None:
    (tmp_path / "program.py").write_text(LIGHT + STOPPED)
    before = processes()
    env = {**os.environ, "MONARCH_TREE_HOSTS": "3"}
    program = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert program.stdout is not None
        agents = {int(pid) for pid in program.stdout.readline().split()}
        assert len(agents) == 9
        assert wait_until(lambda: not agents & processes().keys(), 60), agents & processes().keys()
    finally:
        program.kill()
        program.communicate()
    assert wait_until(lambda: not processes().keys() - before.keys(), 20), processes().keys() - before.keys()

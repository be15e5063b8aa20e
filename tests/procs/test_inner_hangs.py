"""An agent that others hang on does nothing, but lives: what is urgent does not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inner_hosts import COMMON

STOPS = (
    COMMON
    + """
from monarch._core.stop_ladder import Ending
from monarch._debug.asking import ask_ranks
from monarch._debug.here import where_here
from monarch._meshes.inside import state_of
from monarch._node.services.asking import send_signal
from monarch._node.services.registry import request
from monarch_kernel.calls.record import Calls
from monarch_kernel.calls.running import Running
from monarch_kernel.calls.stop import stop_ranks

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
        # Not on the host whose agent will do nothing, but on two hosts that hang on it.
        meshes = [hosts.slice(hosts=slice(1, 9)).spawn_procs({"gpus": 1}) for _ in range(3)]
        sleepers = [each.spawn("sleepers", Sleeper) for each in meshes]
        until(lambda: hung(9))
        calls = [each.sleep.call(place) for place, each in enumerate(sleepers)]
        for place in range(3):
            until(asleep(place, 8))
        os.kill(agents[0], signal.SIGSTOP)
        print(len(tree().parents))
        answers = ask_ranks(state_of(meshes[0]).procs, range(8), request(where_here))
        print({rank for rank, answer in answers.items() if isinstance(answer, str)})
        print(len(tree().parents))
        stopped = stop_ranks(Running("", [calls[0]]), Calls(current_node()))
        print(len(stopped.ranks(Ending.LEFT)))
        # The connections are now as before, so that all of the other two meshes goes by the agent again.
        os.kill(agents[0], signal.SIGCONT)
        until(lambda: hung(9))
        os.kill(agents[0], signal.SIGSTOP)
        procs = state_of(meshes[1]).procs
        send_signal(current_node(), [procs.proc(rank) for rank in range(8)], signal.SIGTERM)
        try:
            calls[1].get(60)
        except SupervisionError as error:
            print("SIGTERM" in str(error))
        until(lambda: all(current_node().peers.get(procs.proc(rank)).dead is not None for rank in range(8)))
        os.kill(agents[0], signal.SIGCONT)
        until(lambda: hung(9))
        os.kill(agents[0], signal.SIGSTOP)
        meshes[2].stop().get(60)
        print(lost())
        os.kill(agents[0], signal.SIGCONT)
"""
)


def test_stop_and_signals_pass_an_agent_that_hangs(program: Callable[..., Any]) -> None:
    done = program(STOPS, MONARCH_TREE_HOSTS="3", timeout=240)
    assert done.ok().splitlines() == ["6", "set()", "4", "0", "True", "[]"]

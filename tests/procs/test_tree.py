"""Another host relays most of many: nothing is lost or doubled when that one, or a connection, is lost."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tree_model
from monarch._core.causes import HostLost
from monarch._node.spreads.hurrying import PATIENCE
from tree_model import PROGRAM, World, model


def check(world: World) -> None:
    """Check that every host that is left has got and sent everything, once and in order."""
    left = [name for name in world.names if name not in world.given_up]
    assert {f"{name}/agent" for name in left} == {*world.agents}
    for name in left:
        assert world.seen[name] == world.called[name]
        assert world.noted[name] == world.told[name]
        assert world.shown.get(f"{name}/m.0", b"") == world.printed.get(f"{name}/m.0", b"")
        gateway = world.hosts.gateways[name]
        assert not gateway.kept
    for number, answers in world.answers.items():
        assert {name for name in left if number in world.called[name]} <= answers.keys()


@settings(max_examples=400, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(5, 12),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(200, 900),
)
def test_losses_in_the_tree_lose_nothing(
    seed: int, count: int, losses: int, breaks: int, hangs: int, steps: int
) -> None:
    with model(count, seed) as world:
        choose = world.random
        world.settle(choose.choice([0.3, 1.0, 5.0]))
        events = [
            *["kill", "stop"][: min(losses, 2)],
            *["kill"] * max(0, losses - 2),
            *["break"] * breaks,
            *["hang"] * hangs,
        ]
        at = {choose.randrange(steps): event for event in events}
        for step in range(steps):
            agents = [each for proc, each in sorted(world.agents.items()) if proc not in world.stopped]
            if not agents:
                break
            match at.get(step, ""):
                case "kill":
                    world.kill(choose.choice(agents).proc)
                case "stop":
                    world.stop(choose.choice(agents).proc)
                case "hang":
                    world.hang(choose.choice(agents).proc, choose.choice([0.5, 3.0, 40.0]))
                case "break":
                    world.break_some()
                case _:
                    what = choose.random()
                    if what < 0.08:
                        world.print(choose.choice(agents))
                    elif what < 0.14:
                        world.tell(choose.choice(agents))
                    elif what < 0.2:
                        hosts = choose.sample(world.names, choose.choice([1, 1, 4, count]))
                        world.call(hosts)
                        if choose.random() < 0.3:
                            world.hosts.hurry(hosts)
                    else:
                        world.step()
        world.settle(250.0)
        check(world)
        if not losses and breaks < 2 and not world.ties:
            # All of them live and have a connection, and no message between their ranks was lost.
            assert not world.given_up
        if len(world.agents) >= 3:
            groups = world.hosts.spreads.groups()
            assert len(world.uplinks.tree.parents) == len(world.agents) - len(groups)
            for name, parent in world.uplinks.tree.parents.items():
                assert world.hosts.gateways[name].group == world.hosts.gateways[parent].group


@pytest.mark.parametrize("blocked", [("h1/agent", "h0/agent"), ("h0/agent", "h1/agent")])
def test_host_does_not_hang_on_one_that_does_not_reach_it(blocked: tuple[str, str]) -> None:
    with model(9, 1) as world:
        world.blocked.add(blocked)
        agent = world.agents["h1/agent"]
        for _ in range(500):
            world.step()
            if world.random.random() < 0.05:
                world.tell(agent)
                world.print(agent)
                world.call(["h1"])
                # Messages of its own are not delayed by that.
                assert len(world.told["h1"]) - len(world.noted["h1"]) < 10
        world.settle(60.0)
        assert not world.given_up and len(world.uplinks.tree.parents) == 5
        # It tries again from time to time.
        world.blocked.clear()
        world.settle(200.0)
        check(world)
        assert len(world.uplinks.tree.parents) == 6


@pytest.mark.parametrize("answered", [False, True])
def test_parent_that_hangs_does_not_delay_urgent_calls(answered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_model, "_LATENCY", 0.02)
    with model(9, 1) as world:
        world.settle(10.0)
        children = ["h1", "h2"]
        assert world.uplinks.tree.parents["h1"] == "h0"
        # A call that has reached the ranks, whose answers go by the parent; or one that does not reach them.
        if answered:
            world.call(children)
            world.settle(0.05)
        world.hang("h0/agent", 60.0)
        for hosts in ([*children], ["h1"], ["h2"]):
            world.call(hosts)
        world.hosts.hurry(children)
        world.settle(PATIENCE + 0.5)
        assert all(world.answers.values()), world.answers
        assert not world.given_up
        # It is not slow again at once.
        world.call(children)
        world.settle(0.5)
        assert all(world.answers.values()), world.answers
        world.settle(200.0)
        check(world)
        assert len(world.uplinks.tree.parents) == 6


@pytest.mark.parametrize("size", [0, 3000])
def test_parent_that_hung_is_used_again_once_it_answers(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before, however long that takes, and soon after."""
    monkeypatch.setattr(tree_model, "_LATENCY", 0.02)
    with model(9, 1) as world:
        world.hosts.spreads.lease = 600.0
        for agent in world.agents.values():
            agent.router.lease = 600.0
        world.settle(10.0)
        assert len(world.uplinks.tree.parents) == 6
        world.hang("h0/agent", 45.0)
        world.call(world.names, size)
        for _ in range(4):
            world.settle(0.3)
            world.hosts.hurry(world.names)
        world.settle(3.0)
        for _ in range(38):
            # The ranks of other hosts wait for nothing.
            assert "h0" not in world.uplinks.tree.parents.values()
            world.call(world.names)
            world.settle(1.0)
            assert {*world.names[1:]} <= world.answers[world._calls].keys()
        world.settle(10.0)
        assert len(world.uplinks.tree.parents) == 6
        check(world)
        assert not world.given_up


def test_urgent_calls_wait_for_new_large_messages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that began long ago does not come by a parent that hangs."""
    monkeypatch.setattr(tree_model, "_LATENCY", 0.02)
    monkeypatch.setattr(tree_model.arrivals, "SLOW", 1000)
    with model(9, 1) as world:
        world.settle(10.0)
        children = ["h1", "h2"]
        world.hang("h0/agent", 60.0)
        world.call(["h0", *children], 3000)
        world.settle(3.5)
        assert not world.answers[1].keys() & {*children}
        world.call(children)
        world.hosts.hurry(children)
        world.settle(PATIENCE + 0.5)
        assert all(world.answers[number].keys() >= {*children} for number in (1, 2)), world.answers
        world.settle(200.0)
        check(world)


def test_host_that_hung_and_is_given_up_ends() -> None:
    """It takes the end of its new connection for that of the old one, which it did not need."""
    with model(9, 1) as world:
        world.settle(10.0)
        agent = world.agents["h1/agent"]
        world.hang("h1/agent", 30.0)
        world.uplinks.tree.straighten("h1")
        world.settle(0.1)
        world.give_up("h1", HostLost("h1"))
        world.settle(31.0)
        world.tell(agent)
        world.settle(60.0)
        check(world)


def test_program_that_takes_nothing_for_long_keeps_its_hosts() -> None:
    """Its connections last, as while code keeps the GIL."""
    with model(9, 1) as world:
        world.settle(10.0)
        for agent in world.agents.values():
            world.tell(agent)
        world.stopped.add(PROGRAM)
        world.settle(600.0)
        world.stopped.discard(PROGRAM)
        world.settle(300.0)
        check(world)
        assert not world.given_up
        assert len(world.uplinks.tree.parents) == 6


def test_program_has_connections_to_the_first_of_each_group() -> None:
    with model(64, 1, 16) as world:
        world.settle(10.0)
        assert len([each for each in world.wires if each.src.startswith("c/") and each.open]) == 8
        assert not [each for each in world.wires if each.dst.startswith("c/") and each.open and each.src > "h9"]
        assert len(world.uplinks.tree.parents) == 56


def test_lack_of_descriptors_delays_new_connections_only() -> None:
    with model(9, 1) as world:
        world.settle(10.0)
        connect = world.hosts.connect_to

        def full(*_: object, **__: object) -> Any:
            raise OSError(errno.EMFILE, "too many open files")

        world.hosts.connect_to = world.hosts.spreads.connect = full
        world.kill("h0/agent")
        for host in ("h1", "h2", "h4"):
            world.call([host])
        world.settle(3.0)
        assert world.given_up == {"h0"}
        world.hosts.connect_to = connect
        world.settle(60.0)
        check(world)


def test_few_hosts_keep_their_connections() -> None:
    with model(15, 1, 16) as world:
        world.settle(10.0)
        assert not world.uplinks.tree.parents

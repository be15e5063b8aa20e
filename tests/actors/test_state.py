"""The check after each test finds lost credit, pending calls, open ports and unknown threads."""

from __future__ import annotations

import threading
import time
from typing import Any

from monarch._node.current import current_node
from monarch._session.statistics import statistics_of
from monarch.actor import Actor, Channel, endpoint
from state import credit_lost, strange_threads, unsettled


class Works(Actor):
    @endpoint
    def work(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)

    @endpoint
    def lose(self, credit: int) -> None:
        for finished in current_node().replies.counts.values():
            finished.total -= credit


def test_lost_credit_is_found(procs: Any) -> None:
    works = procs(1).spawn("works", Works).slice(gpus=0)
    works.lose.call_one(7).get(timeout=20)
    assert [text.partition(" of ")[0] for text in credit_lost(0.1)] == ["7 lost credit"]
    works.lose.call_one(-7).get(timeout=20)
    assert credit_lost(5) == []


def test_credit_of_pending_work_is_not_lost(procs: Any) -> None:
    works = procs(2).spawn("works", Works)
    works.work.broadcast(0.4)
    for _ in range(20):
        works.work.broadcast()
    begin = time.monotonic()
    assert credit_lost(5) == [] and time.monotonic() - begin < 5
    windows = statistics_of(current_node()).windows
    assert {windows[peer.proc].sent for peer in works._members_at().peers} == {21}


def test_open_calls_and_ports_are_found(procs: Any) -> None:
    works = procs(1).spawn("works", Works).slice(gpus=0)
    works.work.call_one().get(timeout=20)
    before = unsettled()
    call = works.work.call_one(0.3)
    _, receiver = Channel.open()
    found = [what for what in unsettled() if what not in before]
    assert found == [f"call works.work() (port {call.port})", f"open port {receiver.port} of a ChannelEntry"]
    receiver.close()
    call.get(timeout=20)
    assert unsettled() == before


def test_threads_of_unknown_names_are_found() -> None:
    before = [each.ident or 0 for each in threading.enumerate()]
    goes = threading.Event()
    thread = threading.Thread(target=goes.wait, name="strange")
    thread.start()
    assert strange_threads(before) == ["thread strange"]
    goes.set()
    thread.join()
    assert strange_threads(before) == []

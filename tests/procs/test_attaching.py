"""Attaching a detached mesh from one program: by two threads, and while its agent stops."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest
import zmq

from leaks import wait_until
from monarch import job as keeping
from monarch._node.current import current_node
from monarch._node.future import in_thread
from monarch._procs.agent.detached_records import find
from monarch._procs.agent.services import listen
from monarch._session.detached import agents
from monarch._session.session import need_session
from monarch.exceptions import DetachedMeshInUseError, MonarchError, SpawnError

pytestmark = pytest.mark.slow

ENDS = 5.0
"""Seconds until a mesh that was left is free, on a busy machine."""


def test_one_of_two_threads_attaches(host: None, leaks: Any) -> None:
    keeping.keep("mine", 60).leave()
    assert wait_until(lambda: not find("mine").user, ENDS)
    tries = [in_thread(current_node(), "attach", lambda: keeping.attach("mine")) for _ in range(2)]
    got, errors = [], []
    for each in tries:
        try:
            got.append(each.get(60))
        except DetachedMeshInUseError as error:
            errors.append(str(error))
    assert len(got) == 1 and "is already attached to this process" in errors[0]
    assert got[0].attached and got[0].hosts.spawn_procs({"gpus": 1}).initialized.get(60)
    got[0].end()
    leaks.rebase()


def test_agent_that_stops_after_it_has_answered_is_named(
    host: None, leaks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = keeping.keep("mine", 60)
    pid, node = find("mine").pid, current_node()
    monkeypatch.setattr(agents, "PATIENCE_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MonarchError, match=r"but host \S+ did not answer within 0.5 s; its agents may be suspended"):
        agents.ask_agent(node, mesh.ids[0], listen())
    assert not [sink for sink in node.ports.sinks.values() if type(sink).__module__ == agents.__name__]
    os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    agents.ask_agent(node, mesh.ids[0], listen())
    mesh.end()
    # This program listens for hosts from now on.
    leaks.rebase()


def test_attachment_that_lacks_resources_says_so(host: None) -> None:
    """The next one can begin."""
    session = need_session(current_node())
    for error in (OSError(errno.EMFILE, "Too many open files"), zmq.ZMQError(errno.EMFILE)):
        with (
            pytest.raises(SpawnError, match=r"cannot attach hosts: .*Too many open files"),
            session.one_attachment(),
        ):
            raise error
    with session.one_attachment():
        pass

"""A minimal host agent with one zygote: tests send it commands as lines of JSON, and it answers likewise."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any

from monarch._procs.agent.zygotes import Forked, ForkFailed, RankSpec, Succeeded, Zygote, ZygoteGone, ZygoteReady
from monarch._procs.os import posix
from monarch._procs.rank.output import read_tail


def tell(event: str, **about: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **about}) + "\n")
    sys.stdout.flush()


class SmallAgent:
    def __init__(self, setup: dict[str, Any]) -> None:
        setup["controller"] = tuple(setup["controller"])
        self.zygote = Zygote(**setup)
        self.fds: dict[int, list[tuple[int, int]]] = {}
        self.ranks: dict[int, tuple[int, int]] = {}
        self.codes: dict[int, int] = {}
        self.gone = False
        tell("started", pid=self.zygote.pid)

    def ask(self, request: dict[str, Any]) -> None:
        fds = [(posix.memfd("stdout"), posix.memfd("stderr")) for _ in request["ranks"]]
        ours = [(os.dup(out), os.dup(err)) for out, err in fds]
        self.fds[request["token"]] = ours
        ranks = [RankSpec(**{**rank, "config": rank["config"].encode()}) for rank in request["ranks"]]
        self.zygote.fork(request["token"], request["entry"], ranks, fds)
        for pair in fds:
            for fd in pair:
                os.close(fd)

    def hear(self) -> None:
        for report in self.zygote.receive():
            if isinstance(report, ZygoteReady):
                tell("ready", problems=report.problems)
            elif isinstance(report, Succeeded):
                tell("succeeded", pid=report.pid)
            elif isinstance(report, Forked):
                self.ranks.update(zip(report.pids, self.fds.pop(report.token), strict=True))
                tell("forked", token=report.token, pids=report.pids)
            elif isinstance(report, ForkFailed):
                self.ranks.update(zip(report.pids, self.fds.pop(report.token), strict=False))
                tell("failed", token=report.token, pids=report.pids, reason=report.reason)
            else:
                assert isinstance(report, ZygoteGone)
                tell("gone", reason=report.reason)
                self.gone = True

    def reap(self) -> None:
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                self.codes[pid] = os.waitstatus_to_exitcode(status)
                if pid == self.zygote.pid:
                    self.zygote.note_exit(self.codes[pid])
        except ChildProcessError:
            pass

    def tell_ends(self) -> None:
        for pid in self.codes.keys() & self.ranks.keys():
            out, err = self.ranks.pop(pid)
            texts = [read_tail(fd).data.decode() for fd in (out, err)]
            tell("exited", pid=pid, code=self.codes.pop(pid), stdout=texts[0], stderr=texts[1])


def main() -> None:
    posix.set_pdeathsig(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    agent = SmallAgent(json.loads(sys.argv[1]))
    closed = False
    rest = b""
    while True:
        watched = [0, woken] if agent.gone or closed else [0, woken, agent.zygote.fileno()]
        ready, _, _ = select.select(watched, [], [])
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready:
            text = os.read(0, 1 << 20)
            if not text:
                break
            *lines, rest = (rest + text).split(b"\n")
            for request in map(json.loads, lines):
                if request["ask"] == "fork":
                    agent.ask(request)
                else:
                    agent.zygote.close()
                    closed = True
                    tell("closed")
        agent.reap()
        if not closed:
            agent.hear()
        agent.tell_ends()
    agent.zygote.close()


if __name__ == "__main__":
    main()

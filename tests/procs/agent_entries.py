"""Entry points of ranks in the agent's tests; imported by path. Config: proc, place, folder, common part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import zmq

from monarch._procs.session_folder import ipc_address
from monarch._wire import messages as m
from monarch._wire.links import Inbox, Link, make_context


def wait(config: bytes) -> None:
    """Never ends by itself."""
    while True:
        signal.pause()


def ignore(config: bytes) -> None:
    """Ends only by a kill."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    wait(config)


def leave(config: bytes) -> int:
    """Exit with the status from config, after some last words."""
    code = config.split(b"\0")[3]
    print("last words", file=sys.stderr)
    return int(code)


def die(config: bytes) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def with_children(config: bytes) -> None:
    """Has a subprocess, one of a group of its own, and a grandchild whose parent has ended."""
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], preexec_fn=os.setpgrp)
    subprocess.run(["sh", "-c", "sleep 1000 & exit"])
    wait(config)


def listen(config: bytes) -> None:
    """Answer each Call: to its sender through ipc on this host, else through the agent."""
    proc, place, folder, _ = config.split(b"\0", 3)
    me, host = proc.decode(), proc.decode().partition("/")[0]
    context = make_context()
    inbox = Inbox(context, ipc_address(folder.decode(), me))
    hello = m.encode(m.Hello(m.VERSION, me, os.getpid()))
    links: dict[str, Link] = {}

    def link(to: str) -> Link:
        if to not in links:
            links[to] = Link(context, ipc_address(folder.decode(), to), hello)
        return links[to]

    agent = f"{host}/agent"
    ready = m.encode(m.Ready(me, os.getpid()))
    owner = config.split(b"\0", 3)[3].decode()
    link(owner).send(ready)
    while True:
        frames = inbox.socket.recv_multipart()
        if not frames[0]:
            continue
        message = m.decode(frames[0])
        if isinstance(message, m.Call):
            if message.method == "late":
                threading.Event().wait(0.2)
            bulk = message.bulk is not None
            body = b"%d bulk" % len(frames[1:]) if not bulk else b"mapped"
            reply = m.encode(m.Reply(me, message.port, int(place), m.RESULT, 1, body))
            if message.src.startswith(f"{host}/"):
                link(message.src).send(reply)
            else:
                link(agent).send(m.encode(m.Route(message.src, 1)), [reply])
            if message.method == "die":
                # All messages are sent before the end.
                for each in links.values():
                    each.close(10_000)
                inbox.close()
                context.term()
                os._exit(9)


__all__ = ["die", "ignore", "leave", "listen", "wait", "with_children", "zmq"]

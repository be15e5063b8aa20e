"""The start of programs of whose hosts a few relay the others."""

from __future__ import annotations

COMMON = """
import os, signal, sys, threading, time
from pathlib import Path
import psutil
from monarch._core.telemetry.events import Metrics
from monarch._node.current import current_node
from monarch._session.session import session_of
from monarch._telemetry.collector import telemetry_of
from monarch.actor import Actor, endpoint
from monarch.exceptions import SupervisionError
from monarch.telemetry import log_metric
from monarch.testing import local_hosts

class Rank(Actor):
    @endpoint
    def agent(self):
        process = psutil.Process()
        while process.name() != "monarch-agent":
            process = process.parent()
        return process.pid

    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def large(self, size):
        return b"x" * size

    @endpoint
    def leave(self):
        print("last words")
        os._exit(3)

    @endpoint
    def talk(self, path):
        count = 0
        while not os.path.exists(path):
            print("line", count)
            log_metric("count", count, count)
            count += 1
            time.sleep(0.005)
        Path(f"part {os.getpid()}").write_text(str(count))
        os.rename(f"part {os.getpid()}", f"told {os.getpid()}")
        return os.getpid()

def until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, condition.__code__.co_consts
        time.sleep(0.01)

def connections():
    return len([each for each in psutil.Process().net_connections("tcp") if each.status == "ESTABLISHED"])

def tree():
    return session_of(current_node())._uplinks.tree

def lost():
    return [each.host for each in current_node().hosts.gateways.values() if each.closed.is_set()]

def relayed(count):
    # All but the first of each group.
    return len(tree().parents) == count - len(current_node().hosts.spreads.groups())
"""

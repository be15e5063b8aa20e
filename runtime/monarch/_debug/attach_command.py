"""``monarch debug``: a prompt for the ranks of a running program of this user on this machine."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from monarch._debug.commands import parse_command
from monarch._telemetry.exchange import NAME, VERSION, MeshesRequest, send
from monarch._telemetry.programs import OTHER_VERSION, Programs, WatchedProgram

_CONNECT_S = 3.0
"""Seconds for a program to take a client."""
_ANSWER_S = 60.0
"""Seconds for it to answer a command."""
_NONE = "none of your programs is running a mesh on this machine; start one with %mesh up in a notebook"


def main(args: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        "monarch debug",
        description="Inspect ranks of a running notebook or program: where they are, their values, and why they wait.",
        epilog="Ranks that are paused here continue when the command ends, however it ends.",
    )
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="process ID of the program; omit it for a list")
    arguments = parser.parse_args(args)
    with suppress(ImportError):
        # Keys that edit a line.
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    programs = Programs()
    programs.look()
    running = [program for program in programs.running if program.meshes or program.trouble]
    chosen = _chosen(running, arguments.pid)
    if isinstance(chosen, str):
        print(f"monarch debug: {chosen}", file=sys.stderr)
        return 1
    try:
        return _prompt(chosen)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    except OSError as error:
        print(f"monarch debug: {chosen.name} does not answer: {error}", file=sys.stderr)
    except ValueError:
        print(f"monarch debug: {chosen.name} {OTHER_VERSION}", file=sys.stderr)
    return 1


def _chosen(running: Sequence[WatchedProgram], pid: int | None) -> WatchedProgram | str:
    """Return the program to attach to, or why it cannot be chosen."""
    if not running:
        return _NONE
    listed = "\n".join(f"  {program.pid}  {program.name}: {_meshes(program)}" for program in running)
    if pid is None:
        return running[0] if len(running) == 1 else f"several programs are running; name one by its PID:\n{listed}"
    found = next((program for program in running if program.pid == pid), None)
    return found or f"process {pid} is not running a mesh; these are:\n{listed}"


def _meshes(program: WatchedProgram) -> str:
    names = [copy.read(lambda model: model.name) for copy in program.meshes.values()]
    return program.trouble or ", ".join(f"mesh {name!r}" for name in names)


def _prompt(program: WatchedProgram) -> int:
    """Ask for commands until the user leaves or the program ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(os.path.join(program.folder, NAME))
        send(connection, MeshesRequest(VERSION, {}, True), time.monotonic() + _CONNECT_S)
        connection.settimeout(_ANSWER_S)
        lines = connection.makefile("rb")
        _say(f"attached to {program.name}; 'help' lists the commands, 'quit' leaves")
        while True:
            answer = lines.readline()
            if not answer:
                _say("the program has ended")
                return 0
            message: Any = json.loads(answer)
            _say(str(message["text"]))
            line = _ask(str(message["prompt"]))
            if line is None:
                return 0
            connection.sendall(json.dumps({"line": line}).encode() + b"\n")


def _ask(prompt: str) -> str | None:
    """Return a line; None at the end of the input, and to leave."""
    try:
        line = input(prompt)
    except EOFError:
        print()
        return None
    return None if parse_command(line)[0] == "quit" else line


def _say(text: str) -> None:
    if text:
        print(text, flush=True)

"""The ``monarch`` command: commands on hosts, workers, and detached meshes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from monarch._meshes.host_mesh import HostMesh, this_host
from monarch.exceptions import MonarchError


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with arguments, by default those of the process; return the exit code."""
    given = _parser().parse_args(args)
    try:
        code: int = given.run(given)
    except MonarchError as error:
        print(f"monarch: {error}", file=sys.stderr)
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("monarch", description="Runs commands on hosts, and manages detached meshes.")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    run = verbs.add_parser("exec", help="run a command on each host, and return its highest exit code")
    run.add_argument("--per-host", action="append", default=[], metavar="AXIS=N", help="processes of each host")
    run.add_argument("-e", "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable")
    run.add_argument("--workdir", help="working directory")
    run.add_argument("cmd", nargs=argparse.REMAINDER, help="the command and its arguments")
    run.set_defaults(run=_exec)
    run.add_argument("--hosts", default="", metavar="ADDRESSES", help="workers, such as tcp://a:22222,tcp://b:22222")
    run.add_argument("--key", default="", metavar="FILE", help="the key file of the workers")
    # Its own module takes its arguments; here is its line of help.
    verbs.add_parser("worker", help="serve this machine as a host; see 'monarch worker --help'", add_help=False)
    verbs.add_parser("list", help="list the detached meshes").set_defaults(run=_list)
    end = verbs.add_parser("end", help="end a detached mesh")
    end.add_argument("name")
    end.set_defaults(run=_end)
    return parser


def _hosts(given: argparse.Namespace, stack: ExitStack) -> HostMesh:
    """Return the hosts of the arguments, by default this one; they are let go at the end."""
    if not given.hosts:
        return this_host()
    from monarch._session.workers import attach_to_workers

    hosts = attach_to_workers(ca=given.key, workers=given.hosts.split(","))
    stack.callback(lambda: hosts.shutdown().get(30))
    return hosts


def _exec(given: argparse.Namespace) -> int:
    from monarch._session.commands import exec_command

    cmd = given.cmd[1:] if given.cmd[:1] == ["--"] else given.cmd
    per_host = {axis: int(count) for axis, _, count in (pair.partition("=") for pair in given.per_host)}
    env = {name: value for name, _, value in (pair.partition("=") for pair in given.env)}
    with ExitStack() as stack:
        hosts = _hosts(given, stack)
        return exec_command(hosts, cmd, env=env, workdir=given.workdir, per_host=per_host or None).get()


def _list(given: argparse.Namespace) -> int:
    from monarch._session.detached import records

    for record in records():
        print(record)
    return 0


def _end(given: argparse.Namespace) -> int:
    from monarch._session.detached import end

    end(given.name)
    return 0

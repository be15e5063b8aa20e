"""The ``monarch`` command: commands and shells on hosts, workers, views, and detached meshes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from monarch._meshes.host_mesh import HostMesh, this_host
from monarch.exceptions import MonarchError


def main(args: Sequence[str] | None = None) -> int:
    """Run the command with arguments, by default those of the process; return the exit code."""
    arguments = _parser().parse_args(args)
    try:
        code: int = arguments.run(arguments)
    except MonarchError as error:
        print(f"monarch: {error}", file=sys.stderr)
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "monarch", description="Run commands and shells on hosts, watch meshes, and manage detached meshes."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("exec", help="run a command on each host, and return the highest exit code")
    shell = commands.add_parser("shell", help="run an interactive shell on a host, and return its exit code")
    shell.add_argument("--rank", type=int, default=0, metavar="N", help="index of the host (default: 0)")
    shell.set_defaults(run=_shell)
    for each in (run, shell):
        each.add_argument("-e", "--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable")
        each.add_argument("--workdir", help="working directory")
        each.add_argument(
            "--hosts", default="", metavar="ADDRESSES", help="workers, such as tcp://a:22222,tcp://b:22222"
        )
        each.add_argument("--key", default="", metavar="FILE", help="the key file of the workers")
    run.add_argument("--per-host", action="append", default=[], metavar="AXIS=N", help="processes per host")
    run.add_argument("cmd", nargs=argparse.REMAINDER, help="the command and its arguments")
    run.set_defaults(run=_exec)
    # Their own modules take their arguments; here are their lines of help.
    commands.add_parser("worker", help="serve this machine as a host; see 'monarch worker --help'", add_help=False)
    commands.add_parser("top", help="show the meshes of your running programs, live", add_help=False)
    commands.add_parser("debug", help="inspect the ranks of a running program at a prompt", add_help=False)
    commands.add_parser("list", help="list the detached meshes").set_defaults(run=_list)
    end = commands.add_parser("end", help="end a detached mesh")
    end.add_argument("name")
    end.set_defaults(run=_end)
    return parser


def _hosts(arguments: argparse.Namespace, stack: ExitStack) -> HostMesh:
    """Return the hosts of the arguments, by default this one; they are let go at the end."""
    if not arguments.hosts:
        return this_host()
    from monarch._session.workers import attach_to_workers

    hosts = attach_to_workers(ca=arguments.key, workers=arguments.hosts.split(","))
    stack.callback(lambda: hosts.shutdown().get(30))
    return hosts


def _exec(arguments: argparse.Namespace) -> int:
    from monarch._session.commands.execution import exec_command

    cmd = arguments.cmd[1:] if arguments.cmd[:1] == ["--"] else arguments.cmd
    per_host = {axis: int(count) for axis, _, count in (pair.partition("=") for pair in arguments.per_host)}
    with ExitStack() as stack:
        hosts = _hosts(arguments, stack)
        return exec_command(hosts, cmd, env=_env(arguments), workdir=arguments.workdir, per_host=per_host or None).get()


def _shell(arguments: argparse.Namespace) -> int:
    from monarch._session.commands.shells import shell

    with ExitStack() as stack:
        host = _hosts(arguments, stack).flatten("rank").slice(rank=arguments.rank)
        return shell(host, env=_env(arguments), workdir=arguments.workdir)


def _env(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: value for name, _, value in (pair.partition("=") for pair in arguments.env)}


def _list(arguments: argparse.Namespace) -> int:
    from monarch._procs.agent.detached_records import records

    # A record has the key of its mesh.
    for record, state in records():
        print(f"{record.name}: {state}" if record is not None else state)
    return 0


def _end(arguments: argparse.Namespace) -> int:
    from monarch._session.detached.attaching import end

    end(arguments.name)
    return 0

"""A job that runs the script of a torchrun command on this machine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from typing import Any

from monarch._core.kinds import is_a
from monarch._meshes.spmd import SPMDActor
from monarch._session.jobs.jobs import ProcessJob
from monarch.exceptions import ArgumentError

_MESH = "workers"
_TORCHRUN = ("torchrun", "torch.distributed.run")
_FLAGS = ("--standalone", "--no-python", "--run-path")
_OPTIONS = (
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--max-restarts", "--monitor-interval"),
    *("--start-method", "--role", "--log-dir", "--redirects", "--tee", "--local-ranks-filter", "--node-rank"),
    *("--master-addr", "--master-port", "--local-addr", "--signals-to-handle"),
)
"""Options of torchrun that have a value and no effect here."""


class SPMDJob(ProcessJob):
    """A job of one simulated host, on which ``run_spmd()`` runs a torchrun command; see ``serve``.

    Args:
        command: such as ``["torchrun", "--nproc-per-node=4", "train.py", "--lr", "0.1"]``.
        env: additional environment variables of the processes.

    Raises:
        ArgumentError: the command is not one of torchrun or Python on one machine; a ValueError.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.command = list(command)
        self.script, self.processes = parse_command(self.command)
        super().__init__({_MESH: 1}, env)

    def run_spmd(self) -> None:
        """Run the script in new processes, each a rank, and wait for its end.

        Raises:
            ActorError: the script has failed on some ranks.
            DeviceMeshError: processes have died.
        """
        hosts = getattr(self.state(), _MESH)
        with hosts.spawn_procs(per_host={"gpus": self.processes}) as procs:
            actors: Any = procs.spawn("spmd", SPMDActor)
            address, port = actors.slice(hosts=0, gpus=0).get_host_port.call_one().get()
            actors.main.call(address, port, self.script).get()


def serve(
    appdef: Sequence[str],
    scheduler: str = "",
    scheduler_cfg: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> SPMDJob:
    """Return the job of a torchrun command on this machine; ``run_spmd()`` runs it, and ``kill()`` ends its host.

    Args:
        appdef: the command, as a list of words. Applications of torchx are not supported.
        scheduler: ignored: the host is this machine.
        scheduler_cfg: likewise.
        env: additional environment variables of the processes.

    Raises:
        ArgumentError: see ``SPMDJob``.
    """
    if not is_a(appdef, list) and not is_a(appdef, tuple):
        raise ArgumentError(
            f"serve: expected a torchrun command as a list of words, got {type(appdef).__name__}; for several "
            f"machines, start hosts with monarch.job.SlurmJob, SSHJob or KubernetesJob, and run the script "
            f"with monarch.spmd.SPMDActor"
        )
    return SPMDJob(appdef, env)


def parse_command(command: Sequence[str]) -> tuple[list[str], int]:
    """Return the script of a command with its arguments, and the number of processes.

    Raises:
        ArgumentError: see ``SPMDJob``.
    """
    words = list(command)
    if len(words) > 2 and _is_python(words[0]) and words[1] == "-m" and words[2] in _TORCHRUN:
        words = words[2:]
    if words and words[0] in _TORCHRUN:
        return _parse_torchrun(words[1:])
    if len(words) > 1 and _is_python(words[0]):
        return words[1:], 1
    raise ArgumentError(
        f"expected a command such as ['torchrun', '--nproc-per-node=4', 'train.py'] or ['python', 'train.py'], "
        f"got {command!r}"
    )


def _is_python(word: str) -> bool:
    return re.fullmatch(r"(.*/)?python[\d.]*", word) is not None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ArgumentError(f"torchrun: {message}")


def _parse_torchrun(words: list[str]) -> tuple[list[str], int]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--nproc-per-node", "--nproc_per_node", default="1")
    parser.add_argument("-m", "--module", action="store_true")
    for name in _FLAGS:
        parser.add_argument(name, name.replace("-", "_").replace("__", "--", 1), action="store_true")
    for name in _OPTIONS:
        short = {"--redirects": ["-r"], "--tee": ["-t"]}.get(name, [])
        parser.add_argument(name, name.replace("-", "_").replace("__", "--", 1), *short)
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    found = parser.parse_args(words)
    if found.nnodes not in ("1", "1:1"):
        raise ArgumentError(
            f"--nnodes={found.nnodes}: expected 1, as the job runs on this machine; for several, start hosts with "
            f"monarch.job.SlurmJob, SSHJob or KubernetesJob and run the script with monarch.spmd.SPMDActor"
        )
    if found.no_python:
        raise ArgumentError("--no-python is not supported: the script runs in Python processes")
    if not found.nproc_per_node.isdecimal() or int(found.nproc_per_node) < 1:
        raise ArgumentError(f"--nproc-per-node: expected a number, at least 1, got {found.nproc_per_node!r}")
    return [*(["-m"] if found.module else []), found.script, *found.arguments], int(found.nproc_per_node)

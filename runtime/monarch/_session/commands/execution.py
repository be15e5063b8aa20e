"""Commands on the hosts of a mesh: a shell command or a Python program in each of its processes."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from monarch._actors.actor import Actor
from monarch._actors.endpoint import endpoint
from monarch._core.shapes.extent import Point
from monarch._meshes.context import current_rank
from monarch._meshes.host_mesh import HostMesh
from monarch._node.current import open_node
from monarch._node.future import Future, in_thread
from monarch.exceptions import ArgumentError


def exec_command(
    host_mesh: HostMesh,
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    output_dir: str | None = None,
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    per_host: Mapping[str, int] | None = None,
) -> Future[int]:
    """Run a command on each host and return its highest exit code. It starts at once.

    Each process has ``MONARCH_RANK_<AXIS>`` and ``MONARCH_SIZE_<AXIS>``, such as ``MONARCH_RANK_HOSTS``, and the
    processes of the command are stopped before the future is done.

    Args:
        host_mesh: the hosts.
        cmd: the command and its arguments; ``["train.py", ...]`` and ``["-m", "module", ...]`` run as ``__main__`` of
            the process.
        env: additional environment variables.
        workdir: working directory; by default that of this program, where it exists.
        output_dir: a folder of each host for ``stdout.txt`` and ``stderr.txt``; by default the output is shown here.
        rank: run it on this host only, by its number.
        point: run it on these hosts only, by their coordinates.
        per_host: run it in a mesh of processes of each host, such as ``{"gpus": 4}``.

    Raises:
        ArgumentError: the command is empty, or both ``rank`` and ``point`` are given.
    """
    if not cmd or isinstance(cmd, str):
        raise ArgumentError(f"cmd: expected a list with a command and its arguments, got {cmd!r}")
    if rank is not None and point is not None:
        raise ArgumentError("expected rank or point, got both")
    hosts = host_mesh.slice(**point) if point is not None else host_mesh
    hosts = hosts.flatten("rank").slice(rank=rank) if rank is not None else hosts
    procs = hosts.spawn_procs(per_host=dict(per_host) if per_host else None, name="exec")

    def run() -> int:
        try:
            commands: Any = procs.spawn("command", Command)
            codes = commands.run.call(list(cmd), dict(env or {}), workdir, os.getcwd(), output_dir).get()
            return max(codes.values())
        finally:
            procs.stop().get()

    return in_thread(open_node(), "exec_command", run)


def variables_of(point: Point) -> dict[str, str]:
    """Return the environment variables of a process at a point."""
    ranks = {f"MONARCH_RANK_{label.upper()}": str(point[label]) for label in point}
    return ranks | {f"MONARCH_SIZE_{label.upper()}": str(point.size(label)) for label in point}


class Command(Actor):
    """Runs a command in its process."""

    @endpoint
    def run(self, cmd: list[str], env: dict[str, str], workdir: str | None, here: str, output_dir: str | None) -> int:
        """Run a command and return its exit code."""
        os.environ.update(variables_of(current_rank()) | env)
        if workdir is not None or os.path.isdir(here):
            os.chdir(workdir or here)
        with _output(output_dir) as (out, err):
            if cmd[0] == "-m" or cmd[0].endswith(".py"):
                with contextlib.redirect_stdout(out or sys.stdout), contextlib.redirect_stderr(err or sys.stderr):
                    return _python(cmd)
            done = subprocess.run(cmd, stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=False)
            return done.returncode if done.returncode >= 0 else 128 - done.returncode


@contextlib.contextmanager
def _output(folder: str | None) -> Generator[tuple[Any, Any], None, None]:
    """Open the files of the output; None for each without a folder."""
    if folder is None:
        yield None, None
        return
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "stdout.txt"), "w") as out, open(os.path.join(folder, "stderr.txt"), "w") as err:
        yield out, err


def _python(cmd: list[str]) -> int:
    """Run a program as ``__main__`` and return its exit code; its other errors are raised."""
    module = cmd[0] == "-m"
    sys.argv = cmd[1:] if module else list(cmd)
    try:
        if module:
            runpy.run_module(cmd[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(cmd[0], run_name="__main__")
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0

"""A real Slurm cluster for tests: slurmctld, munged and several slurmd on this machine, in a folder of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from leaks import wait_until
from workers import free_port

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_DAEMONS = ("munged", "slurmctld", "slurmd", "salloc")
_CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/control.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
MpiDefault=none
KillWait=2
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
"""


def why_none() -> str:
    """Return why there can be no cluster here; empty if there can."""
    if any(shutil.which(name, path=_PATH) is None for name in _DAEMONS):
        return "Slurm and munge are not installed; run .ci/install-slurm"
    if os.getuid():
        return "slurmd has to run as root to start jobs"
    return ""


class SlurmCluster:
    """A cluster with nodes ``n1``, ``n2``... and partitions ``low`` and ``high``; jobs in ``high`` preempt others.

    Args:
        folder: for its configuration, state and logs.
        count: the number of nodes.
    """

    def __init__(self, folder: Path, count: int = 3) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        config = folder / "slurm.conf"
        host = socket.gethostname().partition(".")[0]
        lines = [_CONFIG.format(host=host, control=free_port(), folder=folder)]
        for number in range(1, count + 1):
            lines.append(f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1\n")
        nodes = f"Nodes=n[1-{count}] State=UP MaxTime=60"
        lines.append(f"PartitionName=low {nodes} Default=YES PriorityTier=1 PreemptMode=CANCEL GraceTime=20\n")
        lines.append(f"PartitionName=high {nodes} PriorityTier=10 PreemptMode=OFF\n")
        config.write_text("".join(lines))
        (folder / "state").mkdir()
        self.env = {"SLURM_CONF": str(config), "PATH": _PATH}
        munge = folder / "munge"
        munge.mkdir(mode=0o700)
        (munge / "key").write_bytes(secrets.token_bytes(1024))
        (munge / "key").chmod(0o400)
        files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._run("munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        assert wait_until((munge / "socket").exists, 10)
        self._run("slurmctld", "-D", "-i")
        for number in range(1, count + 1):
            self._run("slurmd", "-D", "-N", f"n{number}", name=f"n{number}")
        assert wait_until(
            lambda: self.tool("sinfo", "-h", "-N", "-p", "low", "-o", "%t").split() == ["idle"] * count, 30
        )

    def _run(self, *command: str, name: str = "") -> None:
        self._processes[name or command[0]] = subprocess.Popen(
            command,
            env={**os.environ, **self.env},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tool(self, *command: str) -> str:
        """Return the output of a command of Slurm."""
        done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=30)
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Return the states of all jobs that have not ended."""
        return self.tool("squeue", "-h", "-o", "%T").split()

    def close(self) -> None:
        """End all jobs and daemons."""
        self.tool("scancel", "--user=root")
        wait_until(lambda: not self.jobs(), 20)
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

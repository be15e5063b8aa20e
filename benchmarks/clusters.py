"""Hosts of launchers: from the request until 2 x 4 ranks have answered a call that used torch.

The hosts are real: OpenSSH's servers on loopback with a home each, and a Ray cluster of two nodes on this machine, as
in the tests. Both share this machine's cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import FLOOR, OURS, LaneError, Measure, Options, Target, calm

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

_HOSTS, _RANKS = 2, 4
_PATIENCE_S = 180.0
_PROGRAM = """
import json, sys, time
from monarch.actor import Actor, endpoint
from monarch.job import {job}

class Uses(Actor):
    @endpoint
    def total(self) -> float:
        import torch

        return torch.ones(3).sum().item()

if __name__ == "__main__":
    {before}
    begun = time.perf_counter()
    job = {job}({{"all": json.loads(sys.argv[1])}}, **json.loads(sys.argv[2])).told_by(lambda line: None)
    procs = job.state().all.spawn_procs({{"gpus": {ranks}}})
    values = procs.spawn("uses", Uses).total.call().get({patience}).values()
    print(time.perf_counter() - begun, flush=True)
    assert [*values] == [3.0] * {count}
    job.kill()
"""


def run(options: Options) -> list[Measure]:
    """Seconds from the request to the first answers."""
    from leaks import MARKER

    os.environ.setdefault(MARKER, "benchmark")
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return [*_ssh(options), *_ray(options)]


def _ssh(options: Options) -> list[Measure]:
    import sshd

    if why := sshd.why_none():
        print(f"hosts by ssh are left out: {why}", file=sys.stderr)
        return []
    root = Path(__file__).resolve().parents[1] / "runtime"
    hide = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {root} && exec "$0" "$@"']
    can_hide = not subprocess.run([*hide, "true"], capture_output=True, check=False).returncode
    measures: list[Measure] = []
    for what, prefix in {"with the runtime in place": [], "without it": hide}.items():
        if prefix and not can_hide:
            continue
        with tempfile.TemporaryDirectory(prefix="ssh-") as folder:
            hosts = sshd.SSHHosts(Path(folder), 0)
            try:
                names = [hosts.add(prefix) for _ in range(_HOSTS)]
                measure = Measure("clusters", f"{_HOSTS} x {_RANKS} ranks by ssh, {what}", "s", "less")
                measure.notes.append("floor: ssh HOST true, then imports of torch, one for each host at once")
                measure.load = calm(options)
                for _ in range(options.rounds(5, 1)):
                    measure.samples.setdefault(FLOOR, []).append(_reach(hosts.config, names[0]) + _imports())
                    if prefix:
                        _forget(Path(folder))
                    given = {"config": hosts.config}
                    measure.samples.setdefault(OURS, []).append(_start("SSHJob", names, given, sys.executable))
                measures.append(_limited(measure))
            finally:
                hosts.close()
    return measures


def _ray(options: Options) -> list[Measure]:
    import rays

    if why := rays.why_none():
        print(f"hosts of Ray are left out: {why}", file=sys.stderr)
        return []
    measure = Measure("clusters", f"{_HOSTS} x {_RANKS} ranks on a warm Ray cluster", "s", "less")
    measure.notes.append("floor: imports of torch, one for each host at once")
    measure.notes.append("warm: the cluster runs and this program is connected, as in a notebook after its first cell")
    try:
        cluster = rays.start()
    except TimeoutError as error:
        raise LaneError(str(error)) from error
    try:
        measure.load = calm(options)
        connect = f"import ray; ray.init({cluster.address!r}, log_to_driver=False, logging_level='ERROR')"
        for _ in range(options.rounds(5, 1)):
            measure.samples.setdefault(FLOOR, []).append(_imports())
            seconds = _start("RayJob", _HOSTS, {"address": cluster.address}, rays.python(), connect, cluster.auth)
            measure.samples.setdefault(OURS, []).append(seconds)
    finally:
        cluster.close()
    return [_limited(measure)]


def _limited(measure: Measure) -> Measure:
    floor = measure.value(FLOOR)
    assert floor is not None
    measure.target = Target("≤ floor + 1 s", floor + 1.0)
    return measure


def _reach(config: str, name: str) -> float:
    begun = time.perf_counter()
    subprocess.run(["ssh", "-F", config, name, "true"], check=True, stdin=subprocess.DEVNULL)
    return time.perf_counter() - begun


def _imports() -> float:
    begun = time.perf_counter()
    command = [sys.executable, "-c", "import torch"]
    running = [subprocess.Popen(command) for _ in range(_HOSTS)]
    for each in running:
        each.wait()
    return time.perf_counter() - begun


def _forget(folder: Path) -> None:
    """Remove the runtimes that hosts keep."""
    for each in folder.glob("home*/.cache"):
        subprocess.run(["rm", "-rf", str(each)], check=True)


def _start(
    job: str, hosts: object, given: object, python: str, before: str = "pass", env: dict[str, str] | None = None
) -> float:
    """Return the seconds that a fresh program has measured."""
    import json

    text = _PROGRAM.format(job=job, ranks=_RANKS, count=_HOSTS * _RANKS, patience=_PATIENCE_S, before=before)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(text)
        done = subprocess.run(
            [python, str(path), json.dumps(hosts), json.dumps(given)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            env={**os.environ, **(env or {}), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    if done.returncode:
        raise LaneError(f"{job}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return float(done.stdout.split()[0])

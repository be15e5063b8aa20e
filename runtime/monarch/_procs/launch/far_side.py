"""The first program on another host: sent over the launcher's own connection, and run by any Python from 3.7.

It reports what this host has, puts the runtime in place, and becomes the host agent. It uses the standard library
only, until it knows what is installed. It ends when its standard input does.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping
from typing import Any

_MODULES = ("torch", "numpy", "zmq", "msgspec", "cloudpickle", "psutil")
_ELSEWHERE = "192.0.2.1"
"""An address for documentation, which tells the default route."""
_OLD = 14 * 86400
"""Seconds after which an unused runtime of another program version is removed."""


def say(kind: str, **more: Any) -> None:
    """Report to the launcher, in one line."""
    line = "monarch:" + json.dumps(dict(more, kind=kind, task=_task())) + "\n"
    os.write(1, line.encode())


def _task() -> int:
    """Return the number of this process among those that one command started."""
    return int(os.environ.get("SLURM_PROCID", "0") or 0)


def main(order: Mapping[str, Any], payload: bytes) -> None:
    """Become the host agent of an order.

    Args:
        order: from the launcher: agent, root, stamp, digest, listen, python, env.
        payload: the runtime as a zip file.
    """
    os.environ.update(order["env"])
    if order["packages"]:
        _with_packages(order, payload)
    from importlib.util import find_spec

    here = ".".join(map(str, sys.version_info[:3]))
    missing = [name for name in _MODULES if find_spec(name) is None]
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    say("environment", python=here, torch=_version("torch"), missing=missing, host=name,
        executable=sys.executable)  # fmt: skip
    if missing or here.split(".")[:2] != order["python"].split(".")[:2]:
        sys.exit(3)
    try:
        root = _runtime(order, payload)
    except OSError as error:
        say("failed", reason=f"cannot store the runtime: {error}")
        sys.exit(4)
    sys.path.insert(0, root)
    from monarch._procs.launch.serving import serve_launched

    serve_launched(order, _address(order["listen"]), say)


def _with_packages(order: Mapping[str, Any], payload: bytes) -> None:
    """Become the Python of an environment with the packages of the order, which runs this program again."""
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        source = {name: archive.read(f"monarch/_procs/launch/{name}.py") for name in ("far_packages", "far_side")}
    space: dict[str, Any] = {"__name__": "far_packages"}
    exec(compile(source["far_packages"], "far_packages.py", "exec"), space)
    try:
        python = space["prepare"](order["packages"], _cache, say)
    except (OSError, space["InstallError"], tarfile.TarError) as error:
        say("failed", reason=f"cannot install the packages of {order['packages']['name']}: {error}")
        sys.exit(4)
    again = io.BytesIO()
    again.write(b"%d\n%s" % (len(source["far_side"]), source["far_side"]))
    again.write(json.dumps(dict(order, packages={}, installed=True)).encode() + b"\n")
    again.write(payload)
    # Standard input stays the connection to the launcher.
    with tempfile.TemporaryFile() as file:
        file.write(again.getvalue())
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        text = f"import os;f=os.fdopen({file.fileno()},'rb');exec(f.read(int(f.readline())))"
        os.execv(python, [python, "-u", "-c", text])


def _version(name: str) -> str:
    try:
        from importlib.metadata import version

        return version(name)
    except Exception:
        # Python 3.7, or installed without metadata.
        return ""


def stamp(root: str) -> str:
    """Return what tells one state of a folder of Python files from another: names, sizes and times."""
    import hashlib

    entries: list[tuple[str, int, int]] = []
    for folder, folders, files in os.walk(os.path.join(root, "monarch")):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                known = os.stat(path)
                entries.append((os.path.relpath(path, root), known.st_size, known.st_mtime_ns))
    return hashlib.sha256(repr(entries).encode()).hexdigest()


def _runtime(order: Mapping[str, Any], payload: bytes) -> str:
    """Return the folder with the runtime: the program's own where the hosts share it, or one filled from the zip."""
    if os.path.isdir(order["root"]) and stamp(order["root"]) == order["stamp"]:
        return order["root"]
    base = _cache()
    target = os.path.join(base, "runtime-" + order["digest"])
    if os.path.isdir(target):
        os.utime(target)
        return target
    made = tempfile.mkdtemp(dir=base, prefix="new-")
    try:
        with zipfile.ZipFile(io.BytesIO(payload)) as archive:
            archive.extractall(made)
        try:
            os.rename(made, target)
        except OSError:
            # Another host with the same home was first.
            if not os.path.isdir(target):
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    for name in os.listdir(base):
        path = os.path.join(base, name)
        if path != target and time.time() - os.stat(path).st_mtime > _OLD:
            shutil.rmtree(path, ignore_errors=True)
    return target


def _cache() -> str:
    """Return a folder that only this user can write to."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for base in (os.path.join(home, "monarch-kernel"),
                 os.path.join(tempfile.gettempdir(), f"monarch-kernel-{os.getuid()}")):  # fmt: skip
        try:
            os.makedirs(base, mode=0o700, exist_ok=True)
            if os.lstat(base).st_uid == os.getuid() and not os.path.islink(base) and os.access(base, os.W_OK):
                os.chmod(base, 0o700)
                return base
        except OSError:
            continue
    raise OSError(f"neither {home} nor {tempfile.gettempdir()} is writable")


def _address(hint: str) -> str:
    """Return the address of this host on the way to the program.

    Args:
        hint: ``ssh``, an address of the program's host, or ``$NAME`` for an environment variable that has one.
    """
    connection = os.environ.get("SSH_CONNECTION", "").split()
    if hint == "ssh" and len(connection) == 4 and (":" not in connection[2] or connection[2] == "::1"):
        return "127.0.0.1" if connection[2] == "::1" else connection[2]
    target = os.environ.get(hint[1:], "") if hint.startswith("$") else hint
    for name in (target, _ELSEWHERE):
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket sends nothing; it only selects the route.
                probe.connect((name, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return "127.0.0.1"


if __name__ == "__main__":
    # The file that this program has come from.
    _input = globals().get("f", sys.stdin.buffer)
    _order = json.loads(_input.readline().decode())
    main(_order, _input.read(_order["size"]))

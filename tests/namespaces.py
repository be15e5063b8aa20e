"""Network namespaces for tests: whether this machine can make some."""

from __future__ import annotations

import shutil
import subprocess


def why_none() -> str:
    """Why there can be no network namespaces with links between them here; empty if there can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    # One letter alone would be taken for a word of ip's.
    script = "ip link add v0 type veth peer name w0 && ip link add br0 type bridge && unshare -n true"
    tried = subprocess.run(["unshare", "-Urn", "sh", "-c", script], capture_output=True, text=True)
    return f"network namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else ""

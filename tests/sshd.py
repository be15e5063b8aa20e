"""Hosts for tests, reached by real ssh: OpenSSH servers on loopback, each with a home of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from leaks import MARKER, wait_until
from workers import free_port as free_port

_SERVER = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_PRIVSEP = Path("/run/sshd")


def why_none() -> str:
    """Return why there can be no ssh hosts here; empty if there can."""
    if _SERVER is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        return "OpenSSH's server and client are not installed; run .ci/install-sshd"
    if not _PRIVSEP.exists() and os.getuid():
        return f"{_PRIVSEP} does not exist, and only root can make it"
    return ""


class SSHHosts:
    """Servers on loopback, and a configuration of the client by which they are hosts ``node1``, ``node2``...

    Args:
        folder: for keys, homes and logs.
        count: the number of hosts.
    """

    def __init__(self, folder: Path, count: int = 2) -> None:
        if not os.getuid():
            _PRIVSEP.mkdir(mode=0o755, exist_ok=True)
        self.folder = folder
        self.config = str(folder / "config")
        self.servers: list[subprocess.Popen[bytes]] = []
        self.ports: list[int] = []
        for name in ("host_key", "id", "other_id"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        self._entries = [
            f"Host * !stranger\n  IdentityFile {folder}/id\n"
            f"Host *\n  HostName 127.0.0.1\n  User {_user()}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n  LogLevel ERROR\n"
        ]
        for _ in range(count):
            self.add()

    def add(self, prefix: Sequence[str] = (), entry: str = "", **settings: str) -> str:
        """Start one more server, and return the name of its host.

        Args:
            prefix: a command to start it under.
            entry: more lines for its entry of the client's configuration.
            settings: of the server.
        """
        number = len(self.servers) + 1
        home, port = self.folder / f"home{number}", free_port()
        home.mkdir()
        # What runs there is told from other processes of the machine, as all that a test starts.
        env = {
            "HOME": str(home),
            MARKER: os.environ[MARKER],
            "XDG_RUNTIME_DIR": os.environ["XDG_RUNTIME_DIR"],
            "OMP_NUM_THREADS": "1",
        }
        known = {
            "Port": str(port),
            "ListenAddress": "127.0.0.1",
            "HostKey": f"{self.folder}/host_key",
            "AuthorizedKeysFile": f"{self.folder}/authorized_keys",
            "PidFile": "none",
            "StrictModes": "no",
            "PermitRootLogin": "yes",
            "SetEnv": " ".join(f"{key}={value}" for key, value in env.items()),
            **settings,
        }
        path = self.folder / f"sshd{number}.conf"
        path.write_text("".join(f"{key} {value}\n" for key, value in known.items()))
        assert _SERVER is not None
        log = self.folder / f"sshd{number}.log"
        log.touch()
        self.servers.append(
            subprocess.Popen([*prefix, _SERVER, "-D", "-f", str(path), "-E", str(log)], start_new_session=True)
        )
        self.ports.append(port)
        name = f"node{number}"
        self.name(name, f"  Port {port}\n{entry}")
        assert wait_until(lambda: "Server listening" in log.read_text(), 10), log.read_text()
        return name

    def name(self, name: str, entry: str) -> None:
        """Add an entry to the configuration of the client."""
        # The first value of a setting counts.
        self._entries.insert(0, f"Host {name}\n{entry}")
        Path(self.config).write_text("".join(self._entries))

    def close(self) -> None:
        """End the servers, and the sessions that they still serve."""
        for server in self.servers:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name

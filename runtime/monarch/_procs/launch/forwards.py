"""Ports that an ssh connection forwards, where no other connection is possible."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence

from monarch.exceptions import SpawnError

_PATIENCE_S = 15.0


class Forwards:
    """The forwarded ports of one connection. They end with it.

    Args:
        client: the ssh command with the control socket of the connection.
        host: the name of the host.
    """

    def __init__(self, client: Sequence[str], host: str) -> None:
        self._client = list(client)
        self._host = host

    def to_host(self, address: str) -> str:
        """Return the local address of a port of the host.

        Raises:
            SpawnError: the server does not allow it.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._run("-L", f"127.0.0.1:{port}:{address.removeprefix('tcp://')}")
        return f"tcp://127.0.0.1:{port}"

    def to_here(self, address: str) -> str:
        """Return the address on the host of a port of this machine.

        Raises:
            SpawnError: the server does not allow it.
        """
        port = self._run("-R", f"127.0.0.1:0:{address.removeprefix('tcp://')}").strip()
        if not port.isdecimal():
            raise SpawnError(
                f"host {self._host}: ssh printed no forwarded port (got {port!r}); set "
                f"AllowTcpForwarding yes in its sshd_config"
            )
        return f"tcp://127.0.0.1:{port}"

    def _run(self, kind: str, forward: str) -> str:
        command = [*self._client, "-O", "forward", kind, forward, "--", self._host]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SpawnError(f"host {self._host}: no answer to '{kind} {forward}' in {_PATIENCE_S:g} s") from error
        if done.returncode:
            why = done.stderr.strip() or f"code {done.returncode}"
            raise SpawnError(
                f"host {self._host}: ssh cannot forward {kind} {forward}: {why}; set AllowTcpForwarding yes in its "
                f"sshd_config, or omit 'reverse' if this machine can reach its ports directly"
            )
        return done.stdout

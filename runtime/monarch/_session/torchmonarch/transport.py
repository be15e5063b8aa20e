"""The choice of a transport by programs for torchmonarch: here each connection has the one that suits its two ends."""

from __future__ import annotations

import threading
from enum import Enum

from monarch.exceptions import ArgumentError


class ChannelTransport(Enum):
    """The transports of torchmonarch."""

    TcpWithLocalhost = "tcp-localhost"
    TcpWithHostname = "tcp"
    MetaTlsWithHostname = "metatls-hostname"
    MetaTlsWithIpV6 = "metatls"
    Tls = "tls"
    Local = "local"
    Unix = "ipc"


_SERVED = (ChannelTransport.Unix, ChannelTransport.TcpWithHostname, ChannelTransport.TcpWithLocalhost)
_lock = threading.Lock()
_chosen: ChannelTransport | str | None = None
"""Lock: ``_lock``."""


def enable_transport(transport: ChannelTransport | str) -> None:
    """Accept the transport that a program for torchmonarch chooses; it changes nothing.

    Processes of a machine are connected by Unix sockets and shared memory, and hosts by TCP, encrypted by CURVE.

    Args:
        transport: "ipc", "tcp", an address such as ``tcp://10.0.0.1:4444``, or the same as a ``ChannelTransport``.

    Raises:
        ArgumentError: the transport is not available here, as those of Meta's machines are not.
        RuntimeError: the program has chosen another one.
    """
    global _chosen
    names = {each.value: each for each in ChannelTransport}
    is_address = isinstance(transport, str) and transport.startswith("tcp://")
    chosen = transport if is_address or isinstance(transport, ChannelTransport) else names.get(transport)
    if not is_address and chosen not in _SERVED:
        raise ArgumentError(f"transport {transport!r} is not available here; choose 'ipc', 'tcp' or 'tcp://HOST:PORT'")
    with _lock:
        if _chosen not in (None, chosen):
            raise RuntimeError(f"this program already uses transport {_chosen!r} and cannot switch to {transport!r}")
        _chosen = chosen

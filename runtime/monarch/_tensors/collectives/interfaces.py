"""The network interface for collectives: the one whose address other hosts use for this one."""

from __future__ import annotations

import ipaddress
import os
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"

# Otherwise both libraries guess from the host name, which on many machines gives an unreachable address.
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface(address: str) -> None:
    """Make gloo and NCCL use the interface that has an address; variables that are already set stay."""
    name = interface_of(address)
    if name:
        for variable in _VARIABLES:
            if variable == "NCCL_SOCKET_IFNAME" and name == "lo":
                # Ranks of one host do not use sockets there, and NCCL may refuse the interface.
                continue
            # NCCL takes a name without = for the beginning of one, as of eth10 for eth1.
            os.environ.setdefault(variable, f"={name}" if variable == "NCCL_SOCKET_IFNAME" else name)


def interface_of(address: str) -> str:
    """Return the name of the interface with this IPv4 or IPv6 address, or of this host name, or an empty string."""
    known = _addresses(address)
    if not known:
        return ""
    # The common case, without the 15 ms that importing psutil takes in each rank.
    if all(_parsed(each).is_loopback for each in known):
        return "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else ""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] in known for each in addresses):
            return name
    return ""


def _addresses(address: str) -> set[str]:
    """Return the numeric addresses of an address; empty for an unknown host name."""
    # Looking up a numeric address imports the tables for host names, 5 ms in each rank.
    with suppress(ValueError):
        return {str(_parsed(address))}
    with suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(address, None)}
    return set()


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])

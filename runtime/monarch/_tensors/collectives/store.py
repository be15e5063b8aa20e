"""Rendezvous: a store that the first rank serves, at a port that the system chose."""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

# torch exports these without __all__.
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from monarch._tensors.collectives.name_lookups import no_name_lookups
from monarch.exceptions import GroupError

JOIN_SECONDS = 60.0
"""How long ranks wait for the others to join."""
_FIRST_TRY = 1.0
"""Seconds of the first try to connect; a broken group is noticed between tries."""
_STORE_SECONDS = 300.0
"""torch's default for requests to a store."""


def serve_store(address: str, clients: int) -> tuple[TCPStore, int]:
    """Serve a store at a free port of an address of this machine; the port is bound before any rank learns of it."""
    listener = socket.create_server((address, 0), backlog=max(128, clients))
    port = int(listener.getsockname()[1])
    with no_name_lookups(address):
        store = TCPStore(
            address,
            port,
            clients,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=JOIN_SECONDS),
            # The store owns it from now on.
            master_listen_fd=listener.detach(),
        )
    return store, port


def find_store(address: str, port: int, size: int, ended: Callable[[], str] = lambda: "") -> TCPStore:
    """Connect to the store that another rank serves.

    Args:
        address: the address of the machine that serves it.
        port: bound before this rank has learned of it.
        size: the number of ranks.
        ended: why the groups that need the store are broken; empty while they are not.

    Raises:
        GroupError: the groups are broken, the serving rank is gone, or nothing answered in time.
    """
    deadline, patience = time.monotonic() + JOIN_SECONDS, _FIRST_TRY
    while True:
        if reason := ended():
            raise GroupError(reason)
        store = _try_store(address, port, size, min(patience, max(_FIRST_TRY, deadline - time.monotonic())))
        if store is not None:
            break
        if time.monotonic() > deadline:
            raise GroupError(
                f"timed out after {JOIN_SECONDS:g} s connecting to the store of the process group at {address}:{port}; "
                f"check that its rank is running, and that the port is reachable"
            )
        # A slow machine gets more time at each try.
        patience *= 2
    # Connections are cut when groups break; one that is newer than the cut would wait for ranks that never come.
    if reason := ended():
        raise GroupError(reason)
    return store


def _try_store(address: str, port: int, size: int, seconds: float) -> TCPStore | None:
    """Connect to a store; return None if it does not answer in time."""
    try:
        # torch would retry where no server listens any more, and without the two descriptors that it needs.
        with socket.create_connection((address, port), timeout=seconds) as probe:
            probe.dup().close()
        with no_name_lookups(address):
            store = TCPStore(
                address,
                port,
                size,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=seconds),
            )
    except ConnectionRefusedError:
        raise GroupError(f"the rank that serves the store of the process group at {address}:{port} is gone") from None
    except (TimeoutError, dist.DistNetworkError):
        return None
    store.set_timeout(datetime.timedelta(seconds=_STORE_SECONDS))
    return store


def part_of(store: Store, number: int) -> Store:
    """Return the part of a store that belongs to one generation."""
    return PrefixStore(f"round {number}", store)


def meet(store: Store, rank: int, size: int, says: str, seconds: float = JOIN_SECONDS) -> list[str]:
    """Wait until all ranks have joined; return their entries by rank.

    Raises:
        GroupError: some did not join in time; it names them.
    """
    store.set(f"joined/{rank}", says)
    keys = [f"joined/{other}" for other in range(size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except dist.DistStoreError:
        missing = [other for other in range(size) if not store.check([keys[other]])]
        raise GroupError(
            f"ranks {missing} of {size} did not join the process group within {seconds:g} s: they are in code that "
            f"holds the GIL, have no file descriptors left, or cannot reach this rank; stop that code, then try again"
        ) from None
    # One round trip; a get for each key would cost n² of them in all.
    return [bytes(each).decode() for each in store.multi_get(keys)]

"""Rendezvous: a store that the first rank serves, at a port that the system chose."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from monarch._tensors.collectives.name_lookups import no_name_lookups
from monarch.exceptions import GroupError

JOIN_SECONDS = 60.0
"""How long ranks wait for the others to join."""


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


def find_store(address: str, port: int, size: int) -> TCPStore:
    """Connect to the store that another rank serves."""
    with no_name_lookups(address):
        return TCPStore(address, port, size, is_master=False, wait_for_workers=False)


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
            f"ranks {missing} of {size} did not join the process group within {seconds:g} s: they run code that "
            f"holds the GIL, or cannot reach this rank; stop it, then use the group again"
        ) from None
    # One round trip; a get for each key would cost n² of them in all.
    return [bytes(each).decode() for each in store.multi_get(keys)]

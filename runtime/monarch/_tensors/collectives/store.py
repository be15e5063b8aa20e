"""How ranks find each other: a store that the first of them serves, at a port that the system chose."""

from __future__ import annotations

import datetime
import socket

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from monarch._tensors.collectives.name_lookups import no_name_lookups
from monarch.exceptions import GroupError

JOIN_SECONDS = 60.0
"""How long those that are there wait for the others to join."""


def serve_store(address: str, clients: int) -> tuple[TCPStore, int]:
    """A store at a free port of an address of this machine, which is bound before anybody is told of it."""
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
    """The store that another rank serves."""
    with no_name_lookups(address):
        return TCPStore(address, port, size, is_master=False, wait_for_workers=False)


def part_of(store: Store, number: int) -> Store:
    """The part of a store that belongs to one round."""
    return PrefixStore(f"round {number}", store)


def meet(store: Store, rank: int, size: int, says: str, seconds: float = JOIN_SECONDS) -> list[str]:
    """Waits until all ranks are there; what each of them says of itself, by rank.

    Raises:
        GroupError: some did not come in time; it names them.
    """
    store.set(f"joined/{rank}", says)
    keys = [f"joined/{other}" for other in range(size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except dist.DistStoreError:
        missing = [other for other in range(size) if not store.check([keys[other]])]
        raise GroupError(
            f"ranks {missing} of {size} did not join the process group within {seconds:g} s: they are in code that "
            f"keeps Python's lock, or cannot reach this one; stop what they do, and use the group again"
        ) from None
    # One round trip; a get for each key would cost n² of them in all.
    return [bytes(each).decode() for each in store.multi_get(keys)]

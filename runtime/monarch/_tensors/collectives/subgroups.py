"""Process groups of some ranks, each with its own connection to the store.

``dist.new_group`` cannot create several at once. It names a group that only its members create by the number of groups
of a process, so ranks that have created others before wait for each other under different names. And all groups of a
process share one connection, which is locked while one of them waits: ranks in several groups that are created in
different orders would deadlock.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

# torch exports these without __all__.
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from monarch._tensors.torch_compat import make_group


def name_of_subgroup(ranks: Sequence[int], token: str) -> str:
    """Return the name of the group of some ranks, in torch's own format: backends derive keys and file names from it.

    Args:
        ranks: in the default group.
        token: the same on all members, and unique to the default group.
    """
    text = ",".join(map(str, sorted(ranks)))
    return hashlib.sha1(f"{token} {text}".encode(), usedforsecurity=False).hexdigest()


def make_subgroup(ranks: Sequence[int], backend: str, store: Store, token: str, timeout: datetime.timedelta) -> Any:
    """Create the group of some ranks of the default one, together with its other members.

    Args:
        ranks: in the default group, including this process.
        backend: as ``dist.new_group`` takes it.
        store: for the rendezvous of the members; a connection of its own.
        token: the same on all members, and unique to the default group.
        timeout: the timeout of its collectives.
    """
    members, name = sorted(ranks), name_of_subgroup(ranks, token)
    return make_group(members, dist.get_rank(), backend, PrefixStore(f"groups {token}", store), name, timeout)

"""Process groups of some ranks, each made over a connection of its own to the store.

``dist.new_group`` is no way to have several at once. It names a group that only its members make by how many groups a
process has, so that ranks which have made others before wait for each other under different names. And all groups of a
process share one connection, which is taken while one of them waits: ranks that are in several groups, and begin them
in different orders, would wait for each other in a circle.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from monarch._tensors.torch_compat import make_group


def make_subgroup(ranks: Sequence[int], backend: str, store: Store, token: str, timeout: datetime.timedelta) -> Any:
    """Makes the group of some ranks of the default one, together with its other members.

    Args:
        ranks: in the default group; this process is one of them.
        backend: as ``dist.new_group`` takes it.
        store: by which the members find each other; a connection that nobody else uses.
        token: the same on all members, and another one for each default group.
        timeout: of its collectives.
    """
    members = sorted(ranks)
    text = ",".join(map(str, members))
    # As torch's own names are: backends make keys and file names of it.
    name = hashlib.sha1(f"{token} {text}".encode(), usedforsecurity=False).hexdigest()
    return make_group(members, dist.get_rank(), backend, PrefixStore(f"groups {token}", store), name, timeout)

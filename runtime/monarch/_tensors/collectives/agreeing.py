"""The ranks of a process group show each other what they are about to call, by the store of the group.

The n-th collective of a group has a key for each rank. A rank waits until all have set theirs, reads them, and raises
if they do not agree. All ranks read the same, so all raise, and none has begun its collective.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

# torch exports these without __all__.
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from monarch._core.collective_calls import CollectiveCall, agree
from monarch._core.text.mismatch import describe_calls, describe_missing
from monarch._tensors.torch_compat import default_group, groups, store_of, timeout_of
from monarch.exceptions import CollectiveMismatchError, GroupError

_LOOK_S = 0.05
"""The most seconds between two looks for the other ranks."""
_SHARE = 0.1
"""Fraction of the time waited so far between two looks."""
_READERS_S = 10.0
"""The most seconds to wait until all have read."""
_PREFIX = "monarch checks"

on_left: list[Callable[[Any], object]] = []
"""Called with a group that a thread leaves before the other ranks have come. Set up before there is any."""
more_time: list[Callable[[float], float]] = []
"""Called with the timeout of a group that has ended, and returns how many seconds it continues. Set up likewise."""


@dataclass
class _Checked:
    """A process group whose collectives are checked."""

    store: Store
    begun: int = 0
    """Checks that this rank has begun."""


_lock = threading.Lock()
# Under the lock; no other code runs under it.
_checked: dict[Any, _Checked] = {}
_broken: dict[Any, str] = {}
"""By group, why its ranks are freed from it."""
_waiting: dict[int, Any] = {}
"""By thread in a check, the group for whose ranks it waits; None once all have come."""


def agree_all(group: Any, call: CollectiveCall) -> None:
    """Wait until all ranks of a group are about to call a collective, and raise if these do not agree.

    Raises:
        CollectiveMismatchError: they do not; on all ranks of the group.
        GroupError: this rank was freed from the wait.
        DistBackendError: ranks have not come within the timeout of the group.
    """
    with _lock:
        known = _checked.get(group)
    if known is None:
        store = store_of(group)
        if store is None:
            return
        known = _Checked(PrefixStore(_PREFIX, store))
        living = set(groups())
        with _lock:
            for each in [each for each in _checked if each not in living]:
                del _checked[each]
            known = _checked.setdefault(group, known)
    ident = threading.get_ident()
    with _lock:
        known.begun += 1
        number = known.begun
        _waiting[ident] = group
    try:
        _agree(group, known.store, number, call)
    finally:
        with _lock:
            _waiting.pop(ident, None)


def _agree(group: Any, store: Store, number: int, call: CollectiveCall) -> None:
    rank, size = int(group.rank()), int(group.size())
    keys = [f"{number}/{each}" for each in range(size)]
    try:
        _raise_if_broken(group)
        store.set(keys[rank], call.packed())
        _wait(group, store, keys, call)
        with _lock:
            # Nothing that happens to the other ranks changes what this one does.
            _waiting[threading.get_ident()] = None
        texts = [bytes(each).decode() for each in store.multi_get(keys)]
        calls = {place: CollectiveCall.unpacked(text) for place, text in enumerate(texts)}
    except dist.DistBackendError:
        _leave(group, store, keys[rank])
        raise
    except RuntimeError as error:
        _leave(group, store, keys[rank])
        # Connections are cut to free a rank.
        _raise_if_broken(group)
        raise GroupError(f"collectives of {_name(group)} cannot be checked: {error}") from error
    except BaseException:
        _leave(group, store, keys[rank])
        raise
    # All have read the check before this one.
    with contextlib.suppress(RuntimeError):
        store.delete_key(f"{number - 1}/{rank}")
    if not agree(calls):
        _wait_for_readers(store, [f"{key}/read" for key in keys], rank)
        raise CollectiveMismatchError(describe_calls(calls, dist.get_process_group_ranks(group), _name(group)))


def _wait(group: Any, store: Store, keys: list[str], call: CollectiveCall) -> None:
    seconds, begun = timeout_of(group), time.monotonic()
    # A wait in the store would hold its connection, and each one that times out is a warning of torch.
    while not store.check(keys):
        _raise_if_broken(group)
        waited = time.monotonic() - begun
        if waited > seconds and (more := max((each(seconds) for each in more_time), default=0.0)):
            begun = time.monotonic() - seconds + more
        elif waited > seconds:
            members = dist.get_process_group_ranks(group)
            missing = [members[place] for place, key in enumerate(keys) if not store.check([key])]
            if missing:
                raise dist.DistBackendError(describe_missing(call, missing, _name(group), seconds))
        time.sleep(min(_LOOK_S, waited * _SHARE))


def _wait_for_readers(store: Store, keys: list[str], rank: int) -> None:
    """Wait until all ranks have read what they called: the failure of one frees those that still wait for it."""
    with contextlib.suppress(RuntimeError):
        store.set(keys[rank], "")
        begun = time.monotonic()
        while not store.check(keys) and time.monotonic() - begun < _READERS_S:
            time.sleep(min(_LOOK_S, (time.monotonic() - begun) * _SHARE))


WAITS = _wait.__code__
"""Of the function in which a thread waits for the other ranks."""


def _leave(group: Any, store: Store, key: str) -> None:
    # A rank that comes later would take this one for present.
    with contextlib.suppress(RuntimeError):
        store.delete_key(key)
    for each in on_left:
        each(group)


def _raise_if_broken(group: Any) -> None:
    with _lock:
        reason = _broken.get(group)
    if reason is not None:
        raise GroupError(reason)


def free_checks(reason: str) -> None:
    """Free all threads of this process from checks, since the connections of its groups are cut."""
    with _lock:
        if not _checked:
            return
    now = groups()
    with _lock:
        for each in [each for each in _broken if each not in now]:
            del _broken[each]
        _broken.update(dict.fromkeys(now, reason))


def begin_again(renewed: list[Any]) -> None:
    """Check groups that have got new connections, and another store, from their first collective."""
    with _lock:
        for each in renewed:
            _checked.pop(each, None)
            _broken.pop(each, None)


def waits_for_ranks(ident: int) -> bool:
    """Return whether a thread waits for other ranks to call a collective of its group."""
    with _lock:
        return _waiting.get(ident) is not None


def has_read(ident: int) -> bool:
    """Return whether a thread is in a check to which all ranks have come."""
    with _lock:
        return ident in _waiting and _waiting[ident] is None


def is_checked_now(group: Any) -> bool:
    """Return whether a thread of this process is in a check of a group: its collective is not counted yet."""
    with _lock:
        return any(each is group for each in _waiting.values())


def _name(group: Any) -> str:
    if group is default_group():
        return "the default group"
    return f"the group of ranks {','.join(map(str, dist.get_process_group_ranks(group)))}"

"""States on disk, by torch.distributed.checkpoint: each rank writes its part; any layout can be read back.

Torch plans what each rank writes from the plans of all. Here plans travel in messages, not collectives, so ranks that
write need no process group, and a broken group does not stop the writing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import marshal
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from monarch._core.kinds import is_a, is_list, is_mapping
from monarch.exceptions import DeviceMeshError

Path = tuple[Any, ...]
"""Keys of dicts and indices of lists, outermost first."""
RANK = "@rank."
"""Prefix of a rank number: the rank's own table, for values stored by content."""


class StateCopy(DefaultSavePlanner):
    """A copy of a state in CPU memory, and the plan of what to write of it.

    Args:
        state: nested dicts and lists of tensors, DTensors and values that can be pickled. A top-level value that has
            ``state_dict`` and ``load_state_dict`` stands for its own state.

    Raises:
        ValueError: a part of it cannot be saved; the text begins with its key.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__()
        leaves = dict(leaves_of(states_in(state)))
        self._paths = {name: path for name, (path, _) in leaves.items()}
        self.mappings = {name: tuple(map(_torch_key, path)) for name, path in self._paths.items()}
        self.state_dict = {name: value for name, (_, value) in leaves.items()}
        self.is_coordinator = False
        self._copies: dict[MetadataIndex, Any] = {}
        self.abandoned = False
        """Whether the copy was abandoned."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            try:
                for item in self._items_of(name, value):
                    found = super().lookup_object(item.index)
                    self._copies[item.index] = _bytes(found) if item.type is WriteItemType.BYTE_IO else _copy(found)
                    items.append(item)
            except Exception as error:
                raise ValueError(
                    f"{name!r}, of type {type(value).__name__}, cannot be saved: {type(error).__name__}: {error}"
                ) from error
        # The tensors themselves belong to the actor, and may change from now on.
        self.state_dict = {}
        self._plan = SavePlan(items)

    def _items_of(self, name: str, value: Any) -> list[WriteItem]:
        if isinstance(value, torch.Tensor) and any(each.is_partial() for each in getattr(value, "placements", ())):
            raise ValueError("it has a Partial placement; redistribute it to Replicate or Shard first")
        return create_default_local_save_plan({name: value}, False).items

    def key_by_content(self, rank: int) -> None:
        """Key each unsharded value by its content: equal values of several ranks are stored once, and different ones
        separately, where torch would keep any one of them. A table maps a rank to its values."""
        names: dict[str, tuple[str, Path]] = {}
        items: list[WriteItem] = []
        copies: dict[MetadataIndex, Any] = {}
        for item in self._plan.items:
            name = key = item.index.fqn
            value = self._copies[item.index]
            if item.type is not WriteItemType.SHARD:
                key = f"{name}@{_digest(value)}"
                item = dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=key))
            names[name] = (key, self._paths[name])
            copies[item.index] = value
            items.append(item)
        # A rank without a part of a DTensor still knows it.
        names.update((name, (name, path)) for name, path in self._paths.items() if name not in names)
        table = create_default_local_save_plan({f"{RANK}{rank}": names}, False).items[0]
        copies[table.index] = _bytes(names)
        self._copies, self._plan = copies, SavePlan([*items, table])
        self.mappings = {item.index.fqn: (item.index.fqn,) for item in self._plan.items}

    def local_plan(self) -> bytes:
        """Return this rank's plan, to be merged with the others'."""
        return pickle.dumps(dataclasses.replace(self._plan, planner_data=self.mappings))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the data to write for an item."""
        if self.abandoned:
            raise DeviceMeshError("the checkpoint was abandoned")
        return self._copies[index]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Already done when the copy was made."""
        return object

    def write(self, plan: bytes, folder: str) -> bytes:
        """Write this rank's part into an existing folder and sync it to disk; return what was written."""
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}, created by the first rank, is not visible on {os.uname().nodename}; "
                f"a checkpoint of several hosts needs a path on a shared file system"
            )
        try:
            return pickle.dumps(_writer(folder).write_data(self.finish_plan(pickle.loads(plan)), self).wait())
        except Exception as error:
            # For a full disk, torch reports only that its file is shorter than it should be.
            cause = _of_the_disk(error)
            if cause is None:
                raise
            raise OSError(cause.errno, f"{cause.strerror} while writing to {folder}{self._room(folder)}") from error

    def _room(self, folder: str) -> str:
        """Describe the size of this copy and the free disk space, for an error."""
        size = sum(
            each.nbytes if isinstance(each, torch.Tensor) else len(each.getbuffer()) for each in self._copies.values()
        )
        try:
            disk = os.statvfs(folder)
        except OSError:
            return ""
        return f": this rank has up to {size:,} bytes to write; {disk.f_bavail * disk.f_frsize:,} bytes are free there"


class WholePlan:
    """Merge the plans of all ranks; for the first of them.

    Args:
        plans: one for each rank.

    Raises:
        ValueError: they do not fit together.
    """

    def __init__(self, plans: list[bytes]) -> None:
        planner = DefaultSavePlanner()
        try:
            made, self._metadata = planner.create_global_plan([pickle.loads(plan) for plan in plans])
        except (ValueError, AssertionError) as error:
            raise ValueError(
                f"the states of these {len(plans)} ranks are inconsistent: {error}; save a DTensor on all "
                f"ranks that hold a shard of it, and use a key for a tensor on all ranks or on none"
            ) from error
        self.plans = [pickle.dumps(plan) for plan in _writer("").prepare_global_plan(made)]
        """The plan of each rank."""

    def finish(self, results: list[bytes], folder: str) -> None:
        """Write the metadata for readers, once all ranks have written their parts."""
        written: list[list[WriteResult]] = [pickle.loads(each) for each in results]
        for rank, several in enumerate(written):
            for name in {each.storage_data.relative_path for each in several}:
                if not os.path.exists(os.path.join(folder, name)):
                    raise FileNotFoundError(
                        f"{name}, written by rank {rank}, is not visible in {folder} on {os.uname().nodename}; "
                        f"a checkpoint of several hosts needs a path on a shared file system"
                    )
        _writer(folder).finish(self._metadata, written)


def states_in(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a state with its top-level objects replaced by their states."""
    if not is_a(state, Mapping):
        raise ValueError(f"state: expected a dict of names to tensors and values, got {type(state).__name__}")
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def is_stateful(value: Any) -> bool:
    """Return whether an object has ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def leaves_of(state: Any, path: Path = ()) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """Yield the parts of a state by torch's names for them; a list without tensors or dicts is one part."""
    for key, value in _items(state):
        here = (*path, key)
        if has_parts(value):
            yield from leaves_of(value, here)
        else:
            yield ".".join(map(str, here)), (here, value)


def _items(state: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return state.items() if is_mapping(state) else enumerate(state)


def has_parts(value: Any) -> bool:
    """Return whether a value consists of parts with a name each: a dict, or a list with tensors."""
    if is_list(value):
        return any(isinstance(each, torch.Tensor) or has_parts(each) for each in value)
    return isinstance(value, Mapping)


def _torch_key(key: Any) -> Any:
    return key if isinstance(key, int) else str(key)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise ValueError("it is on the meta device and has no values")
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _bytes(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file


def _of_the_disk(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _digest(value: torch.Tensor | io.BytesIO) -> str:
    made = hashlib.blake2b(digest_size=16)
    if isinstance(value, torch.Tensor):
        made.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        made.update(value.view(-1).view(torch.uint8).numpy().data if value.numel() else b"")
        return made.hexdigest()
    value.seek(0)
    try:
        # Equal values have one form here, whereas a pickle also records which parts are the same object.
        made.update(marshal.dumps(torch.load(value, map_location="cpu", weights_only=False), 2))
    except ValueError:
        made.update(value.getbuffer())
    return made.hexdigest()


def _writer(folder: str) -> FileSystemWriter:
    # No more GPU copies are pending.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(False)
    return writer

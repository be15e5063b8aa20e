"""States on disk, by torch.distributed.checkpoint: what each rank has is written by it, and read in any layout.

Torch plans what each rank writes from what all of them have. Here the plans of the ranks are passed on by messages and
not by collectives, so ranks that write need no process group, and a group that breaks does not end the writing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import marshal
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from monarch.exceptions import DeviceMeshError

Path = tuple[Any, ...]
"""Keys of dicts and indices of lists, from the outside in."""
RANK = "@rank."
"""Before the number of a rank: its own table, where values are kept by content."""


class Copy(DefaultSavePlanner):
    """A copy of a state in memory of the CPU, and what is to be written of it.

    Args:
        state: nested dicts and lists of tensors, DTensors and values that can be pickled. A value at the top that has
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
        """Whether nobody wants it any more."""
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
        # The tensors themselves belong to the actor, and change from now on.
        self.state_dict = {}
        self._plan = SavePlan(items)

    def _items_of(self, name: str, value: Any) -> list[WriteItem]:
        if isinstance(value, torch.Tensor) and any(each.is_partial() for each in getattr(value, "placements", ())):
            raise ValueError("it is a partial sum on each rank; redistribute it first")
        return create_default_local_save_plan({name: value}, False).items

    def key_by_content(self, rank: int) -> None:
        """Gives each value that is not shared out a key with its content in it: equal ones of several ranks are kept
        once, and others apart, where torch would keep any one of them. A table says which of them a rank has."""
        names: dict[str, tuple[str, Path]] = {}
        items: list[WriteItem] = []
        copies: dict[MetadataIndex, Any] = {}
        for item in self._plan.items:
            name = key = item.index.fqn
            found = self._copies[item.index]
            if item.type is not WriteItemType.SHARD:
                key = f"{name}@{_digest(found)}"
                item = dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=key))
            names[name] = (key, self._paths[name])
            copies[item.index] = found
            items.append(item)
        # A rank that has no part of a DTensor knows it all the same.
        names.update((name, (name, path)) for name, path in self._paths.items() if name not in names)
        table = create_default_local_save_plan({f"{RANK}{rank}": names}, False).items[0]
        copies[table.index] = _bytes(names)
        self._copies, self._plan = copies, SavePlan([*items, table])
        self.mappings = {item.index.fqn: (item.index.fqn,) for item in self._plan.items}

    def local_plan(self) -> bytes:
        """What this rank has, to be put together with what the others have."""
        return pickle.dumps(dataclasses.replace(self._plan, planner_data=self.mappings))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written for an item."""
        if self.abandoned:
            raise DeviceMeshError("the checkpoint was given up")
        return self._copies[index]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """It was done when the copy was made."""
        return object

    def write(self, plan: bytes, folder: str) -> bytes:
        """Writes this rank's part into a folder that is there, and on to the disk; what it has written."""
        if not os.path.isdir(folder):
            raise FileNotFoundError(
                f"{folder}, which the first rank has made, is not seen from {os.uname().nodename}; "
                f"a checkpoint of several hosts goes to a folder that all of them share"
            )
        try:
            return pickle.dumps(_writer(folder).write_data(self.finish_plan(pickle.loads(plan)), self).wait())
        except Exception as error:
            # Torch says of a full disk only that its file is not as long as it should be.
            cause = _of_the_disk(error)
            if cause is None:
                raise
            raise OSError(cause.errno, f"{cause.strerror}, in writing to {folder}{self._room(folder)}") from error

    def _room(self, folder: str) -> str:
        """How many bytes this copy has, and how many the disk has left, for an error."""
        size = sum(
            each.nbytes if isinstance(each, torch.Tensor) else len(each.getbuffer()) for each in self._copies.values()
        )
        try:
            disk = os.statvfs(folder)
        except OSError:
            return ""
        return (
            f": this rank has up to {size:,} bytes to write, and {disk.f_bavail * disk.f_frsize:,} bytes are free there"
        )


class Whole:
    """What all ranks are to write, as the first of them knows it.

    Args:
        plans: what each has.

    Raises:
        ValueError: they do not fit together.
    """

    def __init__(self, plans: list[bytes]) -> None:
        planner = DefaultSavePlanner()
        try:
            made, self._metadata = planner.create_global_plan([pickle.loads(plan) for plan in plans])
        except (ValueError, AssertionError) as error:
            raise ValueError(
                f"the states of these {len(plans)} ranks do not make up a whole: {error}; a DTensor is saved by all "
                f"ranks that it is shared out over, and a key means a tensor on all ranks or on none"
            ) from error
        self.plans = [pickle.dumps(plan) for plan in _writer("").prepare_global_plan(made)]
        """What each is to write."""

    def finish(self, results: list[bytes], folder: str) -> None:
        """Writes what readers need, when all ranks have written their parts."""
        written: list[list[WriteResult]] = [pickle.loads(each) for each in results]
        for rank, several in enumerate(written):
            for name in {each.storage_data.relative_path for each in several}:
                if not os.path.exists(os.path.join(folder, name)):
                    raise FileNotFoundError(
                        f"{name}, which rank {rank} has written, is not in {folder} as {os.uname().nodename} sees it; "
                        f"a checkpoint of several hosts goes to a folder that all of them share"
                    )
        _writer(folder).finish(self._metadata, written)


def states_in(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state with those of the objects at its top in their place."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a state is a dict of names to tensors and values, and not {type(state).__name__}")
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state.items()}


def is_stateful(value: Any) -> bool:
    """Whether it is an object that gives its state and takes one."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def leaves_of(state: Any, path: Path = ()) -> Iterator[tuple[str, tuple[Path, Any]]]:
    """The parts of a state by the names that torch gives them; a list without tensors or dicts is one part."""
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        here = (*path, key)
        if _has_parts(value):
            yield from leaves_of(value, here)
        else:
            yield ".".join(map(str, here)), (here, value)


def _has_parts(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(each, torch.Tensor) or _has_parts(each) for each in value)
    return isinstance(value, Mapping)


def _torch_key(key: Any) -> Any:
    return key if isinstance(key, int) else str(key)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        raise ValueError("it has no memory yet")
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _bytes(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    return file


def _of_the_disk(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def _digest(found: torch.Tensor | io.BytesIO) -> str:
    made = hashlib.blake2b(digest_size=16)
    if isinstance(found, torch.Tensor):
        made.update(f"{found.dtype} {tuple(found.shape)} ".encode())
        made.update(found.view(-1).view(torch.uint8).numpy().data if found.numel() else b"")
        return made.hexdigest()
    found.seek(0)
    try:
        # Equal values have one form here, where a pickle tells also which parts are the same object.
        made.update(marshal.dumps(torch.load(found, map_location="cpu", weights_only=False), 2))
    except ValueError:
        made.update(found.getbuffer())
    return made.hexdigest()


def _writer(folder: str) -> FileSystemWriter:
    # Nothing is to be copied from a GPU any more.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(False)
    return writer

"""Restores: each rank reads the parts of a version that it needs, whatever layout it was written in."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from monarch._core.kinds import is_dict
from monarch._tensors.checkpoints.files import RANK, Path, is_stateful, leaves_of, states_in
from monarch.exceptions import ArgumentError

_SHOWN = 8
"""Keys that an error lists."""


class DamagedError(OSError):
    """A file of a checkpoint cannot be read.

    Args:
        text: what is wrong.
        changed: how many tensors had been read in place by then.
    """

    def __init__(self, text: str, changed: int = 0) -> None:
        super().__init__(text)
        self.changed = changed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.changed)


class Version:
    """A version on disk, read by this rank alone.

    Args:
        folder: its path.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            raise _damaged(folder, ".metadata cannot be read", error) from error
        self.known: dict[str, Any] = self._metadata.state_dict_metadata
        """Metadata of each key."""

    def tensor_size(self, key: str) -> torch.Size | None:
        """Return the size of a tensor; None for another value."""
        metadata = self.known[key]
        return metadata.size if isinstance(metadata, TensorStorageMetadata) else None

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
        """Return size and dtype of each tensor by key; None for other values."""
        return {
            key: (tuple(each.size), each.properties.dtype) if isinstance(each, TensorStorageMetadata) else None
            for key, each in self.known.items()
        }

    def paths(self) -> dict[str, Path]:
        """Return the keys of dicts and indices of lists that lead to each value, by its key."""
        mappings: dict[str, Path] = self._metadata.planner_data or {}
        return {key: tuple(mappings.get(key, (key,))) for key in self.known}

    def make(self, key: str, device: Any = "cpu") -> torch.Tensor:
        """Return an empty tensor to read one into."""
        metadata = self.known[key]
        return torch.empty(metadata.size, dtype=metadata.properties.dtype, device=device)

    def check(self, wanted: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        """Check that the wanted keys can be read, without reading them.

        Args:
            wanted: by key, the value to read into; anything for a value that is not a tensor.
            names: names of some keys in errors.

        Raises:
            ArgumentError: a key is missing, or has another size.
        """
        check_keys(self.folder, {key: self.tensor_size(key) for key in self.known}, wanted, names)

    def read(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Read the wanted keys: tensors into the given ones; other values are returned by key.

        Raises:
            DamagedError: a file is missing, too short, or cannot be read. Tensors are unchanged by the first two.
        """
        planner = _Planner()
        planner.state_dict = dict(wanted)
        planner.metadata = self._metadata
        plan = planner.create_local_plan()
        self._check_files(plan.items)
        self._reader.set_up_storage_reader(self._metadata, False)
        try:
            self._reader.read_data(plan, planner).wait()
        except Exception as error:
            raise _damaged(self.folder, "a file cannot be read", error, planner.changed) from error
        return planner.values

    def _check_files(self, items: Iterable[ReadItem]) -> None:
        """Check that the files are as long as they were, before a tensor is changed."""
        needed: dict[str, int] = {}
        for item in items:
            place = self._metadata.storage_data[item.storage_index]
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), place.offset + place.length)
        for name, size in needed.items():
            try:
                found = os.stat(os.path.join(self.folder, name)).st_size
            except OSError as error:
                raise _damaged(self.folder, f"{name} cannot be opened", error) from error
            if found < size:
                raise _damaged(self.folder, f"{name} is truncated: {found:,} of at least {size:,} bytes")

    def load(self, state: Any) -> None:
        """Read a state into another one, in place; top-level objects with ``load_state_dict`` get theirs.

        Raises:
            ArgumentError: a key of the state is missing, or has another size; then nothing was read.
        """
        parts = states_in(state)
        leaves = dict(leaves_of(parts))
        wanted = {name: value for name, (_, value) in leaves.items()}
        self.check(wanted)
        for name, value in self.read(wanted).items():
            put(parts, leaves[name][0], value)
        for key, value in state.items():
            if is_stateful(value):
                value.load_state_dict(parts[key])
            else:
                state[key] = parts[key]


def check_keys(
    folder: str,
    sizes: Mapping[str, torch.Size | None],
    wanted: Mapping[str, Any],
    names: Mapping[str, str] | None = None,
) -> None:
    """Check that the wanted keys can be read from a checkpoint.

    Args:
        folder: the folder of the checkpoint, for errors.
        sizes: the sizes of its tensors by key; None for another value.
        wanted: by key, the value to read into; anything for a value that is not a tensor.
        names: names of some keys in errors.

    Raises:
        ArgumentError: a key is missing, or has another size.
    """
    called = names or {}
    missing = [called.get(key, key) for key in wanted if key not in sizes]
    if missing:
        keys = [key for key in sizes if not key.startswith(RANK)]
        raise ArgumentError(
            f"the checkpoint {folder} has no {_list(map(repr, missing))}, which the state has; "
            f"it has {_list(map(repr, keys)) or 'nothing'}"
        )
    for key, value in wanted.items():
        size = sizes[key]
        name = called.get(key, key)
        if size is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"{name!r} is a tensor in the checkpoint {folder}, but {type(value).__name__} in the state"
            )
        if size != value.size():
            raise ArgumentError(
                f"{name!r} has size {tuple(size)} in the checkpoint {folder}, but {tuple(value.size())} in the state"
            )
        if value.is_meta:
            raise ArgumentError(f"{name!r} is on the meta device; call to_empty() on its model first")


class _Planner(DefaultLoadPlanner):
    """Read values where no part of the state has to be replaced for that."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.values: dict[str, Any] = {}
        self.changed = 0
        """How many parts of tensors were read."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Count a part of a tensor that was read in place."""
        self.changed += 1

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take a value."""
        where = None if torch.cuda.is_available() else "cpu"
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location=where, weights_only=False)


def _damaged(folder: str, what: str, error: Exception | None = None, changed: int = 0) -> DamagedError:
    # torch advises other options of its own function in the further lines.
    lines = f"{type(error).__name__}: {error}".splitlines() if error is not None else []
    why = f" ({lines[0]})" if lines else ""
    return DamagedError(f"the checkpoint {folder} is damaged: {what}{why}; restore another version of it", changed)


def put(state: Any, path: Path, value: Any) -> None:
    """Set a part of a state, creating missing dicts."""
    for key in path[:-1]:
        if is_dict(state) and key not in state:
            state[key] = {}
        state = state[key]
    state[path[-1]] = value


def _list(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more

"""Variables of cells on disk: what of a namespace is saved, and how it comes back into that of another rank.

Values mostly differ between the ranks of a notebook, so each rank has a table of its own. Values common to all ranks
are restored on any number of ranks, the others on the rank that had them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from monarch._core.kinds import class_of, is_mapping
from monarch._node.services.registry import service
from monarch._notebook.namespace import Namespace

if TYPE_CHECKING:
    from monarch._tensors.checkpoints.restores import Version

STATEFUL, TENSOR, VALUE = "by load_state_dict", "tensors", "values"
"""How a variable came back."""
_PLAIN = (int, float, complex, str, bytes, type(None))
Table = dict[str, tuple[str, tuple[Any, ...]]]
"""Of each part of a variable, as ``model.weight``, its key on disk and where in the variables it is."""


class NotRestored(ValueError):
    """A variable cannot come back; the text says why."""


@service("variables.take", "actor")
def take(namespace: Namespace, names: list[str]) -> dict[str, Any]:
    """Return the state of variables, to be saved.

    Args:
        namespace: the namespace of the rank.
        names: names of variables; none for all of the cells that are tensors, have a state or are plain values.

    Raises:
        NameError: this rank has no such variable.
    """
    from monarch._tensors.checkpoints.files import is_stateful

    variables = namespace.variables
    missing = [name for name in names if name not in variables]
    if missing:
        known = ", ".join(name for name, _ in namespace.names_of()) or "no variables"
        raise NameError(f"name {missing[0]!r} is not defined on rank {namespace.point.rank}, which has {known}")
    chosen = names or [name for name, _ in namespace.names_of() if _is_saved(variables[name])]
    # A tuple is one part, whatever is in it.
    return {
        name: value if is_stateful(value) or _is_tensor(value) else (value,)
        for name, value in ((name, variables[name]) for name in chosen)
    }


def _is_saved(value: Any) -> bool:
    from monarch._tensors.checkpoints.files import is_stateful

    return is_stateful(value) or _is_tensor(value) or _is_plain(value)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_plain(value: Any) -> bool:
    if is_mapping(value):
        return class_of(value) is dict and all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    if type(value) in (list, tuple, set):
        return all(_is_plain(each) for each in value)
    return isinstance(value, _PLAIN)


@service("variables.load", "actor")
def load(namespace: Namespace, folder: str, names: list[str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Bring variables back from a version.

    Args:
        namespace: the namespace of the rank.
        folder: the path of the version.
        names: names of variables; none for all that the version has.

    Returns:
        How each restored variable came back; why each other one did not, and is unchanged; and why some came back in
        part only.
    """
    from monarch._tensors.checkpoints.restores import DamagedError, Version

    try:
        version = Version(folder)
        table, apart = _table_of(version, namespace.point.rank)
    except DamagedError as error:
        return {}, dict.fromkeys(names or ["all variables"], str(error)), {}
    saved = {name.partition(".")[0] for name in (*table, *apart)}
    restored: dict[str, str] = {}
    failed: dict[str, str] = {}
    partly: dict[str, str] = {}
    for name in names or sorted(saved):
        try:
            if name not in saved:
                raise NotRestored(f"it is not in the checkpoint, which has {', '.join(sorted(saved)) or 'nothing'}")
            if any(_is_of(name, each) for each in apart):
                raise NotRestored("it differed between ranks, and this rank is not in the checkpoint")
            restored[name] = _restore(namespace, version, name, {k: v for k, v in table.items() if _is_of(name, k)})
        except DamagedError as error:
            (partly if error.changed else failed)[name] = str(error)
        except Exception as error:
            failed[name] = str(error) if isinstance(error, NotRestored) else f"{type(error).__name__}: {error}"
    return restored, failed, partly


def _is_of(name: str, part: str) -> bool:
    return part.partition(".")[0] == name


def _table_of(version: Version, rank: int) -> tuple[Table, set[str]]:
    """Return the table of a rank; for a new rank, the values common to all, and the names that differ."""
    from monarch._tensors.checkpoints.files import RANK

    tables = [key for key in version.known if key.startswith(RANK)]
    if not tables:
        raise NotRestored(f"{version.folder} was not written by %mesh checkpoint; monarch.restore reads it into actors")
    own = f"{RANK}{rank}"
    if own in tables:
        return version.read({own: None})[own], set()
    read: list[Table] = list(version.read(dict.fromkeys(tables)).values())
    names = {name for table in read for name in table}
    alike = {name for name in names if all(table.get(name) == read[0].get(name) for table in read)}
    return {name: read[0][name] for name in alike}, names - alike


def _restore(namespace: Namespace, version: Version, name: str, parts: Table) -> str:
    variables = namespace.variables
    if name not in parts:
        _restore_state(variables.get(name), version, name, parts)
        return STATEFUL
    key = parts[name][0]
    if version.tensor_size(key) is None:
        variables[name] = version.read({key: None})[key][0]
        return VALUE
    variables[name] = _restore_tensor(variables, version, name, key)
    return TENSOR


def _restore_tensor(variables: dict[str, Any], version: Version, name: str, key: str) -> Any:
    """Restore in place if a tensor of the same kind exists, since others, such as an optimizer, may refer to it."""
    import torch

    current = variables.get(name)
    known = version.known[key]
    if isinstance(current, torch.Tensor) and current.dtype == known.properties.dtype and current.shape == known.size:
        version.check({key: current}, {key: name})
        version.read({key: current})
        return current
    if key == name:
        raise NotRestored("it is a DTensor; run the cells that create it, then restore it")
    device = current.device if isinstance(current, torch.Tensor) else variables.get("device", "cpu")
    made = version.make(key, device)
    version.read({key: made})
    return made.requires_grad_(bool(known.properties.requires_grad))


def _restore_state(owner: Any, version: Version, name: str, parts: Table) -> None:
    from monarch._tensors.checkpoints.files import is_stateful, leaves_of
    from monarch._tensors.checkpoints.optimizers import is_optimizer, make_room
    from monarch._tensors.checkpoints.restores import put

    if not is_stateful(owner):
        raise NotRestored("no variable of that name has load_state_dict; run the cells that create it first")
    optimizer = is_optimizer(owner)
    if optimizer and not owner.state and any(path[1] == "state" for _, path in parts.values()):
        make_room(owner)
    state = {name: owner.state_dict()}
    leaves = dict(leaves_of(state))
    missing = {part: path for part, (path, _) in leaves.items() if part not in parts}
    if missing and not optimizer:
        raise NotRestored(f"the checkpoint has no {', '.join(list(missing)[:4])}")
    for path in missing.values():
        if path[1] == "state":
            # It has made more of it than there was at the time; options that are new since stay.
            del state[name]["state"][path[2]][path[3]]
    wanted: dict[str, Any] = {}
    for part, (key, _) in parts.items():
        value = leaves[part][1] if part in leaves else None
        if version.tensor_size(key) is not None and not hasattr(value, "dtype"):
            if key == part:
                raise NotRestored(f"{part} is a DTensor, and {name} has not allocated it yet")
            value = version.make(key)
        wanted[key] = value
    version.check(wanted, {key: part for part, (key, _) in parts.items()})
    wanted.update(version.read(wanted))
    for key, path in parts.values():
        put(state, path, wanted[key])
    owner.load_state_dict(state[name])

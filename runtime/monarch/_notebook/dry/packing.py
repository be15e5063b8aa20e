"""The variables that a cell uses, for a simulation of it: tensors travel without their values."""

from __future__ import annotations

import io
import pickle
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle

from monarch._node.services.registry import service
from monarch._wire.codes import DISPATCH_TABLE

if TYPE_CHECKING:
    from monarch._notebook.namespace import Namespace

_MOST = 64 << 20
"""Bytes of one variable, besides tensors."""
_known: dict[Any, Any] = {}
"""Memory of the tensors that are being unpacked, by its address on the rank."""


class Packed(NamedTuple):
    """The variables of a rank that a cell uses.

    Attributes:
        body: a pickle of them by name; empty for none.
        missing: why others did not come along, by name.
        device: the device for the simulation: "cpu", or the name of a GPU of the table.
    """

    body: bytes
    missing: dict[str, str]
    device: str


@service("dry.pack", "actor")
def pack(namespace: Namespace, source: str, name: str) -> Packed:
    """Return the variables of this rank that a cell uses.

    Args:
        namespace: the namespace of the rank.
        source: code of the cell.
        name: the name of the cell.
    """
    used = _names_in(compile(source, name, "exec"))
    variables = {key: value for key, value in namespace.variables.items() if key in used and not key.startswith("__")}
    for key in _own_names():
        variables.pop(key, None)
    missing: dict[str, str] = {}
    body = _dumped(variables)
    if isinstance(body, str):
        # Some of them cannot travel: find out which. Those that can stay together, since they share parts.
        for key in list(variables):
            reason = _dumped({key: variables[key]})
            if isinstance(reason, str):
                missing[key] = reason
                del variables[key]
        body = _dumped(variables)
    return Packed(body if isinstance(body, bytes) else b"", missing, _device())


def unpack(packed: Packed, own: dict[str, Any]) -> dict[str, Any]:
    """Return the variables as tensors without values.

    Args:
        packed: by ``pack``.
        own: names that each cell has, such as ``rank``.
    """
    _known.clear()
    try:
        variables: dict[str, Any] = pickle.loads(packed.body) if packed.body else {}
    finally:
        _known.clear()
    for value in list(variables.values()):
        for function in vars(value).values() if isinstance(value, type) else (value,):
            if isinstance(function, types.FunctionType) and function.__module__ == "__main__":
                function.__globals__.update(own)
    return {**variables, **own}


def _own_names() -> tuple[str, ...]:
    return "rank", "world_size", "device", "point", "mesh", "display", "torch", "dist"


def _names_in(code: types.CodeType) -> set[str]:
    found = {*code.co_names, *code.co_freevars}
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            found |= _names_in(each)
    return found


def _dumped(variables: dict[str, Any]) -> bytes | str:
    """Return a pickle, or why there is none."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(variables)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if file.tell() > _MOST:
        return f"it is too large: {file.tell() >> 20} MiB besides tensors"
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Leaves out the values of tensors."""

    dispatch_table = DISPATCH_TABLE

    # cloudpickle types it narrower than pickle does.
    def reducer_override(self, obj: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        import torch

        if not isinstance(obj, torch.Tensor):
            return super().reducer_override(obj)
        if type(obj) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"a {type(obj).__name__} has shards on other ranks; create it in the simulated cell")
        if obj.layout is not torch.strided:
            raise TypeError(
                f"expected strided tensors, got one of layout {obj.layout}; create it in the simulated cell"
            )
        if obj.grad_fn is not None:
            raise TypeError("expected a leaf tensor, got one that autograd computed; use detach()")
        storage = obj.untyped_storage()
        key = storage.data_ptr() or id(storage)
        return _made, (
            key, storage.nbytes(), obj.dtype, tuple(obj.shape), obj.stride(), obj.storage_offset(),
            isinstance(obj, torch.nn.Parameter), obj.requires_grad,
        )  # fmt: skip


def _made(
    key: int, size: int, dtype: Any, shape: Any, stride: Any, offset: int, is_parameter: bool, requires_grad: bool
) -> Any:
    import torch

    base = _known.get((key, dtype))
    if base is None:
        base = _known[key, dtype] = torch.empty(size // dtype.itemsize, dtype=dtype)
    tensor = base.as_strided(shape, stride, offset).detach()
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _device() -> str:
    """Return the name of the device of this rank in the table of devices."""
    import torch

    from monarch._engine.simulation.devices import DEVICES

    if not torch.cuda.is_available():
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    return next((each for each in DEVICES if each in name), "h100")

"""The private names of torch that are read from given tensors; torch itself is not imported here.

The others are in ``_tensors/torch_compat.py``, which is on a higher floor.
"""

from __future__ import annotations

from typing import Any


def has_hooks(tensor: Any) -> bool:
    """Return whether a tensor calls user functions in its backward pass."""
    return bool(tensor._backward_hooks)


def storage_key(storage: Any) -> int:
    """Return what identifies a live storage, also an empty one."""
    return storage._cdata


def untyped(storage: Any) -> Any:
    """Return the untyped storage below a typed one, without the warning that ``TypedStorage.untyped()`` gives."""
    return storage._untyped_storage


def stored_attribute(torch: Any, tensor: Any, name: str) -> Any:
    """Return an attribute of a tensor without the ``__torch_function__`` of its class."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(torch.Tensor, name).__get__(tensor)

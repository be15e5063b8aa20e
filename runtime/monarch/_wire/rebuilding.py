"""Make the tensors of a message again on arrival."""

from __future__ import annotations

from typing import Any

in_rank = False
"""Whether GPU tensors go to GPU memory on arrival, even if this process has not used the GPU yet."""


def itself(value: Any) -> Any:
    """Return the value itself."""
    return value


def make_storage(buffer: Any) -> Any:
    """Return a storage on a buffer, or on a copy of it if it is small or may not be written."""
    import torch

    if not len(buffer):
        return torch.UntypedStorage(0)
    if isinstance(buffer, bytearray):
        # From the body, so small: a copy in its own memory can be resized.
        return torch.frombuffer(buffer, dtype=torch.uint8).clone().untyped_storage()
    if memoryview(buffer).readonly:
        buffer = bytearray(buffer)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def make_tensor(
    storage: Any, dtype: Any, offset: int, size: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool
) -> Any:
    """Return a tensor on a storage."""
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, strides)
    if requires_grad:
        tensor.requires_grad_()
    return tensor


def goes_to_gpu() -> bool:
    """Return whether GPU tensors are put into GPU memory of this process on arrival."""
    import torch

    return torch.cuda.is_initialized() or (in_rank and torch.cuda.is_available())


def make_tied(first: Any, requires_grad: bool) -> Any:
    """Return a tensor with the memory of another one of its message."""
    made = first.detach()
    return made.requires_grad_() if requires_grad else made


def make_gpu_tensor(tensor: Any, requires_grad: bool) -> Any:
    """Return a tensor of a GPU, in GPU memory if this process uses that."""
    if goes_to_gpu():
        tensor = tensor.cuda()
    return tensor.requires_grad_() if requires_grad else tensor


def make_typed_storage(storage: Any, dtype: Any) -> Any:
    """Return a typed storage on an untyped one."""
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

"""Digests of numpy arrays and torch tensors, part by part: no copy is larger than a part.

Neither library is imported: a value of theirs exists only where it is imported already. All NaNs count as equal, and
zeros of different sign as different.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import prod
from typing import Any, cast

from monarch._core.digests.digest import RAW_BYTES, Digest

PART = 1 << 22
"""Maximum number of elements of a part."""
_PARTS = 64
"""Number of parts of an array that is not too large for that."""
_SMALL = 1 << 12
"""Minimum number of elements of a part that is not the last."""
_KINDS = "biufcmMUS"
"""Kinds of numpy dtypes whose bytes are the value."""


class UnknownContentsError(Exception):
    """The contents of a value cannot be read completely."""


def is_array(value: object) -> bool:
    """Return whether a value is an array, a tensor or a data frame of any library; False for numpy scalars."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, getattr(numpy, "generic", ())):
        return False
    kind = type(value)
    return hasattr(kind, "shape") and (hasattr(kind, "dtype") or hasattr(kind, "dtypes"))


def is_plain_array(value: object) -> bool:
    """Return whether a value is exactly a NumPy array or a torch tensor, not one of a subclass."""
    numpy = sys.modules.get("numpy")
    plain = type(value) in _plain_tensors(sys.modules.get("torch")) or is_nested(value)
    return plain or type(value) is getattr(numpy, "ndarray", None)


def is_nested(value: Any) -> bool:
    """Return whether a value is one of torch's nested tensors, of any layout."""
    kind = cast("type[object]", type(value))
    of_torch = kind.__module__.startswith("torch.nested.") or kind in _plain_tensors(sys.modules.get("torch"))
    return of_torch and getattr(value, "is_nested", False) is True


def digest_array(value: Any) -> Digest:
    """Return the digest of a numpy array or a torch tensor.

    Raises:
        UnknownContentsError: it is of a subclass, layout or dtype whose contents are not plain bytes.
    """
    if not is_plain_array(value):
        raise UnknownContentsError
    numpy = sys.modules.get("numpy")
    if type(value) is getattr(numpy, "ndarray", None):
        return _digest_ndarray(value, numpy)
    return _digest_tensor(value, sys.modules["torch"])


def plain_bytes(part: Any) -> Any:
    """Return a buffer with the contents of a part of a dense tensor or of an array of numbers; all NaNs are equal."""
    numpy = sys.modules.get("numpy")
    if type(part) is getattr(numpy, "ndarray", None):
        return _bytes_of_numbers(part, numpy)
    return _bytes_of(part, sys.modules["torch"])


def size_of(value: Any) -> int:
    """Return the bytes of the elements of an array or tensor; 0 if it does not say, as a sparse one."""
    try:
        return int(value.nbytes)
    except Exception:
        return 0


def _plain_tensors(torch: Any) -> tuple[type, ...]:
    # A module that another thread is still importing may lack a name.
    nn = getattr(torch, "nn", None)
    found = (getattr(torch, "Tensor", None), getattr(nn, "Parameter", None), getattr(nn, "Buffer", None))
    return tuple(each for each in found if isinstance(each, type))


# numpy


def _digest_ndarray(value: Any, numpy: Any) -> Digest:
    dtype = value.dtype
    form = f"ndarray {dtype.descr if dtype.names else dtype.str} {value.shape}"
    if dtype.names:
        fields = [_digest_ndarray(value[name], numpy).whole for name in dtype.names]
        return Digest(sha256("".join([form, *fields]).encode()).hexdigest())
    # Extended floats have bytes that belong to no number.
    if dtype.kind not in _KINDS or (dtype.kind == "f" and dtype.itemsize > 8) or dtype.itemsize > 16 * _SMALL:
        raise UnknownContentsError
    if dtype.kind == "c" and dtype.itemsize > 16:
        raise UnknownContentsError

    return _combine(form, dtype.itemsize, _parts(value), lambda part: _bytes_of_numbers(part, numpy))


def _bytes_of_numbers(part: Any, numpy: Any) -> Any:
    part = numpy.ascontiguousarray(part)
    if part.dtype.kind in "fc":
        numbers = part.view(part.real.dtype) if part.ndim else part.reshape(1).view(part.real.dtype)
        strange = numpy.isnan(numbers)
        if strange.any():
            part = numpy.where(strange, numpy.array(numpy.nan, numbers.dtype), numbers)
    return part.reshape(-1).view(numpy.uint8).data if part.size else b""


# torch


def _digest_tensor(value: Any, torch: Any) -> Digest:
    if value.is_nested:
        # Its shape may have a size that is only a symbol; the members have all of it.
        members = [_digest_tensor(each, torch).whole for each in value.detach().unbind()]
        return Digest(sha256("".join([f"nested {value.layout} {len(members)} ", *members]).encode()).hexdigest())
    form = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {value.device.type} {value.layout}"
    # Metadata of autograd is not a part of the value, and reading through it would record operations.
    value = value.detach()
    if value.device.type == "meta":
        return Digest(sha256(form.encode()).hexdigest())
    if value.is_quantized:
        form += _scale_of(value, torch)
        return _combine(form, value.element_size(), _parts(value), lambda part: _bytes_of(part.int_repr(), torch))
    if value.layout != torch.strided:
        members = [_digest_tensor(each, torch).whole for each in _members(value, torch)]
        return Digest(sha256("".join([form, *members]).encode()).hexdigest())
    return _combine(form, value.element_size(), _parts(value), lambda part: _bytes_of(part, torch))


def _scale_of(value: Any, torch: Any) -> str:
    """Return a text that tells how the integers of a quantized tensor are scaled."""
    if value.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return f" {value.qscheme()} {value.q_scale()!r} {value.q_zero_point()}"
    scales = [each.tolist() for each in (value.q_per_channel_scales(), value.q_per_channel_zero_points())]
    return f" {value.qscheme()} {value.q_per_channel_axis()} {scales}"


def _members(value: Any, torch: Any) -> list[Any]:
    """Return the strided tensors that a sparse one consists of."""
    if value.layout == torch.sparse_coo:
        if not value.is_coalesced():
            # Two such tensors may hold the same value in different ways, and a sum of duplicates is a new tensor.
            if value._values().nbytes > PART:
                raise UnknownContentsError
            value = value.coalesce()
        return [value.indices(), value.values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    raise UnknownContentsError


def _bytes_of(part: Any, torch: Any) -> Any:
    part = part.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    if part.is_complex():
        part = torch.view_as_real(part).reshape(-1)
    if part.is_floating_point():
        if part.element_size() == 1:
            # Few operations take 8-bit floats; wider ones hold them exactly.
            part = part.to(torch.float32)
        strange = torch.isnan(part)
        if bool(strange.any()):
            part = part.masked_fill(strange, float("nan"))
    return part.view(torch.uint8).numpy().data if part.numel() else b""


# Both


def _parts(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield consecutive parts in row-major order, by the shape alone, with their numbers of elements."""
    count = prod(value.shape)
    yield from _split(value, count, min(PART, max(_SMALL, -(-count // _PARTS))))


def _split(value: Any, count: int, most: int) -> Iterator[tuple[int, Any]]:
    if count <= most:
        yield count, value
        return
    row = count // value.shape[0]
    if row > most:
        for number in range(value.shape[0]):
            yield from _split(value[number], row, most)
        return
    step = most // row
    for start in range(0, value.shape[0], step):
        part = value[start : start + step]
        yield row * part.shape[0], part


def _combine(form: str, width: int, parts: Iterator[tuple[int, Any]], data_of: Callable[[Any], Any]) -> Digest:
    whole = sha256(form.encode())
    blocks: list[tuple[int, bytes]] = []
    raw = b""
    for count, part in parts:
        data = data_of(part)
        digest = sha256(data).digest()
        whole.update(digest)
        blocks.append((count, digest[:12]))
        if not raw and len(blocks) == 1 and len(data) <= RAW_BYTES:
            raw = bytes(cast("bytes", data))
    if len(blocks) > 1:
        raw = b""
    # Of 8-bit floats the bytes are those of wider ones.
    width = len(raw) // blocks[0][0] if raw and blocks[0][0] else width
    return Digest(whole.hexdigest(), form, width, tuple(blocks), raw)

"""Cheap fingerprints of tensors, computed where they are: sums of their bits, and whether they hold NaN or Inf."""

from __future__ import annotations

import sys
import zlib
from typing import Any

from monarch._core.kinds import class_of

_COLUMNS = 512
"""Words of a row. Bits are summed by column, and columns are weighted, so that moved values change the sum."""
_SMALL = 16 << 10
"""Bytes up to which a checksum of the whole is faster than sums."""
_SEED = 20261123
_weights: dict[Any, Any] = {}
"""By device; single dict operations, by the thread that trains."""


def mark_of(tensor: Any) -> Any:
    """Return the fingerprint of a tensor as an int64 scalar on its device; equal contents have equal ones.

    Args:
        tensor: dense; a copy is made if it is not contiguous.
    """
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().reshape(-1)
    octets = (torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    whole = octets.numel() // 8 * 8
    words, rest = octets[:whole].view(torch.int64), octets[whole:]
    weights = _weights_on(tensor.device)
    rows = words.numel() // _COLUMNS
    end = words[rows * _COLUMNS :]
    mark = (end * weights[: end.numel()]).sum()
    if rows:
        body = words[: rows * _COLUMNS].view(rows, _COLUMNS)
        mark = mark * 31 + (body.sum(0) * weights).sum()
    return mark * 31 + (rest * weights[: rest.numel()]).sum() if rest.numel() else mark


def number_of(tensor: Any) -> int:
    """Return the fingerprint of a tensor on the CPU; equal contents have equal ones."""
    torch: Any = sys.modules["torch"]
    octets = tensor.detach().reshape(-1)
    if octets.numel() * octets.element_size() > _SMALL:
        return int(mark_of(tensor))
    if octets.is_complex():
        octets = torch.view_as_real(octets.resolve_conj()).reshape(-1)
    return zlib.crc32(octets.view(torch.uint8).numpy())


def size_sum(tensor: Any) -> Any:
    """Return a float32 scalar on the device that is NaN or Inf if an element of a tensor is; Inf also beyond 1e19."""
    torch: Any = sys.modules["torch"]
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    if flat.dtype in (torch.float32, torch.float64) and flat.device.type == "cpu":
        # One pass, by BLAS.
        return torch.dot(flat, flat).to(torch.float32)
    return torch.linalg.vector_norm(flat.to(torch.float32) if flat.element_size() == 1 else flat, dtype=torch.float32)


def strangeness(tensor: Any) -> str:
    """Return ``NaN`` or ``Inf`` if a tensor has one, else an empty text; it waits for a GPU."""
    torch: Any = sys.modules["torch"]
    flat = tensor.detach()
    if bool(torch.isnan(flat).any()):
        return "NaN"
    return "Inf" if bool(torch.isinf(flat).any()) else ""


def local_part(tensor: Any) -> tuple[Any, bool]:
    """Return the part of a tensor that this rank has, and whether other ranks have other parts."""
    kind = class_of(tensor)
    if kind.__name__ == "DTensor":
        return tensor.to_local(), not all(each.is_replicate() for each in tensor.placements)
    # Of FSDP, which holds a part of several parameters.
    return tensor, kind.__name__ == "FlatParameter"


def _weights_on(device: Any) -> Any:
    torch: Any = sys.modules["torch"]
    found = _weights.get(device)
    if found is None:
        generator = torch.Generator().manual_seed(_SEED)
        odd = torch.randint(-(1 << 62), 1 << 62, (_COLUMNS,), generator=generator, dtype=torch.int64) * 2 + 1
        found = _weights[device] = odd.to(device)
    return found

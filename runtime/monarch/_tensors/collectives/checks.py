"""Checked collectives: ranks compare operation, shapes and dtypes before each, as torch does at debug level DETAIL.

torch wraps each process group created after that. A check is a collective of its own and takes milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed import DebugLevel, set_debug_level  # pyright: ignore[reportPrivateImportUsage]

# Imported here, so that the receiving thread is not the first to import it.
from monarch._tensors.collectives import waiting as waiting

_MISMATCH = re.compile(
    r"Rank (\d+) is running collective: CollectiveFingerPrint\((.*?)\), "
    r"but Rank (\d+) is running collective: CollectiveFingerPrint\((.*?)\)\.\s*Collectives differ",
    re.S,
)
_TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
          "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool"}  # fmt: skip


def check_collectives() -> None:
    """Make process groups created in this process from now on check their collectives."""
    set_debug_level(DebugLevel.DETAIL)


def describe_mismatch(error: BaseException) -> str:
    """Describe the mismatching collectives of ranks; empty if the error is of another kind."""
    found = _MISMATCH.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return ""
    own, other = _call(found[2]), _call(found[4])
    if own == other:
        return _uncounted(own, {int(found[1]): _number(found[2]), int(found[3]): _number(found[4])})
    # torch parses the data of another operation in its own format, so names are only right for equal operations.
    same = own[0] == other[0]
    sides = {int(found[1]): " ".join(own), int(found[3]): " ".join(other) if same else "another collective"}
    texts = [f"rank {rank} called {sides[rank]}" for rank in sorted(sides)]
    return f"ranks of a process group called mismatching collectives: {', '.join(texts)}; " + (
        "give all of them tensors of one shape and dtype" if same else "call the same one on all of them"
    )


def _uncounted(call: Sequence[str], numbers: dict[int, str]) -> str:
    """Describe equal calls that only differ in the number of operations that their ranks have begun before."""
    counts = ", ".join(f"rank {rank}: {numbers[rank]}" for rank in sorted(numbers))
    return (
        f"ranks of a process group called {' '.join(call)} after different numbers of operations ({counts}): some "
        f"ranks have skipped a collective, or have called send or recv, which torch's check counts as well; run "
        f"programs with send and recv without the check"
    )


def _number(fingerprint: str) -> str:
    found = re.search(r"SequenceNumber=(\d+)", fingerprint)
    return found[1] if found else "unknown"


def _call(fingerprint: str) -> tuple[str, ...]:
    """Return operation, shapes and dtypes, as far as known."""
    operation = re.search(r"OpType=(\w+)", fingerprint)
    shapes = re.search(r"TensorShape=\[(.*?)\](?=, TensorDtypes)", fingerprint)
    types = re.search(r"TensorDtypes=([\w, ]*?)(?=, TensorDeviceTypes)", fingerprint)
    texts = [operation[1].lower() if operation else "a collective"]
    if shapes:
        texts.append(f"of shape ({shapes[1]})")
    if types:
        texts.append("and dtype " + ", ".join(_TYPES.get(each, each) for each in types[1].split(", ")))
    return tuple(texts)

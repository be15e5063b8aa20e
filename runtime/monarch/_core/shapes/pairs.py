"""Pairs that iterating over a mesh of values yields; their errors name ``values()``."""

from __future__ import annotations

from typing import Any, NoReturn

_ADVICE = "iterating over a ValueMesh yields (point, value) pairs; use .values() for the values"


class Pair(tuple[Any, Any]):
    """A ``(point, value)`` pair. Operations on the value raise, and say how to get the values."""

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        __tracebackhide__ = True
        raise TypeError(_ADVICE)

    # Operators of a tuple that a pair refuses.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __rpow__ = _refuse
    # Likewise.
    __lt__ = __le__ = __gt__ = __ge__ = _refuse  # pyright: ignore[reportIncompatibleMethodOverride]
    __neg__ = __abs__ = __float__ = __int__ = _refuse

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be an array, which NumPy and Matplotlib ask for."""
        __tracebackhide__ = True
        raise TypeError(_ADVICE)

    def __getattr__(self, name: str) -> NoReturn:
        __tracebackhide__ = True
        raise AttributeError(f"a pair of a ValueMesh has no attribute {name!r}: {_ADVICE}")

    def __getitem__(self, key: Any) -> Any:
        __tracebackhide__ = True
        if isinstance(key, str):
            raise TypeError(f"a pair of a ValueMesh cannot be indexed by {key!r}: {_ADVICE}")
        return super().__getitem__(key)

    def __format__(self, spec: str) -> str:
        __tracebackhide__ = True
        if spec:
            raise TypeError(f"a pair of a ValueMesh cannot be formatted by {spec!r}: {_ADVICE}")
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pair, (tuple(self),)

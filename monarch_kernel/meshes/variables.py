"""Variables of cells, read and set in the notebook by name: ``mesh["x"]``, ``mesh.scatter("x", data)``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from monarch._kernel_api import CellVariables, Region, ValueMesh, current_node, state_of, view_at
from monarch.exceptions import ActorError, MonarchError, SerializationError
from monarch_kernel.grammar.arguments import Usage
from monarch_kernel.meshes.concatenating import is_plain, is_tensor, join
from monarch_kernel.meshes.deaths import naming_deaths
from monarch_kernel.meshes.mesh import Mesh
from monarch_kernel.meshes.variable_errors import explain, one_line, unpicklable


class NoVariable(MonarchError, KeyError):
    """Ranks have no such variable."""

    def __str__(self) -> str:
        return str(self.args[0])


# The name of the error that a dict raises.
NoVariable.__name__ = NoVariable.__qualname__ = "KeyError"


def provide_variables(mesh: Mesh) -> None:
    """Let the processes of a mesh be subscripted with names of variables."""
    current_node().part(CellVariables).by_uid[state_of(mesh.procs).procs.uid] = _Variables(mesh)


class _Variables:
    """The variables of one mesh.

    Args:
        mesh: from ``%mesh up``.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get(self, region: Region, name: str) -> ValueMesh[Any]:
        """Return the values of a variable."""
        with naming_deaths(self._mesh):
            try:
                return self._cells(region).pull.call(name).get()
            except ActorError as error:
                text = explain(self._mesh, error)
                if isinstance(error.exception, NameError):
                    raise NoVariable(text) from None
                raise Usage(f"{self._mesh.name}[{name!r}]: {text}") from None
            except SerializationError as error:
                raise Usage(unpicklable(error, f"{self._mesh.name}[{name!r}]")) from None

    def set(self, region: Region, name: str, value: Any) -> None:
        """Set a variable: to the same value on all ranks, or to those of a ValueMesh."""
        __tracebackhide__ = True
        cells = self._cells(region)
        if isinstance(value, ValueMesh):
            values = cast("ValueMesh[Any]", value).values()
            if len(values) != len(cells):
                raise ValueError(
                    f"{self._mesh.name}[{name!r}]: expected a ValueMesh of {len(cells)} values, got {len(values)}"
                )
            self._push(cells, name, values, f"[{name!r}]")
            return
        with naming_deaths(self._mesh), one_line(self._mesh, f"{self._mesh.name}[{name!r}]"):
            cells.push.call({name: value}).get()

    def scatter(self, region: Region, name: str, value: Any) -> None:
        """Set a variable to a part of a value on each rank."""
        __tracebackhide__ = True
        cells = self._cells(region)
        self._push(cells, name, split(value, len(cells)), f".scatter({name!r})")

    def gather(self, region: Region, name: str) -> Any:
        """Return the values of a variable, joined."""
        return join(list(self.get(region, name).values()))

    def _cells(self, region: Region) -> Any:
        return view_at(self._mesh.cells, region)

    def _push(self, cells: Any, name: str, values: list[Any], what: str) -> None:
        with naming_deaths(self._mesh), one_line(self._mesh, f"{self._mesh.name}{what}"):
            cells.push.call_each([{name: value} for value in values]).get()


def split(value: Any, count: int) -> list[Any]:
    """Split a value along its first dimension into parts whose sizes differ by 1 at most, the larger ones first.

    Raises:
        TypeError: it has no length, or no order.
    """
    __tracebackhide__ = True
    rows = getattr(value, "iloc", value)
    try:
        if is_tensor(value) and not is_plain(value):
            raise TypeError
        length = len(value)
        size, larger = divmod(length, count)
        bounds = [size * part + min(part, larger) for part in range(count + 1)]
        parts = [rows[start:end] for start, end in pairwise(bounds)]
    except (TypeError, KeyError):
        raise TypeError(
            f"scatter: expected a list, tuple, range, dense tensor, array or DataFrame, got {_kind(value)}"
        ) from None
    # A view of a tensor is sent with all of its storage.
    return [part.clone() if hasattr(part, "untyped_storage") else part for part in parts]


def _kind(value: Any) -> str:
    layout = str(getattr(value, "layout", "")).removeprefix("torch.") if is_tensor(value) else ""
    return f"{type(value).__name__} ({layout})" if layout not in ("", "strided") else type(value).__name__

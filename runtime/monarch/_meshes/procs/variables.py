"""Variables of cells on the ranks of a mesh, by name: ``mesh["x"]``. The notebook provides them."""

from __future__ import annotations

from keyword import iskeyword
from typing import TYPE_CHECKING, Any, Protocol

from monarch._core.kinds import is_a
from monarch._core.shapes.region import Region
from monarch._core.shapes.value_mesh import ValueMesh
from monarch._node.node import Node
from monarch.exceptions import MonarchError, StoppedError

if TYPE_CHECKING:
    from monarch._meshes.procs.state import ProcsState


class MeshVariables(Protocol):
    """The variables of one mesh."""

    def get(self, region: Region, name: str) -> ValueMesh[Any]: ...
    def set(self, region: Region, name: str, value: Any) -> None: ...
    def scatter(self, region: Region, name: str, value: Any) -> None: ...
    def gather(self, region: Region, name: str) -> Any: ...


class CellVariables:
    """The part of a node with the meshes whose ranks run cells."""

    def __init__(self, _: Node) -> None:
        self.by_uid: dict[str, MeshVariables] = {}
        """By uid of the processes. Single dict operations, by any thread."""


class HasVariables:
    """Mixin of process meshes: the variables of the cells that their ranks run."""

    if TYPE_CHECKING:
        _region: Region
        _state: ProcsState
        _node: Node

    __iter__: Any = None
    """Not iterable, though it can be subscripted."""

    def __getitem__(self, name: str) -> ValueMesh[Any]:
        """Return the variable of each rank.

        Args:
            name: the name of a variable that ``%%mesh`` cells have defined.

        Raises:
            KeyError: ranks have no such variable.
            MonarchError: the mesh is not one of ``%mesh up``.
        """
        __tracebackhide__ = True
        return self._variables(name, "[{!r}]").get(self._region, name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable of the cells: the same value on each rank, or from a ValueMesh of these ranks, its own."""
        __tracebackhide__ = True
        self._variables(name, "[{!r}]").set(self._region, name, value)

    def scatter(self, name: str, value: Any) -> None:
        """Split a value along its first dimension, and set a variable of the cells to a part on each rank.

        Args:
            name: the name of the variable.
            value: a list, tuple, range, dense tensor, array, Series or DataFrame. The sizes of the parts differ by 1 at
                most.

        Raises:
            TypeError: the value cannot be split.
        """
        __tracebackhide__ = True
        self._variables(name, ".scatter({!r})").scatter(self._region, name, value)

    def gather(self, name: str) -> Any:
        """Return the parts of all ranks joined along their first dimension: the inverse of ``scatter``.

        Values are joined only if that loses nothing. Others come as a list in rank order: numbers, arrays and tensors
        whose dtypes or other dimensions differ, sparse tensors, DTensors, and subclasses such as named tuples.
        """
        __tracebackhide__ = True
        return self._variables(name, ".gather({!r})").gather(self._region, name)

    def _variables(self, name: str, what: str) -> MeshVariables:
        __tracebackhide__ = True
        mesh = self._state.procs.name
        if not is_a(name, str):
            raise TypeError(
                f"{mesh}{what.format(name)}: expected the name of a variable; {mesh}.slice(...) selects ranks"
            )
        if not name.isidentifier() or iskeyword(name):
            raise TypeError(f"{mesh}{what.format(name)}: expected the name of a variable")
        if self._state.stopped is not None:
            raise StoppedError(
                f"{mesh}{what.format(name)}: this mesh has ended; %mesh lists the running ones, each in the "
                f"variable of its name",
                mesh=mesh,
            )
        variables = self._node.part(CellVariables).by_uid.get(self._state.procs.uid)
        if variables is None and self._node.hosts.in_rank:
            raise MonarchError(
                f"{mesh}{what.format(name)} works only in the notebook, and this code runs on a rank: use {name} "
                f"directly, or run it in a cell without %mesh and %%mesh"
            )
        if variables is None:
            raise MonarchError(
                f"{mesh}{what.format(name)}: the ranks of {mesh} run no cells; start a mesh with %mesh up in a "
                f"notebook, or spawn an actor and call its endpoints"
            )
        return variables

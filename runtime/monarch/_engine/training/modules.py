"""``module_to_mesh``: a module whose parameters and buffers are distributed tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from monarch._engine import wiring
from monarch._engine.dtensor_compat import resetter_of
from monarch._engine.layouts.specs import Placements, replicated
from monarch._engine.making import made_with_placements
from monarch._engine.meshes.tensor_mesh import TensorMesh, tensor_mesh_of
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.training.lazy import is_lazy, lazy_parts, move_when_run, put_in_place
from monarch._engine.training.plans import check_patterns, placements_for, split_plan
from monarch._engine.training.recurrent import run_by_steps
from monarch._engine.training.styles import apply_hooks, check_style, dim_of, sharded
from monarch._engine.values.distributing import distribute_to
from monarch._engine.values.redistribution import moved, to_placements
from monarch.exceptions import ArgumentError, AxisError

M = TypeVar("M", bound=nn.Module)

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Parts of names of modules that wrappers of torch add."""

wiring.wire()


def module_to_mesh(module: M, mesh: Any, plan: Any = "replicate", *, axis: str | None = None) -> M:
    """Move the parameters and buffers of a module to a mesh, in place, and return it.

    Gradients are combined over the mesh automatically, and are sharded as their parameters are; so is the state
    of an optimizer.

    Args:
        module: any module. Parameters that are shared stay shared. Those on the device ``meta`` are made on the ranks,
            by the ``reset_parameters`` of their modules; those of lazy modules move at the first call.
        mesh: a Mesh, or a mesh of processes or a slice of one.
        plan: ``"replicate"``: each rank has all parameters. ``"shard"``: each parameter is sharded over all ranks, and
            gathered when its module runs. ``"auto"``: ``"shard"`` for parameters of 65,536 elements or more. A dict:
            specs as for ``monarch.distribute``, or one of these names, by pattern of parameter names, such as
            ``{"*.up.weight": ["mp", None]}``; or styles of ``torch.distributed.tensor.parallel`` by pattern of module
            names, such as ``{"*.up": ColwiseParallel()}``. Others are replicated.
        axis: the axis along which parallel styles shard; by default the last one of the mesh.

    Raises:
        ArgumentError: the plan does not fit the module, or a module on ``meta`` has no ``reset_parameters``.
        AxisError: the mesh has no axis of a spec.
        DeviceMeshError: a rank has died.
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        raise ArgumentError(f"module: expected a torch.nn.Module, got {type(given).__name__}")
    target = tensor_mesh_of(mesh)
    _Mover(module, target, plan, _axis(target, axis)).run()
    return module


def _axis(mesh: TensorMesh, axis: str | None) -> int:
    if axis is not None and axis not in mesh.axes:
        raise AxisError(f"axis: the mesh has no axis {axis!r}; it has {', '.join(mesh.axes)}")
    return mesh.axes.index(axis) if axis is not None else len(mesh.axes) - 1


class _Mover:
    """Moves one module. Nothing is changed before the plan is checked."""

    def __init__(self, module: nn.Module, mesh: TensorMesh, plan: Any, axis: int) -> None:
        self._module, self._mesh, self._axis = module, mesh, axis
        self._plan, self._styles = split_plan(plan)
        self._known: dict[int, Any] = {}
        self._gathered: dict[int, list[str]] = {}

    def run(self) -> None:
        modules: dict[str, nn.Module] = dict(cast("Any", self._module.named_modules(remove_duplicate=False)))
        parameters = dict(_parameters(modules))
        check_patterns(self._plan, [*parameters], "parameter")
        check_patterns(self._styles, [_plain(name) for name in modules if name], "module")
        for pattern, style in self._styles.items():
            for name, each in modules.items():
                if fnmatchcase(_plain(name), pattern):
                    check_style(style, each, name)
        lazy = lazy_parts(modules)
        placed = {name: self._placements(modules, name, each) for name, each in parameters.items() if not is_lazy(each)}
        empty = [(name, each) for name, each in modules.items() if name not in lazy and _is_meta(each)]
        for name, each in empty:
            if resetter_of(each) is None:
                raise ArgumentError(
                    f"module_to_mesh: {name or type(each).__name__} ({type(each).__name__}) has tensors on the meta "
                    f"device but no reset_parameters() to initialize them; define it, or create it on a real device"
                )
        for prefix, part in modules.items():
            if prefix not in lazy:
                self._move(prefix, part, placed)
        for part in set(modules.values()):
            run_by_steps(part)
        with torch.no_grad():
            for _, each in dict((id(each), (name, each)) for name, each in empty).values():
                cast("Callable[[], Any]", resetter_of(each))()
        for prefix, part in dict((id(each), (name, each)) for name, each in lazy.items()).values():
            move_when_run(part, partial(self._move_late, modules, prefix, part))
        for pattern, style in self._styles.items():
            for name, each in modules.items():
                if fnmatchcase(_plain(name), pattern):
                    apply_hooks(style, each, self._axis)

    def _move_late(self, modules: Mapping[str, nn.Module], prefix: str, part: nn.Module) -> Any:
        """Move a lazy module, whose parameters have shapes now."""
        names = dict(_parameters({prefix: part}))
        placed = {name: self._placements(modules, name, each) for name, each in names.items()}
        return self._move(prefix, part, placed, in_place=True)

    def _placements(
        self, modules: Mapping[str, nn.Module], name: str, parameter: torch.Tensor
    ) -> tuple[Placements, bool]:
        placements, gathers = placements_for(self._plan or "replicate", self._mesh, name, parameter)
        owner, _, own = name.rpartition(".")
        for pattern, style in self._styles.items():
            if fnmatchcase(owner, pattern):
                part = next(each for whole, each in modules.items() if _plain(whole) == owner)
                return sharded(placements, self._axis, dim_of(style, part, own)), False
        return placements, gathers

    def _move(
        self, prefix: str, part: nn.Module, placed: dict[str, tuple[Placements, bool]], in_place: bool = False
    ) -> Any:
        """Move the own tensors of a module; return the hook that gathers them at each call, or None."""
        gathered: list[str] = []
        for full, parameter in _parameters({prefix: part}):
            name = full.rpartition(".")[2]
            if isinstance(parameter, Tensor):
                continue
            placements, gathers = placed[full]
            setattr(part, name, self._parameter(parameter, placements, in_place))
            if gathers:
                gathered.append(name)
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            if not isinstance(buffer, Tensor):
                setattr(part, name, self._buffer(buffer))
        return _gather_when_run(part, gathered) if gathered else None

    def _parameter(self, parameter: nn.Parameter, placements: Placements, in_place: bool) -> nn.Parameter:
        found = self._known.get(id(parameter))
        if found is None:
            made = nn.Parameter(self._moved(parameter, placements), requires_grad=parameter.requires_grad)
            if in_place:
                made = put_in_place(parameter, made)
            # The old one is kept too, so that no other gets its id.
            found = self._known[id(parameter)] = made, parameter
            if parameter.requires_grad:
                cast("Any", made).register_hook(_synchronizer(placements))
        return found[0]

    def _buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        found = self._known.get(id(buffer))
        if found is None:
            whole = placements_for("replicate", self._mesh, "", buffer)[0]
            found = self._known[id(buffer)] = self._moved(buffer, whole), buffer
        return found[0]

    def _moved(self, tensor: torch.Tensor, placements: Placements) -> Tensor:
        if tensor.is_meta:
            return made_with_placements(self._mesh, "empty", tuple(tensor.shape), tensor.dtype, placements, ())
        return distribute_to(self._mesh, tensor.detach(), placements)


def _parameters(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the own parameters of modules with their plain names, also of wrappers that hide themselves in names."""
    for prefix, part in modules.items():
        for name, each in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            yield (f"{_plain(prefix)}.{name}" if _plain(prefix) else name), each


def _plain(name: str) -> str:
    """Return the name of a module without wrappers of torch, such as that of ``checkpoint_wrapper``."""
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


def _is_meta(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return any(each.is_meta for each in own)


def _synchronizer(placements: Placements) -> Any:
    """Return a hook that combines a gradient once, where it arises, instead of at each use."""

    def synchronize(grad: torch.Tensor) -> torch.Tensor:
        if isinstance(grad, Tensor) and grad.monarch_layout.placements != placements:
            return moved(grad, placements)
        return grad

    return synchronize


def _gather_when_run(module: nn.Module, names: list[str]) -> Callable[[nn.Module, Any], None]:
    """Let a module see whole parameters while it runs; return the hook before a call."""

    def before(module: nn.Module, args: Any) -> None:
        for name in names:
            parameter: Any = dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)
            if parameter is None:
                # Pruning, or a parametrization, has put a result of other parameters in its place.
                continue
            # An attribute of the object comes before a parameter of the same name.
            module.__dict__[name] = to_placements(parameter, replicated(parameter.placements))

    def after(module: nn.Module, args: Any, result: Any) -> None:
        for name in names:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True)
    return before

"""All private names of torch that distributed tensors need, tested against the torch that is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor import _random as random_ops
from torch.distributed.tensor import _redistribute as redistributing
from torch.distributed.tensor import _utils as divisions
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.optim import _adafactor as adafactor_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _python_dispatch as dispatching
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "DTensorSpec",
    "DataDependentOutputException",
    "DispatchMode",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "adafactor_module",
    "check_of_linalg",
    "collectives_of_ranks",
    "collectives_on_shapes",
    "convert_modules_by",
    "cpu_attention",
    "dtensor_over",
    "efficient_attention",
    "fake_mode_of",
    "fake_store",
    "flash_attention",
    "forget_shardings",
    "functional_collectives",
    "fused_sgd",
    "group_of_name",
    "group_of_object",
    "inductor",
    "is_fake",
    "is_op",
    "is_parameter",
    "largest_of_each",
    "last_node",
    "lazy_conjugate",
    "lazy_negative",
    "lift_fresh",
    "local_scalar",
    "map_nodes",
    "memory_id",
    "mesh_without_groups",
    "no_torch_function",
    "onednn_is_enabled",
    "propagate",
    "quiet_inference",
    "resetter_of",
    "returns_view",
    "same_storage_numel",
    "schema_of",
    "seed_devices",
    "set_onednn",
    "shard_of_dtensor",
    "shard_sizes",
    "spec_for",
    "spec_of_dtensor",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "unscale",
    "view_in_place",
    "view_out_of_place",
    "watched_inference",
    "without_modes",
    "wrapper",
]

no_torch_function: Any = cast("Any", torch)._C._disabled_torch_function_impl
"""For a subclass of Tensor whose ops go straight to ``__torch_dispatch__``."""


local_scalar: Any = cast("Any", torch.ops.aten)._local_scalar_dense.default
"""The op behind ``item()``."""


_attention: Any = torch.ops.aten
cpu_attention = (
    _attention._scaled_dot_product_flash_attention_for_cpu.default,
    _attention._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
"""Attention on the CPU, and its gradients."""
efficient_attention: tuple[Any, Any] = (
    _attention._scaled_dot_product_efficient_attention.default,
    _attention._scaled_dot_product_efficient_attention_backward.default,
)
"""Attention on GPUs for any dtype but float64, and its gradients."""
flash_attention: tuple[Any, Any] = (
    _attention._scaled_dot_product_flash_attention.default,
    _attention._scaled_dot_product_flash_attention_backward.default,
)
"""Attention on GPUs for float16 and bfloat16, and its gradients."""
lazy_conjugate: Any = cast("Any", torch.ops.aten)._conj.default
"""Sets a bit of a tensor only."""
lift_fresh: Any = cast("Any", torch.ops.aten).lift_fresh.default
"""The op with which ``torch.tensor()`` makes its result."""
collectives_of_ranks: Any = functional
"""Functions for collectives, which return their results."""
unscale: Any = cast("Any", torch.ops.aten)._amp_foreach_non_finite_check_and_unscale_.default
"""The op of a GradScaler."""
largest_of_each: tuple[Any, ...] = (_attention._foreach_norm.Scalar, _attention._foreach_max.default)
"""Ops that reduce each tensor of a list."""
fused_sgd: tuple[Any, ...] = (_attention._fused_sgd_.default, _attention._fused_sgd_.tensor_lr)
"""The ops of SGD with ``fused=True``."""
check_of_linalg: Any = cast("Any", torch.ops.aten)._linalg_check_errors.default
"""Raises if an op of ``torch.linalg`` has failed."""
lazy_negative: Any = cast("Any", torch.ops.aten)._neg_view.default
"""Sets a bit of a tensor only."""
same_storage_numel: Any = cast("Any", torch.ops.aten)._has_same_storage_numel.default
"""An op of forward-mode autograd."""


def onednn_is_enabled() -> bool:
    """Return whether torch uses oneDNN on CPUs. ``torch.backends.mkldnn.flags`` also sets flags of other devices."""
    return bool(cast("Any", torch)._C._get_mkldnn_enabled())


def set_onednn(enabled: bool) -> None:
    """Let torch use oneDNN on CPUs, or not."""
    cast("Any", torch)._C._set_mkldnn_enabled(enabled)


def wrapper(cls: Any, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Any:
    """Return an instance of a subclass of Tensor without memory."""
    tensors: Any = torch.Tensor
    return tensors._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


def mesh_without_groups(device: str, ranks: Sequence[int], sizes: Sequence[int], axes: tuple[str, ...]) -> DeviceMesh:
    """Return a DeviceMesh that only tells how tensors are sharded."""
    return DeviceMesh(
        device,
        torch.tensor(list(ranks)).view(*sizes),
        mesh_dim_names=axes,
        _init_backend=False,
        _rank=ranks[0],
    )


def spec_for(mesh: DeviceMesh, placements: Any, shape: Any, stride: Any, dtype: torch.dtype) -> DTensorSpec:
    """Return torch's description of a sharded tensor."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def schema_of(op: Any) -> Any:
    """Return the schema of an op."""
    return op._schema


def returns_view(op: Any) -> bool:
    """Return whether the results of an op share memory with an argument that it does not change."""
    schema = getattr(op, "_schema", None)
    found = schema.returns if schema is not None else ()
    return any(each.alias_info is not None and not each.alias_info.is_write for each in found)


def overload_of(op: Any) -> str:
    """Return the name of the overload of an op."""
    return op._overloadname


def view_out_of_place(op: Any) -> Any:
    """Return the op that gives a view for one that changes a shape in place, such as ``squeeze`` for ``squeeze_``."""
    name = schema_of(op).name.partition("::")[2]
    packet = getattr(torch.ops.aten, name.rstrip("_"), None)
    return getattr(packet, overload_of(op), None) or getattr(packet, "int", None)


def view_in_place(op: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
    """Change the shape of a tensor without memory."""
    with no_dispatch():
        op(tensor, *args, **kwargs)


@contextmanager
def quiet_inference() -> Generator[None]:
    """Keep torch from logging the errors of shapes that it raises in a block."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


@contextmanager
def seed_devices(seed: int, mesh: Any) -> Generator[None]:
    """Seed the generators in a block, and restore them.

    Args:
        seed: from 0 to below 2**63.
        mesh: a mesh of GPUs, on which DTensor draws shards of a whole; None for the CPU.
    """
    if is_fake(torch.empty(0)):
        # Only shapes are computed.
        yield
        return
    devices = [torch.cuda.current_device()] if mesh is not None else []
    with cast("Any", torch.random).fork_rng(devices):
        if mesh is None:
            torch.default_generator.manual_seed(seed)
        else:
            random_ops.manual_seed(seed, mesh)
        yield


def fake_mode_of(tensor: torch.Tensor) -> Any:
    """Return the mode of a tensor that has a shape only; None for others."""
    return getattr(tensor, "fake_mode", None)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape only."""
    return isinstance(tensor, FakeTensor)


def propagate(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return how the results of an op are sharded.

    Args:
        op: a torch op.
        args: with a DTensorSpec for each tensor.
        kwargs: likewise.

    Returns:
        DTensorSpecs, nested as the results of the op; and whether the ranks move the first tensor to other placements
        first, so that the result of a view shares no memory with it.

    Raises:
        NotImplementedError: torch has no rule for the op.
    """
    propagator: Any = cast("Any", DTensor)._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    found = propagator.propagate_op_sharding_non_cached(OpSchema(op, args, kwargs, schema_info=info))
    moved = False
    if found.needs_redistribute and found.redistribute_schema is not None and args and isinstance(args[0], DTensorSpec):
        first: Any = found.redistribute_schema.args_schema[0]
        moved = isinstance(first, DTensorSpec) and first.placements != args[0].placements
    return found.output_spec, moved


def without_modes() -> Any:
    """Return a block whose ops no mode sees."""
    return cast("Any", dispatching)._disable_current_modes()


def forget_shardings() -> None:
    """Forget how ops run on sharded tensors: torch keeps it with a mesh, and takes a new mesh for the same one."""
    debugging: Any = debug
    transforms: Any = redistributing
    debugging._clear_sharding_prop_cache()
    transforms.clear_redistribute_planner_cache()
    transforms._gen_transform_infos.cache_clear()


def set_apart(mesh: Any, number: int) -> None:
    """Make torch distinguish a mesh from others of the same ranks, since it caches shardings by equal meshes.

    Args:
        mesh: a DeviceMesh that nobody has compared yet.
        number: at least 1, for meshes that may be equal to each other.
    """
    # Torch has it for tests in which threads stand for ranks; numbers of threads are positive.
    mesh._thread_id = -number
    mesh.__dict__.pop("_hash", None)


def shard_sizes(
    shape: Sequence[int], sizes: Sequence[int], coordinates: Sequence[int], placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and offsets of the shard of a tensor at a place of a mesh with these sizes."""
    inside: Any = divisions
    # torch computes some offsets with tensors, which no mode may see.
    with cast("Any", dispatching)._disable_current_modes():
        found = inside._compute_local_shape_and_global_offset(
            torch.Size(shape), tuple(sizes), list(coordinates), placements
        )
    return tuple(found[0]), tuple(found[1])


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, also one of a subclass of Tensor."""
    return isinstance(tensor, nn.Parameter)


def resetter_of(module: nn.Module) -> Callable[[], Any] | None:
    """Return the method that gives the tensors of a module their first values; None without one."""
    own: Any = module
    found = getattr(own, "reset_parameters", None)
    if found is None and isinstance(module, nn.MultiheadAttention | nn.Transformer):
        found = own._reset_parameters
    return found if callable(found) else None


def dtensor_over(shard: torch.Tensor, spec: Any) -> DTensor:
    """Return a DTensor of a shard, as torch describes it, without checks."""
    return cast("Any", DTensor)(shard, spec, requires_grad=False)


def shard_of_dtensor(tensor: Any) -> torch.Tensor:
    """Return the shard of this rank, outside of autograd; waits for its collective."""
    shard = tensor._local_tensor
    return shard.wait() if hasattr(shard, "wait") else shard


_spec_of = attrgetter("_spec")


def spec_of_dtensor(tensor: Any) -> Any:
    """Return torch's description of a DTensor."""
    return _spec_of(tensor)


DispatchMode: Any = dispatching.TorchDispatchMode
"""Base of a block that sees each op."""
truth_checks: dict[Any, Any] = {
    cast("Any", torch.ops).aten._is_all_true.default: torch.ops.aten.all.default,
    cast("Any", torch.ops).aten._is_any_true.default: torch.ops.aten.any.default,
}
"""Ops without a rule, which the checks of distributions use, and ops that compute the same."""
functional_collectives: Any = cast("Any", torch.ops)._c10d_functional
"""Collectives in graphs."""


def is_op(value: Any) -> bool:
    """Return whether a value is an op of torch, with a schema."""
    return isinstance(value, cast("Any", torch)._ops.OpOverload)


def memory_id(tensor: torch.Tensor) -> int:
    """Return the same number for tensors that share memory, also for those with a shape only."""
    return cast("Any", tensor.untyped_storage())._cdata


def map_nodes(arguments: Any, function: Any) -> Any:
    """Return arguments of a node of a graph with other leaves."""
    return cast("Any", fx).node.map_aggregate(arguments, function)


def inductor(module: Any, examples: list[Any]) -> Any:
    """Return a graph as compiled by inductor."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, examples)


@contextmanager
def watched_inference(begin: Any, end: Any) -> Generator[None]:
    """Call functions in a block around torch's inference of whole shapes, which runs ops on tensors without memory."""
    propagator: Any = cast("Any", DTensor)._op_dispatcher.sharding_propagator
    infer = propagator._propagate_tensor_meta_non_cached

    def watched(schema: Any) -> Any:
        begin()
        try:
            return infer(schema)
        finally:
            end()

    propagator._propagate_tensor_meta_non_cached = watched
    try:
        yield
    finally:
        del propagator._propagate_tensor_meta_non_cached


def fake_store() -> Any:
    """Return the store of process groups that send nothing."""
    return FakeStore()


def collectives_on_shapes() -> None:
    """Let collectives of torch.distributed run on fake tensors."""
    import torch.distributed._tools.fake_collectives as registered

    del registered


def convert_modules_by(function: Any) -> None:
    """Let a function of this process convert the tensors of modules, as for ``Module.to``."""
    module: Any = nn.Module
    module._apply = function


def group_of_object(value: Any) -> Any:
    """Return the process group that an op got; None for another value."""
    try:
        return cast("Any", dist.ProcessGroup).unbox(value) if isinstance(value, torch.ScriptObject) else None
    except (RuntimeError, TypeError):
        return None


def group_of_name(name: str) -> Any:
    """Return the process group of a name; None if there is none."""
    groups: Any = dist.distributed_c10d
    try:
        return groups._resolve_process_group(name)
    except (RuntimeError, ValueError, KeyError):
        return None


def last_node(graph: Any) -> Any:
    """Return the newest node of a graph that is being made."""
    return graph._root._prev

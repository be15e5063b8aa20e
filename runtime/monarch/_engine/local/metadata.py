"""Metadata of the results of an op on rank-local tensors, inferred once for each signature, on fake tensors."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from monarch._engine.dispatching.metadata import OpEffect, failing_of, info_of, put, results_of, writes_of
from monarch._engine.dtensor_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    quiet_inference,
    schema_of,
)
from monarch._engine.issuing.encoding import Template, op_name
from monarch._engine.layouts.rank_layout import RankLayout, layout_of
from monarch.exceptions import MeshOpError

if TYPE_CHECKING:
    from monarch._engine.meshes.tensor_mesh import TensorMesh

_ANY = 0.5
"""Stands for numbers with a fraction, as in dispatching/metadata.py."""


class _Fakes(threading.local):
    """The mode of all fake tensors of a thread, which may meet in one function: torch's modes serve one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.mode: Any = FakeTensorMode()


_fakes = _Fakes()


def fake_mode() -> Any:
    """Return a block in which torch makes fake tensors."""
    return _fakes.mode


def fake(layout: RankLayout) -> Any:
    """Return a fake tensor, in a block of ``fake_mode``."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.mesh.device)


def rank_plan(
    mesh: TensorMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: list[RankLayout], stream: int
) -> OpEffect:
    """Return what an op does.

    Args:
        mesh: the mesh of its tensors.
        op: a torch op.
        args: with Inputs and Values; nested in lists.
        kwargs: likewise.
        layouts: the layouts of the tensors.
        stream: number of the stream that runs it; 0 for the main one.

    Raises:
        MeshOpError: the shapes of its results depend on values.
    """
    __tracebackhide__ = True
    schema = schema_of(op)
    writes = writes_of(schema, args, kwargs)
    outputs = _infer(op, args, kwargs, layouts)
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    changed = tuple(sorted(set(writes.values())))
    failing = failing_of(schema, changed, layouts)
    if stream or is_random:
        template = Template("rank_op", (), (op_name(op), list(args), stream, is_random), kwargs, failing)
    else:
        template = Template("aten", op_name(op), args, kwargs, failing)
    results, form = _results(mesh, schema, outputs, writes)
    return OpEffect(mesh.stream.template(template), results, form, is_random, writes=changed, info=info_of(schema))


def _infer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: list[RankLayout]) -> Any:
    __tracebackhide__ = True
    try:
        with quiet_inference(), fake_mode():
            fakes = [fake(each) for each in layouts]
            given = [put(arg, fakes.__getitem__, _ANY) for arg in args]
            return op(*given, **{key: put(arg, fakes.__getitem__, _ANY) for key, arg in kwargs.items()})
    except DynamicOutputShapeException:
        raise MeshOpError(
            f"{op}: the shape of its result depends on values, which differ from rank to rank; call it in a function, "
            f"as in monarch.remote(function, propagate=...)"
        ) from None
    except DataDependentOutputException:
        raise MeshOpError(
            f"{op}: its result depends on values, which differ from rank to rank; call it in a function of "
            f"monarch.remote, or look at the value of one rank with monarch.inspect(tensor)"
        ) from None
    except Exception as error:
        # A mistake of the program, as in dispatching/metadata.py.
        raise error.with_traceback(None) from None


def _results(mesh: TensorMesh, schema: Any, outputs: Any, writes: dict[Any, int]) -> tuple[tuple[Any, ...], str]:
    returns = schema.returns
    if not returns:
        return (), "none"

    def result(made: Any, alias: Any) -> Any:
        index = None
        if alias is not None and alias.is_write:
            index = writes.get("".join(alias.before_set))
        if index is not None:
            return index
        return layout_of(mesh, made.shape, made.stride(), made.dtype) if isinstance(made, torch.Tensor) else None

    return results_of(returns, outputs, result)

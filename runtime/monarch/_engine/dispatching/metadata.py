"""Metadata of the results of an op, inferred once for each signature.

torch's own sharding propagation decides, over a mesh without process groups, as it does again on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from monarch._core.kinds import is_list, is_tuple
from monarch._engine.dtensor_compat import (
    DataDependentOutputException,
    DTensorSpec,
    DynamicOutputShapeException,
    FakeTensorMode,
    cpu_attention,
    propagate,
    quiet_inference,
    schema_of,
)
from monarch._engine.issuing.encoding import Input, Template, Value, op_name
from monarch._engine.layouts.layout import Layout
from monarch._engine.layouts.specs import is_replicated, replicated
from monarch.exceptions import MeshOpError, MonarchError

if TYPE_CHECKING:
    from monarch._engine.meshes.tensor_mesh import TensorMesh

aten: Any = torch.ops.aten
_FLOATS_MATTER = ("upsample", "interpolate", "_upsample", "linalg_vector_norm", "norm.", "_foreach_norm")
"""Ops whose sizes depend on numbers with a fraction, or how ranks combine their terms: the order of a norm."""
_ANY = 0.5
"""Stands for numbers with a fraction when metadata are inferred: allowed by ops that take a probability."""


class OpEffect(NamedTuple):
    """The effect of an op on metadata.

    Attributes:
        template: its number in the stream.
        results: for each result a Layout of a new tensor, the index of the input that it is, or None.
        form: "one", "list", "tuple" or "none": how the results are returned.
        is_random: whether its values come from a seed.
        is_view: whether its results share memory with its first tensor, to the program.
        is_copy: whether they do not on the ranks.
        writes: the inputs that it changes in place.
        info: the result that tells whether the others are right, as in ``torch.linalg``; -1 for none.
    """

    template: int
    results: tuple[Any, ...]
    form: str
    is_random: bool
    is_view: bool = False
    is_copy: bool = False
    writes: tuple[int, ...] = ()
    info: int = -1


class NoRuleError(Exception):
    """torch has no sharding rule for an op with these arguments; the text says why.

    Attributes:
        advice: what to do.
    """

    advice = "Give it whole values, as in tensor.replicate(), or fetch them with tensor.full_tensor()"


class ByValueError(NoRuleError):
    """The result of an op depends on values, also on whole ones."""

    advice = "Fetch the values with tensor.full_tensor(); torch.where(mask, a, b) and sums over a mask need no fetch"


def plan(mesh: TensorMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: list[Layout]) -> OpEffect:
    """Return what an op does.

    Args:
        mesh: the mesh of its tensors.
        op: a torch op.
        args: with Inputs and Values; nested in lists.
        kwargs: likewise.
        layouts: the layouts of the tensors.

    Raises:
        NoRuleError: torch has no rule, and some tensors are sharded.
    """
    __tracebackhide__ = True
    schema = schema_of(op)
    writes = writes_of(schema, args, kwargs)
    kind, outputs, moved = _infer(mesh, op, args, kwargs, layouts)
    random = torch.Tag.nondeterministic_seeded in op.tags and op not in cpu_attention
    if random:
        kind = "random" if kind == "aten" else "random_whole"
    changed = tuple(sorted(set(writes.values())))
    template = Template(kind, op_name(op), args, kwargs, failing_of(schema, changed, layouts))
    results, form = _results(mesh, op, outputs, writes, layouts)
    is_view = not changed and _is_view(schema)
    return OpEffect(
        mesh.stream.template(template), results, form, random, is_view, is_view and moved, changed, info_of(schema)
    )


def failing_of(schema: Any, changed: tuple[int, ...], layouts: Sequence[Any]) -> tuple[int, ...]:
    """Return the inputs that have no value if an op fails: those that it changes, and all if it only checks them."""
    return changed if changed or schema.returns else tuple(range(len(layouts)))


def info_of(schema: Any) -> int:
    """Return the index of the result that shows whether the others are right; -1 for none."""
    return next((at for at, each in enumerate(schema.returns) if each.name == "info"), -1)


def writes_of(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, int]:
    """Return the inputs that an op changes: by the alias of its schema, for lists by the positions of both."""
    writes: dict[Any, int] = {}
    for at, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[at] if at < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        names = "".join(argument.alias_info.before_set)
        if isinstance(given, Input):
            writes[names] = given.place
        elif is_list(given):
            for index, each in enumerate(given):
                if isinstance(each, Input):
                    # The schema may give all lists of an op one name.
                    writes[at, index] = each.place
    return writes


def _infer(
    mesh: TensorMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: list[Layout]
) -> tuple[str, Any, bool]:
    """Return the kind of the template, the specs of the results as torch nests them, and whether the first tensor is
    moved to other placements."""
    __tracebackhide__ = True
    try:
        return "aten", *_propagate(op, args, kwargs, layouts)
    except RuntimeError as error:
        if isinstance(error, MonarchError):
            raise
        # An error of the program, such as of shapes, is raised again here.
        _infer_whole(mesh, op, args, kwargs, layouts)
        if all(is_replicated(layout.placements) for layout in layouts):
            return "local", _infer_whole(mesh, op, args, kwargs, layouts), False
        raise NoRuleError(str(error).partition("\n")[0]) from error
    except NoRuleError as error:
        # Errors of the program come first, even if torch's rule did not expect them.
        whole = _infer_whole(mesh, op, args, kwargs, layouts)
        if not all(is_replicated(layout.placements) for layout in layouts):
            raise error from None
        return "local", whole, False


def _propagate(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: list[Layout]) -> tuple[Any, bool]:

    def spec(index: int) -> DTensorSpec:
        return layouts[index].spec

    given = tuple(put(arg, spec, _ANY) for arg in args)
    try:
        with quiet_inference():
            return propagate(op, given, {key: put(arg, spec, _ANY) for key, arg in kwargs.items()})
    except NotImplementedError as error:
        raise NoRuleError(str(error)) from error
    except DynamicOutputShapeException as error:
        raise ByValueError("the shape of its result depends on values") from error
    except DataDependentOutputException as error:
        raise ByValueError("its result depends on values") from error
    except RuntimeError:
        raise
    except Exception as error:
        # A rule that does not expect such arguments.
        raise NoRuleError(f"torch's sharding rule failed: {type(error).__name__}: {error}") from error


def _infer_whole(
    mesh: TensorMesh, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: list[Layout]
) -> Any:
    """Return the specs of the results of an op that each rank runs on whole values."""
    __tracebackhide__ = True
    whole = replicated(tuple(layouts[0].placements))
    try:
        with quiet_inference(), FakeTensorMode():
            fakes = [
                torch.empty_strided(each.shape, each.stride, dtype=each.dtype, device=mesh.device) for each in layouts
            ]
            given = [put(arg, fakes.__getitem__, _ANY) for arg in args]
            made = op(*given, **{key: put(arg, fakes.__getitem__, _ANY) for key, arg in kwargs.items()})
    except DynamicOutputShapeException as error:
        raise ByValueError("the shape of its result depends on values") from error
    except (NotImplementedError, DataDependentOutputException) as error:
        raise ByValueError(f"its result cannot be determined without values: {error}") from error
    except Exception as error:
        # A mistake of the program, such as of shapes: the frames of the inference say nothing about it.
        raise error.with_traceback(None) from None

    def spec(tensor: Any) -> Any:
        if isinstance(tensor, torch.Tensor):
            return mesh.layouts.of(tensor.shape, tensor.stride(), tensor.dtype, whole).spec
        if is_list(tensor):
            return [spec(each) for each in tensor]
        if is_tuple(tensor):
            return tuple(spec(each) for each in tensor)
        return None

    return spec(made)


def put(arg: Any, tensor: Any, number: Any) -> Any:
    if isinstance(arg, Input):
        return tensor(arg.place)
    if isinstance(arg, Value):
        return number
    if is_list(arg):
        return [put(each, tensor, number) for each in arg]
    return arg


def _results(
    mesh: TensorMesh, op: Any, outputs: Any, writes: dict[Any, int], layouts: list[Layout]
) -> tuple[tuple[Any, ...], str]:
    returns = schema_of(op).returns
    if not returns:
        return (), "none"

    def result(spec: Any, alias: Any) -> Any:
        index = None
        if alias is not None and alias.is_write:
            index = writes.get("".join(alias.before_set))
        if index is None:
            return mesh.layouts.of_spec(spec) if spec is not None else None
        if spec is not None:
            found = mesh.layouts.of_spec(spec)
            before = layouts[index]
            if found.placements != before.placements:
                raise MeshOpError(
                    f"{op} cannot change this tensor in place: its result has different placements, "
                    f"{found.placements} instead of {before.placements}; use the op that returns a new tensor"
                )
        return index

    return results_of(returns, outputs, result)


def results_of(returns: Any, outputs: Any, result: Callable[[Any, Any], Any]) -> tuple[tuple[Any, ...], str]:
    """Return ``result(output, alias)`` of each output of an op, and how torch nests them."""
    if len(returns) == 1 and str(returns[0].type).startswith("List"):
        return tuple([result(each, None) for each in outputs or ()]), "list"
    found: list[Any] = list(outputs) if is_tuple(outputs) or is_list(outputs) else [outputs] * len(returns)
    made = tuple([result(each, of.alias_info) for each, of in zip(found, returns, strict=True)])
    return made, "one" if len(returns) == 1 else "tuple"


def _is_view(schema: Any) -> bool:
    """Return whether the results of an op share memory with an argument that it does not change."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)


def floats_matter(op: Any) -> bool:
    """Return whether the metadata of an op depends on numbers with a fraction."""
    name = schema_of(op).name.partition("::")[2]
    return f"{name}.".startswith(_FLOATS_MATTER)

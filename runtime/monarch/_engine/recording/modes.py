"""Shows a recorder the functions and ops of torch that a step runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from monarch._engine.dtensor_compat import DispatchMode, tree_leaves, tree_map_only
from monarch._engine.local.tensor import RankTensor
from monarch._engine.recording.tape import Number
from monarch._engine.tensors.tensor import Tensor

_tensors: Any = torch.Tensor
_READS: set[Any] = {_tensors.tolist, _tensors.numpy, _tensors.__array__}
"""Functions that read a plain tensor without an op."""


class Functions(TorchFunctionMode):
    """Sees functions of torch with the arguments that the program gives.

    Args:
        recorder: a Recorder.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        kwargs = kwargs or {}
        if func is torch.Tensor.item and not isinstance(args[0], Tensor) and not recorder.inside:
            return recorder.values.item(args[0], func)
        if func in _READS and not isinstance(args[0], Tensor):
            recorder.values.read_whole(args[0])
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(each, Number) for each in leaves):
            return func(*args, **kwargs)
        if torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in leaves):
            recorder.refuse(
                f"autograd records a number that changes from call to call at {recorder.here()}\n"
                f"Pass it as a distributed tensor."
            )
        given: list[float] = []

        def token(number: Number) -> float:
            given.append(recorder.tokens.of(number))
            return given[-1]

        args, kwargs = tree_map_only(Number, token, (args, kwargs))
        result = func(*args, **kwargs)
        if recorder.tokens.unseen(given):
            name = getattr(func, "__name__", func)
            recorder.refuse(
                f"torch.{name} computes with a number that differs from call to call, in a way that cannot be "
                f"repeated, at {recorder.here()}\nPass the number as a distributed tensor."
            )
        return result


class Ops(DispatchMode):
    """Sees ops, of the mesh and of the program.

    Args:
        recorder: a Recorder.
    """

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        DispatchMode.__init__(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self._recorder
        kwargs = kwargs or {}
        if recorder.inside:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(isinstance(each, RankTensor) for each in tensors):
            recorder.local()
        if not any(isinstance(each, Tensor) for each in tensors):
            return recorder.values.run(func, args, kwargs)
        with recorder.mesh_op(tensors):
            return func(*args, **kwargs)

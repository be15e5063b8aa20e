"""Gives the class of rank-local tensors the functions that need it."""

from __future__ import annotations

from typing import Any

from monarch._engine.local.arguments import argument
from monarch._engine.local.checking import mixed
from monarch._engine.local.converting import assembled, to_local
from monarch._engine.local.dispatching import dispatch
from monarch._engine.local.looking import item
from monarch._engine.local.moving import to_mesh
from monarch._engine.local.reducing import reduce, reduce_
from monarch._engine.local.slicing import slice_mesh
from monarch._engine.local.streams import main
from monarch._engine.local.tensor import RankTensor, above
from monarch._engine.tensors.tensor import above as above_divided


def wire_local() -> None:
    """Complete the class of rank-local tensors; done before the first one is made."""
    above.dispatch = dispatch
    above.item = item
    above.argument = argument
    above.main = main
    above.reduce = reduce
    above.reduce_ = reduce_
    above.slice_mesh = slice_mesh
    above.to_mesh = to_mesh
    above_divided.to_local = to_local
    above_divided.assembled = assembled
    above_divided.to_mesh = to_mesh
    above_divided.refuse_mixed = _refuse_mixed


def _refuse_mixed(op: Any, types: Any) -> None:
    if RankTensor in types:
        raise mixed(op)

"""Gives the class of tensors the functions that need it."""

from __future__ import annotations

from monarch._engine.dispatching import dispatch
from monarch._engine.fetching import full_tensor
from monarch._engine.local.wiring import wire_local
from monarch._engine.ops.attention import register_attention
from monarch._engine.printing import describe
from monarch._engine.redistribution import redistribute
from monarch._engine.resilience.healing import heal_tensors
from monarch._engine.tensor import above
from monarch._engine.tensor_mesh import TensorMeshes
from monarch._engine.training.adafactor import register_adafactor
from monarch._engine.views.picture import picture


def wire() -> None:
    """Complete the class of tensors; done before the first one is made."""
    register_attention()
    register_adafactor()
    above.dispatch = dispatch
    above.full_tensor = full_tensor
    above.describe = describe
    above.picture = picture
    above.redistribute = redistribute
    TensorMeshes.heal = staticmethod(heal_tensors)
    wire_local()

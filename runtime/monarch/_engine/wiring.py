"""Gives the class of tensors the functions that need it."""

from __future__ import annotations

from monarch._engine.attention_rules import register_attention
from monarch._engine.dispatching.adafactor import register_adafactor
from monarch._engine.dispatching.dispatch import dispatch
from monarch._engine.local.wiring import wire_local
from monarch._engine.meshes.healing import heal_tensors
from monarch._engine.meshes.tensor_mesh import TensorMeshes
from monarch._engine.tensors.printing import describe
from monarch._engine.tensors.tensor import above
from monarch._engine.values.fetching import full_tensor
from monarch._engine.values.redistribution import redistribute
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

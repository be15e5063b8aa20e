"""Distributed tensors: one program, one tensor, every rank computes.

import monarch
from monarch.distributed import Mesh

mesh = Mesh(shape=(2, 2), mesh_dim_names=("dp", "mp"))
x = monarch.randn(1024, 1024, mesh=mesh, spec=["dp", None])
print((x @ x.T).sum().item())
"""

from __future__ import annotations

from monarch._engine.active import NoMesh, get_active_mesh, no_mesh
from monarch._engine.checkpoints.loading import load
from monarch._engine.checkpoints.saving import async_save, save
from monarch._engine.local.gradients import grad_function, grad_generator
from monarch._engine.local.looking import fetch_shard, inspect, show
from monarch._engine.local.moving import to_mesh
from monarch._engine.local.reducing import reduce, reduce_
from monarch._engine.local.remote import Remote, call_on_shard_and_fetch, remote
from monarch._engine.local.slicing import slice_mesh
from monarch._engine.local.streams import Borrow, Stream, get_active_stream
from monarch._engine.local.tensor import RankTensor
from monarch._engine.making import arange, distribute, empty, from_local, full, ones, rand, randn, zeros
from monarch._engine.mesh import Mesh
from monarch._engine.recording.compiling import Compiled, compile
from monarch._engine.recording.reports import Cost, CostRow, Graph
from monarch._engine.simulation.forecast import CollectiveRow, Forecast
from monarch._engine.simulation.simulate import simulate
from monarch._engine.tensors.tensor import Tensor
from monarch._engine.training.modules import module_to_mesh
from monarch._engine.values.fetching import fetch

__all__ = [
    "Borrow",
    "CollectiveRow",
    "Compiled",
    "Cost",
    "CostRow",
    "Forecast",
    "Graph",
    "Mesh",
    "NoMesh",
    "RankTensor",
    "Remote",
    "Stream",
    "Tensor",
    "arange",
    "async_save",
    "call_on_shard_and_fetch",
    "compile",
    "distribute",
    "empty",
    "fetch",
    "fetch_shard",
    "from_local",
    "full",
    "get_active_mesh",
    "get_active_stream",
    "grad_function",
    "grad_generator",
    "inspect",
    "load",
    "module_to_mesh",
    "no_mesh",
    "ones",
    "rand",
    "randn",
    "reduce",
    "reduce_",
    "remote",
    "save",
    "show",
    "simulate",
    "slice_mesh",
    "to_mesh",
    "zeros",
]

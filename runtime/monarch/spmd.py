"""Programs that were written for torchrun, on meshes of actors."""

from __future__ import annotations

from monarch._meshes.spmd import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async

__all__ = ["SPMDActor", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]

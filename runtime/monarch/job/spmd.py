"""Jobs that run a torchrun command, in the form of torchmonarch."""

from __future__ import annotations

from monarch._session.torchmonarch.spmd_job import SPMDJob, serve

__all__ = ["SPMDJob", "serve"]

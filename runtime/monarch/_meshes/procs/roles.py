"""Roles, for meshes whose ranks differ: some load data on the CPU, others train."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from monarch._core.kinds import is_a
from monarch.exceptions import ShapeError

_DEVICES = ("", "cpu", "cuda")


@dataclass(frozen=True)
class Role:
    """The settings that some ranks of each host share.

    Attributes:
        size: the number of ranks on each host.
        device: ``cpu`` to hide GPUs; empty for the default.
        env: environment variables on top of those of the mesh; None removes one.
    """

    size: int
    device: str = ""
    env: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def variables(self) -> dict[str, str | None]:
        """Return the environment variables of the role."""
        hidden: dict[str, str | None] = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        return {**hidden, **{key: None if value is None else str(value) for key, value in self.env.items()}}


def axes_of(per_host: Mapping[str, int] | None, roles: Mapping[str, Role] | None) -> Mapping[str, int] | None:
    """Return the axes of the processes of a host; raise ShapeError if the roles do not fit."""
    if not roles:
        return per_host
    for name, role in roles.items():
        if not is_a(role, Role) or not is_a(role.size, int) or role.size < 1 or role.device not in _DEVICES:
            raise ShapeError(
                f"roles[{name!r}]: expected a Role of at least 1 rank, such as Role(2, device='cpu'), got {role!r}"
            )
    count = sum(role.size for role in roles.values())
    if not per_host:
        return {"procs": count}
    if len(per_host) != 1 or prod(per_host.values()) != count:
        raise ShapeError(f"the roles have {count} ranks on each host, along one axis, but per_host is {dict(per_host)}")
    return per_host


def ranges_of(roles: Mapping[str, Role] | None) -> dict[str, range]:
    """Return the ranks of each role among those of one host."""
    ranges: dict[str, range] = {}
    begin = 0
    for name, role in (roles or {}).items():
        ranges[name] = range(begin, begin + role.size)
        begin += role.size
    return ranges


def environments(roles: Mapping[str, Role] | None, hosts: int, per_host: int) -> dict[int, dict[str, str | None]]:
    """Return the environment variables of roles, by base rank."""
    by_rank: dict[int, dict[str, str | None]] = {}
    for name, ranks in ranges_of(roles).items():
        variables = (roles or {})[name].variables()
        if variables:
            by_rank.update({host * per_host + local: variables for host in range(hosts) for local in ranks})
    return by_rank

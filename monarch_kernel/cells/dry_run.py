"""``%%mesh --dry-run``: a cell that is simulated: memory of a rank, collectives and time, on any number of devices."""

from __future__ import annotations

import re
import sys
from typing import Any

from monarch._kernel_api import (
    DEVICES,
    Packed,
    Rehearsal,
    SimulatedWorld,
    endpoint_of,
    forecast_here,
    member_at,
    pack_for_dry_run,
)
from monarch.actor import this_host
from monarch_kernel.grammar.header import Header, HeaderError
from monarch_kernel.source.cell import CellSource

_WORLD = re.compile(r"(?P<hosts>[1-9][0-9]{0,5})x(?P<gpus>[1-9][0-9]{0,5})(?::(?P<device>\w+))?")
_START_S = 60.0
"""Seconds for the process of a simulation to start."""
WITHOUT_MESH = SimulatedWorld(1, 8, "h100")
"""Devices without a mesh and ``--world``."""


class NotSimulatedError(HeaderError):
    """The cell cannot be simulated, or raises; the text says where."""


def world_of(header: Header, mesh_ranks: int | None, device: str) -> SimulatedWorld:
    """Return the devices of a simulation.

    Args:
        header: the header of the cell.
        mesh_ranks: ranks of the mesh; None without one.
        device: that of its ranks.

    Raises:
        HeaderError: ``--world`` is invalid.
    """
    if header.world is None:
        return WITHOUT_MESH if mesh_ranks is None else SimulatedWorld(1, mesh_ranks, device)
    found = _WORLD.fullmatch(header.world)
    if found is None:
        raise HeaderError(f"--world: expected hosts, GPUs and a device, as in 16x8:h100, got {header.world!r}")
    name = found["device"] or (device if device in DEVICES and device != "cpu" else WITHOUT_MESH.device)
    if name not in DEVICES:
        raise HeaderError(f"--world: expected one of {', '.join(DEVICES)} as the device, got {name!r}")
    return SimulatedWorld(int(found["hosts"]), int(found["gpus"]), name)


def dry_run(shell: Any, views: list[Any], header: Header, name: str, source: CellSource) -> None:
    """Simulate a cell, and show its forecast.

    Args:
        shell: the shell of the notebook.
        views: actors of the ranks that would run it, whose first one gives its variables; none without a mesh.
        header: the header of the cell.
        name: the name of the cell.
        source: the source of the cell.

    Raises:
        NotSimulatedError: it does something that shapes are not enough for, or raises.
    """
    packed = Packed(b"", {}, WITHOUT_MESH.device)
    # A wrong world is told before anything waits for ranks.
    world_of(header, None, packed.device)
    if views:
        (packed,) = endpoint_of(member_at(views[0], 0), pack_for_dry_run).call(source.code, name).get().values()
    world = world_of(header, sum(map(len, views)) or None, packed.device)
    procs = this_host().spawn_procs({"ranks": 1}, name="dry_run")
    try:
        procs.initialized.get(_START_S)
        rehearsal: Any = procs.spawn("rehearsal", Rehearsal)
        found = rehearsal.run.call_one(source.code, name, packed, world).get()
    finally:
        procs.stop()
    if found.output and not header.quiet:
        sys.stdout.write(found.output)
    if found.failure is not None:
        raise NotSimulatedError(_sentence(found.failure, packed, name, source))
    forecast = forecast_here(found)
    shell.user_ns["_mesh"] = forecast
    if header.out:
        shell.user_ns[header.out] = forecast
    if not header.quiet:
        shell.display_pub.publish({"text/plain": repr(forecast), "text/html": forecast.as_html()})


def _sentence(failure: Any, packed: Packed, name: str, source: CellSource) -> str:
    where, text = name, ""
    if failure.line is not None:
        lines = source.typed.splitlines()
        number: int = failure.line.number
        where = f"{name} line {number}"
        if number <= len(lines):
            text = f"\n    {lines[number - 1].strip()}"
    if failure.needs_values:
        return (
            f"{where} cannot be simulated, because it needs the values of tensors, and a dry run has only their "
            f"shapes{text}\n{failure.kind}: {failure.text}"
        )
    if failure.kind == "NameError":
        for each, reason in packed.missing.items():
            if f"'{each}'" in failure.text:
                return f"{where}: cannot simulate the variable {each!r} of the ranks: {reason}{text}"
    return f"{where} raises {failure.kind} in the simulation: {failure.text}{text}"

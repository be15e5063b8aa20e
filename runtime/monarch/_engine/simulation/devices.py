"""Figures of devices and links, from the data sheets of their makers."""

from __future__ import annotations

from typing import NamedTuple

from monarch.exceptions import ArgumentError


class Device(NamedTuple):
    """A device and its links.

    Attributes:
        name: as given to ``simulate``.
        memory: bytes.
        flops: floating point operations a second in 32 bits, as matrix products reach them.
        half_flops: the same in 16 bits.
        bandwidth: bytes a second of its memory.
        link: bytes a second to other devices of the host.
        network: bytes a second to other hosts, for each device.
    """

    name: str
    memory: float
    flops: float
    half_flops: float
    bandwidth: float
    link: float
    network: float


DEVICES = {
    each.name: each
    for each in (
        Device("a100", 80e9, 78e12, 312e12, 2.0e12, 300e9, 25e9),
        Device("h100", 80e9, 250e12, 990e12, 3.35e12, 450e9, 50e9),
        Device("h200", 141e9, 250e12, 990e12, 4.8e12, 450e9, 50e9),
        Device("b200", 180e9, 550e12, 2250e12, 8.0e12, 900e9, 50e9),
        Device("cpu", 64e9, 1e11, 1e11, 2e10, 1e10, 1e9),
    )
}
EFFICIENCY = 0.6
"""Share of the figures that ops reach."""
LATENCY = 10e-6
"""Seconds that each collective takes at least."""
LAUNCH = 3e-6
"""Seconds that each op takes at least."""


def device_of(name: str) -> Device:
    """Return a device by name.

    Raises:
        ArgumentError: it is not known.
    """
    found = DEVICES.get(name)
    if found is None:
        raise ArgumentError(f"device: expected one of {', '.join(DEVICES)}, got {name!r}")
    return found

"""Instruments in the form of OpenTelemetry, whose values are metrics of the mesh."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from monarch._node.current import has_node
from monarch._telemetry.metrics import log_metric
from monarch.exceptions import ArgumentError, MonarchError


class Instrument:
    """Logs its values as metrics, one for each combination of attributes; for any thread.

    Args:
        name: the name of the metric.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def log(self, value: float, attributes: Mapping[str, Any] | None) -> None:
        """Log a value; nothing happens while no mesh is running."""
        labels = ",".join(f"{key}={each}" for key, each in sorted((attributes or {}).items()))
        try:
            if has_node():
                log_metric(f"{self.name}[{labels}]" if labels else self.name, value)
        except ArgumentError:
            raise
        except MonarchError:
            # No mesh is running.
            return


class UpDownCounter(Instrument):
    """A sum to which amounts are added; its metric has the sum."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Held while the sum is logged too, so that its values are in order; no code of the user runs meanwhile.
        self._lock = threading.Lock()
        self._sums: dict[tuple[tuple[str, Any], ...], float] = {}

    def add(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Add an amount to the sum of these attributes."""
        key, amount = tuple(sorted((attributes or {}).items())), float(amount)
        with self._lock:
            self._sums[key] = total = self._sums.get(key, 0) + amount
            self.log(total, attributes)


class Counter(UpDownCounter):
    """A sum that only grows."""

    def add(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Add an amount to the sum of these attributes.

        Raises:
            ArgumentError: the amount is negative; a ValueError.
        """
        if amount < 0:
            raise ArgumentError(f"counter {self.name!r}: expected an amount of at least 0, got {amount}")
        super().add(amount, attributes)


class Histogram(Instrument):
    """Measured values; its metric has each of them."""

    def record(self, amount: float, attributes: Mapping[str, Any] | None = None, context: Any = None) -> None:
        """Record a value."""
        self.log(amount, attributes)


class Meter:
    """Makes instruments whose values views of the mesh show as charts."""

    def create_counter(self, name: str, unit: str = "", description: str = "") -> Counter:
        """Return a counter that only grows."""
        return Counter(name)

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> UpDownCounter:
        """Return a counter that may sink."""
        return UpDownCounter(name)

    def create_histogram(self, name: str, unit: str = "", description: str = "", **_: Any) -> Histogram:
        """Return an instrument for measured values."""
        return Histogram(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            raise NotImplementedError(
                f"{name}: the meter has counters, up-down counters and histograms; monarch.log_metric logs any value"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def get_meter() -> Meter:
    """Return a meter whose instruments log metrics of this process; see ``monarch.log_metric``."""
    return Meter()

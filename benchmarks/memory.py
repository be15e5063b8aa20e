"""Memory of an idle rank with torch: its own pages, and its share of shared pages (PSS)."""

from __future__ import annotations

import time

from harness import Measure, Options, Target, calm, workers


def run(options: Options) -> list[Measure]:
    """MB a rank, of eight."""
    measure = Measure("memory", "idle torch-ready rank, PSS", "MB", "less", target=Target("≤ 45 MB", 45.0))
    with workers(options, options.systems(), 8, measure.notes, torch=True) as race:
        measure.load = calm(options)
        time.sleep(0.5)
        measure.samples = race.rounds(1, "pss")
        alone = race.each("import_pss", only=["floor"])["floor"][0]
    measure.notes.append(f"floor: a fork of a warm process; a process that imports torch by itself has {alone:.0f} MB")
    return [measure]

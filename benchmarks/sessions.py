"""Many programs at once, as in a classroom: each is a session with ranks of its own."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

from harness import OURS, Measure, Options, Process, Target, calm

SESSIONS = 30
RANKS = 4


def run(options: Options) -> list[Measure]:
    """Seconds until the last session has torch-ready ranks: with the start of the programs, and without."""
    whole = Measure(
        "sessions", f"{SESSIONS} sessions of {RANKS} ranks, from the start", "s", "less", load=calm(options)
    )
    ranks = Measure("sessions", f"{SESSIONS} sessions of {RANKS} ranks, programs started", "s", "less", load=whole.load)
    ranks.target = Target("< 5 s", 5.0)
    for _ in range(options.rounds(3, 1)):
        begin = time.perf_counter()
        lanes = [Process(OURS, sys.executable) for _ in range(SESSIONS)]
        try:
            with ThreadPoolExecutor(SESSIONS) as pool:
                list(pool.map(lambda lane: lane.ask("start"), lanes))
                started = time.perf_counter()
                list(pool.map(lambda lane: lane.ask("spawn", count=RANKS, torch=True), lanes))
                end = time.perf_counter()
        finally:
            for lane in lanes:
                lane.end()
        whole.samples.setdefault(OURS, []).append(end - begin)
        ranks.samples.setdefault(OURS, []).append(end - started)
    return [whole, ranks]

"""One system in its own process: does what the harness asks, one line of JSON each way.

It is started as ``python lane.py SYSTEM`` by any interpreter that has the system installed, so it imports only the
standard library itself.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from systems.base import Pool, System, Task, Unsupported, payload, touch

_now = time.perf_counter


class Lane:
    """A system, its workers, and the operations that can be timed. Each method returns seconds, unless it says
    otherwise."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._pool: Pool | None = None
        self._task: Task | None = None
        self._payloads: dict[tuple[str, int], Any] = {}
        self._started = False

    @property
    def pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    # Workers

    def start(self) -> list[float]:
        self._started = True
        return _timed(self._system.start)

    def spawn(self, count: int, torch: bool = False) -> list[float]:
        begin = _now()
        self._pool = self._system.spawn(count, torch)
        return [_now() - begin]

    def close(self) -> list[float]:
        pool, self._pool = self.pool, None
        return _timed(pool.close)

    def stop(self) -> list[float]:
        if self._pool is not None:
            self.close()
        self.shut()
        started, self._started = self._started, False
        return _timed(self._system.stop) if started else [0.0]

    def pss(self) -> list[float]:
        """Return MB of each worker: its own pages, and its share of shared pages."""
        return [_pss(pid) for pid in self.pool.all("ready")]

    def spread(self) -> list[float]:
        """Bind this program to one core and the workers to the others, as the scheduler would on a larger machine."""
        first, *rest = sorted(os.sched_getaffinity(0))
        for pid, cores in ((os.getpid(), [first]), *((pid, rest or [first]) for pid in self.pool.all("ready"))):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread), cores)
        return [0.0]

    # Tasks

    def open(self, what: str, **options: Any) -> list[float]:
        """Prepare one of the tasks of the system, replacing the previous one."""
        self.shut()
        begin = _now()
        self._task = getattr(self._system, what)(**options)
        return [_now() - begin]

    def run(self, count: int, **options: Any) -> list[float]:
        """Return the figures of the task."""
        assert self._task is not None
        return self._task.run(count, **options)

    def shut(self) -> list[float]:
        task, self._task = self._task, None
        return _timed(task.close) if task is not None else [0.0]

    # Calls

    def one(self, count: int) -> list[float]:
        return _repeat(count, lambda number: self.pool.one("echo", number))

    def all(self, count: int) -> list[float]:
        return _repeat(count, lambda number: self.pool.all("echo", number))

    def flight_one(self, count: int) -> list[float]:
        return [_timed(self.pool.flight_one, range(count))[0] / count]

    def flight_all(self, count: int) -> list[float]:
        return [_timed(self.pool.flight_all, range(count))[0] / count]

    def cpu(self, count: int, period: float) -> list[float]:
        """Return CPU seconds of controller and workers for a call of all of them, one each period."""
        before = sum(self.pool.all("cpu")) + time.process_time()
        due = _now()
        for number in range(count):
            due += period
            self.pool.all("echo", number)
            time.sleep(max(0.0, due - _now()))
        return [(sum(self.pool.all("cpu")) + time.process_time() - before) / count]

    # Payloads

    def share(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Send to all workers, which read all of it."""
        array = self._payload(kind, size)
        return [self._right(size, self.pool.all, "touch", array) for _ in range(count)]

    def give(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Send to the first worker, which reads all of it."""
        array = self._payload(kind, size)
        return [self._right(size, self.pool.one, "touch", array) for _ in range(count)]

    def take(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Receive from the first worker; all of it is read here."""
        self.pool.one("keep", kind, size)
        return [self._right(size, lambda: touch(self.pool.one("fetch"))) for _ in range(count)]

    def put_all(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Send an array to all workers."""
        value = self._payload(kind, size)
        expected = touch(value)
        return _repeat(count, lambda _: self._same(expected, *set(self.pool.all("touch", value))))

    def put(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Send an argument of any kind to the first worker, which reads all of it and answers with a number."""
        value = self._payload(kind, size)
        expected = touch(value)
        return _repeat(count, lambda _: self._same(expected, self.pool.one("touch", value)))

    def get(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Receive a result of any kind from the first worker; all of it is read here."""
        self.pool.one("keep", kind, size)
        expected = touch(payload(kind, size))
        return _repeat(count, lambda _: self._same(expected, touch(self.pool.one("fetch"))))

    def small(self, kind: str, size: int, count: int = 1) -> list[float]:
        """Send a value of any kind to the first worker and back."""
        value = self._payload(kind, size)
        return _repeat(count, lambda _: self.pool.one("echo", value))

    def memcpy(self, size: int, copies: int, count: int = 1, reads: int = 0) -> list[float]:
        """Return seconds of copies into existing memory, and of reads of all of it."""
        import numpy

        source, target = numpy.ones(size, numpy.uint8), numpy.zeros(size, numpy.uint8)
        target[:] = 2
        times: list[float] = []
        for _ in range(count):
            begin = _now()
            for _ in range(copies):
                numpy.copyto(target, source)
            for _ in range(reads):
                touch(target.view(numpy.float32))
            times.append(_now() - begin)
        return times

    def import_torch(self) -> list[float]:
        """Return the seconds of one import of torch in a fresh process, from start to end."""
        return _timed(subprocess.run, [sys.executable, "-c", "import os, torch; os._exit(0)"], check=True)

    def import_pss(self) -> list[float]:
        """Return MB of a single process that has imported torch."""
        code = "import sys, torch; torch.ones(4) + 1; print(flush=True); sys.stdin.read()"
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        measured = _pss(process.pid)
        process.communicate()
        return [measured]

    def _payload(self, kind: str, size: int) -> Any:
        if (kind, size) not in self._payloads:
            self._payloads[kind, size] = payload(kind, size)
        return self._payloads[kind, size]

    def _same(self, expected: float, value: float) -> None:
        if value != expected:
            raise ValueError(f"wrong answer: {value} and not {expected}")

    def _right(self, size: int, call: Callable[..., Any], *args: Any) -> float:
        begin = _now()
        result = call(*args)
        taken = _now() - begin
        results = result if isinstance(result, list) else [result]
        if any(value != size / 4 for value in results):
            raise ValueError(f"wrong answer: {results}")
        return taken


def _timed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[float]:
    begin = _now()
    call(*args, **kwargs)
    return [_now() - begin]


def _repeat(count: int, call: Callable[[int], Any]) -> list[float]:
    """Return seconds of each call; fewer calls of a slow system, so that a round of all systems stays short."""
    times: list[float] = []
    for number in range(count):
        times += _timed(call, number)
        if len(times) >= 3 and sum(times) > 0.3:
            break
    return times


def _pss(pid: int) -> float:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


def main() -> None:
    """Answer requests until there are no more."""
    # Output of a system must not get into the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    lane = Lane(importlib.import_module(f"systems.{sys.argv[1]}").SYSTEM)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(lane, request["do"])(**request["with"])}
        except Unsupported as error:
            answer = {"unsupported": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
    lane.stop()
    # Other threads of some systems never end.
    os._exit(0)


if __name__ == "__main__":
    main()

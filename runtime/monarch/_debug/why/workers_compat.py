"""The workers that code waits for: of data loaders, pools and executors, by the private names of these classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monarch._core.kinds import is_dict, is_list, is_tuple
from monarch._procs.os.children import doing_of_child

THREADS = "threads"
_SHOWN = 4
"""Most processes that are named."""
Values = Mapping[str, Any]


def of_loader(values: Values) -> str:
    """Return the worker that a data loader waits for."""
    loader = values.get("self")
    workers, tasks, next_task = (getattr(loader, name, None) for name in ("_workers", "_task_info", "_rcvd_idx"))
    task = tasks.get(next_task) if is_dict(tasks) else None
    # Of a task that is done, the data is there too.
    number = task[0] if is_tuple(task) and len(task) == 1 and type(task[0]) is int else None
    if not is_list(workers) or number is None or not 0 <= number < len(workers):
        return "DataLoader workers"
    pid = getattr(workers[number], "pid", None)
    return f"DataLoader worker {number} (pid {pid}){doing_of(pid)}"


def of_pool(values: Values) -> str:
    """Return a pool of ``multiprocessing``: of threads or processes."""
    known = values.get("self")
    pool = known if is_list(getattr(known, "_pool", None)) else getattr(known, "_pool", None)
    workers = getattr(pool, "_pool", None)
    kind = THREADS if type(pool).__name__ == "ThreadPool" else "processes"
    return f"a pool of {len(workers)} {kind}" if is_list(workers) else "a pool"


def of_spawned(values: Values) -> str:
    """Return the processes of ``mp.spawn`` that have not ended."""
    context = values.get("self")
    processes, left = getattr(context, "processes", None), getattr(context, "sentinels", None)
    if not is_list(processes) or not is_dict(left):
        return "processes of mp.spawn"
    indices = sorted(index for index in left.values() if type(index) is int and index < len(processes))
    pids = ", ".join(f"{index} (pid {getattr(processes[index], 'pid', None)})" for index in indices[:_SHOWN])
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    return f"process{'es' if len(indices) > 1 else ''} {pids}{more} of mp.spawn"


def of_executor(values: Values) -> str:
    """Return an executor of ``concurrent.futures`` that is shut down."""
    return (
        f"a pool of {THREADS}" if type(values.get("self")).__name__ == "ThreadPoolExecutor" else "a pool of processes"
    )


def doing_of(pid: Any) -> str:
    """Return what a child process waits in, as the end of a phrase; empty if it runs."""
    doing = doing_of_child(pid) if type(pid) is int else ""
    return f", which is {doing}" if doing else ""

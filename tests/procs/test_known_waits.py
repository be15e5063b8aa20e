"""What functions of Python's library wait for, as a wait is explained."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

from leaks import wait_until
from monarch._debug.why.known_waits import of_child
from monarch._debug.why.pool_threads import of_future


def test_command_of_a_child_is_one_line() -> None:
    child = type("Popen", (), {"args": ["python", "-c", "import time\nwhile True:\n    pass"], "pid": 0})()
    assert of_child({"self": child}) == "python -c import time while True: pass (pid 0)"


def test_work_of_a_pool_is_where_its_thread_is() -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait()

    with ThreadPoolExecutor(1) as pool:
        running, queued = pool.submit(work), pool.submit(int)
        try:
            assert begun.wait(20)
            text = of_future({"self": running})
            assert text.startswith("a pool task in thread 'ThreadPoolExecutor-")
            assert " at test_known_waits.py" in text
            assert of_future({"self": queued}) == "a pool task that has not started"
            assert of_future({"pending": {queued, running}}) == text
        finally:
            end.set()


def test_work_without_a_line_names_its_thread_only() -> None:
    end = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(end.wait)
        try:
            assert wait_until(waits.running)
            assert wait_until(lambda: re.fullmatch("a pool task in thread '[^']+'", of_future({"self": waits})))
        finally:
            end.set()

"""Ctrl-C in a waiting program: raised immediately, and no message is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

GUARD = 20.0
"""Seconds after which something counts as hanging."""

CTRL_C = """
import signal, sys, threading, time
from monarch.actor import Actor, endpoint, this_host, shutdown_context

class Slow(Actor):
    def __init__(self):
        self.count = 0

    @endpoint
    def nap(self, seconds):
        time.sleep(seconds)
        return "slept"

    @endpoint
    def add(self):
        self.count += 1
        return self.count

def wait_until_waiting(thread):
    # Until it is inside the wait of a future.
    for _ in range(6000):
        frame = sys._current_frames().get(thread.ident)
        while frame is not None and frame.f_code.co_name != "_wait":
            frame = frame.f_back
        if frame is not None:
            return
        time.sleep(0.005)

def tell():
    wait_until_waiting(threading.main_thread())
    print("waits", flush=True)

if __name__ == "__main__":
    a = this_host().spawn_procs({"gpus": 2}).spawn("slow", Slow)
    one, other = a.slice(gpus=0), a.slice(gpus=1)
    a.add.call().get()
    if sys.argv[1] == "beside":
        helper = threading.Thread(target=lambda: one.nap.call_one(1.5).get(), daemon=True)
        helper.start()
        wait_until_waiting(helper)
    future = other.nap.call_one(1.5)
    counts = [one.add.call_one() for _ in range(1000)] if sys.argv[1] != "beside" else []
    threading.Thread(target=tell).start()
    try:
        future.get()
        print("no interrupt")
    except KeyboardInterrupt:
        print("interrupted", not future.done)
    print(future.get(timeout=20))
    # The first one was all of them, so the counts go on from there.
    print([count.get(timeout=20) for count in counts] == list(range(2, 1002)) or sys.argv[1] == "beside")
    if sys.argv[1] == "beside":
        helper.join(20)
        print(helper.is_alive())
    shutdown_context().get(timeout=20)
    print("done")
"""


@pytest.mark.parametrize("who", ["alone", "beside"])
def test_ctrl_c_during_get_raises_immediately(tmp_path: Path, who: str) -> None:
    """It is raised immediately, whether the main thread leads or waits beside a leader; no message is lost."""
    path = tmp_path / "program.py"
    path.write_text(CTRL_C)
    process = subprocess.Popen(
        [sys.executable, str(path), who], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert err == ""
    lines = out.splitlines()
    assert lines[:3] == ["interrupted True", "slept", "True"]
    assert lines[-1] == "done"
    assert process.returncode == 0
    if who == "beside":
        assert lines[3] == "False"


INTERRUPTS = """
import signal, sys, threading, time, os
from monarch.actor import Actor, endpoint, this_host, shutdown_context

class Echo(Actor):
    @endpoint
    def echo(self, x):
        return x

if __name__ == "__main__":
    a = this_host().spawn_procs().spawn("echo", Echo)
    a.echo.call_one(0).get()
    stop = False
    def disturb():
        while not stop:
            time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=disturb)
    interrupts = 0
    thread.start()
    number = 0
    answers = []
    future = None
    while number < 1000:
        try:
            if future is None:
                future = a.echo.call_one(number)
            answers.append(future.get())
            future = None
            number += 1
        except KeyboardInterrupt:
            interrupts += 1
            if len(answers) > number:
                future = None
                number += 1
    while True:
        try:
            stop = True
            thread.join()
            break
        except KeyboardInterrupt:
            pass
    time.sleep(0.05)
    print(interrupts > 10, sorted({*answers}) == list(range(1000)))
"""


def test_many_interrupts_lose_no_answer(tmp_path: Path) -> None:
    """Each is a KeyboardInterrupt in the program, and the same future can be waited for again."""
    path = tmp_path / "program.py"
    path.write_text(INTERRUPTS)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True True\n", done.stderr
    assert done.returncode == 0

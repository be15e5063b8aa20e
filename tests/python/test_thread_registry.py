"""The registry of threads knows its own, whatever their names are."""

from __future__ import annotations

import gc
import threading

from monarch._python.threads import is_own, new_thread, spawn_thread


def test_registry_knows_only_its_own_threads() -> None:
    seen: list[tuple[bool, str, bool]] = []

    def look(more: str) -> None:
        me = threading.current_thread()
        seen.append((is_own(me), me.name + more, me.daemon))

    spawn_thread("monarch-test", look, "!").join()
    stranger = threading.Thread(target=look, args=("?",), name="monarch-stranger")
    stranger.start()
    stranger.join()
    assert seen == [(True, "monarch-test!", True), (False, "monarch-stranger?", False)]


def test_registry_keeps_no_thread_alive() -> None:
    before = sum(is_own(each) for each in gc.get_objects() if isinstance(each, threading.Thread))
    for _ in range(3):
        new_thread("monarch-test", print)
    gc.collect()
    assert sum(is_own(each) for each in gc.get_objects() if isinstance(each, threading.Thread)) <= before

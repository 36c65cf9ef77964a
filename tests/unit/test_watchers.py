"""Who waits in a process, and what a forked child inherits of it."""

from __future__ import annotations

import os
import signal

from semel.stores.watchers import Watchers


def test_all_who_wait_for_a_scope_are_woken_until_they_leave() -> None:
    watchers, heard = Watchers(), list[str]()

    def first() -> None:
        heard.append("first")

    def second() -> None:
        heard.append("second")

    watchers.add(b"a", first)
    watchers.add(b"a", second)
    watchers.wake(b"b")
    watchers.wake(b"a")
    watchers.remove(b"a", first)
    watchers.remove(b"a", first)
    assert b"a" in watchers
    watchers.wake(b"a")
    watchers.remove(b"a", second)
    assert not watchers
    assert heard == ["first", "second", "second"]


def test_R29_a_child_that_is_forked_while_a_thread_of_its_parent_is_seated_does_not_wait_for_it() -> None:
    watchers = Watchers()
    watchers.add(b"a", lambda: None)
    with watchers._lock:  # as another thread would have it
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            status = 1
            try:
                watchers.wake(b"a")
                watchers.add(b"a", lambda: None)
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert watchers

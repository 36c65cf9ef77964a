"""What goes on in the background of a `Semel`, and its end."""

from __future__ import annotations

import threading

import pytest

from semel.runtime import ThreadRuntime, run_sync


def test_who_closes_while_a_thread_begins_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begins, may_begin = threading.Event(), threading.Event()
    start = threading.Thread.start

    def slowly(thread: threading.Thread) -> None:
        if thread.name == "semel-background":
            begins.set()
            assert may_begin.wait(10)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    runtime, done = ThreadRuntime(), list[str]()

    async def work() -> None:
        done.append("written")

    caller = threading.Thread(target=runtime.background, args=(work(),))
    caller.start()
    assert begins.wait(10)
    threading.Timer(0.05, may_begin.set).start()
    run_sync(runtime.drain(10))
    assert done == ["written"]
    caller.join()


def test_what_could_not_begin_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    runtime = ThreadRuntime()

    async def work() -> None:
        """Never runs."""

    written = work()
    with pytest.raises(RuntimeError, match="new thread"):
        runtime.background(written)
    written.close()
    run_sync(runtime.drain(10))
    assert not runtime._busy

"""A thread that connects, and a signal that strikes while it is started."""

from __future__ import annotations

import threading

import pytest

from semel.stores.connecting import in_time


class Late(Exception):
    """What a signal's handler raises."""


@pytest.mark.parametrize("struck", [True, False])
def test_what_a_handler_raised_as_the_thread_started_is_told(
    struck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's own `start` forgets the thread when it is struck, though that has begun and forgotten itself."""

    def start(thread: threading.Thread) -> None:
        try:
            if struck:
                raise Late
        except Late:
            raise KeyError(thread)  # noqa: B904 - as threading does
        raise KeyError(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Late if struck else KeyError):
        in_time(lambda: 1, 1, late=lambda _: None)

"""Work in a thread of its own, to its end, and what came of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["failure_in_another_thread", "in_another_thread"]


def failure_in_another_thread(work: Callable[[], object]) -> BaseException | None:
    """What `work` raises there; whatever strikes this thread meanwhile is raised here."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    return failed[0] if failed else None


def in_another_thread(work: Callable[[], object]) -> None:
    """To its end, as if this thread had been stopped here."""
    failure = failure_in_another_thread(work)
    if failure is not None:
        raise failure

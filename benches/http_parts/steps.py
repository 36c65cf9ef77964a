"""Where the time of a keyed request goes, in process: each stretch between two waits, of semel and of the hand-written floor.

A task runs from wait to wait, and nothing else runs meanwhile, so each stretch can be timed by itself: without the server, the
connection to Redis and the loop. What Redis spends in scripts it tells itself. The tenth percentile of many, because the machine
may be busy; the garbage collector is off.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import Coroutine, Generator
from typing import Any, Final

from benches.core_parts.measure import Figure, Term
from benches.http_parts.apps import guarded, starlette
from benches.http_parts.floor import floored
from benches.http_parts.load import BODY
from semel.testing import services

__all__ = ["bench"]

_AT_ONCE: Final = 32
_SENT: Final = BODY.encode()
# What is timed, by the name of a task's coroutine: the request's own task, and the one that runs the handler.
_NAMES: Final = {"_asked": "request", "IdempotencyMiddleware._first": "handler", "_Floor._run": "handler"}
_STRETCHES: Final = (
    ("fresh", "request", 0, "before the claim is sent"),
    ("fresh", "request", 1, "from its answer to the handler's task"),
    ("fresh", "handler", 0, "the handler, up to its record"),
    ("fresh", "handler", 1, "from the record to the end"),
    ("replay", "request", 0, "before the claim is sent"),
    ("replay", "request", 1, "from its answer to the end"),
    ("fresh", "redis", 0, "Redis, both scripts"),
    ("replay", "redis", 0, "Redis, its script"),
)
Times = dict[tuple[str, int], list[int]]


class _Timed:
    """A coroutine, and how long it runs between two waits."""

    __slots__ = ("_coroutine", "_name", "_number", "_times")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str, times: Times) -> None:
        self._coroutine, self._name, self._times, self._number = coroutine, name, times, 0

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        begun = time.perf_counter_ns()
        try:
            return self._coroutine.send(value)
        finally:
            spent = time.perf_counter_ns() - begun
            self._times.setdefault((self._name, self._number), []).append(spent)
            self._number += 1

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()


def bench(*, quick: bool) -> list[Figure]:
    """One figure for each stretch: semel's time and the floor's. First of all the bare handler's, which is in both."""
    with services.redis() as server:
        found = asyncio.run(_measured(server, 0.2 if quick else 6.0))
    bare = _usual(found["bare", "fresh"]["request", 0])
    figures = [Figure("in process: the bare Starlette route", Term("µs", bare, "µs"))]
    for mode, task, number, what in _STRETCHES:
        terms = [_usual(found[name, mode][task, number]) for name in ("semel", "rules")]
        ours, floor = Term("semel", terms[0], "µs"), Term("by hand (rules)", terms[1], "µs")
        figures.append(
            Figure(f"in process, {mode}: {what}", ours, floor, note=f"{terms[0] - terms[1]:+.1f} µs")
        )
    return figures


def _usual(times: list[int]) -> float:
    return sorted(times)[len(times) // 10] / 1000


def _scripts(server: services.RedisServer) -> int:
    """ns that the server has spent in scripts so far."""
    return int(server.info("commandstats").get("cmdstat_evalsha", {"usec": 0})["usec"]) * 1000


async def _measured(server: services.RedisServer, seconds: float) -> dict[tuple[str, str], Times]:
    app, numbers = starlette(), itertools.count()
    semel, rules = guarded(app, server.url), floored(app, server.url, "rules")
    apps = {"semel": semel, "rules": rules, "bare": app}
    found: dict[tuple[str, str], Times] = {(name, mode): {} for name in apps for mode in ("fresh", "replay")}
    for each in apps.values():
        for number in range(_AT_ONCE):
            await _asked(each, f"done-{number}")
    try:
        gc.disable()
        until, spent = time.monotonic() + seconds, _scripts(server)
        while time.monotonic() < until:
            for (name, mode), times in found.items():
                keys = [
                    f"done-{number}" if mode == "replay" else f"key-{next(numbers)}"
                    for number in range(_AT_ONCE)
                ]
                _time_into(times)
                await asyncio.gather(*(_asked(apps[name], key) for key in keys))
                before, spent = spent, _scripts(server)
                times.setdefault(("redis", 0), []).append((spent - before) // _AT_ONCE)
            gc.collect()
    finally:
        gc.enable()
        asyncio.get_running_loop().set_task_factory(None)
        await rules.aclose()
        await semel._plan.once.aclose()  # the face that `guarded` has made
    return found


def _time_into(times: Times) -> None:
    def task_of(loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None) -> asyncio.Task[Any]:
        name = _NAMES.get(coroutine.__qualname__)
        timed = coroutine if name is None else _timed(_Timed(coroutine, name, times))
        return asyncio.Task(timed, loop=loop, context=context)

    asyncio.get_running_loop().set_task_factory(task_of)


async def _timed(timed: _Timed) -> None:
    await timed


async def _asked(app: Any, key: str) -> None:
    """One request, as uvicorn would ask it."""

    async def receive() -> Any:
        return {"type": "http.request", "body": _SENT, "more_body": False}

    async def send(message: Any) -> None:
        if message.get("status", 201) != 201:
            raise RuntimeError(f"answered {message['status']}")

    headers = [
        (b"host", b"127.0.0.1:8000"), (b"authorization", b"user-1"), (b"content-type", b"application/json"),
        (b"idempotency-key", key.encode()), (b"content-length", b"%d" % len(_SENT)),
    ]  # fmt: skip
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/orders",
        "raw_path": b"/orders", "query_string": b"", "root_path": "", "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000), "state": {},
    }  # fmt: skip
    await app(scope, receive, send)

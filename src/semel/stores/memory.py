"""Records in a dictionary: one process, gone with it. The plainest use of `model`, and the reference for the others.

`memory://` is private to its face; `memory://name` is one store for everybody in the process who says that name.
Room is reserved when a key is claimed, so that a settle can never fail for want of it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from semel import model
from semel.errors import ConfigurationError, StoreUnavailable
from semel.forks import survive_fork
from semel.keys import Scope
from semel.model import Answer, Ask, Event, Kind, Note, Record, Renewal, Settle, State, Verdict
from semel.store import Capabilities, Colour, Facts, Page, Query, Settings, Unwatch
from semel.stores.queries import matches, page_start

__all__ = ["MemoryStore", "open_url"]

_shared: dict[str, MemoryStore] = {}
_shared_lock = threading.Lock()


def open_url(url: str, settings: Settings, colour: Colour) -> MemoryStore:
    del colour  # memory serves both
    parts = urlsplit(url)
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigurationError(
            f"{url!r} says more than a name: write memory://, or memory://name for a store that others in this process share"
        )
    name = parts.netloc
    if not name:
        return MemoryStore(capacity=settings.capacity)
    with _shared_lock:
        return _shared.setdefault(name, MemoryStore(capacity=settings.capacity))


class MemoryStore:
    """All verbs under one lock. `clock` is an argument so that tests can move time."""

    colour: Colour = "both"
    capabilities = Capabilities()

    def __init__(self, *, capacity: int = 10_000, clock: Callable[[], float] = time.time) -> None:
        self._capacity = capacity
        self._clock = clock
        self._renew_lock()
        survive_fork(self, MemoryStore._renew_lock)
        self._records: dict[bytes, Record] = {}
        self._audit: dict[bytes, tuple[float, list[Event]]] = {}
        self._watchers: dict[bytes, list[Callable[[], None]]] = defaultdict(list)

    def _renew_lock(self) -> None:
        """Also in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        with self._lock:
            return [self._claim(ask) for ask in asks]

    def _claim(self, ask: Ask) -> Verdict | Exception:
        now = self._clock()
        key = ask.scope.hash
        record = self._records.get(key)
        verdict, changed = model.claim(record, ask, now)
        if changed is not None:
            if record is None and len(self._records) >= self._capacity and not self._make_room(now):
                return StoreUnavailable(
                    f"the memory store holds its {self._capacity} records and none has expired; raise `capacity`, "
                    "shorten `retention`, or use a store that is not memory"
                )
            self._records[key] = changed
        return verdict

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        with self._lock:
            answers: list[Answer | Exception] = [self._settle(end) for end in ends]
        for end in ends:
            self._wake(end.scope.hash)
        return answers

    def _settle(self, end: Settle) -> Answer:
        now = self._clock()
        key = end.scope.hash
        record = self._records.get(key)
        answer, changed = model.settle(record, end, now)
        if changed is not None:
            self._records[key] = changed
        forgotten = end.kind is Kind.FORGOTTEN and answer is Answer.OK
        if forgotten:
            self._records.pop(key, None)
        if end.actor and (changed is not None or (forgotten and model.view(record, now) is not None)):
            kept_until, events = self._audit.get(key, (0.0, []))
            events.append(model.event_of(record, end, now))
            self._audit[key] = (max(kept_until, now + end.retention), events)
        return answer

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        answers: list[Answer | Exception] = []
        with self._lock:
            for renewal in renewals:
                key = renewal.scope.hash
                answer, changed = model.renew(self._records.get(key), renewal, self._clock())
                if changed is not None:
                    self._records[key] = changed
                answers.append(answer)
        return answers

    async def note(self, note: Note) -> Answer:
        with self._lock:
            answer, changed = model.note(self._records.get(note.scope.hash), note, self._clock())
            if changed is not None:
                self._records[note.scope.hash] = changed
        return answer

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        with self._lock:
            return self._records.get(scope.hash), self._clock()

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        with self._lock:
            self._watchers[scope.hash].append(wake)

        async def unwatch() -> None:
            with self._lock:
                waiting = self._watchers.get(scope.hash, [])
                if wake in waiting:
                    waiting.remove(wake)
                if not waiting:
                    self._watchers.pop(scope.hash, None)

        return unwatch

    def _wake(self, key: bytes) -> None:
        with self._lock:
            waiting = tuple(self._watchers.get(key, ()))
        for wake in waiting:
            wake()

    async def scan(self, query: Query) -> Page:
        with self._lock:
            now = self._clock()
            if query.history is not None:
                kept_until, events = self._audit.get(query.history.hash, (0.0, []))
                return Page(events=tuple(events) if now < kept_until else (), now=now)
            after = page_start(query)
            found = sorted(
                (key, record)
                for key, record in self._records.items()
                if key > after and matches(record, query, now)
            )
        page = found[: query.limit]
        cursor = page[-1][0].hex() if len(found) > query.limit else ""
        return Page(records=tuple(record for _, record in page), cursor=cursor, now=now)

    async def purge(self, limit: int) -> int:
        with self._lock:
            now = self._clock()
            seen = [(key, model.view(record, now)) for key, record in self._records.items()]
            dead = [key for key, state in seen if state is None][:limit]
            for key in dead:
                del self._records[key]
            for key in [key for key, state in seen if state is State.EXPIRED]:
                self._records[key] = model.bury(self._records[key])
            for key in [key for key, (kept_until, _) in self._audit.items() if kept_until <= now]:
                del self._audit[key]
            return len(dead)

    def _make_room(self, now: float) -> bool:
        dead = [key for key, record in self._records.items() if model.view(record, now) is None]
        for key in dead:
            del self._records[key]
        return bool(dead)

    async def facts(self) -> Facts:
        return Facts(
            store="memory",
            durable_writes=False,
            survives_failover=False,
            warnings=(
                "records live in this process only: use a URL such as sqlite:///semel.db to keep them",
            ),
        )

    async def aclose(self) -> None:
        """Nothing was opened; a named store stays for the others who use it."""

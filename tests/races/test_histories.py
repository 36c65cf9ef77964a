"""H1 on real stores: some order of atomic decisions of the model explains what racing processes were told by the store.

The simulator's checker looks at histories that several processes, each with several threads, wrote down while they raced
for the same keys: with leases that lapse, late settles, connections that break before a request or after its commit, and
a process that is killed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from semel import Semel
from semel.errors import StoreUnavailable
from semel.keys import Scope, make_scope
from semel.model import Ask, Busy, Kind, Note, Renewal, Replay, Settle, Won
from semel.runtime import run_sync
from semel.steps import Step, encode
from semel.store import Settings, open_store
from semel.testing.mutants import planted
from semel.testing.proxy import CHUNKS, RESP, Proxy
from semel.testing.simulation.history import Call, inexplicable
from semel.testing.simulation.recorded import Log, Recorded, clock_offset, read_logs

from .conftest import STORES, url_of

pytestmark = pytest.mark.timeout(600)

PROCESSES, THREADS, ROUNDS, KEYS = 3, 3, 12, 16
LONG = 60.0  # a lease that does not lapse here: then it does not matter when exactly a lost claim arrived
MOST = 200_000  # configurations that a search for an order looks at: on a busy machine everything overlaps


class Race:
    """Processes that race for a few keys on one store."""

    def __init__(self, folder: Path, *, lease: float, sleeps: float = 0.4, mutant: str = "") -> None:
        self._folder, self._lease, self._sleeps, self._mutant = folder, lease, sleeps, mutant
        self._tenant = uuid.uuid4().hex
        self._offset = clock_offset()
        context = multiprocessing.get_context("fork")
        self._starts: list[Any] = []
        self._workers: list[Any] = []
        # Forked before a proxy's thread runs: each waits for its URL.
        for number in range(PROCESSES):
            ours, theirs = context.Pipe()
            worker = context.Process(target=self._work, args=(number, theirs))
            worker.start()
            self._starts.append(ours)
            self._workers.append(worker)

    @property
    def logs(self) -> list[Path]:
        return [self._folder / f"log-{number}" for number in range(PROCESSES)]

    def run(self, url: str, *, kill: bool) -> None:
        for start in self._starts:
            start.send_bytes(json.dumps([url, kill and start is self._starts[0]]).encode())
        if kill:
            victim = self._workers[0]
            until = time.monotonic() + 20
            while not self._log_size() and time.monotonic() < until:
                time.sleep(0.001)
            os.kill(victim.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.join(60)
        codes = [worker.exitcode for worker in self._workers]
        assert codes == [-signal.SIGKILL if kill else 0, 0, 0], codes

    def close(self) -> None:
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
            worker.join()

    @property
    def clock_was_set_by(self) -> float:
        """Seconds. Times of calls and of decisions are not comparable then."""
        return clock_offset() - self._offset

    def _log_size(self) -> bool:
        with suppress(FileNotFoundError):
            return self.logs[0].stat().st_size > 4_000
        return False

    # ------------------------------------------------------------------------------------- in a worker
    def _work(self, number: int, start: Any) -> None:
        url, is_victim = json.loads(start.recv_bytes())
        failures: list[Any] = []
        threading.excepthook = failures.append
        with ExitStack() as stack:
            if self._mutant:
                stack.enter_context(planted(self._mutant))
            inner = open_store(url, Settings(timeout=30.0), "sync")
            store = Recorded(inner, Log(self.logs[number]))
            threads = [
                threading.Thread(target=self._rounds, args=(store, random.Random(f"{number}/{each}")))
                for each in range(THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            while is_victim:  # it is killed, however busy its killer is
                signal.pause()
            run_sync(inner.aclose())
        for failure in failures:
            traceback.print_exception(failure.exc_value)
        if failures:
            sys.exit(1)

    def _rounds(self, store: Recorded, rng: random.Random) -> None:
        for _ in range(ROUNDS):
            scope = make_scope("semel", self._tenant, "race", f"k{rng.randrange(KEYS)}")
            with suppress(StoreUnavailable):
                self._round(store, scope, rng)

    def _round(self, store: Recorded, scope: Scope, rng: random.Random) -> None:
        """One owner's life, or what a loser does; now and then too slow for the lease."""
        nonce = rng.randbytes(16)
        try:
            (verdict,) = run_sync(store.claim((Ask(scope, nonce, self._lease, 600.0),)))
        except StoreUnavailable:
            run_sync(store.settle((Settle(scope, nonce, Kind.RELEASED, 600.0),)))  # as a face does
            raise
        if not isinstance(verdict, Won):
            if rng.random() < 0.3:
                run_sync(store.peek(scope))
            return
        if rng.random() < 0.3:
            run_sync(store.note(Note(scope, nonce, encode(Step("s", "done", 0.0, nonce)))))
        if self._lease < LONG and rng.random() < self._sleeps:
            time.sleep(self._lease * rng.uniform(0.8, 1.6))
        else:
            time.sleep(rng.uniform(0.0, 0.004))  # long enough to be met by others
        if rng.random() < 0.4:
            run_sync(store.renew((Renewal(scope, nonce, self._lease, 600.0),)))
        kind = Kind.DONE if rng.random() < 0.1 else Kind.RELEASED
        run_sync(store.settle((Settle(scope, nonce, kind, 600.0, result=nonce),)))


def _explained(race: Race, calls: list[Call]) -> None:
    """H1, or everything that is needed to understand why not."""
    told, histories, undecided = inexplicable(calls, most=MOST, at_length=True)
    seen = Counter(type(call.answer).__name__ for call in calls if call.verb == "claim")
    lost = sum(call.answer is None for call in calls)
    locked = sum(call.is_locked_out for call in calls)
    facts = (
        f"{len(calls)} calls on {histories} keys, {lost} without an answer, {locked} before a locked row, {undecided} undecided, "
        f"clock set by {race.clock_was_set_by * 1000:+.3f} ms, load {os.getloadavg()}: {seen}"
    )
    print(f"\n{facts}")
    assert not told, "\n".join([*told, facts])
    assert undecided <= 1, f"too many histories are too long to be decided: make the race smaller. {facts}"
    assert seen["Won"] > 10, facts
    assert seen["Busy"] > 0, f"nobody met anybody: this was no race. {facts}"


@pytest.fixture
def race_url(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> str:
    return url_of(request, store, "sync", tmp_path)


@pytest.mark.parametrize("store", STORES)
def test_H1_an_order_explains_a_race_with_leases_that_lapse(race_url: str, tmp_path: Path) -> None:
    for number in range(4):  # on a busy machine an owner may be as late as its heirs
        race = Race(_folder(tmp_path, number), lease=0.05)
        try:
            race.run(race_url, kill=False)
        finally:
            race.close()
        calls = read_logs(race.logs)
        _explained(race, calls)
        taken_over = any(isinstance(call.answer, Won) and call.answer.record.attempts > 1 for call in calls)
        if taken_over and any(call.answer == "lost" for call in calls):
            return
    pytest.fail("no owner was overtaken: leases did not lapse")


@pytest.mark.parametrize("store", STORES)
def test_H1_an_order_explains_a_race_with_lost_answers_and_a_killed_process(
    race_url: str, store: str, tmp_path: Path
) -> None:
    for number in range(
        4
    ):  # an adapter may send everything again in time, and the victim die between two calls
        race = Race(_folder(tmp_path, number), lease=LONG)
        broken_at: list[float] = []
        try:
            if store == "sqlite":
                race.run(race_url, kill=True)
            else:
                broken_at = _run_through_a_proxy(race, race_url, RESP if store == "redis" else CHUNKS)
        finally:
            race.close()
        calls = read_logs(race.logs, broken_at=broken_at)
        _explained(race, calls)
        if store == "sqlite" or (len(broken_at) > 3 and any(call.answer is None for call in calls)):
            return
    pytest.fail("the network broke too seldom, or every answer was heard: nothing was lost")


SLOW = "$$ begin if random() < 0.15 then perform pg_sleep(0.09); end if; return null; end $$"
SLOW_ROWS = (
    f"create function slow() returns trigger language plpgsql as {SLOW}",
    "create trigger slow after update on semel for each row execute function slow()",
)


@pytest.mark.long
@pytest.mark.parametrize("store", ["postgres"])
def test_H1_an_order_explains_a_race_for_rows_that_are_held_for_longer_than_a_claim_waits(
    race_url: str, tmp_path: Path
) -> None:
    """As on a busy machine: a claim is sent away as busy though the key is free, since its last owner is still writing."""
    import psycopg

    with Semel(race_url) as once:
        once.create()
    with psycopg.connect(race_url.replace("+psycopg", ""), autocommit=True) as connection:
        for statement in SLOW_ROWS:
            connection.execute(statement)
    race = Race(tmp_path, lease=0.05)
    try:
        race.run(race_url, kill=False)
    finally:
        race.close()
    _explained(race, read_logs(race.logs))


def _run_through_a_proxy(race: Race, url: str, framing: Any) -> list[float]:
    """Run it with connections that break before a request or after its commit; when they did."""
    parts = urlsplit(url)
    with Proxy(parts.hostname or "", parts.port or 0, framing=framing) as proxy:
        nemesis = Nemesis(proxy)
        try:
            race.run(url.replace(f":{parts.port}", f":{proxy.port}"), kill=True)
        finally:
            nemesis.stop()
    return nemesis.struck_at


class Nemesis(threading.Thread):
    def __init__(self, proxy: Proxy) -> None:
        super().__init__()
        self._faults = (proxy.reset_before, proxy.swallow_reply)
        self._rng = random.Random(1)
        self._stopped = threading.Event()
        self.struck_at: list[float] = []
        self.start()

    def run(self) -> None:
        while not self._stopped.is_set():
            if self._strike(self._rng.randint(5, 20)):
                # An adapter sends again by itself; broken as well, its caller is told nothing.
                for _ in range(self._rng.randrange(3)):
                    self._strike(1)

    def _strike(self, at: int) -> bool:
        seen = 0.0

        def match(request: bytes) -> bool:
            nonlocal seen
            del request
            seen = time.time()
            return True

        fired = self._rng.choice(self._faults)(at=at, match=match).fired
        while not fired.wait(0.05):
            if self._stopped.is_set():
                return False
        self.struck_at.append(seen)
        return True

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@pytest.mark.parametrize(
    ("store", "mutant"), [("redis", "redis-lease-unseen"), ("mysql", "mysql-settle-unfenced")]
)
def test_H1_the_history_of_a_store_that_is_broken_on_purpose_has_no_order(
    race_url: str, mutant: str, tmp_path: Path
) -> None:
    for number in range(4):  # now and then nobody comes between an owner's late settle and its lease
        race = Race(_folder(tmp_path, number), lease=0.05, sleeps=0.9, mutant=mutant)
        try:
            race.run(race_url, kill=False)
        finally:
            race.close()
        if inexplicable(read_logs(race.logs), most=MOST)[0]:
            return
    pytest.fail("four histories of a broken store were explained")


def _folder(parent: Path, number: int) -> Path:
    folder = parent / str(number)
    folder.mkdir()
    return folder


def test_H1_a_replay_of_what_nobody_settled_has_no_order() -> None:
    """The checker's own teeth, on a history of a few lines."""
    scope = make_scope("semel", "t", "o", "k")
    first, second = (Ask(scope, letter * 16, 10.0, 100.0) for letter in (b"a", b"b"))
    claim, replay = Call("claim", first, 0.0), Call("claim", second, 2.0)
    busy = Call("claim", second, 2.0)
    from semel import model

    _, record = model.claim(None, first, 0.5)
    assert record is not None
    claim.returned(1.0, Won(record))
    replay.returned(3.0, Replay(record))
    busy.returned(3.0, Busy(5.0, 1))
    assert not inexplicable([claim, busy])[0]
    assert inexplicable([claim, replay])[0]

"""Finding what needs attention, and dropping what has ended."""

# ruff: noqa: N802 - a test bears the number of its ruling

from __future__ import annotations

from semel.errors import ConfigurationError
from semel.model import Answer, Expired, Kind, Policy, Replay, State, Unknown, Won, view
from semel.store import Query
from semel.testing.contract.bench import FAILURE, LEASE, RETENTION, Bench, SkipTest, clause

__all__ = ["PurgeClauses", "ScanClauses"]


class ScanClauses:
    """Every query is bounded to the bench's tenant: other tests use the same store."""

    @clause
    async def test_by_default_a_scan_finds_running_unknown_and_failed(self, bench: Bench) -> None:
        await _one_of_each(bench)
        assert sorted(await bench.found()) == ["failed", "held", "running", "unknown"]
        assert await bench.found(tenant=bench.tenant + "x") == []

    @clause
    async def test_a_scan_by_state_goes_by_what_a_record_reads_as(self, bench: Bench) -> None:
        await _one_of_each(bench)
        assert await bench.found(states=frozenset({State.RUNNING})) == ["running"]
        assert sorted(await bench.found(states=frozenset({State.UNKNOWN}))) == ["held", "unknown"]
        assert await bench.found(states=frozenset({State.FAILED})) == ["failed"]
        two = frozenset({State.FAILED, State.RUNNING})
        assert sorted(await bench.found(states=two)) == ["failed", "running"]

    @clause
    async def test_a_scan_for_done_lists_nothing_else(self, bench: Bench) -> None:
        await _one_of_each(bench)
        assert set(await bench.found(states=frozenset({State.DONE}))) <= {"done"}

    @clause
    async def test_a_scan_by_operation(self, bench: Bench) -> None:
        for operation in ("pay", "ship", "Pay"):
            await bench.win(bench.scope(f"key of {operation}", operation=operation))
        assert await bench.found(operation="pay") == ["key of pay"]
        assert await bench.found(operation="refund") == []
        assert await bench.found(operation="%") == []

    @clause
    async def test_abandoned_runs_are_those_past_their_lease(self, bench: Bench) -> None:
        for policy in Policy:
            await bench.win(bench.scope(policy), policy=policy)
        renewed = await bench.win(bench.scope("renewed"))
        finished = await bench.win(bench.scope("finished"))
        assert await bench.found(abandoned=True) == []
        await bench.wait(LEASE - 4)
        await bench.renew(renewed)
        await bench.finish(finished, Kind.UNKNOWN)
        await bench.wait(6)
        assert sorted(await bench.found(abandoned=True)) == sorted(Policy)

    @clause
    async def test_a_run_that_ended_is_no_longer_found(self, bench: Bench) -> None:
        for kind in (Kind.DONE, Kind.RELEASED):
            await bench.settled(kind, bench.scope(kind))
        forgotten = await bench.settled(Kind.FAILED, bench.scope("forgotten"))
        await bench.forget(forgotten.scope)
        await bench.win(bench.scope("expired"))
        await bench.settled(Kind.FAILED, bench.scope("expired too"))
        await bench.wait(LEASE + RETENTION + 4)
        assert await bench.found() == []

    @clause
    async def test_R12_unknown_is_found_however_old_it_is(self, bench: Bench) -> None:
        await bench.settled(Kind.UNKNOWN, bench.scope("said"))
        await bench.win(bench.scope("read"), policy=Policy.HOLD)
        await bench.wait(2 * RETENTION)
        assert sorted(await bench.found(states=frozenset({State.UNKNOWN}))) == ["read", "said"]

    @clause
    async def test_a_record_is_found_by_its_ref_within_its_tenant(self, bench: Bench) -> None:
        if not getattr(self, "finds_refs", True):
            raise SkipTest("the store is said not to find refs")
        ref, other, foreign = f"{bench.tenant}'%", f"{bench.tenant}-2", f"{bench.tenant}-foreign"
        await bench.settled(Kind.DONE, bench.scope("a"), ref=ref)
        await bench.settled(Kind.DONE, bench.scope("b"), ref=other)
        await bench.settled(Kind.DONE, bench.scope("c", tenant=foreign), ref=ref)
        assert await bench.found(ref=ref) == ["a"]
        assert await bench.found(ref=bench.tenant) == []
        assert await bench.found(ref=ref, tenant=foreign) == ["c"]
        assert sorted(await bench.found(ref=ref, tenant=None)) == ["a", "c"]
        assert await bench.found(ref=ref, operation="another") == []

    @clause
    async def test_a_scan_is_read_in_pages(self, bench: Bench) -> None:
        asks = [bench.ask(bench.scope(f"key-{n:02}")) for n in range(25)]
        await bench.store.claim(asks)
        pages = await bench.pages(limit=10)
        assert all(len(page.records) <= 10 for page in pages)
        keys = [record.scope.key for page in pages for record in page.records if record.scope]
        assert sorted(keys) == [f"key-{n:02}" for n in range(25)]

    @clause
    async def test_a_foreign_cursor_or_an_empty_page_is_refused(self, bench: Bench) -> None:
        for query in (Query(cursor="not a cursor"), Query(limit=0)):
            try:
                await bench.store.scan(query)
            except ConfigurationError:
                continue
            raise AssertionError(f"{query} was answered")

    @clause
    async def test_scanned_records_are_whole_and_come_with_the_stores_clock(self, bench: Bench) -> None:
        ask = await bench.win(fingerprint=b"\x01" * 32, labels={"a": "b"}, policy=Policy.HOLD)
        await bench.wait(LEASE + 2)
        (page,) = await bench.pages()
        (record,) = page.records
        assert (record.nonce, record.labels, record.fingerprint) == (ask.nonce, {"a": "b"}, ask.fingerprint)
        assert view(record, page.now) is State.UNKNOWN
        assert record.scope is not None
        assert await bench.peek(record.scope) == record, "a found record's scope must lead to it"
        assert bench.near(page.now, await bench.now())


class PurgeClauses:
    """Cleanup is bounded and never races a live owner."""

    @clause
    async def test_purge_never_drops_what_lives_or_is_unknown(self, bench: Bench) -> None:
        await bench.win(bench.scope("held"), policy=Policy.HOLD)
        await bench.settled(Kind.UNKNOWN, bench.scope("unknown"))
        await bench.settled(Kind.DONE, bench.scope("for ever"), retention=float("inf"))
        await bench.settled(Kind.DONE, bench.scope("expired"))
        await bench.settled(Kind.DONE, bench.scope("buried"), retention=LEASE, tombstone=4 * RETENTION)
        await bench.wait(2 * RETENTION)
        live = await bench.win(bench.scope("live"))
        lapsed = await bench.win(bench.scope("lapsed"), lease=1)
        await bench.wait(4)
        await _purge_all(bench)
        assert isinstance(await bench.claim(bench.ask(bench.scope("held"))), Unknown)
        assert isinstance(await bench.claim(bench.ask(bench.scope("unknown"))), Unknown)
        assert isinstance(await bench.claim(bench.ask(bench.scope("for ever"))), Replay)
        assert await bench.state(bench.scope("buried")) is State.EXPIRED
        assert await bench.state(bench.scope("expired")) is None
        for ask in (live, lapsed):
            await bench.finish(ask)

    @clause
    async def test_purge_is_bounded_and_tells_how_many_it_dropped(self, bench: Bench) -> None:
        asks = [bench.ask(bench.scope(f"key-{n}")) for n in range(12)]
        await bench.store.claim(asks)
        await bench.store.settle([bench.end(ask) for ask in asks])
        await bench.wait(RETENTION + 4)
        for _ in range(3):
            assert 0 <= await bench.store.purge(5) <= 5
        await _purge_all(bench)  # until it says 0; of other tests' records one may be over a moment later
        assert all(isinstance(verdict, Won) for verdict in await bench.store.claim(asks))

    @clause
    async def test_R19_after_a_purge_the_body_of_a_tombstone_is_gone(self, bench: Bench) -> None:
        ask = await bench.win(labels={"a": "b"})
        assert await bench.note(ask, b"step") is Answer.OK
        body = {"result": b"body", "ref": "ord_1", "marker": "m", "error": FAILURE}
        await bench.finish(ask, Kind.FAILED, retention=LEASE, tombstone=RETENTION, **body)
        await bench.wait(LEASE + 4)
        await _purge_all(bench)
        record = await bench.record(ask.scope)
        assert (record.result, record.ref, record.error, record.marker) == (b"", None, None, "")
        assert (record.labels or None, record.steps) == (None, b"")
        assert isinstance(await bench.claim(bench.ask()), Expired)

    @clause
    async def test_R19_purge_drops_a_tombstone_when_it_ends(self, bench: Bench) -> None:
        await bench.settled(Kind.DONE, retention=LEASE, tombstone=LEASE)
        await bench.wait(LEASE + 4)
        await _purge_all(bench)
        assert await bench.state(bench.scope()) is State.EXPIRED
        await bench.wait(LEASE)
        await _purge_all(bench)
        assert await bench.state(bench.scope()) is None


async def _one_of_each(bench: Bench) -> None:
    """One record in each state; `held` only reads as unknown."""
    await bench.win(bench.scope("held"), policy=Policy.HOLD)
    await bench.wait(LEASE + 2)
    await bench.win(bench.scope("running"))
    for kind in (Kind.DONE, Kind.FAILED, Kind.UNKNOWN, Kind.RELEASED):
        await bench.settled(kind, bench.scope(kind))


async def _purge_all(bench: Bench) -> None:
    for _ in range(1000):
        if await bench.store.purge(500) == 0:
            return
    raise AssertionError("purge never says that nothing is left")

"""The quick ways of SQLite, PostgreSQL, batches and retries (semel.posting): the same answers as the store's verbs, also in trouble."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
import psycopg
import pytest

from semel import AsyncSemel
from semel.errors import CodecError, StoreUnavailable
from semel.layers.batch import LONELY
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Busy, Mismatch, Replay, Settle, Unknown, Verdict, Won
from semel.posting import Brief, poster_of
from semel.store import Capabilities
from semel.stores.memory import MemoryStore
from semel.testing import services
from tests.ops.postgres_lab import Lab, ask_for, database_of, end_of, lab
from tests.ops.sqlite_lab import hurried, opened


async def _seven() -> int:
    return 7


# ------------------------------------------------------------------------------------------------ PostgreSQL
@pytest.fixture(params=["asyncpg", "psycopg"])
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    kind: tuple[str, Literal["async"]] = (request.param, "async")
    with lab(postgres_server, kind) as made:
        yield made


def _plain(url: str) -> str:
    return url.replace("+asyncpg", "").replace("+psycopg", "")


async def _posted(store: Any, ask: Ask, *, whole: bool) -> Verdict | Brief | None:
    poster = poster_of(store)
    assert poster is not None
    posted = poster.claim(ask, 0.0)
    assert posted is not None
    return poster.claimed(ask, await posted, whole=whole)


@pytest.mark.parametrize("labels", [None, {"route": "POST /orders"}])
def test_a_plain_replay_read_in_short_equals_the_whole_record(here: Lab, labels: Any) -> None:
    store = here.open()
    owner = here.begin(store, "key", fingerprint=b"f" * 32, labels=labels)
    here.settle(store, end_of(owner, result=b"\x10\xa3yes"))
    for asked in (ask_for("key"), ask_for("key", fingerprint=b"f" * 32)):
        short = here.run(_posted(store, asked, whole=False))
        whole = here.run(_posted(store, asked, whole=True))
        assert isinstance(short, Brief)
        assert isinstance(whole, Replay)
        record = whole.record
        assert (short.attempts, short.expires, short.result) == (
            record.attempts,
            record.expires,
            record.result,
        )
    assert isinstance(here.run(_posted(store, ask_for("key", fingerprint=b"g" * 32), whole=False)), Mismatch)


@pytest.mark.parametrize("more", [{"ref": "ord_1"}, {"marker": "too large"}])
def test_what_is_more_than_its_result_is_read_whole(here: Lab, more: dict[str, Any]) -> None:
    store = here.open()
    ask = here.begin(store, "key")
    here.settle(store, end_of(ask, result=b"\x10\xa3yes", **more))
    found = here.run(_posted(store, ask_for("key"), whole=False))
    assert isinstance(found, Replay)
    assert here.claim(store, ask_for("key")) == [found]


def test_an_outcome_that_is_over_and_a_damaged_one_are_no_replay(here: Lab) -> None:
    store = here.open()
    here.finish(store, "key", result=b"\x10\xa3yes")
    store._skew = 1_000.0
    assert here.run(_posted(store, ask_for("key"), whole=False)) is None, "it takes a write"
    store._skew = 0.0
    with psycopg.connect(_plain(here.url)) as connection:
        connection.execute("update semel set policy = 'bogus'")
    assert isinstance(here.run(_posted(store, ask_for("key"), whole=False)), Unknown)


def test_a_link_that_was_cut_between_two_calls_is_not_seen(
    here: Lab, postgres_server: services.PostgresServer
) -> None:
    async def work() -> None:
        async with AsyncSemel(here.url) as once:
            for number in range(LONELY + 2):  # from then on each call goes the quick way
                await once.execute(f"warm-{number}", _seven)
            cut = (
                "select pg_terminate_backend(pid) from pg_stat_activity "
                f"where datname = '{database_of(here.url)}' and pid <> pg_backend_pid()"
            )
            for key, replayed in (("key", False), ("key", True)):
                postgres_server.execute(cut)
                outcome = await once.execute(key, _seven)
                assert (outcome.value, outcome.replayed) == (7, replayed)

            async def cutting() -> int:
                postgres_server.execute(cut)
                return 8

            assert (await once.execute("other", cutting)).value == 8
            assert (await once.execute("other", _seven)).value == 8

    here.run(work())


def test_a_row_that_somebody_has_locked_is_busy(here: Lab) -> None:
    store = here.open()
    ask = ask_for("key")
    here.run(store.peek(ask.scope))
    with psycopg.connect(_plain(here.url)) as connection:
        other = ask_for("key")
        connection.execute(
            "insert into semel (scope, tenant, operation, key, state, nonce, attempts, token, policy, "
            "fingerprint_version, created, updated, lease_until) values "
            "(%s, 't', 'o', 'k', 'running', %s, 1, 1, 'retry', 1, now(), now(), now())",
            (other.scope.hash, other.nonce),
        )

        async def claim() -> Verdict | Brief | None:
            poster = poster_of(store)
            assert poster is not None
            posted = poster.claim(ask, 0.0)
            assert posted is not None
            try:
                reply: Any = await posted
            except Exception as trouble:
                reply = trouble
            return poster.claimed(ask, reply)

        assert isinstance(here.run(claim()), Busy)
        connection.rollback()


def test_what_cannot_be_said_by_one_statement_goes_the_long_way(here: Lab) -> None:
    store = here.open()
    owner = here.begin(store, "key")

    async def work() -> None:
        poster = poster_of(store)
        assert poster is not None
        now = asyncio.get_running_loop().time()
        odd = ask_for("odd", labels={"scene": "\ud800"})
        assert poster.claim(odd, now) is None
        with pytest.raises(ValueError, match="surrogates"):
            await poster.reclaim(odd, ValueError(), now)
        assert poster.settle(end_of(owner, ref="\0"), now) is None
        assert poster.settle(end_of(owner, actor="ann", new_nonce=b"n" * 16), now) is None
        with pytest.raises(CodecError):
            await poster.resettle(end_of(owner, ref="\0"), CodecError(), now)
        with pytest.raises(StoreUnavailable, match="over"):
            await poster.reclaim(ask_for("key"), StoreUnavailable("over"), now)
        assert isinstance(await poster.reclaim(ask_for("key"), [], now), Busy)

    here.run(work())


def test_a_settle_of_an_overtaken_owner_is_lost(here: Lab) -> None:
    store = here.open()
    owner = here.begin(store, "key")
    late = end_of(msgspec.structs.replace(owner, nonce=b"x" * 16))

    async def work() -> None:
        poster = poster_of(store)
        assert poster is not None
        posted = poster.settle(late, 0.0)
        assert posted is not None
        reply = await posted
        assert poster.settled(late, reply, 0.0) is None
        now = asyncio.get_running_loop().time()
        assert await poster.resettle(late, reply, now) is Answer.LOST

    here.run(work())


def test_a_cancelled_claim_on_the_quick_way_leaves_the_key_to_others(here: Lab) -> None:
    async def work() -> None:
        async with AsyncSemel(here.url) as once:
            for number in range(LONELY + 2):
                await once.execute(f"warm-{number}", _seven)
            left = asyncio.create_task(once.execute("key", _seven))
            await asyncio.sleep(0)  # its statement is on its way
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            assert (await once.execute("key", _seven, wait=5)).value == 7

    here.run(work())


# ---------------------------------------------------------------------------------------------------- SQLite
def test_a_file_that_stays_locked_is_told_before_the_effect_and_waited_for_after_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with AsyncSemel(f"sqlite:///{tmp_path}/semel.db", timeout=20) as once:
            await once.execute("warm", _seven)
            store: Any = once._store
            lock = store._file.writer.lock
            with lock, hurried(store, 0.1), pytest.raises(StoreUnavailable, match="stayed locked"):
                await once.execute("key", _seven)

            left = ExitStack()

            async def locking() -> int:
                lock.acquire()
                left.callback(lock.release)
                left.enter_context(hurried(store, 0.1))
                asyncio.get_running_loop().call_later(0.25, left.close)
                return 8

            assert (await once.execute("other", locking)).value == 8
            assert (await once.execute("other", _seven)).value == 8

    asyncio.run(work())


def test_what_went_wrong_with_a_posted_settle_of_a_file_is_raised(tmp_path: Path) -> None:
    async def work() -> None:
        async with AsyncSemel(f"sqlite:///{tmp_path}/semel.db") as once:
            await once.execute("warm", _seven)
            poster = poster_of(once._store)
            assert poster is not None
            with pytest.raises(StoreUnavailable, match="over"):
                await poster.resettle(end_of(ask_for("key")), StoreUnavailable("over"), 0.0)

    asyncio.run(work())


def test_a_task_that_ends_the_program_leaves_no_other_asleep(tmp_path: Path) -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    loop = asyncio.new_event_loop()
    try:
        once = AsyncSemel(f"sqlite:///{tmp_path}/semel.db")
        loop.run_until_complete(once.execute("warm", _seven))

        async def begun() -> list[asyncio.Task[Any]]:
            fns = [leaves, _seven, _seven]
            return [asyncio.create_task(once.execute(f"key-{at}", fn)) for at, fn in enumerate(fns)]

        tasks = loop.run_until_complete(begun())
        with pytest.raises(SystemExit):
            loop.run_until_complete(loop.create_future())
        assert isinstance(tasks[0].exception(), SystemExit)
        for task in tasks[1:]:
            assert loop.run_until_complete(asyncio.wait_for(task, 5)).value == 7
        loop.run_until_complete(once.aclose())
    finally:
        loop.close()


def test_a_file_that_is_not_open_is_not_posted_to(tmp_path: Path) -> None:
    async def work() -> None:
        store = opened(tmp_path / "semel.db", "async")
        poster = store.poster()
        assert poster is not None
        ask = ask_for("key")
        assert poster.claim(ask, 0.0) is None
        assert poster.settle(end_of(ask), 0.0) is None
        assert isinstance((await store.claim((ask,)))[0], Won)
        posted = poster.settle(end_of(ask), 0.0)
        assert posted is not None
        assert poster.settled(end_of(ask), await posted, 0.0) is Answer.OK
        await store.aclose()
        assert poster.claim(ask_for("other"), 0.0) is None

    asyncio.run(work())


def test_threads_have_no_quick_way(tmp_path: Path) -> None:
    assert opened(tmp_path / "semel.db", "sync").poster() is None


# ---------------------------------------------------------------------------------------- batches and retries
class Flaky(Layer):
    """Loses the replies of the calls that `lost` names by their numbers, beginning at 1."""

    def __init__(self, *, lost: set[int]) -> None:
        super().__init__(MemoryStore())
        self._numbers = itertools.count(1)
        self._lost = lost

    @property
    def capabilities(self) -> Capabilities:
        return msgspec.structs.replace(self.inner.capabilities, batches=True)

    def _trouble(self) -> None:
        if next(self._numbers) in self._lost:
            raise StoreUnavailable("the reply was lost")

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        verdicts = await self.inner.claim(asks)
        self._trouble()
        return verdicts

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        answers = await self.inner.settle(ends)
        self._trouble()
        return answers


@pytest.mark.parametrize("before", [0, LONELY])
def test_a_lost_reply_is_asked_for_again_unseen(before: int) -> None:
    async def work() -> None:
        first = 2 * before + 1
        store = Flaky(lost={first, first + 2})  # the claim's reply, and the settle's
        async with AsyncSemel(store) as once:
            for number in range(before):
                await once.execute(f"warm-{number}", _seven)
            outcome = await once.execute("key", _seven)
            assert (outcome.value, outcome.replayed, outcome.attempt) == (7, False, 1)
            assert (await once.execute("key", _seven)).replayed

    asyncio.run(work())


@pytest.mark.parametrize("before", [0, LONELY])
def test_a_claim_whose_reply_stays_lost_is_told_and_given_back(before: int) -> None:
    async def work() -> None:
        first = 2 * before + 1
        store = Flaky(lost={first, first + 1})
        async with AsyncSemel(store) as once:
            for number in range(before):
                await once.execute(f"warm-{number}", _seven)
            with pytest.raises(StoreUnavailable, match="the reply was lost"):
                await once.execute("key", _seven)
            assert not (await once.execute("key", _seven, wait=5)).replayed

    asyncio.run(work())

"""The statements of plain claims and settles do what those for every claim and settle do, and refuse what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from semel.model import Answer, Ask, Busy, Failure, Kind, Policy, Replay, State, Won
from semel.stores.postgres import PostgresStore
from semel.stores.postgres import asyncpg as adapter
from semel.stores.postgres.sql import claim_words, claims_words, settle_words, settles_words
from semel.stores.rows import COLUMNS, TIMES
from semel.testing import services
from tests.ops.postgres_lab import IDS, KINDS, Lab, ask_for, end_of, lab, rows

TINY = 1e-6  # a clock that is shifted by this much takes the statements for everything


@pytest.fixture(params=KINDS, ids=IDS)
def here(request: pytest.FixtureRequest, postgres_server: services.PostgresServer) -> Iterator[Lab]:
    with lab(postgres_server, request.param) as made:
        yield made


def row_of(server: services.PostgresServer, here: Lab, key: str) -> dict[str, Any]:
    """A row without what differs between any two: identity, and times as spans since its creation."""
    names = [f"{name} - created as {name}" if name in TIMES else name for name in COLUMNS]
    (found,) = rows(server, here.url, f"select {', '.join(names)} from semel where key = '{key}'")
    kept = dict(zip(COLUMNS, found, strict=True))
    for name in ("scope", "key", "nonce", "token"):
        del kept[name]
    return {
        name: None if value is None else round(value.total_seconds()) if name in TIMES else value
        for name, value in kept.items()
    }


def with_general(store: PostgresStore, step: Callable[[], Any]) -> Any:
    store._skew = TINY
    try:
        return step()
    finally:
        store._skew = 0.0


@pytest.mark.parametrize("number", [1, 3])
def test_a_plain_run_leaves_the_row_that_the_general_statements_leave(
    here: Lab, postgres_server: services.PostgresServer, number: int
) -> None:
    store = here.open()

    def life(name: str) -> None:
        asks = [ask_for(f"{name}{at}", fingerprint=b"f" * 32, retention=50.0) for at in range(number)]
        assert all(isinstance(verdict, Won) for verdict in here.claim(store, *asks))
        claimed.append(row_of(postgres_server, here, f"{name}0"))
        ends = [end_of(ask, result=b"r", retention=70.0) for ask in asks]
        assert here.settle(store, *ends) == [Answer.OK] * number
        settled.append(row_of(postgres_server, here, f"{name}0"))

    claimed: list[dict[str, Any]] = []
    settled: list[dict[str, Any]] = []
    life("plain")
    with_general(store, lambda: life("general"))
    assert claimed[0] == claimed[1]
    assert settled[0] == settled[1]
    assert (settled[0]["state"], settled[0]["result"], settled[0]["expires"]) == ("done", b"r", 70)


@pytest.mark.parametrize("number", [1, 3])
def test_a_plain_claim_grants_what_it_wrote_and_a_second_one_reads_it(here: Lab, number: int) -> None:
    store = here.open()
    asks = [ask_for(f"k{at}", lease=7.0) for at in range(number)]
    for ask, verdict in zip(asks, here.claim(store, *asks), strict=True):
        record, _ = here.run(store.peek(ask.scope))
        assert isinstance(verdict, Won)
        assert record is not None
        assert verdict.record.lease_until == pytest.approx(record.lease_until, abs=2e-6)
        assert (verdict.record.nonce, verdict.record.token) == (record.nonce, record.token)
    again = [ask_for(f"k{at}") for at in range(number)] + [ask_for("new")]
    *others, new = here.claim(store, *again)
    assert all(isinstance(verdict, Busy) and 6.0 < verdict.retry_after <= 7.0 for verdict in others)
    assert isinstance(new, Won)
    here.settle(store, *[end_of(ask, result=ask.scope.hash) for ask in asks])
    replays = here.claim(store, *[ask_for(f"k{at}") for at in range(number)])
    assert [verdict.record.result for verdict in replays if isinstance(verdict, Replay)] == [
        ask.scope.hash for ask in asks
    ]


@pytest.mark.parametrize("number", [1, 3])
def test_a_plain_settle_is_refused_where_the_run_is_not_its_own_or_over(
    here: Lab, postgres_server: services.PostgresServer, number: int
) -> None:
    store = here.open()
    asks = [ask_for(f"k{at}", lease=5.0, retention=5.0) for at in range(number)]
    here.claim(store, *asks)
    strangers = [end_of(ask, nonce=b"x" * 16, result=b"theirs") for ask in asks]
    assert here.settle(store, *strangers) == [Answer.LOST] * number
    change = "update semel set expires = clock_timestamp() - interval '1 second'"
    rows(postgres_server, here.url, change)
    assert here.settle(store, *[end_of(ask, result=b"late") for ask in asks]) == [Answer.GONE] * number
    change = "update semel set expires = clock_timestamp() + interval '1 hour', state = 'failed'"
    rows(postgres_server, here.url, change)
    assert here.settle(store, *[end_of(ask, result=b"late") for ask in asks]) == [Answer.REFUSED] * number
    assert set(rows(postgres_server, here.url, "select state, result from semel")) == {("failed", None)}


@pytest.mark.parametrize("number", [1, 3])
def test_a_plain_settle_clears_an_earlier_failure_and_keeps_ref_steps_and_policy(
    here: Lab, postgres_server: services.PostgresServer, number: int
) -> None:
    store = here.open()
    asks = [ask_for(f"k{at}", policy=Policy.PROBE) for at in range(number)]
    here.claim(store, *asks)
    change = (
        "update semel set error_type = 'E', error_code = '1', error_message = 'm', marker = 'too large', "
        "not_before = now(), tombstone = now(), ref = 'r', steps = 's'"
    )
    rows(postgres_server, here.url, change)
    assert here.settle(store, *[end_of(ask, result=b"r") for ask in asks]) == [Answer.OK] * number
    (kept,) = set(
        rows(
            postgres_server,
            here.url,
            "select error_type, error_code, error_message, marker, not_before, tombstone, ref, steps, policy from semel",
        )
    )
    assert kept == (None, None, None, None, None, None, "r", b"s", "probe")


def test_a_row_that_is_locked_does_not_keep_its_company_from_being_settled(here: Lab) -> None:
    store = here.open()
    asks = [here.begin(store, f"k{at}") for at in range(3)]
    plain = here.url.replace("+asyncpg", "").replace("+psycopg", "")
    with psycopg.connect(plain) as session:
        session.execute("select from semel where scope = %s for update", (asks[0].scope.hash,))
        name, args = settles_words([end_of(ask) for ask in sorted(asks, key=lambda ask: ask.scope.hash)], 0.0)
        assert name == "settle_done_many"
        done = here.run(store._talk.run(name, args, store._talk.deadline()))
        assert len(done) == 2
    assert here.settle(store, *[end_of(ask) for ask in asks]) == [Answer.OK] * 3


def test_what_is_not_plain_takes_the_statement_for_everything() -> None:
    plain = ask_for("k", fingerprint=b"f" * 32)
    assert claim_words(plain, 0.0)[0] == "claim_plain"
    assert claims_words([plain, plain], 0.0)[0] == "claim_plain_many"
    others: list[tuple[Ask, float]] = [
        (ask_for("k", policy=Policy.HOLD), 0.0),
        (ask_for("k", labels={"a": "b"}), 0.0),
        (ask_for("k", secret_id="s"), 0.0),
        (ask_for("k", fingerprint_version=2), 0.0),
        (plain, 1.0),
    ]
    for ask, skew in others:
        assert claim_words(ask, skew)[0] == "claim_one"
        assert claims_words([plain, ask], skew)[0] == "claim_many"
    done = end_of(plain, result=b"r")
    assert settle_words(done, 0.0) == ("settle_done", (plain.scope.hash, plain.nonce, 100.0, b"r"))
    assert settles_words([done, done], 0.0)[0] == "settle_done_many"
    for options in (
        {"tombstone": 1.0},
        {"marker": "too large"},
        {"ref": "r"},
        {"error": Failure("E")},
        {"after": 1.0},
        {"policy": Policy.RETRY},
        {"steps": b""},
        {"kind": Kind.FAILED},
    ):
        end = end_of(plain, **options)
        words = settle_words(end, 0.0)
        assert words is not None
        assert words[0] == "settle_one"
        assert settles_words([done, end], 0.0)[0] == "settle_many"
    assert settle_words(end_of(plain, new_nonce=b"n"), 0.0) is None
    assert settle_words(end_of(plain, actor="ann"), 0.0) is None


def test_an_asyncpg_without_the_way_to_its_protocol_is_used_by_its_statements(
    postgres_server: services.PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab(postgres_server, ("asyncpg", "async")) as here:
        made = adapter._Link.__init__

        def without(link: Any, *args: Any, **options: Any) -> None:
            made(link, *args, **options)
            link._bind = None

        monkeypatch.setattr(adapter._Link, "__init__", without)
        store = here.open()
        for key in ("a", "b"):
            here.finish(store, key, result=b"r")
        (verdict,) = here.claim(store, ask_for("a"))
        assert isinstance(verdict, Replay)
        assert verdict.record.state is State.DONE

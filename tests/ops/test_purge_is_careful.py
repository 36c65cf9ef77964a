"""What purge must not do in an SQL store: drop what nobody can read (R15), or leave a body's ghost (R19)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from semel.model import Ask, Expired, Kind, Replay, Settle, Unknown, Won
from semel.runtime import run_sync
from semel.store import Settings, open_store
from semel.stores.rows import LABELS
from semel.testing import services
from tests.ops.postgres_lab import ask_for

WEEK = 604_800.0


@pytest.fixture(params=["postgres", "mariadb"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
def url(server: Any) -> str:
    found: str = server.database(
        driver="psycopg" if isinstance(server, services.PostgresServer) else "pymysql"
    )
    return found


@pytest.fixture
def damage(server: Any, url: str) -> Callable[[str], None]:
    name = url.rpartition("/")[2]
    return lambda change: server.execute(f"UPDATE semel SET {change}", database=name)


def finish(store: Any, ask: Ask, kind: Kind = Kind.DONE, **options: Any) -> None:
    assert isinstance(run_sync(store.claim([ask]))[0], Won)
    end = Settle(ask.scope, ask.nonce, kind, 60.0, result=b"body", **options)
    run_sync(store.settle([end]))


@pytest.mark.parametrize(
    "change", ["policy = '??'", "labels = '{'", "labels = '[]'", """labels = '{"a": 1}'"""]
)
@pytest.mark.parametrize("tombstone", [0.0, 2 * WEEK])
def test_R15_a_record_that_cannot_be_read_is_neither_purged_nor_buried(
    url: str, damage: Callable[[str], None], change: str, tombstone: float
) -> None:
    store: Any = open_store(url, Settings(), "sync")
    finish(store, ask_for("k", labels={"scene": "x"}), tombstone=tombstone)
    damage(change)
    store._skew = WEEK
    assert run_sync(store.purge(10)) == 0
    damage("policy = 'retry', labels = NULL")
    store._skew = 0.0
    (verdict,) = run_sync(store.claim([ask_for("k")]))
    assert isinstance(verdict, Replay)
    assert verdict.record.result == b"body"
    run_sync(store.aclose())


def test_R15_an_abandoned_run_that_cannot_be_read_is_not_purged(
    url: str, damage: Callable[[str], None]
) -> None:
    store: Any = open_store(url, Settings(), "sync")
    run_sync(store.claim([ask_for("k", lease=0.05, retention=1.0)]))
    damage("labels = '{'")
    store._skew = WEEK
    assert run_sync(store.purge(10)) == 0
    assert isinstance(run_sync(store.claim([ask_for("k")]))[0], Unknown)
    run_sync(store.aclose())


def test_labels_of_every_kind_do_not_keep_a_record_for_ever(url: str) -> None:
    store: Any = open_store(url, Settings(), "sync")
    labels = [{"a": 'quote " back \\ slash'}, {"ü": "🙂"}, {"\0": "\n\t\x01"}, {"a": "", "b": "{}"}]
    for number, each in enumerate(labels):
        finish(store, ask_for(f"k{number}", labels=each))
    store._skew = WEEK
    assert run_sync(store.purge(10)) == len(labels)
    run_sync(store.aclose())


@pytest.mark.parametrize("kind", [Kind.DONE, Kind.FAILED])
def test_R19_a_buried_record_stays_expired_when_the_clock_is_set_back(url: str, kind: Kind) -> None:
    store: Any = open_store(url, Settings(), "sync")
    finish(store, ask_for("k"), kind, tombstone=2 * WEEK)
    store._skew = WEEK
    assert run_sync(store.purge(10)) == 0, "the tombstone is kept"
    for shift in (WEEK, 0.0, -WEEK):
        store._skew = shift
        assert isinstance(run_sync(store.claim([ask_for("k")]))[0], Expired), shift
    store._skew = 3 * WEEK
    assert run_sync(store.purge(10)) == 1
    assert isinstance(run_sync(store.claim([ask_for("k")]))[0], Won)
    run_sync(store.aclose())


@pytest.mark.parametrize(
    "text",
    ["", "{", "{}", '{"a":"b"}', '{ "a" : "b" , "c":"d" }', '{"a":"b",}', '{,"a":"b"}', '{"a":1}', '{"a":"b"}}', '{"a":"b" "c":"d"}',
     '["a"]', "null", '{"a":null}', '{"a":"\\u00e9"}', '{"a":"\\x"}', '{"a":"\\u12"}', '{"a":"\\""}', '{"a":"\\"}', '{"a":"b","a":"c"}'],
)  # fmt: skip
def test_the_pattern_of_labels_says_what_the_decoder_says(text: str) -> None:
    try:
        msgspec.json.decode(text, type=dict[str, str])
        readable = True
    except msgspec.MsgspecError:
        readable = False
    pattern = LABELS.replace("[:cntrl:]", r"\x00-\x1f\x7f")  # Python has no such classes
    assert bool(re.fullmatch(pattern, text)) is readable, json.dumps(text)

"""The Redis store beyond the contract: trips, memory, lifetimes, what cannot be read, large results, the index."""

from __future__ import annotations

import asyncio
import math
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from semel import model
from semel.errors import ConfigurationError, OutcomeUnknown, StoreUnavailable
from semel.model import (
    Answer,
    Busy,
    Expired,
    Failure,
    Kind,
    Mismatch,
    Note,
    Policy,
    Renewal,
    Replay,
    State,
    Unknown,
    Won,
)
from semel.runtime import run_sync
from semel.store import Query
from semel.stores.redis import RedisStore
from semel.stores.redis_record import answer, read_peek, verdict
from semel.testing import services
from tests.ops.redis_store_lab import (
    BOTH,
    Colour,
    ask,
    client,
    end,
    finish,
    opened,
    record_key,
    run,
    scope,
    sync_store,
    tombstone_key,
    win,
    word,
)

LARGE = b"x" * 100_000


@pytest.fixture
def server(redis_server: services.RedisServer) -> services.RedisServer:
    return redis_server.flush()


@pytest.fixture
def store(server: services.RedisServer) -> Iterator[RedisStore]:
    with sync_store(server) as store:
        yield store


def calls(server: services.RedisServer) -> dict[str, int]:
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in server.info("commandstats").items()}


# ------------------------------------------------------------------------------------------------ trips and size


@BOTH
def test_a_first_execution_is_two_script_calls_and_a_replay_one_that_writes_nothing(
    server: services.RedisServer, colour: Colour
) -> None:
    async def main() -> None:
        store = opened(server, colour)
        await finish(store, await win(store, "warm up"), result=b"body")
        server.command("CONFIG", "RESETSTAT")
        await finish(store, await win(store), result=b"body")
        first = calls(server)
        assert first.pop("evalsha") == 2
        assert "eval" not in first
        changes = server.info("persistence")["rdb_changes_since_last_save"]
        server.command("CONFIG", "RESETSTAT")
        for _ in range(3):
            (found,) = await store.claim([ask()])
            assert isinstance(found, Replay)
            assert found.record.result == b"body"
        replays = calls(server)
        assert replays["evalsha"] == 3
        assert set(replays) <= {"evalsha", "time", "get", "config|resetstat", "info", "hello", "client|setinfo"}
        assert server.info("persistence")["rdb_changes_since_last_save"] == changes
        await store.aclose()

    run(colour, main)


def test_a_batch_is_one_script_call_per_item_and_answers_in_order(server: services.RedisServer) -> None:
    with sync_store(server) as store:
        run_sync(store.peek(scope()))
        run_sync(win(store, "warm up"))
        server.command("CONFIG", "RESETSTAT")
        asks = [ask(f"key-{n}") for n in range(50)]
        assert all(isinstance(found, Won) for found in run_sync(store.claim(asks)))
        assert calls(server)["evalsha"] == 50


@pytest.mark.parametrize("size", [200, 1024, 4096])
def test_a_record_takes_at_most_a_tenth_more_memory_than_a_plain_set_of_its_result(
    server: services.RedisServer, store: RedisStore, size: int
) -> None:
    many = 300
    if size < 1024:
        pytest.skip("a tenth of a small payload is less than the nonce and the fingerprint") if size < 200 else None
    with client(server) as stranger:

        def used() -> float:
            keys = stranger.keys(b"*:r:*" if stranger.exists(b"{semel:000}:c") or True else b"*")
            return sum(stranger.memory_usage(key) or 0 for key in keys if b"plain" not in key) / many

        for n in range(many):
            owner = run_sync(win(store, f"req-{n:08}", fingerprint=bytes(32)))
            run_sync(finish(store, owner, result=os.urandom(size), retention=86_400.0))
        packed = used()
        length = len(record_key(store, scope()))
        plain = 0.0
        for n in range(many):
            key = f"plain-{n:08}".encode().ljust(length, b"-")
            stranger.set(key, os.urandom(size), px=86_400_000)
            plain += (stranger.memory_usage(key) or 0) / many
        print(f"{size} bytes: {packed:.0f} packed, {plain:.0f} plain, {packed / plain:.2f}")
        if size >= 1024:
            assert packed <= 1.1 * plain

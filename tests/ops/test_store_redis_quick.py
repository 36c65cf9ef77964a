"""lua/quick.lua is a shorter way through settle.lua: what it writes is what the long way writes, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf
from typing import Any

import pytest
import redis

from semel.model import Ask, Settle
from semel.stores.redis.link import Script
from semel.stores.redis.record import CLAIM, SETTLE, pack_ask, pack_end
from semel.testing import services
from tests.ops.redis_store_lab import ask, end

_CLOCK = "local clock = redis.call('TIME')"
_STOPPED = "local clock = {'4102444800', '250001'}"
_QUICK = "if result and #ending == 77"
_LONG = "if #ending < 61 then"
_KEYS = (b"{s}:r:", b"{s}:t:", b"{s}:o", b"{s}:f", b"{s}:c")
_ALL: Any = {"fingerprint": b"f" * 32, "secret_id": "k1", "labels": {"route": "POST /café"}}


def _altered(script: Script, *changes: tuple[str, str]) -> str:
    source = script.source
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.fixture
def server(redis_server: services.RedisServer) -> Iterator[services.RedisServer]:
    yield redis_server
    redis_server.flush()


def _written(client: Any, claim: str, settle: str, owner: Ask, ended: Settle) -> dict[str, Any]:
    """What is there after a claim and a settle at a clock that stands still."""
    client.flushdb()
    hashed = owner.scope.hash
    record, tombstone, *shard = _KEYS
    keys = [record + hashed, tombstone + hashed, *shard]
    claim_keys = [*keys[:3], keys[4]]
    assert client.eval(claim, len(claim_keys), *claim_keys, pack_ask(owner, 0.0))[24:25] == b"F"
    reply = client.eval(settle, len(keys), *keys, pack_end(ended, 0.0), ended.result)
    assert reply == hashed[:8] + owner.nonce + b"O"
    return {
        "record": client.get(keys[0]),
        "tombstone": client.get(keys[1]),
        "ends": [client.pexpiretime(key) for key in keys],
        "open": client.zrange(keys[2], 0, -1, withscores=True),
        "failed": client.zrange(keys[3], 0, -1, withscores=True),
        "counters": client.hgetall(keys[4]),
    }


@pytest.mark.parametrize("retention", [0.0, 60.0, inf])
@pytest.mark.parametrize("tombstone", [0.0, 30.0, inf])
@pytest.mark.parametrize(
    "claimed",
    [{}, {"fingerprint": b"f" * 32}, {"secret_id": "k1"}, {"labels": {"route": "POST /café"}}, _ALL],
    ids=["bare", "fingerprint", "secret", "labels", "all"],
)
def test_both_ways_write_the_same_bytes(
    server: services.RedisServer, retention: float, tombstone: float, claimed: dict[str, Any]
) -> None:
    owner = ask(**claimed)
    ended = end(owner, retention=retention, tombstone=tombstone, result=os.urandom(40))
    claim = _altered(CLAIM, (_CLOCK, _STOPPED))
    quick_only = _altered(SETTLE, (_CLOCK, _STOPPED), (_LONG, f"do return 'took the long way' end {_LONG}"))
    long_only = _altered(SETTLE, (_CLOCK, _STOPPED), (_QUICK, f"if false and {_QUICK[3:]}"))
    with redis.Redis.from_url(server.url) as client:
        quick = _written(client, claim, quick_only, owner, ended)
        assert quick == _written(client, claim, long_only, owner, ended)
    assert quick["record"].endswith(ended.result)

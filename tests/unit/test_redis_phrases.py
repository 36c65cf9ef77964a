"""The ready-made commands are byte for byte what hiredis would have packed."""

from __future__ import annotations

import os

import hiredis
import pytest
from msgspec.structs import replace

from semel.keys import make_scope
from semel.model import Ask
from semel.stores.redis import record
from semel.stores.redis.index import Names
from semel.stores.redis.phrases import Phrase
from semel.stores.redis.record import CLAIM, SETTLE, ask_words, pack_ask


@pytest.mark.parametrize("prefix", ["semel", "a", "a.rather:long-prefix_of_64" + "x" * 30])
@pytest.mark.parametrize("args", [(b"ask",), (b"end" * 40, b""), (b"\r\n$3", b"r" * 5000)])
def test_a_phrase_is_what_hiredis_would_pack(prefix: str, args: tuple[bytes, ...]) -> None:
    shards = Names(prefix).shards
    script, rest = (
        (CLAIM, ("open", "counters")) if len(args) == 1 else (SETTLE, ("open", "failed", "counters"))
    )
    phrase = Phrase(script, shards, rest, len(args))
    for _ in range(20):
        hashed = os.urandom(32)
        shard = Names(prefix).of(hashed)
        start, between, others, route = phrase.of(hashed)
        said = b"".join((start, hashed, between, hashed, others))
        said += b"\r\n$".join(b"%d\r\n%b" % (len(arg), arg) for arg in args) + b"\r\n"
        keys = (shard.record + hashed, shard.tombstone + hashed, *(getattr(shard, name) for name in rest))
        packed = hiredis.pack_command((b"EVALSHA", script.sha1, len(keys), *keys, *args))
        assert said == packed
        assert keys[0].startswith(route), "the route lies in the slot of the record"


def test_an_ask_is_written_as_it_is_packed() -> None:
    """What is alike is remembered, whoever asked in between: more tenants than are remembered, and asks that say more."""
    for number in range(2 * record._MOST_ASKS + 3):
        scope = make_scope("semel", f"tenänt-{number % 1500}", "pay", f"ordér-{number}")
        plain = Ask(scope, os.urandom(16), 10.0 + number % 3, 60.0, secret_id="key-" * (number % 2))
        for ask in (plain, replace(plain, nonce=os.urandom(16)), replace(plain, fingerprint=bytes(32))):
            packed = pack_ask(ask, 0.5)
            assert b"".join(ask_words(ask, 0.5)) == b"%d\r\n%b\r\n" % (len(packed), packed)
    assert 0 < len(record._plain_asks) <= record._MOST_ASKS

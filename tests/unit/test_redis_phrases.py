"""The ready-made commands are byte for byte what hiredis would have packed."""

from __future__ import annotations

import os

import hiredis
import pytest

from semel.keys import make_scope
from semel.model import Ask
from semel.stores.redis import record
from semel.stores.redis.index import Names
from semel.stores.redis.phrases import Phrase
from semel.stores.redis.record import CLAIM, SETTLE, pack_ask


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


def test_an_ask_that_says_little_is_packed_as_any_other() -> None:
    """What is alike is remembered. Only the byte that lets a large record through tells the two ways apart."""
    for number in range(2 * record._MOST_ASKS + 3):  # more tenants than are remembered
        scope = make_scope("semel", f"tenänt-{number % 1500}", "pay", f"ordér-{number}")
        ask = Ask(scope, os.urandom(16), 10.0 + number % 3, 60.0, secret_id="key-" * (number % 2))
        plain, whole = pack_ask(ask, 0.5), pack_ask(ask, 0.5, large=True)
        assert (plain[:29], plain[29], plain[30:]) == (whole[:29], 0, whole[30:])
        assert whole[29] == 1
    assert len(record._plain_asks) <= record._MOST_ASKS

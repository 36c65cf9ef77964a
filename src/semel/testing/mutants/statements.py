"""Bugs in what real stores send to their servers: Lua and SQL with a condition left out. The contract suite catches them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semel.testing.mutants.plant import Patch, mutant

__all__: list[str] = []


def _changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        if old not in text:
            raise LookupError(f"the text to be broken is not there any more: {old!r}")
        text = text.replace(old, new)
    return text


def _lua(name: str, *changes: tuple[str, str]) -> Sequence[Patch]:
    from semel.stores.redis import record as redis_record
    from semel.stores.redis import store as redis_store
    from semel.stores.redis.calls import Script

    real = vars(redis_record)[name]
    broken = Script(real.name, _changed(real.source, *changes))
    return [(module, name, broken) for module in (redis_record, redis_store) if name in vars(module)]


@mutant(
    "redis-settle-unfenced", check="test_nothing_that_an_overtaken_owner_writes_is_accepted", store="redis"
)
def _redis_settle_unfenced() -> Sequence[Patch]:
    """settle.lua does not compare the nonce."""
    return _lua("SETTLE", ("elseif nonce ~= end_nonce then", "elseif false then"))


@mutant(
    "redis-quick-settle-unfenced",
    check="test_nothing_that_an_overtaken_owner_writes_is_accepted",
    store="redis",
)
def _redis_quick_settle_unfenced() -> Sequence[Patch]:
    """The quick settle of Redis does not compare the nonce."""
    return _lua("SETTLE", ("and sub(run, 100, 115) == owner", ""))


@mutant(
    "redis-late-release-forgets-steps",
    check="test_R14_a_release_with_steps_that_comes_later_than_that_keeps_them_for_one_retention",
    store="redis",
)
def _redis_late_release_forgets_steps() -> Sequence[Patch]:
    """settle.lua gives a release that comes late an end in the past, and the steps are gone."""
    return _lua("SETTLE", ("if gone <= free then gone = free + retention end", ""))


@mutant(
    "redis-given-back-binds-nobody",
    check="test_R14_a_take_over_that_was_given_back_leaves_the_key_bound_to_its_request",
    store="redis",
)
def _redis_given_back_binds_nobody() -> Sequence[Patch]:
    """claim.lua takes a take-over that was given back before it ran for a release like any other."""
    return _lua("CLAIM", (" and (marker_size == 0 or attempts == 1)", ""))


@mutant(
    "redis-word-overwrites-a-step",
    check="test_R26_a_word_about_steps_is_lost_when_another_was_noted_since",
    store="redis",
)
def _redis_word_overwrites_a_step() -> Sequence[Patch]:
    """settle.lua does not look whether a step was noted since a person's word was made."""
    return _lua("SETTLE", ("if band(options, 8) ~= 0 and unpack", "if false and unpack"))


@mutant(
    "redis-claim-forgets-its-sender",
    check="test_a_claim_sent_again_wins_again_as_the_same_attempt",
    store="redis",
)
def _redis_claim_forgets_its_sender() -> Sequence[Patch]:
    """claim.lua answers Busy to a claim that is sent again."""
    return _lua("CLAIM", ("elseif state == RUNNING and nonce == ask_nonce then", "elseif false then"))


@mutant(
    "redis-note-unfenced", check="test_a_note_by_a_stranger_is_lost_and_of_an_absent_key_gone", store="redis"
)
def _redis_note_unfenced() -> Sequence[Patch]:
    """note.lua appends whoever sends."""
    return _lua("NOTE", ("if nonce ~= mine then", "if false then"))


@mutant(
    "redis-lease-unseen",
    check="test_another_claim_is_busy_while_the_lease_lasts_and_writes_nothing",
    store="redis",
)
def _redis_lease_unseen() -> Sequence[Patch]:
    """claim.lua takes a running key over without a look at its lease."""
    return _lua("CLAIM", ("elseif seen == RUNNING and now < lease_until then", "elseif false then"))


@mutant(
    "sqlite-settle-unfenced", check="test_nothing_that_an_overtaken_owner_writes_is_accepted", store="sqlite"
)
def _sqlite_settle_unfenced() -> Sequence[Patch]:
    """The quick settle of SQLite does not compare the nonce."""
    from semel.stores.sqlite import records as sqlite_records

    return [(sqlite_records, "_DONE", _changed(sqlite_records._DONE, ("AND nonce = :nonce ", "")))]


@mutant(
    "postgres-settle-unfenced",
    check="test_nothing_that_an_overtaken_owner_writes_is_accepted",
    store="postgres",
)
def _postgres_settle_unfenced() -> Sequence[Patch]:
    """The quick settles of PostgreSQL update whatever row there is."""
    from semel.stores.postgres import sql as postgres_sql

    real = postgres_sql._text
    postgres_sql.statements.cache_clear()

    def text(*args: Any) -> str:
        return _changed(
            real(*args),
            ("r.nonce = $3::bytea and {running}", "$3::bytea is not null and {running}"),
            ("r.nonce = $2::bytea and {running}", "$2::bytea is not null and {running}"),
            ("r.nonce = ends.nonce and ", ""),
        )

    return [(postgres_sql, "_text", text)]


@mutant(
    "mysql-settle-unfenced",
    check="test_nothing_that_an_overtaken_owner_writes_is_accepted",
    store="mysql",
)
def _mysql_settle_unfenced() -> Sequence[Patch]:
    """The settle and the heartbeat of MariaDB and MySQL update whatever run there is."""
    from semel.stores.mysql import rows as mysql_rows

    real = mysql_rows._texts
    mysql_rows.statements.cache_clear()

    def texts() -> Any:
        found = dict(real())
        found["settle"] = _changed(found["settle"], (" AND r.`nonce` = %(nonce)s", ""))
        found["renew"] = _changed(found["renew"], (" AND r.`nonce` = v.nonce", ""))
        return found

    return [(mysql_rows, "_texts", texts)]


@mutant("redis-client-retries", check="test_the_driver_never_tries_again_by_itself", store="redis")
def _redis_client_retries() -> Sequence[Patch]:
    """The connections of redis-py keep their own habit: ten tries, each of which may send again what was sent."""
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from semel.stores.redis import address as redis_address

    return [(redis_address, "_no_retry", lambda _: Retry(NoBackoff(), 10))]


@mutant(
    "redis-record-before-its-index", check="test_a_claim_that_fails_half_way_leaves_no_record", store="redis"
)
def _redis_record_before_its_index() -> Sequence[Patch]:
    """claim.lua writes the record first and its marker in the index last: if that fails, the key is granted to nobody."""
    marker = "  redis.call('ZADD', KEYS[3], ends, sub(KEYS[1], -32))\n"
    record = "  redis.call('SET', KEYS[1], changed, 'PXAT', ends)\n"
    return _lua("CLAIM", (marker + record, record + marker))

"""What a store's live settings are worth: the rows of the guarantee table that hold, and what would strengthen them.

`examine(url)` only reads: no table is made, no setting changed. It answers also where semel's tables are
not there yet. `once.guarantee()` gives the same `guarantee` to a program that has a face open.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from typing import Final, Literal, get_args

import msgspec

from semel.doctor.advice import advice_for, hindrances, unread
from semel.doctor.looks import Attention, Look, Schema, count, look
from semel.doctor.messaging import Messaging
from semel.errors import ConfigurationError, SemelWarning, StoreUnavailable
from semel.guarantees import Facts, Guarantee, Mode, grade
from semel.hosts import scheme_of
from semel.runtime import run_sync
from semel.settings import checked_store_settings
from semel.store import Colour, Settings, Store, open_store
from semel.stores import unfit

__all__ = [
    "Attention",
    "Checkup",
    "Messaging",
    "Requirement",
    "Schema",
    "Verdict",
    "examine",
    "examine_async",
    "judge",
    "without_password",
]

Requirement = Literal["exactly-once", "durable"]
# Drivers that only one colour has; everything else is read by an event loop.
_SYNC_DRIVERS: Final = frozenset({"psycopg", "pymysql"})


class Checkup(msgspec.Struct, frozen=True):
    """What was found. `guarantee.warnings` is what weakens the promise, each with the setting that mends it."""

    url: str
    """Without its password."""
    guarantee: Guarantee
    exactly_once: bool
    """Mode tx is exactly once under every fault that these settings allow; so are messages, where messaging has tables."""
    durable: bool
    """An acknowledged write survives a power loss, and the store drops no record by itself."""
    schema: Schema
    attention: Attention
    advice: tuple[str, ...] = ()
    """What weakens nothing by itself, and is worth knowing."""
    unread: tuple[str, ...] = ()
    """Settings that this user may not read: without them nothing can be promised."""
    problems: tuple[str, ...] = ()
    """Why semel would not work here at all."""
    messaging: Messaging = Messaging()
    """The tables of outbox and inbox, if they are there."""


class Verdict(msgspec.Struct, frozen=True):
    """The exit code of `semel doctor` and its reason: 0 fine, 1 weaker than required, 2 cannot tell or cannot work."""

    code: int
    text: str


def examine(url: str, settings: Settings | None = None) -> Checkup:
    """Read everything; StoreUnavailable or ConfigurationError when the store cannot be reached or the URL is wrong."""
    driver = scheme_of(url).partition("+")[2]
    if driver in _SYNC_DRIVERS:
        return run_sync(_examine(url, settings or Settings(), "sync"))
    if asyncio._get_running_loop() is not None:  # noqa: SLF001 - the one that raises nothing
        raise ConfigurationError(
            "examine(url) inside a running event loop would stop it: await examine_async(url)"
        )
    return asyncio.run(_examine(url, settings or Settings(), "async"))


async def examine_async(url: str, settings: Settings | None = None) -> Checkup:
    """The same inside a running event loop; a URL that names a sync driver is refused."""
    return await _examine(url, settings or Settings(), "async")


async def _examine(url: str, settings: Settings, colour: Colour) -> Checkup:
    settings = msgspec.structs.replace(checked_store_settings(settings, url), create=False)
    store = open_store(url, settings, colour)  # connects to nothing yet
    try:
        found = await look(url, settings, colour)
        return await _asked(store, found, url)
    finally:
        await store.aclose()


async def _asked(store: Store, found: Look, url: str) -> Checkup:
    """Complete with the store's own words what could be seen without it."""
    facts, schema, attention = found.facts, found.schema, found.attention
    problems: list[str] = [*found.problems] if schema.usable else [schema.text]
    if facts is None or (attention is None and schema.readable):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SemelWarning)  # what may not be read is told by `unread`
                facts = await store.facts()
                attention = await count(store.scan)
        except (ConfigurationError, StoreUnavailable) as error:
            # What a face would hear as well: an eviction policy, an old version, tables that keep nothing, a replica.
            away = isinstance(error, StoreUnavailable) and unfit.REPLICA not in str(error)
            if facts is None or away:
                raise
            problems.append(str(error))
    checkup = _checkup(url, facts, schema, attention or Attention(read=False), problems)
    checkup = msgspec.structs.replace(checkup, advice=(*found.notes, *checkup.advice))
    return _with_messaging(checkup, found.messaging)


def _with_messaging(checkup: Checkup, messaging: Messaging) -> Checkup:
    """A table that does not keep messages breaks the promise of mode tx: to add one is an effect in the caller's transaction."""
    kept = not messaging.problems and not messaging.doubts
    return msgspec.structs.replace(
        checkup,
        exactly_once=checkup.exactly_once and kept,
        durable=checkup.durable and kept,
        problems=(*checkup.problems, *messaging.problems),
        messaging=messaging,
    )


def _checkup(url: str, facts: Facts, schema: Schema, attention: Attention, problems: list[str]) -> Checkup:
    guarantee = grade(facts)
    hindering = tuple(hindrances(facts))
    told = (text for text in problems if not any(known in text for known in hindering))
    return Checkup(
        url=without_password(url),
        guarantee=guarantee,
        exactly_once=guarantee.exactly_once,
        durable=facts.durable_writes and not facts.evicts,
        schema=schema,
        attention=attention,
        advice=tuple(advice_for(facts)),
        unread=tuple(unread(facts)),
        problems=(*told, *hindering),
    )


def judge(checkup: Checkup, require: Requirement | None = None) -> Verdict:
    """Whether this store is as strong as required; without a requirement, whether semel would work on it at all."""
    if require not in (None, *get_args(Requirement)):
        raise ConfigurationError(
            f"require must be {' or '.join(map(repr, get_args(Requirement)))}, not {require!r}: what is not known is not judged"
        )
    if checkup.unread:
        return Verdict(2, f"cannot tell: {checkup.unread[0]}")
    no_tx = checkup.guarantee.absent.get(Mode.TX)
    messages = next(iter((*checkup.messaging.problems, *checkup.messaging.doubts)), "")
    if require == "exactly-once" and not checkup.exactly_once:
        why = no_tx or "effects in the same transaction are not exactly once with these settings"
        return Verdict(1, f"refused: {messages if checkup.guarantee.exactly_once else why}")
    if require == "durable" and not checkup.durable:
        return Verdict(1, f"refused: {messages or 'acknowledged writes do not survive with these settings'}")
    if checkup.problems:
        return Verdict(2, f"semel cannot work here: {checkup.problems[0]}")
    if require is not None:
        return Verdict(0, f"{require} holds with these settings")
    if no_tx:
        return Verdict(0, f"semel works here; {no_tx}")
    word = "exactly once" if checkup.exactly_once else "weaker than exactly once"
    return Verdict(0, f"effects in the same transaction are {word} with these settings")


def without_password(url: str) -> str:
    """For people and logs; a password may also stand in the query."""
    hidden = re.sub(r"^([^/]*://[^/?#@:]*):[^/?#]*@", r"\1:***@", url)
    return re.sub(r"([?&][^=&]*pass[^=&]*=)[^&#]*", r"\1***", hidden, flags=re.IGNORECASE)

"""The named statements of `sql/postgres.sql`, made out for one table, and what travels in and out of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import inf
from operator import itemgetter
from typing import Any, Final, NamedTuple

import msgspec

from semel.canonical import FINGERPRINT_VERSION
from semel.errors import CodecError, ConfigurationError
from semel.keys import Scope
from semel.model import Ask, Event, Failure, Kind, Policy, Record, Renewal, Settle, State
from semel.posting import Brief
from semel.stores import rows

__all__ = [
    "SCHEMA_VERSION",
    "WIDTH",
    "Change",
    "Words",
    "ask_args",
    "brief_of",
    "change_args",
    "claim_words",
    "claims_words",
    "columns",
    "end_args",
    "is_plain",
    "new_words",
    "news_words",
    "record_of",
    "renewal_args",
    "schema_sql",
    "settle_words",
    "settles_words",
    "span",
    "statements",
]

Words = tuple[str, Sequence[Any]]
"""A statement by its name, and its arguments."""

SCHEMA_VERSION: Final = 1
WIDTH: Final = len(rows.COLUMNS)

_TABLE = re.compile(r"(?:(?P<schema>[a-z_][a-z0-9_]{0,62})\.)?(?P<name>[a-z_][a-z0-9_]{0,46})")
_encode_labels = msgspec.json.Encoder(order="sorted").encode
# Seconds, about 3,800 years: longer is for ever. Both drivers refuse timestamps beyond the year 9999.
_FAR: Final = 1.2e11
_USED: Final = frozenset({Kind.DONE, Kind.FAILED})


@cache
def statements(table: str) -> Mapping[str, str]:
    """Every statement for this table, by name. A bad table name is a ConfigurationError."""
    found = _TABLE.fullmatch(table)
    if found is None:
        raise ConfigurationError(
            f"table={table!r} cannot be used: a PostgreSQL table name here is lower-case letters, digits and _, at most "
            "47 of them, not beginning with a digit, with an optional schema in front (app.semel)"
        )
    schema, name = found["schema"], found["name"]
    home = f'"{schema}".' if schema else ""
    parts = dict(_parts(_text()))
    # First what is in other statements, and names may be in: `filter` uses `viewed`.
    common = ("filter", "viewed", "buriable", "readable", "running", "moment")
    words = {f"{{{part}}}": parts[part] for part in common} | {
        "{records}": f'{home}"{name}"',
        "{audit}": f'{home}"{name}_audit"',
        "{schema}": f'{home}"{name}_schema"',
        "{begin}": f'{home}"{name}_begin"',
        "{begin_all}": f'{home}"{name}_begin_all"',
        "{enter}": f'{home}"{name}_enter"',
        "{pkey}": f'"{name}_pkey"',
        "{name}": name,
        "{row}": _row(""),
        "{row:r}": _row("r."),
        "{names:held}": ", ".join(f"held.{column}" for column in rows.COLUMNS),
        "{nulls}": ", ".join(["null"] * (WIDTH - 1)),
        "{print}": str(FINGERPRINT_VERSION),
    }
    # Last: `readable` uses it, as E'…', where backslashes mean the same whatever standard_conforming_strings says.
    words["{labels}"] = rows.LABELS.replace("\\", "\\\\")
    return {title: _filled(body, words) for title, body in parts.items()}


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Name and text of each statement. Comments are for the reader of the file, except for those of the schema."""
    for part in re.split(r"^-- name: ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        lines = (
            line for line in body.splitlines() if line and (title == "schema" or not line.startswith("--"))
        )
        yield title, "\n".join(lines)


def _filled(body: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        body = body.replace(word, value)
    return body


def schema_sql(table: str = "semel") -> str:
    """The DDL, for people who may not let a program create tables: run it once, by hand."""
    return statements(table)["schema"] + "\n"


def _text() -> str:
    return files("semel.stores").joinpath("sql/postgres.sql").read_text("utf-8")


def _row(alias: str) -> str:
    """The columns in the order of `rows.COLUMNS`. `date_part` gives float8; `extract` would give numeric, and cost it."""
    return ", ".join(
        f"date_part('epoch', {alias}{column}) as {column}" if column in rows.TIMES else f"{alias}{column}"
        for column in rows.COLUMNS
    )


# ------------------------------------------------------------------------------------------------ arguments


def ask_args(ask: Ask) -> tuple[Any, ...]:
    """$2-$13 of claim_one."""
    scope = ask.scope
    lease = min(ask.lease, _FAR)
    life = lease + ask.retention
    return (
        scope.hash,
        scope.tenant,
        scope.operation,
        scope.key,
        ask.nonce,
        ask.policy.value,
        ask.fingerprint or None,
        ask.fingerprint_version,
        lease,
        life if ask.policy is Policy.RETRY and life < _FAR else None,
        _encode_labels(ask.labels).decode() if ask.labels else None,
        ask.secret_id or None,
    )


def _plain_ask_args(ask: Ask) -> tuple[Any, ...] | None:
    """$1-$8 of claim_plain; None for an ask that needs claim_one."""
    if (
        ask.policy is not Policy.RETRY
        or ask.labels
        or ask.secret_id
        or ask.fingerprint_version != FINGERPRINT_VERSION
    ):
        return None
    scope = ask.scope
    lease = min(ask.lease, _FAR)
    life = lease + ask.retention
    return (
        scope.hash,
        scope.tenant,
        scope.operation,
        scope.key,
        ask.nonce,
        ask.fingerprint or None,
        lease,
        life if life < _FAR else None,
    )


def claim_words(ask: Ask, skew: float) -> Words:
    """The statement for one ask."""
    if not skew and (args := _plain_ask_args(ask)) is not None:
        return "claim_plain", args
    return "claim_one", (skew, *ask_args(ask))


def new_words(ask: Ask, skew: float) -> Words | None:
    """The statement for one ask whose key is most likely new; None for one that needs claim_one."""
    if skew or (args := _plain_ask_args(ask)) is None:
        return None
    return "claim_new", args


def claims_words(asks: Sequence[Ask], skew: float, *, look: bool = False) -> Words:
    """The statement for several asks, sorted by scope. `look`: nothing is inserted."""
    if (plain := _plain_asks_args(asks, skew)) is not None:
        return "claim_plain_many", (*plain, look)
    return "claim_many", (skew, *columns(map(ask_args, asks)), look)


def news_words(asks: Sequence[Ask], skew: float) -> Words | None:
    """As `new_words`, for several asks, sorted by scope."""
    plain = _plain_asks_args(asks, skew)
    return None if plain is None else ("claim_new_many", plain)


def _plain_asks_args(asks: Sequence[Ask], skew: float) -> list[list[Any] | None] | None:
    """$1-$8 of claim_plain_many; None if one of the asks needs claim_many."""
    plain = [] if skew else [args for args in map(_plain_ask_args, asks) if args is not None]
    return columns(plain) if len(plain) == len(asks) else None


def is_plain(end: Settle) -> bool:
    """Whether settle_one can decide it: an owner's word, whose expiry does not depend on what is stored."""
    if end.new_nonce or end.actor or end.kind is Kind.FORGOTTEN:
        return False
    return not (end.kind is Kind.RELEASED and end.steps)


def end_args(end: Settle) -> tuple[Any, ...]:
    """$2-$15 of settle_one."""
    error = end.error
    after = min(end.after, _FAR)
    keep = None if end.kind is Kind.UNKNOWN or end.retention >= _FAR else max(end.retention, after)
    return (
        end.scope.hash,
        end.nonce,
        end.kind.value,
        keep,
        min(keep + end.tombstone, _FAR) if keep is not None and end.tombstone and end.kind in _USED else None,
        after or None,
        end.policy.value if end.policy else None,
        end.marker or None,
        end.result or None,
        _exact(end.ref),
        None if error is None else _shown(error.type),
        None if error is None else _shown(error.code),
        None if error is None else _shown(error.message),
        end.steps,
    )


def _done_args(end: Settle) -> tuple[Any, ...] | None:
    """$1-$4 of settle_done; None for a settle that needs another statement."""
    if (
        end.kind is not Kind.DONE
        or end.tombstone
        or end.marker
        or end.ref is not None
        or end.error is not None
        or end.after
        or end.policy is not None
        or end.steps is not None
        or end.new_nonce
        or end.actor
    ):
        return None
    return end.scope.hash, end.nonce, span(end.retention), end.result or None


def settle_words(end: Settle, skew: float) -> Words | None:
    """The statement for one settle; None when only the model can decide it."""
    if not skew and (args := _done_args(end)) is not None:
        return "settle_done", args
    return ("settle_one", (skew, *end_args(end))) if is_plain(end) else None


def settles_words(ends: Sequence[Settle], skew: float) -> Words:
    """The statement for several settles, all plain, sorted by scope."""
    if not skew:
        done = [args for args in map(_done_args, ends) if args is not None]
        if len(done) == len(ends):
            return "settle_done_many", columns(done)
    return "settle_many", (skew, *columns(map(end_args, ends)))


def columns(items: Iterable[tuple[Any, ...]]) -> list[list[Any] | None]:
    """An array per column. One without a value is NULL as a whole: to `unnest` the same, and most are; a driver looks at
    every element of an array before it sends it."""
    arrays = zip(*items, strict=True)
    return [None if array.count(None) == len(array) else list(array) for array in arrays]


def span(seconds: float) -> float | None:
    """Seconds as a statement takes them; None is for ever."""
    return None if seconds >= _FAR else seconds


def renewal_args(renewal: Renewal) -> tuple[Any, ...]:
    """An item of $2-$5 of renew."""
    return renewal.scope.hash, renewal.nonce, min(renewal.lease, _FAR), span(renewal.retention)


class Change(NamedTuple):
    """A record that the model decided, and the version of the row that it was decided on."""

    record: Record
    version: str
    ends: bool = False
    """Waiters are told."""
    event: Event | None = None
    retention: float = 0.0
    """How long the event is kept."""


def change_args(change: Change) -> tuple[Any, ...]:
    """An item of $2-$37 of swap."""
    record, event = change.record, change.event
    if record.error is not None:
        error = record.error
        shown = Failure(_shown(error.type) or "", _shown(error.code), _shown(error.message) or "")
        record = msgspec.structs.replace(record, error=shown)
    _exact(record.ref)
    if record.expires > _FAR:
        record = msgspec.structs.replace(record, expires=inf)
    times = (record.lease_until, record.tombstone, record.not_before)
    if max(times) > _FAR:
        lease_until, tombstone, not_before = (min(time, 2 * _FAR) for time in times)
        record = msgspec.structs.replace(
            record, lease_until=lease_until, tombstone=tombstone, not_before=not_before
        )
    row = (*rows.to_row(record), change.version, change.ends)
    if event is None:
        return (*row, None, None, None, None, None)
    state = None if event.state is None else event.state.value
    return (*row, event.kind.value, state, _shown(event.actor), _shown(event.reason), span(change.retention))


def _exact(text: str | None) -> str | None:
    """A text that must come back equal: refused when PostgreSQL cannot hold it."""
    if text is not None and _shown(text) != text:
        raise CodecError(
            "a ref with a NUL character or a lone surrogate cannot be stored in PostgreSQL: use another ref"
        )
    return text


def _shown(text: str | None) -> str | None:
    """A text for people: what PostgreSQL cannot hold is escaped rather than losing the outcome that carries it."""
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


# -------------------------------------------------------------------------------------------------- results


# Where the columns of a record are that a `Brief` looks at, in a row of claim_one.
_STATE, _ATTEMPTS, _POLICY, _PRINT, _EXPIRES, _RESOLVED, _RESULT = (
    4 + rows.COLUMNS.index(name)
    for name in ("state", "attempts", "policy", "fingerprint", "expires", "resolved", "result")
)
_seldom = itemgetter(*(4 + rows.COLUMNS.index(name) for name in ("marker", "ref", "error_type", "steps")))
_NONE_OF_THEM: Final = (None,) * 4
_KNOWN_POLICIES: Final = frozenset(policy.value for policy in Policy)


def brief_of(row: Sequence[Any], ask: Ask) -> Brief | None:
    """A plain outcome that this ask replays, of a row of claim_one; None: what it is, `record_of` and the model say."""
    expires, stored = row[_EXPIRES], row[_PRINT]
    if (
        row[_STATE] != "done"
        or (expires is not None and expires <= row[0])
        or (stored and ask.fingerprint and stored != ask.fingerprint)
        or _seldom(row) != _NONE_OF_THEM
        or row[_RESOLVED]
        or row[_POLICY] not in _KNOWN_POLICIES
    ):
        return None
    return Brief(row[_ATTEMPTS], inf if expires is None else expires, row[_RESULT] or b"", 0)


def record_of(row: Sequence[Any]) -> tuple[Record, bool]:
    """The record of a row, and whether it could be read.

    An unreadable row is given as what it amounts to: an unknown outcome that holds its key, with the stored nonce,
    so that its owner, a person or `forget` can still end it, and nobody else (R15).
    """
    try:
        return rows.from_row(row), True
    except (ValueError, TypeError, msgspec.MsgspecError):
        found = dict(zip(rows.COLUMNS, row, strict=True))
    error = Failure("Unreadable", None, "this record cannot be read: resolve it with repair, or forget it")
    scope = Scope(bytes(found["scope"]), found["tenant"], found["operation"], found["key"])
    stand_in = Record(
        state=State.UNKNOWN,
        nonce=bytes(found["nonce"]),
        attempts=found["attempts"],
        token=found["token"],
        created=found["created"],
        updated=found["updated"],
        lease_until=found["lease_until"],
        expires=inf,
        policy=Policy.HOLD,
        error=error,
        ref=found["ref"],
        scope=scope,
    )
    return stand_in, False

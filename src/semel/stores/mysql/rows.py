"""The statements of `sql/mysql.sql`, made ready for a table and a clock, and a record as a row of that table.

Times are DATETIME(6) in UTC there and float seconds here. NULL is "never" in `expires` and "not set" elsewhere; what
lies beyond the year 9999 is the last moment that the type holds, and reads as infinity.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any, Final

import msgspec

from semel.errors import CodecError, ConfigurationError
from semel.keys import Scope
from semel.model import Event, Kind, Policy, Record, Renewal, Settle, State
from semel.stores import rows

__all__ = [
    "Found",
    "Statements",
    "event_from",
    "found_in",
    "micros",
    "moment",
    "placeholder",
    "renew_values",
    "row_of",
    "seconds",
    "settle_values",
    "statements",
]

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - the server's DATETIME has no zone either; both are UTC
_END: Final = datetime(9999, 12, 31, 23, 59, 59, 999_999)  # noqa: DTZ001 - the column has no zone
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST: Final = (_END - _EPOCH) / timedelta(seconds=1)
_FOREVER: Final = 240_000_000_000.0  # seconds: longer spans from now may not fit into the type
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")
# Characters a column holds. Checked here, because without a strict sql_mode the server would cut longer texts silently.
_LIMITS: Final = {
    "tenant": 255,
    "operation": 255,
    "key": 255,
    "marker": 255,
    "ref": 1024,
    "error_type": 1024,
    "error_code": 1024,
    "secret_id": 255,
}
_LIMITED: Final = tuple((at, name, _LIMITS[name]) for at, name in enumerate(rows.COLUMNS) if name in _LIMITS)
_TIMES: Final = tuple(at for at, name in enumerate(rows.COLUMNS) if name in rows.TIMES)
_EXPIRES: Final = rows.COLUMNS.index("expires")
_ERRORS: Final = tuple(at for at, name in enumerate(rows.COLUMNS) if name.startswith("error_"))


# ------------------------------------------------------------------------------------------- statements


@cache
def _texts() -> Mapping[str, str]:
    """The file's statements by name, without its comments."""
    source = files("semel.stores").joinpath("sql/mysql.sql").read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)$", source, flags=re.MULTILINE)[1:]
    return {
        name: "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


class Statements:
    """Every statement of the file by its name, for one table and one shift of the clock."""

    def __init__(self, table: str, skew: float = 0.0) -> None:
        now = f"(UTC_TIMESTAMP(6) + INTERVAL {micros(skew)} MICROSECOND)" if skew else "UTC_TIMESTAMP(6)"
        words = {
            "now": now,
            "table": f"`{table}`",
            "audit": f"`{table}_audit`",
            "schema": f"`{table}_schema`",
            "row": _packed_sql(now),
            "names": ", ".join(f"`{name}`" for name in rows.COLUMNS),
            "changes": ", ".join(f"`{name}` = %s" for name in rows.COLUMNS[1:]),
            "labels": f"_utf8mb4 X'{rows.LABELS.encode().hex()}'",  # no sql_mode reads backslashes in this
        }
        self._texts = {name: text.format(**words) for name, text in _texts().items()}
        self._row = f"({', '.join(['%s'] * len(rows.COLUMNS))})"

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def batch(self, name: str, values: Sequence[Mapping[str, Any]]) -> tuple[str, list[Any]]:
        """A batch statement with its values as the derived table `v`, and the parameters."""
        names = tuple(values[0])
        first = "SELECT " + ", ".join(f"%s AS {column}" for column in names)
        more = " UNION ALL SELECT " + ", ".join(["%s"] * len(names))
        derived = f"({first}{more * (len(values) - 1)}) AS v STRAIGHT_JOIN "
        text = self._texts[name].replace(":values ", derived)
        return text, [row[column] for row in values for column in names]

    def of(self, name: str, count: int) -> str:
        """A statement about `count` scopes."""
        return self._texts[name].replace(":scopes", ", ".join(["%s"] * count))

    def insert(self, count: int) -> str:
        return self._texts["insert"].replace(":rows", ", ".join([self._row] * count))

    def scan(self, conditions: Sequence[str]) -> str:
        return self._texts["scan"].replace(
            ":filter", "".join(f"\n  AND {condition}" for condition in conditions)
        )

    def schema(self) -> tuple[str, str, str]:
        return self._texts["create_records"], self._texts["create_audit"], self._texts["create_schema"]


@cache
def statements(table: str) -> Statements:
    """The statements for `table`; a name that is not a plain identifier is refused."""
    if not _TABLE.fullmatch(table):
        raise ConfigurationError(
            f"table= must be a plain name (a letter or _, then up to 47 letters, digits or _), not {table!r}"
        )
    return Statements(table)


# ------------------------------------------------------------------------------------------------- time


def seconds(moment: datetime) -> float:
    return inf if moment == _END else (moment - _EPOCH) // _MICROSECOND / 1_000_000


def moment(at: float) -> datetime:
    return _END if at >= _LAST else _EPOCH + timedelta(microseconds=round(at * 1_000_000))


def micros(span: float) -> int:
    return round(span * 1_000_000)


def _from_now(span: float) -> int | None:
    """A span for `INTERVAL … MICROSECOND`; None (never) where the type would end first."""
    return micros(span) if span < _FOREVER else None


# ------------------------------------------------------------------------------------------------- rows


class Found(msgspec.Struct, frozen=True):
    """A row as it was read: the record (None: it cannot be read), and what identifies this version of the row."""

    record: Record | None
    scope: Scope
    nonce: bytes
    version: int


def row_of(record: Record) -> list[Any]:
    """The columns of `rows.COLUMNS`, ready to be sent. A text that its column cannot hold is a CodecError."""
    try:
        row = list(rows.to_row(record))
    except UnicodeEncodeError as error:
        raise CodecError(f"a label cannot be stored as UTF-8: {error.reason}") from error
    for at in _TIMES:
        value = row[at]
        if value is not None:
            row[at] = moment(value)
    if row[_EXPIRES] == _END:
        row[_EXPIRES] = None
    if record.error is not None:
        for at in _ERRORS:
            row[at] = _shown(row[at])
    for at, name, limit in _LIMITED:
        if row[at] is not None and len(row[at]) > limit:
            _too_long(name, row[at], limit)
    return row


def _shown(text: str | None) -> str | None:
    """An error's text, for people: what UTF-8 cannot carry (half a surrogate pair) is spelled out."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _too_long(name: str, text: str, limit: int) -> None:
    raise CodecError(f"{name} has {len(text)} characters, the column holds {limit}: shorten it")


def found_in(row: Sequence[Any]) -> tuple[float, Found | None]:
    """What `read` and `scan` give: the store's clock, and the row (None: there is none)."""
    packed, *bodies = row
    clock, version, *fields = packed.split(",")
    now = _time(clock)
    if fields[0] == _NULL:
        return now, None
    tenant, operation, key = map(_text, fields[1:4])
    scope = Scope(bytes.fromhex(fields[0]), tenant, operation, key)
    nonce = bytes.fromhex(fields[_NONCE])
    columns: list[Any] = [None] * len(rows.COLUMNS)
    for at, value in zip(_BODIES, bodies, strict=True):
        columns[at] = value
    try:
        for (at, decode), value in zip(_FIELDS, fields, strict=True):
            if value != _NULL:
                columns[at] = decode(value)
        return now, Found(rows.from_row(columns), scope, nonce, int(version))
    except (ValueError, TypeError, msgspec.MsgspecError):
        return now, Found(None, scope, nonce, int(version))


def _time(text: str) -> float:
    return seconds(datetime.fromisoformat(text))


def _text(digits: str) -> str:
    return bytes.fromhex(digits).decode()


# A driver's work for an answer is by the column, not by the byte (PyMySQL: 200 µs for thirty of them). So all but the
# bodies comes packed into one: numbers and times as they are, texts and bytes as hexadecimal digits.
_NULL: Final = "-"
_NUMBERS: Final = frozenset({"attempts", "token", "fingerprint_version", "resolved"})
_BYTES: Final = frozenset({"scope", "nonce", "fingerprint"})
_BODY_NAMES: Final = ("result", "steps", "error_message", "labels")
_BODIES: Final = tuple(rows.COLUMNS.index(name) for name in _BODY_NAMES)
_PACKED: Final = tuple(name for name in rows.COLUMNS if name not in _BODY_NAMES)
_NONCE: Final = _PACKED.index("nonce")


def _decoder(name: str) -> Callable[[str], Any]:
    if name in rows.TIMES:
        return _time
    if name in _NUMBERS:
        return int
    return bytes.fromhex if name in _BYTES else _text


_FIELDS: Final = tuple((rows.COLUMNS.index(name), _decoder(name)) for name in _PACKED)


def _packed_sql(now: str) -> str:
    """The select list that `found_in` reads."""

    def field(name: str) -> str:
        plain = name in rows.TIMES or name in _NUMBERS
        return f"r.`{name}`" if plain else f"HEX(r.`{name}`)"

    fields = [now, *(f"IFNULL({one}, '{_NULL}')" for one in ("r.`version`", *map(field, _PACKED)))]
    bodies = ", ".join(f"r.`{name}`" for name in _BODY_NAMES)
    return f"CONCAT_WS(',', {', '.join(fields)}), {bodies}"


def event_from(row: Sequence[Any]) -> Event:
    """What `history` gives after the clock, without `kept_until`."""
    at, kind, state, actor, reason, attempt = row
    return Event(seconds(at), Kind(kind), None if state is None else State(state), actor, reason, attempt)


def placeholder(found: Found, now: float) -> Record:
    """What stands for an unreadable record when it is repaired: an unknown outcome of an unknown request."""
    return Record(
        state=State.UNKNOWN,
        nonce=found.nonce,
        attempts=0,
        token=micros(now),
        created=now,
        updated=now,
        lease_until=now,
        expires=inf,
        policy=Policy.HOLD,
        scope=found.scope,
    )


# ----------------------------------------------------------------------------------------------- values


def settle_values(end: Settle) -> dict[str, Any] | None:
    """Parameters of the statement `settle`; None when this end needs the slow way (read, decide, write)."""
    kind, error = end.kind, end.error
    keeps_steps = end.steps is None or kind is not Kind.RELEASED
    if kind is Kind.FORGOTTEN or end.new_nonce or end.actor or end.after or not keeps_steps:
        return None
    tombstone = None
    if kind in (Kind.DONE, Kind.FAILED) and end.tombstone and end.retention != inf:
        tombstone = end.retention + end.tombstone
        if tombstone >= _FOREVER:
            return None
    failure: tuple[str | None, str | None, str | None] = (None, None, None)
    if error is not None:
        failure = (_shown(error.type), _shown(error.code), _shown(error.message))
    values = {
        "scope": end.scope.hash,
        "nonce": end.nonce,
        "state": kind.value,
        "retention": None if kind is Kind.UNKNOWN else _from_now(end.retention),
        "tombstone": None if tombstone is None else micros(tombstone),
        "policy": None if end.policy is None else end.policy.value,
        "marker": end.marker or None,
        "result": end.result or None,
        "ref": end.ref,
        "error_type": failure[0],
        "error_code": failure[1],
        "error_message": failure[2],
        "steps": end.steps,
    }
    for name in ("marker", "ref", "error_type", "error_code"):
        text = values[name]
        if isinstance(text, str) and len(text) > _LIMITS[name]:
            _too_long(name, text, _LIMITS[name])
    return values


def renew_values(renewal: Renewal) -> dict[str, Any]:
    """Parameters of the statement `renew`."""
    return {
        "scope": renewal.scope.hash,
        "nonce": renewal.nonce,
        "lease": micros(renewal.lease),
        "life": _from_now(renewal.lease + renewal.retention),
    }

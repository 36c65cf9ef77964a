"""What a relay reads and writes of messages in the outbox's database, in plain SQL: rows, kept batches, keys that are held back.

`pages` says what each of these words is for; `owners` has those for the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, bindparam, delete, insert, select, text, update
from sqlalchemy.sql.elements import ColumnElement

from semel.messaging.pages import Line, Want
from semel.messaging.sharing import shared, tenants_of
from semel.messaging.sink import Row
from semel.messaging.tables import NOW, Tables, full_name, now

__all__ = [
    "choose",
    "fetch",
    "hold_back",
    "keep",
    "kept",
    "let_go",
    "lines",
    "refresh_ids",
    "remove",
    "renumber",
    "unpark",
    "waiting",
]

# One moment for all rows of a look: with a clock that goes on meanwhile, what becomes due during it would leave out the first rows of
# a key and take those behind them.
_MOMENT: Final = NOW | {"postgresql": "extract(epoch from statement_timestamp())::float8"}
_LETTER: Final = "seq, id, tenant, topic, {key}, type, {schema}, headers, body, created, raw"
_headers: Final = msgspec.json.Decoder(dict[str, str])


# ------------------------------------------------------------------------------------------------- rows
def choose(c: Connection, t: Tables, team: str, want: Want) -> dict[int, list[Row]]:
    """Rows that are due, by part, in their order: visible ones, whatever their numbers, never `number > last seen`."""
    if not want.parts:
        return {}
    conditions, values = _conditions(t, team, want, c.dialect.name)
    if c.dialect.name == "postgresql":
        found = _choose_postgres(c, t, want, conditions, values)
    else:
        found = _choose_each(c, t, want, conditions, values)
    rows: dict[int, list[Row]] = {}
    for part, *letter in found:
        rows.setdefault(part, []).append(_row(letter))
    full = {part: page for part, page in rows.items() if len(page) >= want.each} if want.fair else {}
    if not full:
        return rows
    tenants = tenants_of(c, full_name(t.outbox), full, want.after)

    def fetch(wanted: Sequence[tuple[int, str]], most: int) -> dict[tuple[int, str], list[Row]]:
        return _choose_of(c, t, (conditions, values), wanted, most)

    return shared(rows, want, tenants, fetch)


def _choose_of(
    c: Connection,
    t: Tables,
    which: tuple[str, dict[str, Any]],
    wanted: Sequence[tuple[int, str]],
    most: int,
) -> dict[tuple[int, str], list[Row]]:
    """The first rows of these parts and tenants."""
    (conditions, values), dialect, found = which, c.dialect.name, dict[tuple[int, str], list[Row]]()
    of = f"SELECT {_letter(dialect)} FROM {full_name(t.outbox)} o WHERE o.part = {{part}} AND o.tenant = {{tenant}}"
    of += f" AND {conditions} ORDER BY o.seq LIMIT :most"
    if dialect == "postgresql":
        asked = {"parts": [part for part, _ in wanted], "names": [name for _, name in wanted], "most": most}
        statement = text(
            "SELECT g.part, m.* FROM unnest(CAST(:parts AS int[]), CAST(:names AS text[])) AS g (part, tenant)"
            f" CROSS JOIN LATERAL ({of.format(part='g.part', tenant='g.tenant')}) m"
        )
        for part, *letter in c.execute(statement, values | asked):
            row = _row(letter)
            found.setdefault((part, row.tenant), []).append(row)
        return found
    statement = text(of.format(part=":part", tenant=":of_tenant"))
    for part, name in wanted:
        rows = c.execute(statement, values | {"part": part, "of_tenant": name, "most": most})
        found[part, name] = [_row(letter) for letter in rows]
    return found


def _conditions(t: Tables, team: str, want: Want, dialect: str) -> tuple[str, dict[str, Any]]:
    key = _quoted("key", dialect)
    said = [f"(o.due IS NULL OR o.due <= {_MOMENT[dialect]})"]
    values: dict[str, Any] = {}
    for name, op, given in (
        ("topic", "NOT IN", want.topics),
        ("topic", "IN", want.only_topics),
        ("tenant", "IN", want.tenants),
    ):
        if given:
            names = [f"{name}_{len(values) + n}" for n in range(len(given))]
            values |= dict(zip(names, sorted(given), strict=True))
            said.append(f"o.{name} {op} ({', '.join(':' + n for n in names)})")
    said += _shut(want, values, key)
    if any(want.open.values()):
        taken = sorted({seq for seqs in want.open.values() for seq in seqs})
        said.append(f"o.seq NOT IN ({', '.join(str(int(seq)) for seq in taken)})")
    if want.lines:
        values["team"] = team
        said.append(
            f"NOT EXISTS (SELECT 1 FROM {full_name(t.lines)} l WHERE l.team = :team AND l.part = o.part"
            f" AND l.tenant = o.tenant AND (l.until IS NULL OR l.until > {_MOMENT[dialect]})"
            f" AND ((l.{key} = o.{key} AND l.seq <= o.seq) OR (o.{key} IS NULL AND l.seq = o.seq)))"
        )
    return " AND ".join(said), values


def _shut(want: Want, values: dict[str, Any], key: str) -> list[str]:
    """What stays because its endpoint is away. A missing key is "" here: a comparison with NULL would leave out the rest."""
    said = []
    for shut in want.shut:
        terms = [] if shut.part is None else [f"o.part = {int(shut.part)}"]
        names = []
        for topic in sorted(shut.topics):
            names.append(f"s_{len(values)}")
            values[names[-1]] = topic
        terms.append(f"o.topic IN ({', '.join(':' + name for name in names)})" if names else "1 = 0")
        for column, value in (("o.tenant", shut.tenant), (f"COALESCE(o.{key}, '')", shut.key)):
            if value is not None:
                terms.append(f"{column} = :s_{len(values)}")
                values[f"s_{len(values)}"] = value
        said.append(f"NOT ({' AND '.join(terms)})")
    return said


def _choose_postgres(
    c: Connection, t: Tables, want: Want, conditions: str, values: dict[str, Any]
) -> Iterable[Sequence[Any]]:
    letter = _letter("postgresql")
    statement = text(
        "SELECT p.part, m.* FROM unnest(CAST(:parts AS int[])) AS p (part)"
        f" CROSS JOIN LATERAL (SELECT {letter} FROM {full_name(t.outbox)} o"
        f" WHERE o.part = p.part AND {conditions} ORDER BY o.seq LIMIT :each) m LIMIT :total"
    )
    asked = {"parts": want.parts, "each": want.each, "total": want.total}
    return c.execute(statement, values | asked).all()


def _choose_each(
    c: Connection, t: Tables, want: Want, conditions: str, values: dict[str, Any]
) -> Iterable[Sequence[Any]]:
    dialect = c.dialect.name
    waiting = set(c.execute(select(t.outbox.c.part).distinct()).scalars())
    statement = text(
        f"SELECT o.part, {_letter(dialect)} FROM {full_name(t.outbox)} o"
        f" WHERE o.part = :part AND {conditions} ORDER BY o.seq LIMIT :each"
    )
    found: list[Sequence[Any]] = []
    for part in want.parts:
        if part in waiting and len(found) < want.total:
            asked = {"part": part, "each": want.each}
            found += c.execute(statement, values | asked).all()
    return found


def fetch(c: Connection, t: Tables, part: int, seqs: Collection[int]) -> dict[int, Row]:
    """Rows by number: what a manifest names."""
    if not seqs:
        return {}
    listed = ", ".join(str(int(seq)) for seq in sorted(seqs))
    statement = text(
        f"SELECT {_letter(c.dialect.name)} FROM {full_name(t.outbox)} o WHERE o.part = :part AND o.seq IN ({listed})"
    )
    rows = [_row(row) for row in c.execute(statement, {"part": part})]
    return {row.seq: row for row in rows}


def remove(c: Connection, t: Tables, gone: Mapping[int, Sequence[int]]) -> None:
    """Delivered rows go. On MariaDB one by one: a list could wait for a stranger's row that is not committed."""
    pairs = [(part, seq) for part, seqs in gone.items() for seq in seqs]
    if not pairs:
        return
    if c.dialect.name == "postgresql":
        c.execute(
            text(
                f"DELETE FROM {full_name(t.outbox)} o USING unnest(CAST(CAST(:parts AS text) AS int[]),"
                " CAST(CAST(:seqs AS text) AS bigint[])) AS g (part, seq) WHERE o.part = g.part AND o.seq = g.seq"
            ),
            {"parts": _array(part for part, _ in pairs), "seqs": _array(seq for _, seq in pairs)},
        )
        return
    outbox = t.outbox
    statement = delete(outbox).where(outbox.c.part == bindparam("p"), outbox.c.seq == bindparam("s"))
    c.execute(statement, [{"p": part, "s": seq} for part, seq in pairs])


def refresh_ids(c: Connection, t: Tables, seqs: Sequence[int]) -> None:
    """Messages that waited long: their ids stay known for a retention from now, not from when they were added."""
    if seqs:
        ids = t.ids
        statement = update(ids).where(ids.c.seq == bindparam("s")).values(at=now(c.dialect.name))
        c.execute(statement, [{"s": seq} for seq in seqs])


# ----------------------------------------------------------------------------------------- kept batches
def keep(c: Connection, t: Tables, team: str, part: int, lane: str, batch: int, rows: Sequence[Row]) -> None:
    """Keep a delivered batch for a while, in case the sink turns out to have lost it."""
    clock = now(c.dialect.name)
    statement = insert(t.sent).values(
        {column.name: bindparam(f"v_{column.name}", type_=column.type) for column in t.sent.c} | {"at": clock}
    )
    c.execute(
        statement,
        [
            {
                "v_team": team, "v_part": part, "v_lane": lane, "v_batch": batch, "v_seq": row.seq, "v_id": row.id,
                "v_tenant": row.tenant, "v_topic": row.topic, "v_key": row.key, "v_type": row.type,
                "v_schema": row.schema, "v_headers": msgspec.json.encode(row.headers).decode(), "v_body": row.body,
                "v_created": row.created, "v_raw": int(row.raw),
            }
            for row in rows
        ],
    )  # fmt: skip


def kept(c: Connection, t: Tables, team: str, part: int, lane: str, after: int) -> dict[int, list[Row]]:
    """Kept batches of a lane beyond a number, in order."""
    dialect = c.dialect.name
    statement = text(
        f"SELECT o.batch, {_letter(dialect)} FROM {full_name(t.sent)} o WHERE o.team = :team AND o.part = :part"
        " AND o.lane = :lane AND o.batch > :after ORDER BY o.batch, o.seq"
    )
    found: dict[int, list[Row]] = {}
    for batch, *letter in c.execute(statement, {"team": team, "part": part, "lane": lane, "after": after}):
        found.setdefault(batch, []).append(_row(letter))
    return found


def renumber(c: Connection, t: Tables, team: str, part: int, lane: str, old: int, new: int) -> None:
    """A kept batch went out again under another number."""
    sent = t.sent
    where = (sent.c.team == team) & (sent.c.part == part) & (sent.c.lane == lane) & (sent.c.batch == old)
    c.execute(update(sent).where(where).values(batch=new))


# ------------------------------------------------------------------------------------------------ lines
def lines(c: Connection, t: Tables, team: str, parts: Collection[int] | None = None) -> list[Line]:
    """Keys that are held back, oldest first."""
    table = t.lines
    query = select(
        table.c.part, table.c.tenant, table.c.key, table.c.topic, table.c.id, table.c.seq, table.c.attempts,
        table.c.until, table.c.reason, table.c.since,
    ).where(table.c.team == team)  # fmt: skip
    if parts is not None:
        query = query.where(table.c.part.in_(sorted(parts)))
    rows: list[tuple[Any, ...]] = [tuple(row) for row in c.execute(query.order_by(table.c.since))]
    return [Line(*row) for row in rows]


def hold_back(c: Connection, t: Tables, team: str, line: Line, after: float | None) -> None:
    """Hold a key back: for `after` seconds, or until somebody says otherwise."""
    clock = now(c.dialect.name)
    until: ColumnElement[Any] | None = None if after is None else clock + after
    here = (t.lines.c.team == team) & (t.lines.c.part == line.part) & (t.lines.c.line == line.name)
    values = {
        "attempts": line.attempts,
        "until": until,
        "reason": line.reason,
        "id": line.id,
        "seq": line.seq,
        "topic": line.topic,
    }
    if not c.execute(update(t.lines).where(here).values(values)).rowcount:
        c.execute(
            insert(t.lines).values(
                team=team,
                part=line.part,
                line=line.name,
                tenant=line.tenant,
                key=line.key,
                since=clock,
                **values,
            )
        )


def let_go(c: Connection, t: Tables, team: str, part: int, names: Collection[str]) -> None:
    """These keys flow again."""
    if names:
        table = t.lines
        c.execute(
            delete(table).where(table.c.team == team, table.c.part == part, table.c.line.in_(sorted(names)))
        )


def unpark(
    c: Connection, t: Tables, team: str, *, key: str | None, tenant: str | None, identity: str | None
) -> int:
    """Try parked keys again, from their first message, in order; attempts start anew."""
    table = t.lines
    query = update(table).where(table.c.team == team, table.c.until.is_(None)).values(until=0.0, attempts=0)
    for column, value in ((table.c.key, key), (table.c.tenant, tenant), (table.c.id, identity)):
        if value is not None:
            query = query.where(column == value)
    return c.execute(query).rowcount


# ------------------------------------------------------------------------------------------ care, counts
def waiting(c: Connection, t: Tables, team: str, want: Want) -> bool:
    """Whether anything could be sent now; cheap, and never a write."""
    conditions, values = _conditions(t, team, want, c.dialect.name)
    listed = ", ".join(str(int(part)) for part in want.parts)
    statement = text(
        f"SELECT 1 FROM {full_name(t.outbox)} o WHERE o.part IN ({listed}) AND {conditions} LIMIT 1"
    )
    return bool(want.parts) and c.execute(statement, values).first() is not None


# ------------------------------------------------------------------------------------------------ words
def _quoted(name: str, dialect: str) -> str:
    return f"`{name}`" if dialect in {"mysql", "mariadb"} else f'"{name}"'


def _array(numbers: Iterable[int]) -> str:
    """An array of PostgreSQL's as text: a driver would look at each of thousands of elements, twice."""
    return "{" + ",".join(map(str, numbers)) + "}"


def _letter(dialect: str) -> str:
    said = _LETTER.format(key=_quoted("key", dialect), schema=_quoted("schema", dialect))
    return ", ".join(f"o.{name}" for name in said.split(", "))


def _row(letter: Sequence[Any]) -> Row:
    seq, identity, tenant, topic, key, type_, schema, headers, body, created, raw = letter
    decoded = {} if headers == "{}" else _headers.decode(headers)
    return Row(seq, identity, tenant, topic, key, type_, schema, decoded, bytes(body), created, 0, bool(raw))

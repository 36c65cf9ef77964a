"""Who owns a part of an outbox, and what is under way in it, in plain SQL: relays that live, epochs, states.

`pages` says what each of these words is for; `ledger` has those for the messages themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, select, text, update

from semel.messaging.pages import Member, State
from semel.messaging.scopes import Neighbour
from semel.messaging.tables import Tables, full_name, now

__all__ = [
    "alive",
    "everyone",
    "hold",
    "join",
    "leave",
    "members",
    "raise_epoch",
    "release",
    "save",
    "take",
]

_IDLE: Final = "10000"  # milliseconds


def join(c: Connection, t: Tables, team: str, relay: str, lease: float, about: str, parts: int) -> None:
    """Say that this relay lives, and make sure that the parts are there."""
    clock = now(c.dialect.name)
    values = {"until": clock + lease, "about": about}
    mine = (t.relays.c.team == team) & (t.relays.c.relay == relay)
    if not c.execute(update(t.relays).where(mine).values(values)).rowcount:
        c.execute(insert(t.relays).values(team=team, relay=relay, since=clock, **values))
    known = set(c.execute(select(t.parts.c.part).where(t.parts.c.team == team)).scalars())
    for part in sorted(set(range(parts)) - known):
        _insert_part(c, t, team, part)


def _insert_part(c: Connection, t: Tables, team: str, part: int) -> None:
    verb, tail = (
        ("INSERT IGNORE", "")
        if c.dialect.name in {"mysql", "mariadb"}
        else ("INSERT", "ON CONFLICT DO NOTHING")
    )
    c.execute(
        text(
            f"{verb} INTO {full_name(t.parts)} (team, part, epoch, state) VALUES (:team, :part, 0, :state) {tail}"
        ),
        {"team": team, "part": part, "state": "{}"},
    )


def leave(c: Connection, t: Tables, team: str, relay: str) -> None:
    """Give everything back: the next relay need not wait for the lease."""
    c.execute(update(t.parts).where(t.parts.c.team == team, t.parts.c.owner == relay).values(owner=None))
    c.execute(delete(t.relays).where(t.relays.c.team == team, t.relays.c.relay == relay))


def alive(c: Connection, t: Tables, team: str) -> dict[str, tuple[float, float]]:
    """The relays that live: how long still, and since when, in seconds."""
    clock = now(c.dialect.name)
    relays = t.relays
    c.execute(delete(relays).where(relays.c.until < clock - 600))
    rows = c.execute(
        select(relays.c.relay, relays.c.until - clock, clock - relays.c.since).where(
            relays.c.team == team, relays.c.until > clock
        )
    )
    return {name: (left, age) for name, left, age in rows}


def everyone(c: Connection, t: Tables) -> list[Neighbour]:
    """The relays of all names that live."""
    clock, r = now(c.dialect.name), t.relays.c
    query = select(r.team, r.relay, r.until - clock, r.since, r.about).where(r.until > clock)
    rows: list[tuple[Any, ...]] = [tuple(row) for row in c.execute(query)]
    return [Neighbour(*row) for row in rows]


def members(c: Connection, t: Tables, team: str) -> list[Member]:
    """Every part with its epoch and owner."""
    rows = c.execute(select(t.parts.c.part, t.parts.c.epoch, t.parts.c.owner).where(t.parts.c.team == team))
    return [Member(*row) for row in rows]


def take(
    c: Connection, t: Tables, team: str, relay: str, free: Sequence[Member]
) -> list[tuple[Member, State]]:
    """Own parts from now on, each under its next epoch; those that nobody else took first."""
    parts = t.parts
    wanted = {member.part: member for member in free}
    query = select(parts.c.part, parts.c.epoch, parts.c.state).where(
        parts.c.team == team, parts.c.part.in_(sorted(wanted))
    )
    rows = c.execute(query.order_by(parts.c.part).with_for_update()).all()
    taken = [(wanted[row.part], row.state) for row in rows if wanted[row.part].epoch == row.epoch]
    if taken:
        ours = [member.part for member, _ in taken]
        mine = (parts.c.team == team) & parts.c.part.in_(ours)
        c.execute(update(parts).where(mine).values(owner=relay, epoch=parts.c.epoch + 1))
    return [(member, msgspec.json.decode(state, type=State)) for member, state in taken]


def release(c: Connection, t: Tables, team: str, part: int, epoch: int) -> None:
    """Give a part back."""
    parts = t.parts
    where = (parts.c.team == team) & (parts.c.part == part) & (parts.c.epoch == epoch)
    c.execute(update(parts).where(where).values(owner=None))


def hold(c: Connection, t: Tables, team: str, epochs: Mapping[int, int]) -> set[int]:
    """Lock the rows of the parts that are still ours under these epochs, for the rest of the transaction."""
    parts = t.parts
    query = select(parts.c.part, parts.c.epoch).where(parts.c.team == team, parts.c.part.in_(sorted(epochs)))
    if c.dialect.name == "postgresql":
        # A relay that is stopped in the middle must not keep its rows from its heir: the server ends its transaction.
        query = query.add_columns(func.set_config("idle_in_transaction_session_timeout", _IDLE, True))
    rows = c.execute(query.order_by(parts.c.part).with_for_update())
    return {row[0] for row in rows if epochs[row[0]] == row[1]}


def save(c: Connection, t: Tables, team: str, states: Mapping[tuple[int, int], State]) -> None:
    """Write the states of parts, by number and epoch, that `hold` has locked. What is in them is sent next."""
    if not states:
        return
    told = [msgspec.json.encode(state).decode() for state in states.values()]
    numbers, epochs = [part for part, _ in states], [epoch for _, epoch in states]
    if c.dialect.name == "postgresql":
        statement = text(
            f"UPDATE {full_name(t.parts)} p SET state = g.state FROM unnest(CAST(:parts AS int[]), CAST(:epochs AS bigint[]),"
            " CAST(:states AS text[])) AS g (part, epoch, state) WHERE p.team = :team AND p.part = g.part AND p.epoch = g.epoch"
        )
        c.execute(statement, {"team": team, "parts": numbers, "epochs": epochs, "states": told})
        return
    parts = t.parts
    here = (parts.c.team == team) & (parts.c.part == bindparam("p")) & (parts.c.epoch == bindparam("e"))
    rows = [{"p": p, "e": e, "s": s} for p, e, s in zip(numbers, epochs, told, strict=True)]
    c.execute(update(parts).where(here).values(state=bindparam("s")), rows)


def raise_epoch(c: Connection, t: Tables, team: str, part: int, epoch: int, beyond: int) -> None:
    """The sink knows a higher epoch than this database ever gave: go beyond it."""
    parts = t.parts
    here = (parts.c.team == team) & (parts.c.part == part) & (parts.c.epoch == epoch)
    c.execute(update(parts).where(here).values(epoch=max(epoch, beyond) + 1))

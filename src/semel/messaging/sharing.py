"""Turns between tenants. A part is read in the order of its numbers, a page at a time; where a page is full, more waits behind
it, perhaps of tenants that are not on it. Those are looked up, and every tenant gets its share of the next batch.

Order is a matter of keys, and a key is one tenant's: what is taken is always the beginning of each tenant's messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final

from sqlalchemy import Connection, text

from semel.messaging.pages import Want
from semel.messaging.sink import Row

__all__ = ["shared", "tenants_of"]

_MOST: Final = (
    64  # tenants that are looked up in one part at a time; the next ones have their turn in the next round
)

# One step of the index for each tenant, however many messages it has.
_STEPS: Final = """
SELECT {number} AS part, tenant FROM (
    WITH RECURSIVE t (tenant, n) AS (
        SELECT (SELECT min(o.tenant) FROM {outbox} o WHERE o.part = :p{number} AND o.tenant > :a{number}), 1
        UNION ALL
        SELECT (SELECT min(o.tenant) FROM {outbox} o WHERE o.part = :p{number} AND o.tenant > t.tenant), n + 1
        FROM t WHERE t.tenant IS NOT NULL AND n < {most}
    ) SELECT tenant FROM t WHERE tenant IS NOT NULL
) AS t{number}
"""
# PostgreSQL keeps entries of deleted rows in an index for a while: those of the tenants on the page, of which many were deleted
# lately, are stepped over. Each step goes to the next tenant on the page, unless there is one before it.
_STEPS_POSTGRES: Final = """
SELECT {number} AS part, tenant FROM (
    WITH RECURSIVE t (tenant, n) AS (
        SELECT CAST(:a{number} AS text), 0
        UNION ALL
        SELECT CASE WHEN k.next IS NULL
            THEN (SELECT min(o.tenant) FROM {outbox} o WHERE o.part = :p{number} AND o.tenant > t.tenant)
            ELSE coalesce((
                SELECT min(o.tenant) FROM {outbox} o
                WHERE o.part = :p{number} AND o.tenant > t.tenant AND o.tenant < k.next
            ), k.next) END, n + 1
        FROM t CROSS JOIN LATERAL (
            SELECT min(k) AS next FROM unnest(CAST(:k{number} AS text[])) AS g (k) WHERE k > t.tenant
        ) k
        WHERE t.tenant IS NOT NULL AND n < {most}
    ) SELECT tenant FROM t WHERE n > 0 AND tenant IS NOT NULL
) AS t{number}
"""

Fetch = Callable[[Sequence[tuple[int, str]], int], Mapping[tuple[int, str], Sequence[Row]]]
"""The first rows of these (part, tenant), at most so many of each."""


def tenants_of(
    c: Connection, outbox: str, pages: Mapping[int, Sequence[Row]], after: dict[int, str]
) -> dict[int, list[str]]:
    """Tenants with messages in these parts, a bounded number behind the one where the last look ended.

    That is `after`, which is written.
    """
    postgres = c.dialect.name == "postgresql"
    steps = _STEPS_POSTGRES if postgres else _STEPS
    parts = list(pages)
    said = [steps.format(number=number, outbox=outbox, most=_MOST) for number in range(len(parts))]
    values: dict[str, Any] = {}
    for number, part in enumerate(parts):
        values |= {f"p{number}": part, f"a{number}": after.get(part, "")}
        if postgres:
            values[f"k{number}"] = list({row.tenant for row in pages[part]})
    found: dict[int, list[str]] = {part: [] for part in parts}
    for number, tenant in c.execute(text(" UNION ALL ".join(said)), values):
        found[parts[number]].append(tenant)
    for part, tenants in found.items():
        after[part] = tenants[-1] if len(tenants) == _MOST else ""
    return found


def shared(
    pages: dict[int, list[Row]], want: Want, tenants: Mapping[int, Sequence[str]], fetch: Fetch
) -> dict[int, list[Row]]:
    """The pages with each tenant's share: those that have less on a full page than their share, or nothing, get it.

    `want.after` has an entry afterwards for each of the parts that has several tenants.
    """
    wanted: list[tuple[int, str]] = []
    counts: dict[int, dict[str, int]] = {}
    shares: list[int] = []
    for part, known in tenants.items():
        count = counts[part] = dict.fromkeys(known, 0) | _counted(pages[part])
        if want.tenants:
            count = counts[part] = {name: n for name, n in count.items() if name in want.tenants}
        if len(count) > 1:
            shares.append(max(1, want.each // len(count)))
            want.after.setdefault(part, "")
        else:
            want.after.pop(part, None)
    share = min(shares, default=0)
    for part, count in counts.items():
        if len(count) > 1:
            wanted += [(part, name) for name, n in sorted(count.items()) if n < share]
    if not wanted:
        return pages
    found = fetch(wanted, share)
    for part in {part for part, _ in wanted}:
        lines = _by_tenant(pages[part])
        lines |= {name: list(rows) for (of, name), rows in found.items() if of == part and rows}
        pages[part] = _in_turns(list(lines.values()))[: want.each]
    return pages


def _counted(rows: Sequence[Row]) -> dict[str, int]:
    return {tenant: len(some) for tenant, some in _by_tenant(rows).items()}


def _by_tenant(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.tenant, []).append(row)
    return found


def _in_turns(lines: Sequence[Sequence[Row]]) -> list[Row]:
    return [row for turn in zip_longest(*lines) for row in turn if row is not None]

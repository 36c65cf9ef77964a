"""How PostgreSQL runs the hot statements: by the key, also when their plans were made while the table was empty.

A connection keeps its plans. One that reads the whole table, or all open leases, is the cheapest while there is nothing
in it, and the dearest a minute later.
"""

from __future__ import annotations

import re

import psycopg
import pytest

from semel.stores.postgres.sql import schema_sql, statements
from semel.testing import services

HOT = [
    *("claim_one", "claim_plain", "claim_many", "claim_plain_many", "renew", "note", "read", "mark"),
    *("settle_one", "settle_done", "settle_many", "settle_done_many"),
]


@pytest.mark.parametrize("name", HOT)
@pytest.mark.parametrize("analyzed", [False, True])
def test_hot_statements_go_by_the_key(
    postgres_server: services.PostgresServer, name: str, analyzed: bool
) -> None:
    sql = statements("semel")[name]
    numbers = max(int(number) for number in re.findall(r"\$(\d+)", sql))
    with psycopg.connect(postgres_server.database(), autocommit=True) as connection:
        connection.execute(schema_sql().encode())
        if analyzed:
            connection.execute(_TEN_PAGES)
            connection.execute("vacuum analyze semel")
        connection.execute("set plan_cache_mode = force_generic_plan")
        connection.execute(f"prepare hot as {sql}".encode())
        nothing = ", ".join(["null"] * numbers)
        rows = connection.execute(f"explain execute hot ({nothing})".encode()).fetchall()
    plan = "\n".join(row[0] for row in rows)
    scans = re.findall(r"(?:Scan using (\w+) on|(Seq|Bitmap \w+) Scan on|(Tid) Scan on) (?:semel|\w+)", plan)
    used = {next(filter(None, scan)) for scan in scans}
    assert used <= {"semel_pkey", "Tid"}, plan
    assert "semel_pkey" in used, plan


_TEN_PAGES = """
insert into semel (scope, tenant, operation, key, state, nonce, attempts, token, policy, fingerprint_version, created,
                   updated, lease_until, settled, result)
select sha256(n::text::bytea), 'default', 'default', n::text, 'done', '', 1, 1, 'retry', 1, now(), now(), now(), now(),
       convert_to(repeat(md5(n::text), 32), 'UTF8')
from generate_series(1, 100) n
"""

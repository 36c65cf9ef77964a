"""Record, business rows and outbox rows commit together in a request's own transaction: Flask and Django (FastAPI: the docs)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from flask import Flask, request
from sqlalchemy import text
from sqlalchemy.orm import Session

from semel import Semel, current_run
from semel.messaging import Message
from tests.messaging.conftest import Home

ROOT = Path(__file__).resolve().parents[2]
DJANGO = """
import sys, django
from django.conf import settings
folder = sys.argv[1]
settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{folder}/shop.db"}})
django.setup()
from django.db import connection, transaction
from semel import Semel, current_run
from semel.messaging import Message, Outbox

url = f"sqlite:///{folder}/shop.db"
once, outbox = Semel(url), Outbox(url)
once.create(); outbox.create()
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE orders (item text)")

def place(fails):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES ('tea')")
    outbox.add(current_run(), Message("orders.placed", {"item": "tea"}))
    if fails:
        raise RuntimeError("no")
    return "placed"

for _ in range(2):
    with transaction.atomic():
        once.within(connection).execute("k1", place, False)
try:
    with transaction.atomic():
        once.within(connection).execute("k2", place, True)
except RuntimeError:
    pass
with connection.cursor() as cursor:
    for table in ("orders", "semel_outbox"):
        cursor.execute(f"SELECT count(*) FROM {table}")
        print(table, cursor.fetchone()[0])
once.close(); outbox.close(); connection.close()
"""


def test_django(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", DJANGO, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "orders 1\nsemel_outbox 1\n", done.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_flask(sqlite_home: Home, fails: bool) -> None:
    outbox = sqlite_home.outbox()
    once = Semel(sqlite_home.url, table=sqlite_home.table)
    once.create()
    with sqlite_home.engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (item text)"))
    app = Flask(__name__)

    def place(session: Session) -> str:
        session.execute(text("INSERT INTO orders VALUES ('tea')"))
        outbox.add(current_run(), Message("orders.placed", {"item": "tea"}))
        if fails:
            raise RuntimeError("no")
        return "placed"

    @app.post("/orders")
    def order() -> str:
        with Session(sqlite_home.engine) as session, session.begin():
            return once.within(session).execute(request.headers["Idempotency-Key"], place, session).value

    client = app.test_client()
    codes = [client.post("/orders", headers={"Idempotency-Key": "k1"}).status_code for _ in range(2)]
    assert codes == ([500, 500] if fails else [200, 200])
    wanted = 0 if fails else 1
    assert (sqlite_home.count(), sqlite_home.scalar("SELECT count(*) FROM orders")) == (wanted, wanted)
    once.close()
    outbox.close()

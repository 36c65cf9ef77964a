"""Responses over the cap with a spill store (H26): replayed to the byte, checked, never run again whatever becomes of it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from typer.testing import CliRunner

from semel import AsyncSemel, ConfigurationError, StoreUnavailable
from semel.bodies import BodyMissing, BodyStore, Stored
from semel.bodies.files import FileBodies
from semel.bodies.s3 import S3Bodies
from semel.bodies.table import TableBodies
from semel.cli.commands import app as commands
from semel.http.asgi import IdempotencyMiddleware
from semel.http.fastapi import idempotent
from semel.http.spill import Spill
from semel.messaging.bodies.sql import SqlBodies
from semel.testing import services
from tests.http.conftest import Edge
from tests.http.shop import Ledger, starlette_shop
from tests.http.site import Site
from tests.http.test_rows_keys import problem

BIG = b"x" * 3000


def folder(tmp_path: Path) -> str:
    return f"file://{tmp_path}/responses"


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "responses").rglob("*") if path.is_file())


@pytest.fixture
def shop(colour: str, tmp_path: Path) -> Iterator[Edge]:
    edge = Edge(colour, f"sqlite:///{tmp_path}/semel.db")
    yield edge
    edge.close()


@pytest.fixture(params=["file", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return folder(tmp_path) if request.param == "file" else f"sqlite:///{tmp_path}/responses.db"


# ---------------------------------------------------------------------------------------------------- there and back


def test_h26_a_spilled_response_is_replayed_to_the_byte(shop: Edge, where: str) -> None:
    shop.open(max_response=1000, spill=where)
    first, again = shop.send("/big"), shop.send("/big")
    assert (first.status_code, first.content, first.headers["idempotency-replayed"]) == (201, BIG, "false")
    assert (again.status_code, again.content, again.headers["idempotency-replayed"]) == (201, BIG, "true")
    assert again.headers["location"] == "/big/1"
    assert int(again.headers["idempotency-retention"]) > 86_000
    assert shop.count("big") == 1


def test_h26_a_spilled_stream_is_replayed_to_the_byte(shop: Edge, where: str) -> None:
    shop.open(max_response=3, spill=where)
    first, again = shop.send("/stream"), shop.send("/stream")
    assert (first.content, again.content) == (b"one,two,three", b"one,two,three")
    assert (again.headers["idempotency-replayed"], shop.count("stream")) == ("true", 1)


def test_h26_what_fits_the_record_is_not_spilled(shop: Edge, tmp_path: Path) -> None:
    shop.open(spill=folder(tmp_path))
    assert [shop.send("/big").content for _ in range(2)] == [BIG, BIG]
    assert files(tmp_path) == []


def test_h26_over_the_spills_own_cap_it_is_done_without_a_response(shop: Edge, tmp_path: Path) -> None:
    shop.open(max_response=1000, spill=Spill(folder(tmp_path), max_size=2000))
    assert shop.send("/big").content == BIG
    again = shop.send("/big")
    assert (again.status_code, problem(again), again.json()["original_status"]) == (
        422,
        "response-not-stored",
        201,
    )
    assert (files(tmp_path), shop.count("big")) == ([], 1)


def test_h14_a_failure_that_frees_its_key_spills_nothing(shop: Edge, tmp_path: Path) -> None:
    shop.open(max_response=0, spill=folder(tmp_path))
    assert [shop.send("/status/503").status_code for _ in range(2)] == [503, 503]
    assert files(tmp_path) == []


def test_h37_a_spilled_body_is_encrypted_as_its_record_is(shop: Edge, tmp_path: Path) -> None:
    shop.open(
        semel={"encrypt": {"a": os.urandom(32)}}, max_response=1000, secret=True, spill=folder(tmp_path)
    )
    assert [shop.send("/big").content for _ in range(2)] == [BIG, BIG]
    (file,) = files(tmp_path)
    assert b"xxx" not in file.read_bytes()


def test_h26_the_fastapi_decorator_spills_too(tmp_path: Path) -> None:
    async def run() -> None:
        app, ran = FastAPI(), []
        async with AsyncSemel("memory://") as once:

            @app.post("/report")
            @idempotent(once=once, principal=lambda _: "ada", max_response=10, spill=folder(tmp_path))
            async def report(request: Request) -> Response:
                ran.append(1)
                return Response(BIG, media_type="text/csv")

            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                got = [await client.post("/report", headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert [(a.content, a.headers["content-type"]) for a in got] == [(BIG, "text/csv; charset=utf-8")] * 2
        assert [a.headers["idempotency-replayed"] for a in got] == ["false", "true"]
        assert ran == [1]

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["httptools", "gunicorn"])
def test_h26_another_process_replays_what_a_server_has_spilled(tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        rules: dict[str, Any] = {"max_response": 10, "spill": folder(tmp_path)}
        server = Site(kind, f"sqlite:///{tmp_path}/semel.db", tmp_path, **rules)
        stack.callback(server.stop)
        server.open_gate()
        whole, streamed = server.post("/orders", "k1", content=b"body"), server.post("/stream", "k2")
        server.stop()
        server.start()
        again = server.post("/orders", "k1", content=b"body")
        assert (again.status_code, again.content, again.headers["idempotency-replayed"]) == (
            201,
            whole.content,
            "true",
        )
        again = server.post("/stream", "k2")
        assert (again.content, again.headers["idempotency-replayed"]) == (streamed.content, "true")
        assert (len(files(tmp_path)), server.lines().count("stream")) == (2, 1)


# ------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("damage", ["missing", "changed", "cut"])
def test_h26_a_body_that_is_gone_or_changed_is_told_and_never_run_again(
    shop: Edge, tmp_path: Path, damage: str
) -> None:
    shop.open(max_response=1000, spill=folder(tmp_path))
    shop.send("/big")
    (file,) = files(tmp_path)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(b"y" * 3000 if damage == "changed" else b"x" * 2999)
    again = shop.send("/big")
    told = again.json()
    assert (again.status_code, problem(again)) == (422, "response-not-stored")
    assert (told["original_status"], told["location"], shop.count("big")) == (201, "/big/1", 1)


class Moody:
    """A store that may be out of order."""

    def __init__(self, inner: FileBodies) -> None:
        self.inner = inner
        self.error: Exception | None = None

    def _well(self) -> FileBodies:
        if self.error is not None:
            raise self.error
        return self.inner

    def put(self, name: str, data: bytes) -> None:
        self._well().put(name, data)

    def get(self, name: str) -> bytes:
        return self._well().get(name)

    def delete(self, name: str) -> None:
        self._well().delete(name)

    def stored(self, home: str) -> Iterator[Stored]:
        return self._well().stored(home)


@pytest.mark.parametrize("error", [StoreUnavailable("not mounted"), OSError("a store of one's own")])
def test_h34_a_spill_that_does_not_answer_is_asked_again_later(
    shop: Edge, tmp_path: Path, error: Exception
) -> None:
    store = Moody(FileBodies(tmp_path / "responses"))
    shop.open(max_response=1000, spill=store)
    shop.send("/big")
    store.error = error
    refused = shop.send("/big")
    assert (refused.status_code, problem(refused)) == (503, "store-unavailable")
    assert refused.headers["retry-after"] == "1"
    store.error = None
    assert (shop.send("/big").content, shop.count("big")) == (BIG, 1)


def test_h26_what_cannot_be_spilled_is_done_without_a_response(shop: Edge, tmp_path: Path) -> None:
    store = Moody(FileBodies(tmp_path / "responses"))
    store.error = StoreUnavailable("full")
    shop.open(max_response=1000, spill=store)
    assert shop.send("/big").content == BIG, "its first client gets it all the same"
    store.error = None
    again = shop.send("/big")
    assert (again.status_code, problem(again), shop.count("big")) == (422, "response-not-stored", 1)


class Stuck(Moody):
    """A store that thinks about a body for as long as one likes."""

    def __init__(self, inner: FileBodies) -> None:
        super().__init__(inner)
        self.asked, self.go = threading.Event(), threading.Event()

    def put(self, name: str, data: bytes) -> None:
        self.asked.set()
        assert self.go.wait(30)
        super().put(name, data)


def test_h17_a_process_that_ends_while_a_body_is_stored_frees_no_key(tmp_path: Path) -> None:
    ledger, store = Ledger(), Stuck(FileBodies(tmp_path / "responses"))

    async def run() -> None:
        async with AsyncSemel(f"sqlite:///{tmp_path}/semel.db", timeout=20) as once:
            app = IdempotencyMiddleware(
                starlette_shop(ledger),
                once=once,
                principal=lambda _: "ada",
                authenticated_outside=True,
                store_timeout=20,
                max_response=1000,
                spill=store,
            )
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                first = asyncio.create_task(client.post("/big", headers={"Idempotency-Key": "k"}))
                await asyncio.to_thread(store.asked.wait, 30)
                (running,) = app._running.values()
                running.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await first
                store.go.set()
                again = await client.post("/big", headers={"Idempotency-Key": "k"})
                assert (again.status_code, problem(again)) == (422, "response-not-stored")

    asyncio.run(run())
    assert ledger.count("big") == 1


def test_h26_a_route_that_lost_its_spill_says_that_the_response_is_not_there(
    shop: Edge, tmp_path: Path
) -> None:
    shop.open(max_response=1000, spill=folder(tmp_path))
    shop.send("/big")
    shop.open(max_response=1000)
    again = shop.send("/big")
    assert (again.status_code, problem(again), shop.count("big")) == (422, "response-not-stored", 1)


# --------------------------------------------------------------------------------------------------------- sweeping


def aged(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def test_a_sweep_removes_what_no_record_can_want_any_more(shop: Edge, tmp_path: Path) -> None:
    spill = Spill(folder(tmp_path), grace=10)
    shop.open(max_response=1000, retention=60, spill=spill)
    shop.send("/big")
    (file,) = files(tmp_path)
    aged(file, 65)
    assert (spill.sweep(), shop.send("/big").content) == (0, BIG), "its record may be a little younger"
    aged(file, 75)
    assert (spill.sweep(), files(tmp_path)) == (1, [])


def test_a_sweep_leaves_what_is_kept_for_ever_and_what_is_not_ours(shop: Edge, tmp_path: Path) -> None:
    spill = Spill(folder(tmp_path), grace=0)
    shop.open(max_response=1000, retention=None, spill=spill)
    shop.send("/big")
    spill.store.put("http/5trange", b"somebody else's")
    for file in files(tmp_path):
        aged(file, 1e8)
    assert (spill.sweep(), len(files(tmp_path))) == (0, 2)


@pytest.mark.parametrize("colour", ["async"])
def test_a_bucket_keeps_them_and_the_command_sweeps_it(shop: Edge, s3_server: services.S3Server) -> None:
    client, prefix = s3_server.client(), f"http{uuid.uuid4().hex[:8]}"
    spill = Spill(S3Bodies(client, s3_server.bucket, prefix=prefix), grace=0)
    shop.open(max_response=1000, retention=3, spill=spill)
    first, again = shop.send("/big"), shop.send("/big")
    assert (first.content, again.content, again.headers["idempotency-replayed"]) == (BIG, BIG, "true")
    assert shop.count("big") == 1
    keys = {"AWS_ACCESS_KEY_ID": s3_server.access_key, "AWS_SECRET_ACCESS_KEY": s3_server.secret_key}

    def swept(grace: int) -> str:
        url = f"s3://{s3_server.bucket}/{prefix}?endpoint={s3_server.url}&region=us-east-1"
        return CliRunner().invoke(commands, ["http", "sweep", url, "--grace", str(grace)], env=keys).output

    assert swept(3600) == "0 bodies removed\n"
    deadline = time.monotonic() + 60
    while (said := swept(0)) == "0 bodies removed\n" and time.monotonic() < deadline:
        time.sleep(0.1)  # until its retention is over, by the bucket's clock
    assert said == "1 body removed\n"
    assert "Contents" not in client.list_objects_v2(Bucket=s3_server.bucket, Prefix=prefix)


@pytest.mark.parametrize("where", ["ftp://x", "nonsense", "file://relative", "s3://"])
def test_a_place_that_is_none_is_refused_by_the_command(where: str) -> None:
    done = CliRunner().invoke(commands, ["http", "sweep", where])
    assert done.exit_code == 1
    assert isinstance(done.exception, ConfigurationError)


def test_h14_a_handlers_own_retention_is_the_bodys_too(tmp_path: Path) -> None:
    async def run() -> None:
        spill = Spill(folder(tmp_path), grace=0)
        app = FastAPI()
        async with AsyncSemel("memory://") as once:

            @app.post("/")
            @idempotent(once=once, principal=lambda _: "ada", max_response=0, retention=10, spill=spill)
            async def kept() -> Response:
                return Response(BIG, headers={"Idempotency-Control": "retention=1000"})

            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                await client.post("/", headers={"Idempotency-Key": "k"})
        (file,) = files(tmp_path)
        aged(file, 900)
        assert spill.sweep() == 0
        aged(file, 1100)
        assert spill.sweep() == 1

    asyncio.run(run())


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("bad", ["nonsense", "ftp://x", "file://bodies", 5, "postgresql+nothing://x"])
def test_a_spill_that_is_none_is_refused_at_once(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        Edge("async", "memory://").open(spill=bad)


def test_an_outboxs_reader_is_no_spill(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="only reads"):
        Spill(SqlBodies(f"sqlite:///{tmp_path}/outbox.db"))


def test_sizes_and_times_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="max_size"):
        Spill(folder(tmp_path), max_size=-1)
    with pytest.raises(ConfigurationError, match="grace"):
        Spill(folder(tmp_path), grace=-1)


# -------------------------------------------------------------------------------------------------- bodies in a table


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TableBodies]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/bodies.db"
    else:
        url = str(request.getfixturevalue(f"{request.param}_server").url)
        driver = {"postgres": "postgresql+psycopg", "mariadb": "mysql+pymysql"}[request.param]
        url = f"{driver}://{url.partition('://')[2]}"
    store = TableBodies(url, table=f"bodies_{os.getpid()}_{time.time_ns()}")
    yield store
    store.close()


def test_a_table_keeps_bodies(table: TableBodies) -> None:
    assert isinstance(table, BodyStore)
    assert list(table.stored("http")) == []
    for name in ("http/a", "http/b", "httpx/c"):
        table.put(name, b"\x00\xff" * 5)
    table.put("http/a", b"another")
    assert table.get("http/a") == b"\x00\xff" * 5, "a name is given to one body only"
    found = sorted(table.stored("http"))
    assert [body.name for body in found] == ["http/a", "http/b"]
    assert all(-1 < body.age < 60 for body in found)
    table.delete("http/a")
    table.delete("http/a")
    with pytest.raises(BodyMissing, match="http/a"):
        table.get("http/a")


def test_r49_a_spill_is_closed_by_either_kind_of_block(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/bodies.db"
    with Spill(url) as spill:
        spill.store.put("http/a", b"one")

    async def work() -> bytes:
        async with Spill(url) as again:
            return again.store.get("http/a")

    assert asyncio.run(work()) == b"one"


def test_a_table_is_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.bodies.table._PAGE", 2)
    table = TableBodies(f"sqlite:///{tmp_path}/bodies.db")
    for number in range(5):
        table.put(f"http/{number}", b"")
    assert [body.name for body in table.stored("http")] == [f"http/{number}" for number in range(5)]
    table.close()


def test_a_database_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="semel_bodies"):
        TableBodies(f"sqlite:///{tmp_path}/not/there.db").put("http/a", b"")

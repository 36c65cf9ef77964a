"""R29, R30: faces are made at import time and used after forks, in threads, greenlets and loops, behind a pooler."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from semel import AsyncSemel, Semel
from semel.testing.services.home import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
STORES = ("sqlite", "redis", "postgres", "mysql")
SYNC = {"postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}
# Nobody is overtaken and no store is given up because the machine stands still.
PATIENT: dict[str, Any] = {"lease": 30.0, "timeout": 15.0, "settle_timeout": 20.0}
STOPPED = 50.0  # seconds; then nothing of ours holds up a server that is asked to end
ASYNC = {"postgres": "postgresql+asyncpg", "mysql": "mysql+asyncmy"}


def url_of(request: pytest.FixtureRequest, store: str, folder: Path, schemes: dict[str, str]) -> str:
    if store == "sqlite":
        return f"sqlite:///{folder / 'semel.db'}"
    if store == "redis":
        return str(request.getfixturevalue("redis_server").url)
    server = request.getfixturevalue("postgres_server" if store == "postgres" else "mariadb_server")
    return f"{schemes[store]}://{server.database().partition('://')[2]}"


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request, request.param, tmp_path, SYNC)


@pytest.fixture(params=STORES)
def async_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_of(request, request.param, tmp_path, ASYNC)


def environment(url: str, effects: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "SEMEL_URL": url,
        "SEMEL_TENANT": uuid.uuid4().hex,
        "SEMEL_EFFECTS": str(effects),
        "PYTHONPATH": str(ROOT),
        **more,
    }


@contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOPPED) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("kind", ["sync", "gthread", "gevent"])
def test_R29_gunicorn_with_preload(url: str, kind: str, tmp_path: Path) -> None:
    effects, booted = tmp_path / "effects", tmp_path / "booted"
    booted.mkdir()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "gunicorn",
        "--preload",
        "-c",
        "python:tests.processes.hooks",
        "--graceful-timeout",
        str(round(2 * STOPPED)),
        "-w",
        "2",
        "-k",
        kind,
        "-b",
        f"127.0.0.1:{port}",
    ]
    command += [
        "--log-level",
        "warning",
        *(["--threads", "4"] if kind == "gthread" else []),
        "tests.processes.web",
    ]
    keys = [f"k{number}" for number in range(10)]
    warm = "" if kind == "gevent" and not url.startswith("sqlite") else "1"
    with running(command, environment(url, effects, SEMEL_WARM=warm, SEMEL_BOOTED=str(booted))):
        wait_for(lambda: len(list(booted.iterdir())) == 2)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda key: get(port, key), keys * 4))
    assert Counter(effects.read_text().split()) == Counter(keys)
    assert sum(answer.endswith("False") for answer in answers) == len(keys)
    assert len({answer.rpartition(" ")[0] for answer in answers}) <= 2  # one maker per worker process


GREENLETS = """
import sqlite3, sys
from semel import Semel
once = Semel(f"sqlite:///{sys.argv[1]}", timeout=30)  # before gevent comes, as with --preload
from gevent import monkey, spawn, joinall, sleep
monkey.patch_all()
once.execute("open", int)
stranger = sqlite3.connect(sys.argv[1], isolation_level=None)
stranger.execute("BEGIN IMMEDIATE")
waiting = [spawn(once.execute, f"k{number % 10}", int, wait=60) for number in range(30)]
sleep(0.3)  # other greenlets run: all of them want to write now
assert not any(each.ready() for each in waiting)
stranger.execute("COMMIT")
print(sum(not each.value.replayed for each in joinall(waiting, timeout=60)))
once.close()
"""


def test_R29_greenlets_that_wait_for_the_lock_of_an_sqlite_file_do_not_stop_each_other(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", GREENLETS, str(tmp_path / "semel.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout.strip()) == (0, "10"), done.stderr


@pytest.mark.slow
def test_R29_celery_prefork(redis_server: Any, tmp_path: Path) -> None:
    effects = tmp_path / "effects"
    broker = redis_server.url.rpartition("/")[0] + "/7"
    env = environment(redis_server.url, effects, SEMEL_BROKER=broker)
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tests.processes.tasks",
        "worker",
        "-c",
        "2",
        "-l",
        "warning",
    ]
    with running([*command, "--without-gossip", "--without-mingle"], env):
        keys = [f"k{number}" for number in range(8)]
        code = (
            "import sys; from tests.processes.tasks import handle; "
            "print(sum(1 for r in [handle.delay(k) for k in sys.argv[1:] * 3] if r.get(timeout=60)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *keys], env=env, cwd=ROOT, capture_output=True, text=True, check=True
        )
    assert done.stdout.strip() == "24"
    assert Counter(effects.read_text().split()) == Counter(keys)


def test_R29_a_face_used_before_a_fork_works_in_parent_and_children(url: str) -> None:
    once = Semel(url, tenant=uuid.uuid4().hex, **PATIENT)
    assert once.execute("before", os.getpid).value == os.getpid()
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()

    def child(number: int) -> None:
        value = once.execute("before", os.getpid).value, once.execute(f"child-{number}", os.getpid).value
        answers.put((os.getpid(), value, once.execute("shared", os.getpid, wait=30).value))
        once.close()

    children = [context.Process(target=child, args=(number,)) for number in range(3)]
    for each in children:
        each.start()
    assert once.execute("parent", os.getpid).value == os.getpid()
    got = [answers.get(timeout=60) for _ in children]
    for each in children:
        each.join(60)
        assert each.exitcode == 0
    assert all(before == os.getpid() and own == pid for pid, (before, own), _ in got)
    assert len({shared for *_, shared in got}) == 1
    assert once.execute("after", os.getpid).value == os.getpid()
    once.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_R29_two_loops_in_a_row(async_url: str, run: Any) -> None:
    once = AsyncSemel(async_url, tenant=uuid.uuid4().hex, **PATIENT)

    async def main(number: int) -> Any:
        async def work() -> int:
            return number

        outcomes = await asyncio.gather(*(once.execute("k", work, wait=30) for _ in range(5)))
        return {outcome.value for outcome in outcomes}

    assert run(main(1)) == {1}
    assert run(main(2)) == {1}

    async def closing() -> None:
        await once.aclose()

    run(closing())


def test_R29_two_loops_in_two_threads(async_url: str) -> None:
    once = AsyncSemel(async_url, tenant=uuid.uuid4().hex, **PATIENT)
    made: list[int] = []

    async def main() -> list[Any]:
        async def work() -> int:
            made.append(1)
            await asyncio.sleep(0.05)
            return threading.get_ident()

        return [(await once.execute(f"k{number}", work, wait=30)).value for number in range(5)]

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: asyncio.run(main()), range(2))
    assert one == two
    assert len(made) == 5


def test_R29_threads_share_a_face(url: str) -> None:
    with Semel(url, tenant=uuid.uuid4().hex, **PATIENT) as once, ThreadPoolExecutor(16) as pool:
        made: list[int] = []
        outcomes = list(
            pool.map(lambda number: once.execute(f"k{number % 10}", made.append, number, wait=30), range(100))
        )
    assert len(made) == 10
    assert sum(not outcome.replayed for outcome in outcomes) == 10


def test_R29_nothing_connects_or_starts_a_thread_before_first_use() -> None:
    before = set(threading.enumerate())
    for address in (
        "redis://127.0.0.1:1/0",
        "postgresql+psycopg://u@127.0.0.1:1/d",
        "mysql+pymysql://u@127.0.0.1:1/d",
        "sqlite:////nonexistent/folder/x.db",
        "redis+cluster://127.0.0.1:1",
    ):
        Semel(address)
    assert set(threading.enumerate()) <= before  # one of a test before may end meanwhile


@pytest.mark.parametrize("colour", ["sync", "async"])
def test_R30_behind_pgbouncer_in_transaction_mode(pgbouncer: Any, colour: str) -> None:
    address = pgbouncer.database().partition("://")[2]
    tenant = uuid.uuid4().hex
    if colour == "sync":
        with (
            Semel(f"postgresql+psycopg://{address}", tenant=tenant, **PATIENT) as once,
            ThreadPoolExecutor(8) as pool,
        ):
            outcomes = list(
                pool.map(lambda n: once.execute(f"k{n % 5}", time.sleep, 0.01, wait=60), range(40))
            )
    else:

        async def main() -> list[Any]:
            async with AsyncSemel(f"postgresql+asyncpg://{address}", tenant=tenant, **PATIENT) as once:
                return await asyncio.gather(
                    *(once.execute(f"k{n % 5}", asyncio.sleep, 0.01, wait=60) for n in range(40))
                )

        outcomes = asyncio.run(main())
    assert sum(not outcome.replayed for outcome in outcomes) == 5


def get(port: int, key: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/?{key}", timeout=60) as reply:
        return str(reply.read().decode())


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if ready():
            return
        time.sleep(0.02)
    raise AssertionError("the server did not start")

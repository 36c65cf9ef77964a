"""Real servers for the tests, each started when the first test of a process asks for it.

`./test` sets SEMEL_TEST to quick, full or long. A server that is not installed skips its tests with the remedy in the
reason; under SEMEL_REQUIRE_SERVICES=1 (CI, and wherever `./test` could install) it fails them.
A test that kills, pauses or reconfigures a server starts one of its own: `with services.redis() as server:` takes 10 ms.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import coverage
import pytest
from hypothesis import settings

from semel.testing import services
from semel.testing.services.server import Server
from semel.testing.services.topology import Group
from tests.measuring import spare_the_tracer

MODE = os.environ.get("SEMEL_TEST", "full")
SERVER_FIXTURES = {
    "mariadb_server",
    "nats_server",
    "pgbouncer",
    "postgres_server",
    "rabbitmq_server",
    "redis_cluster",
    "redis_sentinel",
    "redis_server",
    "s3_server",
    "valkey_server",
}
# Two seconds and more to start: with xdist one worker does, the tests that use it follow.
GROUPED_FIXTURES = {"rabbitmq_server", "redis_cluster", "redis_sentinel"}

# pytest-timeout ends the whole process, and measured tests are slower: some took 50 s of their 120 beside one other part.
SLOWED = 5 if coverage.Coverage.current() is not None else 1
if SLOWED > 1:
    spare_the_tracer()

# No deadline: this suite shares two cores with the servers. Fixed examples, but for the long run, which looks for new ones.
settings.register_profile("quick", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("full", deadline=None, derandomize=True, max_examples=100)
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(MODE)

# A run that a shell has started in the background ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

S = TypeVar("S", bound=Server | Group)


def pytest_configure(config: pytest.Config) -> None:
    """What pytest-timeout tells goes to stdout, and a process of xdist has none: it would end without a word."""
    if not hasattr(config, "workerinput"):
        return
    timeouts: Any = importlib.import_module("pytest_timeout")
    end = timeouts.timeout_timer

    def told(item: pytest.Item, limits: Any) -> None:
        writer: Any = config.get_terminal_writer()
        writer._file = sys.__stderr__
        writer.line(f"\n{item.nodeid}: not ended after {limits.timeout:.0f} s, its process is ended")
        end(item, limits)

    timeouts.timeout_timer = told


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object | None) -> None:
    """How a process of xdist died: by a signal (-11 is a crash of Python), or by an exit (pytest-timeout's is 1)."""
    if error:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = node.gateway._io.popen.wait(10)
        print(f"\n{node.gateway.id} died: {error}; its exit code is {code}", file=sys.stderr, flush=True)


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        used = SERVER_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if used:
            item.add_marker(pytest.mark.services)
        for name in sorted(used & GROUPED_FIXTURES):
            item.add_marker(pytest.mark.xdist_group(name))
        if SLOWED > 1:
            item.add_marker(pytest.mark.timeout(SLOWED * _limit(item)), append=False)  # before those it has
        (kept if _selected(item) else dropped).append(item)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish() -> None:
    """Thousands of modules and tests stay until the end: each collection of garbage would look through all of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """What a module left open is complained of at its end, not in whatever test garbage happens to be collected in.

    Without the tracer: under coverage one collection stood still inside of it, called for a weak reference's end.
    """
    yield
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        gc.collect()
    finally:
        sys.settrace(tracer)


def _limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(
        marker.args[0] if marker else item.config.getoption("timeout") or item.config.getini("timeout")
    )


def _selected(item: pytest.Item) -> bool:
    if MODE != "long" and item.get_closest_marker("long"):
        return False
    return not (MODE == "quick" and (item.get_closest_marker("slow") or item.get_closest_marker("services")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    yield from _skip_without_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    yield from _skip_without_server()


def _skip_without_server() -> Generator[None, None, None]:
    """A test that needs a missing server, by a fixture or by starting one itself, is skipped or fails with the remedy."""
    try:
        yield
    except services.ServerMissing as error:
        if os.environ.get("SEMEL_REQUIRE_SERVICES") == "1":
            pytest.fail(f"{error} (SEMEL_REQUIRE_SERVICES=1)", pytrace=False)
        pytest.skip(f"SERVER MISSING: {error}")


def _serve(start: Callable[[], S]) -> Iterator[S]:
    if MODE == "quick":
        pytest.skip("needs a server, and --quick starts none")
    server = start()
    with server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[services.RedisServer]:
    yield from _serve(services.redis)


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[services.RedisServer]:
    yield from _serve(services.valkey)


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[services.RedisCluster]:
    yield from _serve(lambda: services.redis_cluster().patient())


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[services.RedisSentinel]:
    yield from _serve(lambda: services.redis_sentinel().patient())


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[services.PostgresServer]:
    yield from _serve(services.postgres)


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[services.MariaServer]:
    yield from _serve(services.mariadb)


@pytest.fixture(scope="session")
def rabbitmq_server() -> Iterator[services.RabbitServer]:
    yield from _serve(services.rabbitmq)


@pytest.fixture(scope="session")
def nats_server() -> Iterator[services.NatsServer]:
    yield from _serve(services.nats)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[services.S3Server]:
    yield from _serve(services.s3)


@pytest.fixture(scope="session")
def pgbouncer(postgres_server: services.PostgresServer) -> Iterator[services.PgBouncer]:
    yield from _serve(lambda: services.pgbouncer(postgres_server))

"""A login that was refused is one login: nothing tries it again in the background, where it would lock an account (R16)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable
from semel.testing import services

pytestmark = pytest.mark.services

Colour = Literal["sync", "async"]
CALLS = 3
_LINGER = 1.3  # seconds in which a release in the background would have been tried six times


class Guard:
    """A server that counts the logins that it refuses, and knows one user."""

    def __init__(self, right: str, count: Callable[[], int], rotate: Callable[[], None]) -> None:
        self.right = right
        self.wrong = right.replace(":right@", ":wrong@")
        self.count = count
        self.rotate = rotate
        """The password is another one from now on, and connections that were made with it are over."""


def _mariadb() -> Iterator[Guard]:
    with services.mariadb() as server:
        server.execute("CREATE USER app@'%' IDENTIFIED BY 'right'")
        server.execute("GRANT ALL ON *.* TO app@'%'")

        def count() -> int:
            return int(server.execute("SHOW GLOBAL STATUS LIKE 'Access_denied_errors'")[0][1])

        def rotate() -> None:
            server.execute("ALTER USER app@'%' IDENTIFIED BY 'rotated'")
            for (number,) in server.execute(
                "SELECT id FROM information_schema.processlist WHERE user = 'app'"
            ):
                server.execute(f"KILL {number}")

        yield Guard(server.database().replace("root@", "app:right@"), count, rotate)


def _postgres() -> Iterator[Guard]:
    with services.postgres() as server:
        server.execute("create role app login superuser password 'right'")
        rules = (
            "host all app 127.0.0.1/32 scram-sha-256\nlocal all all trust\nhost all all 127.0.0.1/32 trust\n"
        )
        Path(server.execute("show hba_file")[0][0]).write_text(rules, "utf-8")
        server.execute("select pg_reload_conf()")

        def count() -> int:
            return server.log(lines=100_000).count("password authentication failed")

        def rotate() -> None:
            server.execute("alter role app password 'rotated'")
            server.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")

        yield Guard(server.database().replace("postgres@", "app:right@"), count, rotate)


def _redis() -> Iterator[Guard]:
    with services.redis() as server:
        server.command("ACL", "SETUSER", "app", "on", ">right", "~*", "&*", "+@all")

        def count() -> int:
            return int(server.info("errorstats").get("errorstat_WRONGPASS", {"count": 0})["count"])

        def rotate() -> None:
            server.command("ACL", "SETUSER", "app", "resetpass", ">rotated")
            server.command("CLIENT", "KILL", "USER", "app")

        yield Guard(server.url.replace("redis://", "redis://app:right@"), count, rotate)


@pytest.fixture(params=[_mariadb, _postgres, _redis], ids=["mariadb", "postgres", "redis"])
def guard(request: pytest.FixtureRequest) -> Iterator[Guard]:
    yield from request.param()


@pytest.fixture(params=["sync", "async"])
def colour(request: pytest.FixtureRequest) -> Colour:
    found: Colour = request.param
    return found


def _calls(
    url: str, colour: Colour, error: type[Exception], before: Callable[[], None] | None = None
) -> None:
    """One after the other, each refused; then time passes for what goes on in the background."""
    if colour == "sync":
        with Semel(url, timeout=10, lease=5) as once:
            if before is not None:
                once.execute("first", lambda: 1)
                before()
            for number in range(CALLS):
                with pytest.raises(error):
                    once.execute(f"k{number}", lambda: 1)
            time.sleep(_LINGER)
        return

    async def main() -> None:
        async with AsyncSemel(url, timeout=10, lease=5) as once:
            if before is not None:
                await once.execute("first", lambda: 1)
                before()
            for number in range(CALLS):
                with pytest.raises(error):
                    await once.execute(f"k{number}", lambda: 1)
            await asyncio.sleep(_LINGER)

    asyncio.run(main())


def test_a_wrong_password_is_tried_once_for_each_call(guard: Guard, colour: Colour) -> None:
    start = guard.count()
    _calls(guard.wrong, colour, ConfigurationError)
    assert guard.count() - start == CALLS


def test_a_password_that_was_rotated_is_tried_once_for_each_call(guard: Guard, colour: Colour) -> None:
    start = guard.count()
    _calls(guard.right, colour, StoreUnavailable, guard.rotate)
    # The first call may have been sent on the connection that was cut: that one is released, at its end and at the close.
    assert CALLS <= guard.count() - start <= CALLS + 3


def test_calls_that_travel_together_are_refused_together(guard: Guard) -> None:
    start = guard.count()

    async def main() -> None:
        async with AsyncSemel(guard.wrong, timeout=10, lease=5) as once:
            calls = [once.execute(f"k{number}", lambda: 1) for number in range(40)]
            found = await asyncio.gather(*calls, return_exceptions=True)
            assert {isinstance(each, ConfigurationError) for each in found} == {True}
            await asyncio.sleep(_LINGER)

    asyncio.run(main())
    assert 1 <= guard.count() - start <= 10

"""R28: an EXEC whose settle failed inside of it was applied. Nobody applies it again, whoever comes next: its sender may be dead."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from semel import OutcomeUnknown, Semel, points
from semel.hooks import Unrecorded
from semel.testing import services
from semel.testing.proxy import Proxy
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, run
from tests.within.test_redis_moments import through


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


@pytest.fixture(autouse=True)
def _deaf_afterwards() -> Iterator[None]:
    yield
    points.listen(None)


@pytest.fixture
def barred(redis_server: Any) -> Iterator[dict[str, str]]:
    """One who may read and write a record, and not count it."""
    redis_server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", "-hincrby")
    yield {"username": "barred", "password": "pw"}
    redis_server.command("ACL", "DELUSER", "barred")


DIES = """
import os, signal, sys
import redis
from semel import Semel, points

url, tenant, name = sys.argv[1:]
pipe = redis.Redis.from_url(url, username="barred", password="pw").pipeline(transaction=True)
points.listen(lambda point: point == "settle.stored" and os.kill(os.getpid(), signal.SIGKILL))
Semel(url, tenant=tenant, lease=0.5).within(pipe).execute("k1", lambda: pipe.rpush(name, 1) and None)
"""


def test_R28_whoever_takes_over_from_a_dead_sender_does_not_apply_it_again(
    lab: RedisLab, barred: dict[str, str]
) -> None:
    name = lab.name("list")

    async def body() -> None:
        dead = subprocess.run(
            [sys.executable, "-c", DIES, lab.url, lab.tenant, name], timeout=60, check=False
        )
        assert (dead.returncode, lab.plain.llen(name)) == (-9, 1)
        time.sleep(0.7)
        once, pipe = lab.face(), lab.pipe()

        async def work() -> str:
            pipe.rpush(name, 1)
            return "paid"

        with pytest.raises(OutcomeUnknown, match="could not be recorded: the key is unknown now"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.llen(name) == 1
        assert (await wait(once.peek("k1"))).state == "unknown"
        await wait(once.resolve("k1", actor="me", reason="never happened", release=True))
        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"

    run(lab, body())


@pytest.mark.parametrize("heard", [True, False])
def test_R28_what_cannot_be_made_unknown_is_not_said_to_be(
    lab: RedisLab, proxy: Proxy, redis_server: Any, *, heard: bool
) -> None:
    """Something else lies under the name of the counters: no settle works, for nobody."""
    events: list[Any] = []
    taken: list[bytes] = []

    async def body() -> None:
        once, direct = lab.face(lease=0.5, hooks=[events.append]), lab.url
        lab.url = through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None)
        lab.url = direct
        proxy.swallow_reply(match=lambda request: not heard and request.endswith(b"\r\nEXEC\r\n"))

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            if not taken:
                with redis.Redis.from_url(lab.url) as plain:
                    taken.append(once.tag("k1").encode() + b":c")
                    plain.delete(taken[0])
                    plain.set(taken[0], "another program's")
            return "paid"

        try:
            with pytest.raises(ResponseError if heard else OutcomeUnknown) as caught:
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
        finally:
            lab.plain.delete(*taken)
        told = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "could not be made unknown" in told
        assert "holds another program's data" in told
        assert [type(event) for event in events if isinstance(event, Unrecorded)] == [Unrecorded]
        time.sleep(0.7)
        with pytest.raises(OutcomeUnknown, match="could not be recorded: the key is unknown now"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.llen(lab.name("list")) == 1

    run(lab, body())


def test_R28_the_note_of_a_settle_that_failed_is_in_the_log() -> None:
    """What a server's log keeps of the commands, it keeps of the note."""
    with services.redis(appendonly="always") as server:
        server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", "-hincrby")
        subprocess.run([sys.executable, "-c", DIES, server.url, "t", "list"], timeout=60, check=False)
        server.kill()
        server.start()
        time.sleep(0.7)
        with Semel(server.url, tenant="t") as once, redis.Redis.from_url(server.url) as client:
            pipe = client.pipeline(transaction=True)
            with pytest.raises(OutcomeUnknown, match="could not be recorded"):
                once.within(pipe).execute("k1", lambda: pipe.rpush("list", 1) and None)
            assert client.llen("list") == 1


def test_R28_a_note_that_may_not_be_deleted_is_not_taken_for_one_that_stayed(
    lab: RedisLab, redis_server: Any
) -> None:
    redis_server.command("ACL", "SETUSER", "keeps", "on", ">pw", "~*", "&*", "+@all", "-del")

    async def body() -> None:
        once, pipe = lab.face(retention=0.2), lab.pipe(username="keeps", password="pw")

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        for _ in range(2):
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
            time.sleep(0.3)
        assert lab.plain.llen(lab.name("list")) == 2

    try:
        run(lab, body())
    finally:
        redis_server.command("ACL", "DELUSER", "keeps")

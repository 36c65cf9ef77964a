"""R28: an EXEC whose settle failed inside of it was applied. Nobody applies it again, whoever comes next: its sender may be dead."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from semel import LeaseLost, OutcomeUnknown, Semel, points
from semel.hooks import Unrecorded
from semel.testing import services
from semel.testing.proxy import RESP, Proxy
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, run
from tests.within.test_redis_errors import Witness
from tests.within.test_redis_moments import at, through


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


@pytest.fixture(autouse=True)
def _deaf_afterwards() -> Iterator[None]:
    yield
    points.listen(None)


# Who may read and write a record, and not count it; or not take it out of the index of runs, which comes after it is written.
@pytest.fixture(params=["-hincrby", "-zadd -zrem -hincrby"])
def barred(request: pytest.FixtureRequest, redis_server: Any) -> Iterator[dict[str, str]]:
    redis_server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", *request.param.split())
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


def die(lab: RedisLab, name: str) -> None:
    dead = subprocess.run([sys.executable, "-c", DIES, lab.url, lab.tenant, name], timeout=60, check=False)
    assert (dead.returncode, lab.plain.llen(name)) == (-9, 1)


def notes(lab: RedisLab, once: Any) -> list[bytes]:
    with redis.Redis.from_url(lab.url) as plain:
        return [name for name in plain.scan_iter(f"{once.tag('k1')}*") if name.endswith(b":e")]


def test_R28_whoever_takes_over_from_a_dead_sender_does_not_apply_it_again(
    lab: RedisLab, barred: dict[str, str]
) -> None:
    name = lab.name("list")

    async def body() -> None:
        die(lab, name)
        once, pipe = lab.face(), lab.pipe()
        assert (await wait(once.peek("k1"))).state == "unknown", "at once, not when its lease has ended"

        async def work() -> str:
            pipe.rpush(name, 1)
            return "paid"

        with pytest.raises(OutcomeUnknown, match="it is not known whether"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.llen(name) == 1
        await wait(once.resolve("k1", actor="me", reason="never happened", release=True))
        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
        assert notes(lab, once) == []

    run(lab, body())


@pytest.mark.parametrize("heard", [True, False])
def test_R28_a_foreign_value_under_the_counters_keeps_no_record_from_being_unknown(
    lab: RedisLab, proxy: Proxy, redis_server: Any, *, heard: bool
) -> None:
    """No settle works then, for nobody; the EXEC writes the record all the same."""
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
        assert "the key is unknown now" in told
        assert [event for event in events if isinstance(event, Unrecorded)] == []
        assert (await wait(once.peek("k1"))).state == "unknown"
        time.sleep(0.7)  # in this process the run is held for alive until its lease has ended
        with pytest.raises(OutcomeUnknown):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.llen(lab.name("list")) == 1

    run(lab, body())


def test_R28_a_record_that_was_written_before_its_settle_failed_is_done(
    lab: RedisLab, redis_server: Any
) -> None:
    """What was left to do is an entry in the index of runs, which is looked through by time."""
    redis_server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", "-zrem")

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe(username="barred", password="pw")

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        for replayed in (False, True):
            outcome = await wait(once.within(pipe).execute("k1", lab.fn(work)))
            assert (outcome.value, outcome.replayed) == ("paid", replayed)
        assert lab.plain.llen(lab.name("list")) == 1
        once = lab.face(retention=0)  # it ends at once
        assert (await wait(once.within(pipe).execute("k2", lab.fn(work)))).value == "paid"

    try:
        run(lab, body())
    finally:
        redis_server.command("ACL", "DELUSER", "barred")


def test_R28_an_exec_that_comes_late_and_whose_settle_fails_aborts_the_one_that_was_sent_again(
    lab: RedisLab, barred: dict[str, str], redis_server: Any
) -> None:
    name, late = lab.name("list"), []

    def landed(point: str) -> None:
        late.append(point) if point == "settle.sent" else None
        if late == ["settle.sent"] * 2:
            points.listen(None)
            proxy.release()
            until = time.monotonic() + 10
            while not lab.plain.llen(name) and time.monotonic() < until:
                time.sleep(0.01)

    async def body() -> None:
        once, direct = lab.face(lease=30), lab.url
        lab.url = through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None, **barred)
        lab.url = direct
        held = proxy.reset_late(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))

        async def work() -> str:
            pipe.rpush(name, 1)
            return "paid"

        points.listen(landed)
        with pytest.raises(OutcomeUnknown, match="the key is unknown now"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert held.fired.is_set()
        assert (len(late), lab.plain.llen(name)) == (2, 1)
        assert (await wait(once.peek("k1"))).state == "unknown"

    with Proxy("127.0.0.1", redis_server.port, framing=RESP) as proxy:
        run(lab, body())


@pytest.mark.parametrize("on_error", ["release", "replay"])
def test_R28_replies_that_nobody_can_read_hide_no_settle_that_failed(
    lab: RedisLab, barred: dict[str, str], on_error: str
) -> None:
    async def body() -> None:
        with redis.Redis.from_url(lab.url) as plain:
            plain.set(lab.name("binary"), b"\xff\xfe")
        once, pipe = lab.face(), lab.pipe(decode_responses=True, **barred)

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            pipe.get(lab.name("binary"))
            return "paid"

        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                await wait(once.within(pipe).execute("k1", lab.fn(work), on_error=on_error))
        assert lab.plain.llen(lab.name("list")) == 1
        assert (await wait(once.peek("k1"))).state == "unknown"

    run(lab, body())


@pytest.mark.parametrize("server", ["redis", "valkey"])
@pytest.mark.parametrize("barred", [False, True])
def test_R28_a_server_that_is_full_takes_a_settle_with_commands_that_need_no_memory(
    server: str, *, barred: bool
) -> None:
    """Not of one who may not delete: his outcome cannot be recorded there, and that is what is said."""
    with getattr(services, server)() as full:
        full.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", "-del")
        user = {"username": "barred", "password": "pw"} if barred else {}
        lab, events = RedisLab("sync", full.url), list[Any]()
        lab.plain.rpush("list", *range(5))

        async def body() -> None:
            once, direct = lab.face(settle_timeout=1, hooks=[events.append]), lab.url

            def fill(request: bytes) -> bool:
                if request.endswith(b"\r\nEXEC\r\n"):
                    while not any(client["multi"] == "3" for client in lab.plain.client_list()):
                        time.sleep(0.01)  # a full server queues nothing
                    lab.plain.config_set("maxmemory", 1)
                return False

            async def work() -> str:
                pipe.lpop("list")
                return "paid"

            with Proxy("127.0.0.1", full.port, framing=RESP) as proxy:
                proxy.stall(match=fill)
                lab.url = through(lab, proxy, full)
                pipe, lab.url = lab.pipe(retry=None, **user), direct
                if barred:
                    with pytest.raises(redis.exceptions.OutOfMemoryError) as caught:
                        await wait(once.within(pipe).execute("k1", lab.fn(work)))
                    told = str(caught.value) + "".join(caught.value.__notes__)
                    assert "were applied, and their outcome could not be recorded inside the EXEC" in told
                    assert "could not be made unknown" in told
                    assert "unknown now" not in told
                else:
                    assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
            assert lab.plain.llen("list") == 4
            assert (await wait(once.peek("k1"))).state == ("running" if barred else "done")
            assert any(isinstance(event, Unrecorded) for event in events) is barred
            lab.plain.config_set("maxmemory", 0)

        run(lab, body())


def test_R28_an_EXEC_that_was_answered_and_aborted_has_applied_nothing(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(settle_timeout=5), lab.pipe()

        def take_over() -> None:
            with redis.Redis.from_url(lab.url) as plain:
                (name,) = (
                    name
                    for name in plain.scan_iter(f"{once.tag('k1')}*")
                    if plain.type(name) == b"string" and lab.tenant.encode() in plain.get(name)
                )
                plain.delete(name)
            with Semel(lab.url, tenant=lab.tenant) as stranger:
                stranger.execute("k1", lambda: "theirs")

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        def elsewhere() -> None:
            stranger = threading.Thread(target=take_over)
            stranger.start()
            stranger.join()

        at("settle.sent", elsewhere)
        with pytest.raises(LeaseLost, match="none of its commands was applied"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lab.plain.llen(lab.name("list")) == 0

    run(lab, body())


def test_R28_the_record_of_a_settle_that_failed_is_in_the_log() -> None:
    """What a server's log keeps of the commands, it keeps of the record."""
    with services.redis(appendonly="always") as server:
        server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", "-hincrby")
        subprocess.run([sys.executable, "-c", DIES, server.url, "t", "list"], timeout=60, check=False)
        server.kill()
        server.start()
        with Semel(server.url, tenant="t") as once, redis.Redis.from_url(server.url) as client:
            pipe = client.pipeline(transaction=True)
            with pytest.raises(OutcomeUnknown, match="it is not known whether"):
                once.within(pipe).execute("k1", lambda: pipe.rpush("list", 1) and None)
            assert client.llen("list") == 1


@pytest.mark.parametrize("forbidden", ["-del", "-getdel"])
def test_R28_who_may_not_delete_has_his_errors_counted_all_the_same(
    lab: RedisLab, redis_server: Any, forbidden: str
) -> None:
    redis_server.command("ACL", "SETUSER", "keeps", "on", ">pw", "~*", "&*", "+@all", forbidden)

    async def body() -> None:
        once, pipe = lab.face(retention=0.2), lab.pipe(username="keeps", password="pw")

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        for _ in range(2):
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
            time.sleep(0.3)
        assert lab.plain.llen(lab.name("list")) == 2
        assert notes(lab, once) == []

        async def fails() -> None:
            pipe.rpush(lab.name("list"), 1)
            pipe.hset(lab.name("list"), "a", 1)

        witness = Witness(lab, "k2")
        with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
            await wait(once.within(pipe).execute("k2", lab.fn(fails)))
        assert witness.states == ["unknown"]
        assert "1 of the commands" in "".join(caught.value.__notes__)

    try:
        run(lab, body())
    finally:
        redis_server.command("ACL", "DELUSER", "keeps")


@pytest.mark.parametrize("forbidden", ["-info", "-del", "-info -del"])
def test_R28_an_exec_without_an_error_is_done_whoever_may_neither_delete_nor_count(
    lab: RedisLab, redis_server: Any, forbidden: str
) -> None:
    """Its sender died right after it: nobody has looked at the answers."""
    redis_server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", *forbidden.split())
    try:
        die(lab, lab.name("list"))
    finally:
        redis_server.command("ACL", "DELUSER", "barred")

    async def body() -> None:
        assert (await wait(lab.face().peek("k1"))).state == "done"

    run(lab, body())

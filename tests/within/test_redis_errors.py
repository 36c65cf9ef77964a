"""R28: an error reply inside EXEC makes the key unknown in the EXEC itself, whoever dies or waits; so do replies nobody could read."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from semel import LeaseLost, OutcomeUnknown, Semel, StoreUnavailable, points
from semel.hooks import Executed, Failed, Unrecorded
from semel.messaging import Message, Outbox
from semel.stores.redis.record import EXEC_BEGIN
from semel.testing import services
from semel.testing.proxy import Proxy
from semel.within.redis import PipelineEngine
from tests.within.lab import wait
from tests.within.test_redis import RedisLab, _second, run
from tests.within.test_redis_moments import at, through

SERVERS = ["redis_server", "valkey_server"]


@pytest.fixture(params=["sync", "async"])
def lab(request: pytest.FixtureRequest, redis_server: Any) -> RedisLab:
    return RedisLab(request.param, redis_server.url)


@pytest.fixture(autouse=True)
def _deaf_afterwards() -> Iterator[None]:
    yield
    points.listen(None)


class Witness:
    """Looks at a key from outside, just after an EXEC: what is left there if its sender dies now."""

    def __init__(self, lab: RedisLab, key: str = "k1") -> None:
        self.states: list[str] = []
        self._once = Semel(lab.url, tenant=lab.tenant, timeout=20)
        self._key = key
        at("settle.stored", self._look)

    def _look(self) -> None:
        looking = threading.Thread(target=self._read)  # this one may have a loop that runs
        looking.start()
        looking.join()

    def _read(self) -> None:
        with self._once as once:
            found = once.peek(self._key)
            self.states.append(found.state if found else "nothing")


# ------------------------------------------------------------------------------------- inside of the EXEC
FAILING: dict[str, tuple[Any, ...]] = {
    "wrong type": ("LPUSH", "{0}:text", 1),
    "no number": ("INCR", "{0}:text"),
    "script that fails": ("EVAL", "return redis.call('LPUSH', KEYS[1], 1)", 1, "{0}:text"),
    "script that says so": ("EVAL", "return redis.error_reply('NO stock')", 0),
    "script that raises": ("EVAL", "error('no stock')", 0),
    "script that is not there": ("EVALSHA", "0" * 40, 0),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("command", FAILING.values(), ids=FAILING)
def test_R28_an_error_inside_exec_is_unknown_from_the_exec_on(
    request: pytest.FixtureRequest, server: str, command: tuple[Any, ...], *, decode: bool
) -> None:
    for colour in ("sync", "async"):
        lab = RedisLab(colour, request.getfixturevalue(server).url)
        run(lab, _fails(lab, command, decode=decode))


async def _fails(lab: RedisLab, command: tuple[Any, ...], *, decode: bool) -> None:
    once, pipe = lab.face(), lab.pipe(decode_responses=decode)
    lab.plain.set(lab.name("text"), "not a list")

    async def work() -> str:
        pipe.execute_command(*(str(word).format(lab.tenant) for word in command))
        pipe.set(lab.name("a"), 1)
        return "paid"

    witness = Witness(lab)
    with pytest.raises((ResponseError, NoScriptError)) as caught:
        await wait(once.within(pipe).execute("k1", lab.fn(work)))
    assert witness.states == ["unknown"]
    assert lab.plain.get(lab.name("a")) == "1", "EXEC does not roll back"
    record = await wait(once.peek("k1"))
    assert record.state == "unknown"
    assert record.error.message == str(caught.value), "the error itself was added"
    with pytest.raises(OutcomeUnknown):
        await wait(once.within(pipe).execute("k1", lab.fn(_second)))


@pytest.mark.parametrize("server", SERVERS)
def test_R28_a_good_pipeline_is_done_from_the_exec_on(request: pytest.FixtureRequest, server: str) -> None:
    """Errors that the server gives to others do not count, nor those of earlier ones."""
    lab = RedisLab("sync", request.getfixturevalue(server).url)
    plain: Any = lab.plain
    stop = threading.Event()

    def errs() -> None:
        with redis.Redis.from_url(lab.url) as other:
            while not stop.is_set():
                with pytest.raises(ResponseError):
                    other.incrby("no:number", "x")

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        threads = [threading.Thread(target=errs) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(30):
                witness = Witness(lab, f"k{turn}")
                once.within(pipe).execute(
                    f"k{turn}", lambda turn=turn: pipe.set(lab.name("a"), turn) and turn
                )
                assert witness.states == ["done"]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not list(plain.scan_iter("*:e")), "no note is left"

    # the keys of records are binary
    lab.plain.close()
    plain = lab.plain = redis.Redis.from_url(lab.url)
    run(lab, body())


@pytest.mark.parametrize("good", [True, False])
def test_R28_a_sender_that_is_killed_right_after_its_exec(good: bool) -> None:
    with services.redis() as server:
        dying = f"""
import os, signal, redis
from semel import Semel, points

client, once = redis.Redis.from_url({server.url!r}), Semel({server.url!r})
pipe = client.pipeline()
client.set("text", "not a hash")
points.listen(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == "settle.stored" else None)
once.within(pipe).execute("k1", lambda: pipe.hset("{"order" if good else "text"}", "paid", 1) and "paid")
"""
        done = subprocess.run([sys.executable, "-c", dying], check=False, timeout=60)
        assert done.returncode == -signal.SIGKILL
        with Semel(server.url, timeout=20) as once, redis.Redis.from_url(server.url) as client:
            pipe = client.pipeline()
            if good:
                assert once.within(pipe).execute("k1", lambda: "again").value == "paid"
            else:
                with pytest.raises(OutcomeUnknown):
                    once.within(pipe).execute("k1", lambda: "again")
            record = once.peek("k1")
            assert record is not None
            assert record.state == ("done" if good else "unknown")
            assert good or "nobody has read which one" in record.error.message  # type: ignore[union-attr]  # it has one


def test_R28_who_waits_for_the_key_is_not_told_that_it_went_well(redis_server: Any) -> None:
    lab = RedisLab("sync", redis_server.url)
    told: list[Any] = []

    async def body() -> None:
        once, other, pipe = lab.face(), lab.face(), lab.pipe()
        lab.plain.set(lab.name("text"), "not a list")
        begun, heard = threading.Event(), threading.Event()

        def waits() -> None:
            begun.set()
            try:
                told.append(other.execute("k1", lambda: "second", wait=30))
            except OutcomeUnknown as error:
                told.append(error)
            heard.set()

        waiter = threading.Thread(target=waits)

        def work() -> str:
            waiter.start()
            begun.wait(30)
            pipe.lpush(lab.name("text"), 1)
            return "paid"

        # The sender stands still until the waiter, whom the EXEC has woken, was told.
        at("settle.stored", lambda: heard.wait(30))
        with pytest.raises(ResponseError):
            once.within(pipe).execute("k1", work)
        waiter.join(30)

    run(lab, body())
    assert [type(each) for each in told] == [OutcomeUnknown]


def test_R28_what_is_noted_inside_exec_is_in_no_log() -> None:
    with services.redis(appendonly="always") as server:
        lab = RedisLab("sync", server.url)

        async def body() -> None:
            once, pipe = lab.face(), lab.pipe()
            once.within(pipe).execute("k1", lambda: pipe.set(lab.name("a"), 1) and "paid")
            log = b"".join(path.read_bytes() for path in server.folder.rglob("*.aof"))
            assert lab.name("a").encode() in log
            assert b":e\r\n" not in log
            server.kill()
            server.start()
            assert once.execute("k1", lambda: "again").value == "paid", "the settle is"

        run(lab, body())


def test_R28_a_server_whose_memory_is_full_can_note_its_errors() -> None:
    with services.redis() as server, redis.Redis.from_url(server.url) as client:
        begin = EXEC_BEGIN.source
        client.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            client.set("a", 1)
        client.eval(begin, 1, "note")
        assert client.get("note") == str(client.info("stats")["total_error_replies"]).encode()
        assert client.ttl("note") > 0


# ------------------------------------------------------------------------------ errors that a script catches
CATCHES = "redis.pcall('LPUSH', KEYS[1], 1) return 1"


def test_R28_an_error_that_a_script_catches_does_no_harm(lab: RedisLab) -> None:
    """The server counts it all the same: for a moment the key is unknown, until its sender has seen the replies."""

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        lab.plain.set(lab.name("text"), "not a list")

        async def work() -> str:
            pipe.eval(CATCHES, 1, lab.name("text"))
            pipe.set(lab.name("a"), 1)
            return "paid"

        witness = Witness(lab)
        outcome = await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (outcome.value, outcome.replayed) == ("paid", False)
        assert witness.states == ["unknown"]
        record = await wait(once.peek("k1"))
        assert (record.state, record.error) == ("done", None)
        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).replayed

    run(lab, body())


@pytest.mark.parametrize("back", [True, False], ids=["for a moment", "for good"])
def test_R28_a_store_that_is_away_when_a_caught_error_is_put_right(
    lab: RedisLab, proxy: Proxy, redis_server: Any, *, back: bool
) -> None:
    async def body() -> None:
        pipe, outside = lab.pipe(), lab.face()
        lab.plain.set(lab.name("text"), "not a list")
        lab.url = through(lab, proxy, redis_server)
        once = lab.face(timeout=2, settle_timeout=20 if back else 1)

        async def work() -> str:
            pipe.eval(CATCHES, 1, lab.name("text"))
            pipe.incr(lab.name("n"))
            return "paid"

        def gone() -> None:
            proxy.refuse()
            proxy.cut()
            if back:
                threading.Timer(2.5, proxy.refuse, kwargs={"refusing": False}).start()

        at("settle.stored", gone)
        calling = once.within(pipe).execute
        if back:
            assert (await wait(calling("k1", lab.fn(work)))).value == "paid"
        else:
            with pytest.raises(OutcomeUnknown, match="were applied, but a script among them") as caught:
                await wait(calling("k1", lab.fn(work)))
            assert isinstance(caught.value.__cause__, StoreUnavailable)
        assert (await wait(outside.peek("k1"))).state == ("done" if back else "unknown")
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def test_R28_messages_of_an_outbox_are_no_errors(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        with Outbox(lab.url, table=f"o{lab.tenant[:8]}") as outbox:

            async def work() -> str:
                outbox.add(pipe, Message("t", {"a": 1}))
                outbox.add(pipe, Message("t", {"a": 2}))
                return "sent"

            witness = Witness(lab)
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "sent"
            assert witness.states == ["done"]

    run(lab, body())


# ------------------------------------------------------------------------------------ a server that says no
@pytest.fixture
def blind(redis_server: Any) -> Iterator[dict[str, str]]:
    """A user who may not ask how many errors there were."""
    redis_server.command("ACL", "SETUSER", "blind", "on", ">pw", "~*", "&*", "+@all", "-info")
    yield {"username": "blind", "password": "pw"}
    redis_server.command("ACL", "DELUSER", "blind")


def test_R28_without_info_an_error_inside_exec_is_made_unknown_afterwards(
    lab: RedisLab, blind: dict[str, str]
) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe(**blind)
        lab.plain.set(lab.name("text"), "not a list")

        async def work() -> str:
            pipe.set(lab.name("a"), 1)
            return "paid"

        async def fails() -> None:
            pipe.lpush(lab.name("text"), 1)

        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
        assert (await wait(once.peek("k1"))).state == "done"
        witness = Witness(lab, "k2")
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await wait(once.within(pipe).execute("k2", lab.fn(fails)))
        assert witness.states == ["done"], "as the guide says"
        assert (await wait(once.peek("k2"))).state == "unknown"

    run(lab, body())


@pytest.fixture
def user(request: pytest.FixtureRequest, redis_server: Any) -> Iterator[dict[str, str]]:
    """One who may do everything but this."""
    redis_server.command("ACL", "SETUSER", "barred", "on", ">pw", "~*", "&*", "+@all", request.param)
    yield {"username": "barred", "password": "pw"}
    redis_server.command("ACL", "DELUSER", "barred")


@pytest.mark.parametrize("user", ["-get", "-set", "-time"], indirect=True)
def test_R28_a_user_who_may_not_settle_is_refused_before_anything_is_applied(
    lab: RedisLab, user: dict[str, str]
) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe(**user)

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        with pytest.raises(ResponseError, match="can't run this command") as caught:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert "nothing was applied" in "".join(caught.value.__notes__)
        assert lab.plain.llen(lab.name("list")) == 0
        pipe = lab.pipe()
        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
        assert lab.plain.llen(lab.name("list")) == 1

    run(lab, body())


@pytest.mark.parametrize("user", ["-hincrby"], indirect=True)
@pytest.mark.parametrize("heard", [True, False])
def test_R28_a_settle_that_fails_inside_exec_is_made_unknown_and_nothing_runs_again(
    lab: RedisLab, proxy: Proxy, redis_server: Any, user: dict[str, str], *, heard: bool
) -> None:
    async def body() -> None:
        once, direct = lab.face(lease=0.5), lab.url
        lab.url = through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None, **user)
        lab.url = direct
        lost = proxy.swallow_reply(match=lambda request: not heard and request.endswith(b"\r\nEXEC\r\n"))

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        with pytest.raises(ResponseError if heard else OutcomeUnknown) as caught:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        told = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
        assert "the key is unknown now" in told
        assert lost.fired.is_set() is not heard
        time.sleep(0.7)  # longer than its lease
        assert (await wait(once.peek("k1"))).state == "unknown"
        with pytest.raises(OutcomeUnknown):
            await wait(once.within(lab.pipe(**user)).execute("k1", lab.fn(work)))
        assert lab.plain.llen(lab.name("list")) == 1

    run(lab, body())


def test_R28_scripts_alone_wait_for_a_server_that_refuses_writes(lab: RedisLab, redis_server: Any) -> None:
    """It lacks its replicas: a command would be refused while it is queued, a script not before the EXEC."""

    def set_needed(count: int) -> None:
        redis_server.command("CONFIG", "SET", "min-replicas-to-write", str(count))

    async def body() -> None:
        once, pipe = lab.face(), lab.pipe()
        later = threading.Timer(0.5, set_needed, (0,))

        async def work() -> str:
            pipe.eval("return redis.call('INCR', KEYS[1])", 1, lab.name("n"))
            set_needed(1)
            later.start()
            return "paid"

        try:
            assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
        finally:
            later.join()
        assert lab.plain.get(lab.name("n")) == "1"
        assert (await wait(once.peek("k1"))).state == "done"

    run(lab, body())


@pytest.mark.parametrize("user", ["-del"], indirect=True)
def test_R28_what_is_forbidden_to_the_note_is_no_error_of_the_pipeline(
    lab: RedisLab, user: dict[str, str]
) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe(**user)

        async def work() -> str:
            pipe.rpush(lab.name("list"), 1)
            return "paid"

        witness = Witness(lab)
        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
        assert witness.states == ["done"]

    run(lab, body())


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("sees", [True, False])
def test_R28_an_error_inside_exec_whose_store_is_gone_right_after_it(
    lab: RedisLab, proxy: Proxy, redis_server: Any, blind: dict[str, str], *, sees: bool, hooked: bool
) -> None:
    async def body() -> None:
        heard: list[Any] = []
        pipe, outside = lab.pipe(**({} if sees else blind)), lab.face()
        lab.plain.set(lab.name("text"), "not a list")
        lab.url = through(lab, proxy, redis_server)
        once = lab.face(timeout=5, hooks=[heard.append] if hooked else [])

        async def work() -> None:
            pipe.lpush(lab.name("text"), 1)

        def gone() -> None:
            proxy.refuse()
            proxy.cut()

        at("settle.stored", gone)
        with pytest.raises(ResponseError, match="WRONGTYPE") as caught:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert ("may read as done" in "".join(caught.value.__notes__)) is not sees
        alarms = [event.attempt for event in heard if isinstance(event, Unrecorded)]
        assert alarms == ([1] if hooked and not sees else [])
        assert (await wait(outside.peek("k1"))).state == ("unknown" if sees else "done")

    run(lab, body())


# ------------------------------------------------------------------------------------ replies that nobody read
def test_R28_an_error_inside_exec_whose_answer_is_lost_is_not_sent_again(
    lab: RedisLab, proxy: Proxy, redis_server: Any
) -> None:
    async def body() -> None:
        once = lab.face()
        lab.plain.set(lab.name("text"), "not a list")
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None)
        lab.url = direct
        lost = proxy.swallow_reply(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))

        async def work() -> str:
            pipe.incr(lab.name("n"))
            pipe.lpush(lab.name("text"), 1)
            return "paid"

        with pytest.raises(OutcomeUnknown, match="was applied, and the key is unknown now") as caught:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert lost.fired.is_set()
        assert caught.value.attempt == 1
        assert lab.plain.get(lab.name("n")) == "1"
        with pytest.raises(OutcomeUnknown):  # and not InProgress, from a run that has ended
            await wait(once.execute("k1", lab.fn(_second)))
        await wait(once.resolve("k1", value="looked up", actor="me"))
        assert (await wait(once.execute("k1", lab.fn(_second)))).value == "looked up"

    run(lab, body())


@pytest.mark.parametrize("by_hand", [False, True])
def test_R28_a_reply_that_is_no_text_is_told_and_the_key_is_done(lab: RedisLab, *, by_hand: bool) -> None:
    async def body() -> None:
        heard: list[Any] = []
        once, pipe = lab.face(hooks=[heard.append]), lab.pipe(decode_responses=True)
        redis.Redis.from_url(lab.url).set(lab.name("bytes"), b"\xff\xfe")

        async def work() -> str:
            pipe.incr(lab.name("n"))
            pipe.get(lab.name("bytes"))
            return "paid"

        with pytest.raises(UnicodeDecodeError) as caught:
            if by_hand:
                claim = once.within(pipe).claim("k1")
                await wait(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())
                await work()
                await wait(claim.complete("paid"))
            else:
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert "were applied and the key is recorded as done" in "".join(caught.value.__notes__)
        assert [event.attempt for event in heard if isinstance(event, Executed)] == [1]
        again = await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert (again.value, again.replayed) == ("paid", True)
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def test_R28_an_error_among_replies_that_are_no_text_is_unknown(lab: RedisLab) -> None:
    async def body() -> None:
        once, pipe = lab.face(), lab.pipe(decode_responses=True)
        redis.Redis.from_url(lab.url).set(lab.name("bytes"), b"\xff\xfe")

        async def work() -> str:
            pipe.lpush(lab.name("bytes"), 1)
            pipe.get(lab.name("bytes"))
            return "paid"

        with pytest.raises(OutcomeUnknown, match="was applied, and the key is unknown now") as caught:
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert isinstance(caught.value.__context__, Exception)
        assert (await wait(once.peek("k1"))).state == "unknown"

    run(lab, body())


def test_R28_what_redis_py_cannot_spell_is_a_known_failure(lab: RedisLab) -> None:
    async def body() -> None:
        heard: list[Any] = []
        once, pipe = lab.face(lease=60, hooks=[heard.append]), lab.pipe()

        async def work() -> None:
            pipe.set(lab.name("a"), "half a \ud83d")

        with pytest.raises(UnicodeEncodeError):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        assert [event.decision for event in heard if isinstance(event, Failed)] == ["release"]
        assert not lab.plain.exists(lab.name("a"))
        assert (await wait(once.within(pipe).execute("k1", lab.fn(_second)))).value == "second"

    run(lab, body())


def test_R28_a_refusal_after_an_exec_whose_answer_was_lost_is_looked_up(lab: RedisLab) -> None:
    async def body() -> None:
        server: Any = lab.plain
        server.execute_command("ACL", "SETUSER", "brief", "on", ">pw", "~*", "&*", "+@all")
        once, pipe = lab.face(), lab.pipe(username="brief", password="pw")

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "paid"

        def lose() -> None:
            server.execute_command("ACL", "SETUSER", "brief", "-watch")
            raise redis.exceptions.ConnectionError("the answer was lost")

        at("settle.stored", lose)
        try:
            outcome = await wait(once.within(pipe).execute("k1", lab.fn(work)))
        finally:
            server.execute_command("ACL", "DELUSER", "brief")
        assert (outcome.value, outcome.replayed) == ("paid", False)
        assert (await wait(once.execute("k1", lab.fn(_second)))).value == "paid"
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def test_R28_a_refusal_is_not_the_word_on_an_exec_that_is_still_on_its_way(
    lab: RedisLab, proxy: Proxy, redis_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make the record unknown after it was looked at, and the refusal would free it, half of its commands applied."""

    async def body() -> None:
        server: Any = lab.plain
        lab.plain.set(lab.name("text"), "not a list")
        server.execute_command("ACL", "SETUSER", "late", "on", ">pw", "~*", "&*", "+@all")
        once = lab.face()
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None, username="late", password="pw")
        lab.url = direct
        late = proxy.reset_late(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))
        look = PipelineEngine._is_applied

        def execs() -> int:
            return int(server.info("commandstats").get("cmdstat_exec", {}).get("calls", 0))

        async def looked(*args: Any, **options: Any) -> bool:
            found = await look(*args, **options)
            if late.fired.is_set() and not found and not arrived:
                before = execs()
                proxy.release()
                until = time.monotonic() + 20
                while execs() == before and time.monotonic() < until:
                    time.sleep(0.005)
                arrived.append(execs() > before)
            return found

        async def work() -> str:
            pipe.incr(lab.name("n"))
            pipe.lpush(lab.name("text"), 1)
            return "paid"

        arrived: list[bool] = []
        monkeypatch.setattr(PipelineEngine, "_is_applied", looked)
        at("settle.sent", lambda: server.execute_command("ACL", "SETUSER", "late", "-watch"))
        try:
            with pytest.raises(NoPermissionError):
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
        finally:
            server.execute_command("ACL", "DELUSER", "late")
        assert arrived == [True]
        assert not lab.plain.exists(lab.name("n")), "it found that the record has changed"
        assert (await wait(once.execute("k1", lab.fn(_second)))).value == "second"

    run(lab, body())


@pytest.mark.parametrize("word", [b"WATCH", b"EXEC"])
def test_R28_a_pipeline_whose_server_is_silent_for_once_tries_again(
    lab: RedisLab, proxy: Proxy, redis_server: Any, word: bytes
) -> None:
    """redis-py's TimeoutError is neither its ConnectionError nor an OSError."""

    async def body() -> None:
        once = lab.face()
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None, socket_timeout=1)
        lab.url = direct
        lost = proxy.stall(match=lambda request: word in request)

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "paid"

        assert (await wait(once.within(pipe).execute("k1", lab.fn(work)))).value == "paid"
        assert lost.fired.is_set()
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def test_R28_a_key_that_is_forgotten_before_a_lost_answer_is_looked_for(
    lab: RedisLab, proxy: Proxy, redis_server: Any
) -> None:
    """It was applied: nobody may be told that it was not."""

    async def body() -> None:
        once = lab.face()
        direct, lab.url = lab.url, through(lab, proxy, redis_server)
        pipe = lab.pipe(retry=None, socket_timeout=1)
        lab.url = direct
        lost = proxy.stall(match=lambda request: request.endswith(b"\r\nEXEC\r\n"))

        async def work() -> str:
            pipe.incr(lab.name("n"))
            return "paid"

        def forget() -> None:
            lost.fired.wait(10)
            while not lab.plain.exists(lab.name("n")):
                time.sleep(0.01)
            with Semel(lab.url, tenant=lab.tenant) as outside:
                outside.forget("k1")

        impatient = threading.Thread(target=forget)
        impatient.start()
        with pytest.raises(LeaseLost, match="applied only if the key was done and forgotten since"):
            await wait(once.within(pipe).execute("k1", lab.fn(work)))
        impatient.join()
        assert lab.plain.get(lab.name("n")) == "1"

    run(lab, body())


def test_R28_who_cannot_reach_the_pipelines_server_is_told_why(lab: RedisLab) -> None:
    async def body() -> None:
        once = lab.face(settle_timeout=0.1)
        with socket.socket() as unused:  # bound, and nobody listens
            unused.bind(("127.0.0.1", 0))
            lab.url = f"redis://127.0.0.1:{unused.getsockname()[1]}"
            pipe = lab.pipe(retry=None)

            async def work() -> None:
                pipe.set(lab.name("a"), 1)

            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1.*nothing was applied\. Call again"):
                await wait(once.within(pipe).execute("k1", lab.fn(work)))
            assert (await wait(once.peek("k1"))).state == "released", "nobody need wait for its lease"

    run(lab, body())

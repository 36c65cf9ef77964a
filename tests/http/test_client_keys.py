"""The same business action has the same key after a crash, a restart, in another client; another request is refused."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from semel import AsyncSemel, ConfigurationError, InvalidKey, KeyExpired, KeyMismatch, Semel, StoreUnavailable
from semel.http.client import (
    AsyncIdempotentTransport,
    BodyNotRepeatable,
    DurableKeys,
    IdempotentTransport,
    RetentionOver,
    delivered,
)
from tests.docs.markdown import ROOT
from tests.http.libraries import LIBRARIES, TRANSPORT_ERRORS, Caller, Library
from tests.http.rogue import Rogue, Say, problem, rogue

ACTION = {"action": "charge order 7"}
BODY = {"cents": 500}


@pytest.fixture
def server() -> Iterator[Rogue]:
    with rogue() as one:
        yield one


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    chosen: Library = request.param
    return chosen


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'keys.db'}"


def look(store: str, action: str = ACTION["action"]) -> Any:
    with DurableKeys(store) as keys:
        return keys.look(action)


# -- a crash ------------------------------------------------------------------------------------------------------------


class Clients:
    """Starts clients that are real processes; one at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.http.crash_client"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked, self._answers = self._process.stdin, self._process.stdout

    def start(self, library: str, server: Rogue, store: str, point: str = "") -> int:
        """The client's process id."""
        self._asked.write(json.dumps([library, server.url, store, ACTION["action"], point]) + "\n")
        return int(self._answers.readline())

    def ended(self) -> int:
        """Its exit code."""
        return int(self._answers.readline())

    def close(self) -> None:
        self._asked.close()
        assert self._process.wait(30) == 0
        self._answers.close()


@pytest.fixture(scope="module")
def clients() -> Iterator[Clients]:
    some = Clients()
    yield some
    some.close()


def test_a_client_killed_between_sending_and_reply_goes_on_with_its_key(
    clients: Clients, library: Library, server: Rogue, store: str
) -> None:
    server.script = ["hang"]
    client = clients.start(library, server, store)
    assert server.arrived.acquire(timeout=30), "the request came and its effect happened"
    os.kill(client, signal.SIGKILL)
    assert clients.ended() == -signal.SIGKILL
    pending = look(store)
    assert pending.key == server.keys[0]
    assert not pending.done

    reply = Caller(library, keys=store).post(server.url, json=BODY, wishes=ACTION)
    assert reply.report.replayed
    assert server.keys == [pending.key] * 2
    assert len(server.effects) == 1
    assert look(store).status == 201


@pytest.mark.parametrize(
    "point, sent",
    [
        ("claim.won:1", 0),  # about to mint
        ("run.returned:1", 0),  # minted, not recorded
        ("settle.stored:1", 0),  # recorded, not sent
        ("claim.sent:2", 1),  # answered, not marked
        ("settle.stored:2", 1),  # marked, the caller has nothing in hand
    ],
)
def test_a_client_killed_anywhere_else_acts_once_too(
    clients: Clients, server: Rogue, store: str, point: str, sent: int
) -> None:
    clients.start("httpx", server, store, point)
    assert clients.ended() == -signal.SIGKILL
    assert len(server.seen) == sent
    reply = Caller("httpx", keys=store).post(server.url, json=BODY, wishes=ACTION)
    assert reply.report.replayed == bool(sent)
    assert len(set(server.keys)) == 1
    assert len(server.effects) == 1
    assert look(store).done


# -- actions ------------------------------------------------------------------------------------------------------------


def test_an_action_keeps_its_key_and_is_marked_done(library: Library, server: Rogue, store: str) -> None:
    caller = Caller(library, keys=store, attempts=1)
    server.script = ["lose"]
    with pytest.raises(TRANSPORT_ERRORS):
        caller.post(server.url, json=BODY, wishes=ACTION)
    assert not look(store).done
    first = caller.post(server.url, json=BODY, wishes=ACTION)
    again = caller.post(server.url, json=BODY, wishes=ACTION)
    assert first.body == again.body
    assert first.report.action == ACTION["action"]
    assert len(set(server.keys)) == 1
    assert len(server.effects) == 1
    caller.post(server.url, json=BODY, wishes={"action": "charge order 8"})
    caller.post(server.url, json=BODY)
    assert len(set(server.keys)) == 3


def test_all_clients_share_the_keys(server: Rogue, store: str) -> None:
    for library in LIBRARIES:
        Caller(library, keys=store).post(server.url, json=BODY, wishes=ACTION)
    assert len(set(server.keys)) == 1
    assert len(server.effects) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"json": {"cents": 900}},
        {"content": b'{"cents": 500}'},
        {"path": "/other"},
        {"path": "/?a=1"},
        {"method": "PATCH"},
    ],
    ids=["body", "media type", "path", "query", "method"],
)
def test_another_request_under_the_action_is_refused(
    library: Library, server: Rogue, store: str, change: dict[str, Any]
) -> None:
    caller = Caller(library, keys=store)
    caller.post(f"{server.url}/", json=BODY, wishes=ACTION)
    more = {"json": BODY} if "content" not in change else {}
    more |= {name: value for name, value in change.items() if name in ("json", "content")}
    with pytest.raises(KeyMismatch, match="first sent as another request"):
        caller.request(
            change.get("method", "POST"), server.url + change.get("path", "/"), wishes=ACTION, **more
        )
    assert len(server.seen) == 1


def test_the_same_request_may_be_written_differently(library: Library, server: Rogue, store: str) -> None:
    caller = Caller(library, keys=store)
    json_type = {"Content-Type": "application/json; charset=utf-8"}
    caller.post(server.url, content=b'{"a": 1, "b": 2.0}', headers=json_type, wishes=ACTION)
    caller.post(server.url, content=b'{"b":2,"a":1}', headers=json_type, wishes=ACTION)
    for _ in range(2):  # each with a boundary of its own
        caller.post(server.url, files={"f": ("n", b"x")}, wishes={"action": "upload"})
    assert len(set(server.keys)) == 2


def test_what_is_compared_can_be_chosen(library: Library, server: Rogue, store: str) -> None:
    caller = Caller(library, keys=store)
    for time_ in ("10:00", "10:05"):
        caller.post(server.url, json=BODY | {"at": time_}, wishes=ACTION | {"request": BODY})
    assert len(set(server.keys)) == 1


def test_answers_in_front_of_the_handler_leave_the_action_open(
    library: Library, server: Rogue, store: str
) -> None:
    caller = Caller(library, keys=store, attempts=1)
    for answer in (Say(401), Say(429), Say(500), problem("in-progress", 409), problem("key-expired", 422)):
        server.script = [answer]
        assert caller.post(server.url, json=BODY, wishes=ACTION).status == answer.status
        assert not look(store).done
    server.script = [Say(404)]
    caller.post(server.url, json=BODY, wishes=ACTION)
    assert look(store).status == 404


def test_a_redirected_action_is_done_where_it_ends(library: Library, server: Rogue, store: str) -> None:
    server.script = [Say(307, {"Location": f"{server.url}/there"})]
    caller = Caller(library, keys=store)
    caller.post(f"{server.url}/here", json=BODY, wishes=ACTION, follow_redirects=True)
    assert look(store).status == 201
    assert len(set(server.keys)) == 1
    server.script = [Say(303, {"Location": f"{server.url}/there"})]
    caller.post(f"{server.url}/here", json=BODY, wishes={"action": "other"}, follow_redirects=True)
    assert look(store, "other").status == 303


def test_a_body_that_cannot_be_sent_again_is_no_action(library: Library, server: Rogue, store: str) -> None:
    with pytest.raises(BodyNotRepeatable, match="nothing was sent"):
        Caller(library, keys=store, max_body=4).post(
            server.url, content=iter([b"abc", b"def"]), wishes=ACTION
        )
    assert server.seen == []
    assert look(store) is None


# -- retention ----------------------------------------------------------------------------------------------------------


def test_an_action_whose_retention_is_over_is_refused_until_it_is_forgotten(
    library: Library, server: Rogue, store: str
) -> None:
    with DurableKeys(store, retention=0, tombstone=60) as keys:
        caller = Caller(library, keys=keys)
        caller.post(server.url, json=BODY, wishes=ACTION)
        with pytest.raises(RetentionOver, match="forget"):
            caller.post(server.url, json=BODY, wishes=ACTION)
        assert keys.forget(ACTION["action"])
        assert not keys.forget("never heard of")
        caller.post(server.url, json=BODY, wishes=ACTION)
        asyncio.run(keys.aclose())
    assert len(set(server.keys)) == len(server.effects) == 2


def test_nothing_is_left_of_an_action_that_was_forgotten(library: Library, server: Rogue, store: str) -> None:
    caller = Caller(library, keys=store, attempts=1)
    server.retention = "1"
    caller.post(server.url, json=BODY, wishes=ACTION)
    with DurableKeys(store) as keys:
        assert keys.forget(ACTION["action"])
        assert keys.look(ACTION["action"]) is None
    server.script = ["lose"]
    with pytest.raises(TRANSPORT_ERRORS):
        caller.post(server.url, json=BODY | {"other": 1}, wishes=ACTION)
    assert not look(store).done, "what is known about the first one is not said of the second"


def test_without_a_tombstone_an_action_is_forgotten_after_its_retention(
    library: Library, server: Rogue, store: str
) -> None:
    with DurableKeys(store, retention=0, tombstone=0) as keys:
        caller = Caller(library, keys=keys)
        for _ in range(2):
            caller.post(server.url, json=BODY, wishes=ACTION)
        asyncio.run(keys.aclose())
    assert len(set(server.keys)) == 2


def test_the_retention_that_a_server_said_is_known_after_a_restart(
    library: Library, server: Rogue, store: str
) -> None:
    server.script = [problem("in-progress", 409, Retry_After="5", Idempotency_Retention="0")]
    for _ in range(2):  # the second process never asks the server
        with pytest.raises(RetentionOver, match="keeps a key for 0 s"):
            Caller(library, keys=store).post(server.url, json=BODY, wishes=ACTION)
    assert len(server.seen) == 1
    assert issubclass(RetentionOver, KeyExpired)


def test_what_is_left_for_a_replay_is_not_the_whole_retention(
    library: Library, server: Rogue, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First sent 6 s ago, and the replay says that 4 s are left: the server keeps keys for 10 s, not for 4."""
    caller = Caller(library, keys=store, attempts=1)
    server.script = ["lose"]
    with pytest.raises(TRANSPORT_ERRORS):
        caller.post(server.url, json=BODY, wishes=ACTION)
    begun = time.time()
    clock = SimpleNamespace(time=lambda: begun + 6)
    monkeypatch.setattr("semel.http.clients.keys.time", clock)
    server.retention = "4"
    for _ in range(2):
        reply = caller.post(server.url, json=BODY, wishes=ACTION)
        assert reply.headers["idempotency-replayed"] == "true"
    clock.time = lambda: begun + 10.5
    with pytest.raises(RetentionOver, match="keeps a key for 10"):
        caller.post(server.url, json=BODY, wishes=ACTION)
    assert (len(server.seen), len(server.effects)) == (3, 1)


def test_a_clock_that_was_set_back_makes_no_key_younger(
    library: Library, server: Rogue, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does that of another machine: the store's own tells how old a key is, and what the server has forgotten is not sent."""
    server.retention = "1"
    Caller(library, keys=store).post(server.url, json=BODY, wishes=ACTION)
    behind = time.time() - 3600
    monkeypatch.setattr("semel.http.clients.keys.time", SimpleNamespace(time=lambda: behind))
    time.sleep(1.1)  # the store's clock is the system's
    with pytest.raises(RetentionOver, match="keeps a key for 1 s"):
        Caller(library, keys=store).post(server.url, json=BODY, wishes=ACTION)
    assert len(server.seen) == 1


# -- stores -------------------------------------------------------------------------------------------------------------


def test_keys_may_live_in_a_face_of_the_callers(server: Rogue, store: str) -> None:
    with (
        Semel(store, tenant="acme") as once,
        httpx.Client(transport=IdempotentTransport(keys=once)) as client,
    ):
        for _ in range(2):
            client.post(server.url, extensions={"semel": ACTION})
        client.close()
        record = once.peek(ACTION["action"], operation="http.client")
        assert record is not None
        assert record.scope is not None
        assert record.scope.tenant == "acme"

    async def same() -> None:
        async with AsyncSemel(store, tenant="acme") as once:
            async with httpx.AsyncClient(transport=AsyncIdempotentTransport(keys=once)) as client:
                response = await client.post(server.url, extensions={"semel": ACTION})
            keys = DurableKeys(once)
            state = await keys.alook(ACTION["action"])
            report = delivered(response)
            assert report is not None
            assert state is not None
            assert (state.key, state.status) == (report.key, 201)
            assert state.key not in repr(state)
            assert state.key not in repr(report)
            assert await keys.aforget(ACTION["action"])
            assert await keys.alook(ACTION["action"]) is None

    asyncio.run(same())
    assert len(set(server.keys)) == 1


def test_a_face_that_asks_for_fingerprints_keeps_all_that_is_known_of_an_action(
    server: Rogue, store: str
) -> None:
    """The retention that the server said was not: after a restart the action could be sent when its key was forgotten."""
    server.retention = "3600"
    with (
        Semel(store, fingerprints="required") as once,
        httpx.Client(transport=IdempotentTransport(keys=once)) as client,
    ):
        client.post(server.url, extensions={"semel": ACTION})
        state = DurableKeys(once).look(ACTION["action"])
        assert state is not None
        assert state.status == 201
        assert once.peek(ACTION["action"], operation="http.client.retention") is not None


@pytest.mark.parametrize("name", ["redis", "postgres"])
def test_keys_may_live_on_a_server(request: pytest.FixtureRequest, server: Rogue, name: str) -> None:
    place = request.getfixturevalue(f"{name}_server")
    address = str(place.url) if name == "redis" else str(place.database())
    schemes = {
        "httpx": "postgresql+psycopg",
        "httpx-async": "postgresql+asyncpg",
        "requests": "postgresql+psycopg",
    }
    wishes = {"action": f"charge {uuid.uuid4()}"}
    for library in LIBRARIES:
        url = address if name == "redis" else f"{schemes[library]}://{address.partition('://')[2]}"
        Caller(library, keys=url).post(server.url, json=BODY, wishes=wishes)
    assert len(set(server.keys)) == len(server.effects) == 1


def test_faces_of_the_other_colour_and_stores_that_forget_are_refused(store: str) -> None:
    with pytest.raises(ConfigurationError, match="sync code: give Semel"):
        IdempotentTransport(keys=DurableKeys(AsyncSemel(store)))
    with pytest.raises(ConfigurationError, match="async code: give AsyncSemel"):
        AsyncIdempotentTransport(keys=DurableKeys(Semel(store)))
    with pytest.raises(ConfigurationError, match="gone with the process"):
        DurableKeys("memory://")
    with pytest.raises(ConfigurationError, match="forgets at a restart"):
        DurableKeys(Semel("memory://"))
    with pytest.raises(ConfigurationError, match="not int"):
        DurableKeys(7)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigurationError, match="nonsense"):
        DurableKeys("nonsense://x")


def test_nothing_is_sent_when_the_store_of_keys_is_away(
    library: Library, server: Rogue, tmp_path: Path
) -> None:
    missing = f"sqlite:///{tmp_path / 'no such folder' / 'keys.db'}"
    with pytest.raises((StoreUnavailable, ConfigurationError)):
        Caller(library, keys=missing).post(server.url, wishes=ACTION)
    with pytest.raises(InvalidKey):
        Caller(library, keys=f"sqlite:///{tmp_path / 'keys.db'}").post(server.url, wishes={"action": ""})
    assert server.seen == []


def test_a_final_answer_is_handed_over_also_when_it_cannot_be_noted(
    server: Rogue, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    once = Semel(store)

    class Closing(httpx.HTTPTransport):
        """The store goes away between the recording of the key and the answer."""

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            once.close()
            return super().handle_request(request)

    with (
        httpx.Client(transport=IdempotentTransport(Closing(verify=False), keys=once)) as client,
        caplog.at_level(logging.WARNING, "semel"),
    ):
        assert client.post(server.url, extensions={"semel": ACTION}).status_code == 201
    assert "could not be noted that done is 201" in caplog.text
    assert ACTION["action"] not in caplog.text

"""Processes that live for many schedules keep nothing of those that are over."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from semel.testing.chaos import leftovers, workers
from semel.testing.chaos.cells import Part, Plan, matrix
from semel.testing.chaos.ledger import Ledger
from semel.testing.chaos.leftovers import connections, too_many
from semel.testing.chaos.wires import Wire
from semel.testing.proxy import Proxy


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        yield server


def test_open_connections_are_counted_by_where_they_go(listener: socket.socket) -> None:
    where = listener.getsockname()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(where))
        assert connections()[where] == 3
    assert connections()[where] == 0


def test_more_connections_than_a_process_keeps_on_purpose_are_told(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = max(connections().values(), default=0)
    with ExitStack() as stack:
        for _ in range(most + 1):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        monkeypatch.setattr(leftovers, "MOST", most + 1)
        assert too_many() == ""
        monkeypatch.setattr(leftovers, "MOST", most)
        assert f"{most + 1} open connections to 127.0.0.1:{listener.getsockname()[1]}" in too_many()


def test_a_worker_that_keeps_too_much_fails_its_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = next(cell for cell in matrix() if cell.applies)
    plan = Plan(cell=cell, key="k", url="", folder=str(tmp_path), lease=1.0, role="heir")
    idle = Part(name="idle", cells=list, attempt=lambda _: None)
    monkeypatch.setattr(workers, "part_of", lambda _: idle)
    monkeypatch.setattr(workers, "too_many", lambda: "")
    workers._run_errand(plan)
    assert Ledger(str(tmp_path)).answers() == []
    monkeypatch.setattr(workers, "too_many", lambda: "31 open connections")
    workers._run_errand(plan)
    (told,) = Ledger(str(tmp_path)).answers()
    assert (told.by, told.error, told.text) == ("heir", "Crashed", "31 open connections")


def test_a_proxy_that_keeps_too_much_fails_its_schedule() -> None:
    wire = Wire.__new__(Wire)
    wire._line, theirs = socket.socketpair()
    with wire._line, theirs:
        theirs.sendall(b"1")
        assert wire.fired()
        theirs.sendall(b"131 open connections")
        with pytest.raises(RuntimeError, match="the proxy has 31 open connections"):
            wire.fired()


def test_a_server_hears_that_a_stalled_client_has_left_when_the_next_schedule_begins(
    listener: socket.socket,
) -> None:
    with Proxy("127.0.0.1", listener.getsockname()[1]) as proxy:
        rule = proxy.stall()
        with socket.create_connection((proxy.host, proxy.port)) as client:
            client.sendall(b"struck")
            struck, _ = listener.accept()
            assert struck.recv(10) == b"struck"
            assert rule.fired.is_set()
        with struck, socket.create_connection((proxy.host, proxy.port), timeout=20) as other:
            other.sendall(b"first")
            server, _ = listener.accept()
            with server:
                assert server.recv(10) == b"first"
                proxy.release()  # as it is armed anew
                struck.settimeout(20)
                assert _is_over(struck)
                server.sendall(b"reply")  # nobody else's connection is touched
                assert other.recv(10) == b"reply"


def _is_over(connection: socket.socket) -> bool:
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True

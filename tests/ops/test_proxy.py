"""The fault proxy breaks exactly the request it was told to."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from semel.testing import services
from semel.testing.proxy import CHUNKS, RESP, STREAMS, Proxy


class Echo:
    """A server that answers each read with the same bytes and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(4096):
                self.seen.append(data)
                connection.sendall(data)
        except OSError:
            return
        finally:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            connection.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy("127.0.0.1", echo.port) as made:
        yield made


def ask(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return client.recv(4096)


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection((proxy.host, proxy.port), timeout=5) as made:
        yield made


def test_without_rules_bytes_pass_and_are_counted(proxy: Proxy, client: socket.socket) -> None:
    assert [ask(client, b"a"), ask(client, b"b")] == [b"a", b"b"]
    assert (proxy.requests, proxy.connections, proxy.open_connections) == (2, 1, 1)


def test_reset_before_strikes_the_nth_request_and_the_server_never_sees_it(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    rule = proxy.reset_before(at=2)
    assert ask(client, b"one") == b"one"
    with pytest.raises(ConnectionResetError):
        ask(client, b"two")
    assert rule.fired.is_set()
    assert echo.seen == [b"one"]


def test_reset_late_resets_the_client_and_the_server_sees_the_request_after_the_release(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.reset_late(at=2)
    assert ask(client, b"one") == b"one"
    with pytest.raises(ConnectionResetError):
        ask(client, b"two")
    assert echo.seen == [b"one"]
    proxy.release()
    until = time.monotonic() + 30
    while echo.seen != [b"one", b"two"] or proxy.open_connections:
        assert time.monotonic() < until
        time.sleep(0.005)


def test_swallow_reply_lets_the_request_run_and_resets_the_client(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.swallow_reply(match=lambda request: request == b"two")
    assert ask(client, b"one") == b"one"
    with pytest.raises(ConnectionResetError):
        ask(client, b"two")
    assert echo.seen == [b"one", b"two"]


def test_in_a_redis_pipeline_the_swallowed_request_has_run(redis_server: services.RedisServer) -> None:
    key = f"proxy:{time.monotonic_ns()}"
    pushes = [f"*3\r\n$5\r\nRPUSH\r\n${len(key)}\r\n{key}\r\n$1\r\n{n}\r\n".encode() for n in range(9)]
    with Proxy(redis_server.host, redis_server.port, framing=RESP) as proxy:
        proxy.swallow_reply(at=5)
        with socket.create_connection((proxy.host, proxy.port), timeout=5) as client:
            client.sendall(b"".join(pushes))
            with pytest.raises(ConnectionResetError):
                while client.recv(4096):
                    pass
    assert redis_server.command("LRANGE", key, 0, 4) == ["0", "1", "2", "3", "4"]


def test_stall_holds_replies_until_release(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    rule = proxy.stall()
    client.sendall(b"slow")
    assert rule.fired.wait(5)
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(10)
    proxy.release()
    client.settimeout(5)
    assert client.recv(10) == b"slow"
    assert echo.seen == [b"slow"]


def test_who_left_during_a_stall_is_gone_after_the_release() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Proxy(*silent.getsockname()) as proxy:
        rule = proxy.stall()
        with socket.create_connection((proxy.host, proxy.port)) as client:
            client.sendall(b"slow")
            assert rule.fired.wait(30)
        assert proxy.open_connections == 1  # the server is not told
        proxy.release()
        until = time.monotonic() + 30
        while proxy.open_connections and time.monotonic() < until:
            time.sleep(0.002)
        assert not proxy.open_connections


def test_blackhole_swallows_both_directions_and_closes_nothing(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    rule = proxy.blackhole()
    client.sendall(b"x")
    assert rule.fired.wait(5)
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        ask(client, b"y")
    assert echo.seen == []
    assert proxy.open_connections == 1


def test_half_close_ends_the_conversation_after_the_request(proxy: Proxy, client: socket.socket) -> None:
    proxy.half_close()
    client.sendall(b"last")
    assert client.recv(10) == b"last"
    assert client.recv(10) == b""


def test_drip_delivers_the_reply_byte_by_byte(proxy: Proxy, client: socket.socket) -> None:
    proxy.drip()
    client.sendall(b"word")
    got = [client.recv(4096)]
    while sum(map(len, got)) < 4:
        got.append(client.recv(4096))
    assert b"".join(got) == b"word"
    assert len(got) > 1


def test_cut_and_refuse_act_on_all_connections(proxy: Proxy, client: socket.socket) -> None:
    assert ask(client, b"a") == b"a"
    proxy.refuse()
    proxy.cut()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with (
        pytest.raises(ConnectionResetError),  # of the connecting itself, if the reset is quicker
        socket.create_connection((proxy.host, proxy.port), timeout=5) as late,
    ):
        late.recv(1)
    proxy.refuse(refusing=False)
    with socket.create_connection((proxy.host, proxy.port), timeout=5) as again:
        assert ask(again, b"b") == b"b"


def test_a_cleared_rule_does_not_strike(proxy: Proxy, client: socket.socket) -> None:
    rule = proxy.reset_before()
    proxy.clear()
    assert ask(client, b"a") == b"a"
    assert not rule.fired.is_set()


def test_close_twice_is_fine(echo: Echo) -> None:
    proxy = Proxy("127.0.0.1", echo.port)
    proxy.close()
    proxy.close()


@pytest.mark.parametrize(
    "data,commands",
    [
        (b"", []),
        (b"PING\r\n", [b"PING\r\n"]),
        (
            b"*1\r\n$4\r\nPING\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
            [b"*1\r\n$4\r\nPING\r\n", b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"],
        ),
        (b"*1\r\n$4\r\nPI", []),
        (b"*2\r\n$1\r\n\r\r\n$2\r\n\r\n\r\n*1", [b"*2\r\n$1\r\n\r\r\n$2\r\n\r\n\r\n"]),
    ],
)
def test_redis_commands_are_cut_at_their_ends(data: bytes, commands: list[bytes]) -> None:
    assert RESP.split(data) == commands


def test_whole_chunks_takes_a_read_as_one_request() -> None:
    assert CHUNKS.split(b"abc") == [b"abc"]
    assert CHUNKS.split(b"") == []


def frame(command: int, body: bytes = b"") -> bytes:
    """Of RabbitMQ's stream protocol: 2 publishes, 3 confirms."""
    content = command.to_bytes(2, "big") + b"\x00\x01" + body
    return len(content).to_bytes(4, "big") + content


def test_of_a_stream_only_publications_count_and_their_confirmation_is_the_reply(echo: Echo) -> None:
    with (
        Proxy("127.0.0.1", echo.port, framing=STREAMS) as proxy,
        socket.create_connection((proxy.host, proxy.port), timeout=5) as client,
    ):
        rule = proxy.swallow_reply(at=2)
        assert ask(client, frame(5)) == frame(5)
        assert ask(client, frame(2, b"one")) == frame(2, b"one")
        assert proxy.requests == 1
        assert not rule.fired.is_set()
        whole = frame(2, b"two") + frame(3) + frame(3)
        client.sendall(whole[:7])
        client.sendall(whole[7:])
        with pytest.raises(ConnectionResetError):
            client.recv(4096)
        assert rule.fired.is_set()
        assert b"".join(echo.seen).startswith(frame(5) + frame(2, b"one") + frame(2, b"two"))


def test_a_publication_that_is_reset_before_is_never_seen(echo: Echo) -> None:
    with (
        Proxy("127.0.0.1", echo.port, framing=STREAMS) as proxy,
        socket.create_connection((proxy.host, proxy.port), timeout=5) as client,
    ):
        proxy.reset_before()
        client.sendall(frame(5) + frame(2))
        with pytest.raises(ConnectionResetError):
            while client.recv(4096):
                pass
        assert frame(2) not in b"".join(echo.seen)

"""`redis+cluster://host:port,host:port`: any node that answers will do, for a sink, for a consumer and for an outbox."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis

from semel import ConfigurationError, StoreUnavailable, hosts
from semel.messaging import Message, Outbox, Relay
from semel.messaging.sink import Row, SinkUnavailable
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.redis_servers import client_of, name_of
from semel.messaging.sources import open_source
from semel.testing import services
from semel.testing.services import home
from tests.messaging.conftest import awaited
from tests.pythons import strict_urlsplit


def some_nodes(cluster: services.RedisCluster) -> str:
    """One that is not there, and two that are."""
    listed = ",".join(f"{host}:{port}" for host, port in cluster.addresses[:2])
    return f"redis+cluster://127.0.0.1:{home.free_port()},{listed}"


@awaited
async def test_outbox_sink_and_consumer_find_a_cluster_by_any_of_its_nodes(
    redis_cluster: services.RedisCluster,
) -> None:
    where, stream = some_nodes(redis_cluster), f"s{secrets.token_hex(4)}"
    outbox = Outbox(where, table=f"c{secrets.token_hex(4)}", parts=4)
    client: Any = redis.RedisCluster(*redis_cluster.addresses[0])
    with client.pipeline(transaction=True) as pipe:
        outbox.add(pipe, Message("orders", 1, key="k", id="m1"), Message("orders", 2, key="k", id="m2"))
        pipe.execute()
    client.close()
    async with Relay(outbox, {"orders": f"{where}/0?stream={stream}"}) as relay:
        assert (await relay.drain()).sent == 2
    outbox.close()
    source = open_source(f"{where}?stream={stream}&timeout=5", group="g")
    found: list[Any] = []
    while len(found) < 2:
        for delivery in await source.receive(10):
            found.append((delivery.message.id, delivery.message.body))
            await delivery.ack()
    await source.aclose()
    assert found == [("m1", 1), ("m2", 2)]


@awaited
async def test_a_sink_says_which_nodes_did_not_answer() -> None:
    ports = home.free_port(), home.free_port()
    sink: Any = open_sink(
        f"redis+cluster://me:secret@127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/0?stream=x&timeout=2"
    )
    row = Row(1, "m1", "default", "orders", None, None, None, {}, b"1", 0.0)
    with pytest.raises(SinkUnavailable, match=rf"127.0.0.1:{ports[0]}, 127.0.0.1:{ports[1]}") as caught:
        await sink.publish(0, 1, 1, [row])
    await sink.aclose()
    assert "secret" not in str(caught.value)


@awaited
async def test_a_consumer_of_a_cluster_that_is_away_waits_for_it() -> None:
    """A Cluster none of whose nodes answers is told of by an exception of its own."""
    source = open_source(f"redis+cluster://127.0.0.1:{home.free_port()}?stream=x&timeout=2", group="g")
    with pytest.raises(StoreUnavailable, match="did not answer"):
        await source.receive(1)
    await source.aclose()


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The address of a server that asks for a password, and is no cluster."""
    with services.redis() as server:
        server.command("CONFIG", "SET", "requirepass", "right")
        yield server.url.partition("://")[2].partition("/")[0]


@pytest.mark.parametrize(
    ("scheme", "login", "words"),
    [
        ("redis", "me:wrong@", "refuses this user or password"),
        ("redis+cluster", "me:wrong@", "refuses this user or password"),
        ("redis+cluster", ":right@", "is no cluster: .*; write redis://"),
    ],
)
@awaited
async def test_a_server_that_will_not_have_us_is_a_matter_of_configuration(
    guarded: str, scheme: str, login: str, words: str
) -> None:
    url = f"{scheme}://{login}{guarded}?stream=x&timeout=5"
    sink: Any = open_sink(url)
    row = Row(1, "m1", "default", "orders", None, None, None, {}, b"1", 0.0)
    with pytest.raises(ConfigurationError, match=words) as caught:
        await sink.publish(0, 1, 1, [row])
    await sink.aclose()
    source = open_source(url, group="g")
    with pytest.raises(ConfigurationError, match=words) as read:
        await source.receive(1)
    await source.aclose()
    for said in (str(caught.value), str(read.value)):
        assert "wrong" not in said.replace("WRONGPASS", "")
        assert guarded in said


def test_login_and_options_are_those_of_every_node() -> None:
    client = client_of(
        "rediss+cluster://me:s%2Ft@one:7001,two,[::1]:7003/0?ssl_cert_reqs=none", timeout=3, connect_timeout=2
    )
    nodes = sorted((node.host, node.port) for node in client.startup_nodes)
    assert nodes == [("::1", 7003), ("one", 7001), ("two", 6379)]
    for node in client.startup_nodes:
        settings = node.connection_kwargs
        assert (settings["username"], settings["password"], settings["socket_timeout"]) == ("me", "s/t", 3)
        assert settings["ssl_cert_reqs"] == "none"
    assert name_of("rediss+cluster://me:s%2Ft@one:7001,two/0") == "one:7001, two:6379"


def test_one_node_or_several_are_named_as_urls_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "urlsplit", strict_urlsplit)
    local = socket.gethostbyname("localhost")  # as redis-py does
    for named, nodes, name in (
        ("one:7000, two:7001 ", [("one", 7000), ("two", 7001)], "one:7000, two:7001"),
        ("", [(local, 6379)], "localhost:6379"),
        (":7000", [(local, 7000)], "localhost:7000"),
        ("[::1]:7000,[::2]", [("::1", 7000), ("::2", 6379)], "[::1]:7000, [::2]:6379"),
        ("one,[::1]:7001", [("::1", 7001), ("one", 6379)], "one:6379, [::1]:7001"),
    ):
        for end in ("", "/", "/0"):
            url = f"redis+cluster://me:s%40t@{named}{end}"
            client = client_of(url, timeout=3, connect_timeout=2)
            assert sorted((node.host, node.port) for node in client.startup_nodes) == nodes
            assert {node.connection_kwargs["password"] for node in client.startup_nodes} == {"s@t"}
            assert name_of(url) == name
            sink: Any = open_sink(f"redis+cluster://me:s%40t@{named}?stream=x")
            assert sink._name() == name


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis+cluster://h:1,:2/0?stream=x", "has no host: write host:port,host:port"),
        ("redis+cluster://h:1,h:x/0?stream=x", "number 2 of the hosts in the URL is no host:port"),
        ("redis+cluster://h:1,[::1/0?stream=x", "number 2 of the hosts in the URL is no host:port"),
        ("redis://h:1,h:2/0?stream=x", "the port in a redis:// URL is not a number"),
        ("redis://[::1/0?stream=x", r"the host in a redis:// URL is no name and no address"),
        (
            "redis+cluster://me:geheim@one:1,me:geheim@two:2?stream=x",
            "has user and password once, .* @ as %40",
        ),
        ("redis+cluster://me:ge,@heim@one:1,two:2?stream=x", "@ as %40"),
        ("redis+cluster://me:1,geheim/x@one:1,two:2?stream=x", "/ as %2F"),
        ("redis+cluster://me:geheim#x@one:1,two:2?stream=x", "# as %23"),
        ("redis+cluster://me:geheim?x@one:1,two:2?stream=x", "[?] as %3F"),
        ("redis://me:geheim/x@one:1?stream=x", "/ as %2F"),
        ("redis://me:geheim?geheim@one:1?stream=x", "[?] as %3F"),
        ("redis://me:geheim\u2100@one:1?stream=x", "is no name and no address"),
    ],
)
def test_nodes_that_cannot_be_meant_are_refused_without_a_word_of_the_password(url: str, words: str) -> None:
    for opened in (open_sink, partial(open_source, group="g")):
        with pytest.raises(ConfigurationError, match=words) as caught:
            opened(url)
        assert "geheim" not in str(caught.value)

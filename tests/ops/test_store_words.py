"""What stores say about a URL, a client or tables that cannot be used: the cause and the remedy that fit the case."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
import redis
import redis.asyncio

from semel import AsyncSemel, ConfigurationError, Semel, StoreUnavailable
from semel.testing import services

COLOURS = ["sync", "async"]


def use(source: Any, colour: str = "sync", **settings: Any) -> Any:
    """One call on a face of its own."""

    async def coroutine() -> Any:
        async with AsyncSemel(source, **settings) as once:
            return (await once.execute("k", lambda: 1)).value

    if colour == "async":
        return asyncio.run(coroutine())
    with Semel(source, **settings) as once:
        return once.execute("k", lambda: 1).value


@pytest.mark.parametrize(
    "url, said",
    [
        ("redis://", "names no server: redis://localhost:6379/0"),
        ("rediss://", "names no server: rediss://"),
        ("unix://", "names no server: unix:///run"),
        ("redis+sentinel://", r"names no server: redis\+sentinel://host:26379/service"),
        ("redis+cluster://", r"names no server: redis\+cluster://"),
        ("redis+other://x", "this is no Redis URL"),
        ("memory://a/b", "says more than a name: write memory://"),
        ("memory://a?x=1", "says more than a name"),
        ("memory://a#b", "says more than a name"),
        ("mysql://host", "names no database; write it as mysql://user:password@host:3306/database"),
        ("mysql:///shop", "names no host; write it as mysql://"),
    ],
)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_url_that_lacks_something_is_told_what(url: str, said: str, colour: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        use(url, colour)


@pytest.mark.parametrize("name", ["shop", "shop.1", "127.0.0.1:80", "shop/"])
def test_a_named_store_in_memory_is_shared(name: str) -> None:
    assert use(f"memory://{name}") == 1


def test_a_client_of_the_other_colour_is_told_in_good_english() -> None:
    with pytest.raises(ConfigurationError, match=r"is a sync client under an async face: .*redis.asyncio"):
        AsyncSemel(redis.Redis())
    with pytest.raises(ConfigurationError, match=r"is an async client under a sync face: .*`redis`"):
        Semel(redis.asyncio.Redis())


@pytest.mark.services
@pytest.mark.parametrize("colour", COLOURS)
def test_tls_at_a_plain_port_is_told_as_such(redis_server: services.RedisServer, colour: str) -> None:
    url = redis_server.url.replace("redis://", "rediss://")
    with pytest.raises(StoreUnavailable, match="TLS"):
        use(url, colour, timeout=0.5)


@pytest.mark.services
@pytest.mark.parametrize("colour", COLOURS)
def test_a_plain_server_is_told_to_be_no_sentinel(redis_server: services.RedisServer, colour: str) -> None:
    place = redis_server.url.removeprefix("redis://").partition("/")[0]
    with pytest.raises(ConfigurationError, match=r"is no Sentinel: .*26379.*redis://"):
        use(f"redis+sentinel://{place}/shop", colour)


@pytest.mark.services
@pytest.mark.parametrize("layers", [{}, {"namespace": "shop"}], ids=["plain", "namespace"])
def test_a_pipeline_with_a_key_in_a_foreign_slot_is_told_of_the_tag(
    redis_cluster: services.RedisCluster, layers: dict[str, Any]
) -> None:
    host, _, port = redis_cluster.url.partition("://")[2].partition(",")[0].partition(":")
    client: Any = redis.RedisCluster(host=host, port=int(port.partition("/")[0]))
    name = uuid.uuid4().hex
    with Semel(redis_cluster.url, prefix=name, timeout=20, **layers) as once:
        # Keys of several slots: some are on the node that has the record, others are not.
        for tag in ("{a}", "{b}", "{q}", "{z}", "{shop}", "{order}"):
            pipe = client.pipeline(transaction=True)
            business = f"{name}{tag}"
            with pytest.raises(
                ConfigurationError, match=r"another slot .*nothing was applied.*once\.tag\(key\)"
            ):
                once.within(pipe).execute(f"k{tag}", lambda to=pipe, key=business: to.set(key, 1) and None)
            assert client.get(business) is None
        pipe = client.pipeline(transaction=True)
        business = f"{name}{once.tag('k')}"
        once.within(pipe).execute("k", lambda: pipe.set(business, 1) and None)
        assert client.get(business) == b"1"
    client.close()


@pytest.mark.services
@pytest.mark.parametrize("colour", COLOURS)
def test_tables_that_were_dropped_are_a_matter_of_configuration_on_mariadb_too(
    mariadb_server: services.MariaServer, colour: str
) -> None:
    url = mariadb_server.database()
    database = url.rpartition("/")[2]

    async def main() -> None:
        async with AsyncSemel(url, timeout=20) as once:
            await once.execute("k", lambda: 1)
            drop()
            with pytest.raises(ConfigurationError, match=r"the table does not exist: .*semel schema sql"):
                await once.execute("l", lambda: 1)

    def drop() -> None:
        for table in ("semel", "semel_audit"):
            mariadb_server.execute(f"DROP TABLE {table}", database=database)

    if colour == "async":
        asyncio.run(main())
        return
    with Semel(url, timeout=20) as once:
        once.execute("k", lambda: 1)
        drop()
        with pytest.raises(ConfigurationError, match=r"the table does not exist: .*semel schema sql"):
            once.execute("l", lambda: 1)

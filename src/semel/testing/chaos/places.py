"""The stores of the matrix: shared servers that nobody breaks, and private ones for drivers that break them."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from semel import Semel
from semel.messaging import Outbox
from semel.testing import services
from semel.testing.chaos.cells import Cell
from semel.testing.chaos.transactions import TABLE
from semel.testing.services.redis import Appendonly
from semel.testing.services.server import Server

__all__ = [
    "DDL",
    "PARTS",
    "TABLES",
    "Addresses",
    "Places",
    "Private",
    "coloured",
    "near",
    "node_of",
    "shared_servers",
    "sqlite_tables",
    "with_tables",
]

_SCHEMES = {
    ("postgres", "sync"): "postgresql+psycopg",
    ("postgres", "async"): "postgresql+asyncpg",
    ("mariadb", "sync"): "mysql+pymysql",
    ("mariadb", "async"): "mysql+asyncmy",
}
DDL = {
    "postgres": f"CREATE TABLE {TABLE} (id serial PRIMARY KEY, k text NOT NULL, made_by text, made_at double precision)",
    "mariadb": f"CREATE TABLE {TABLE} (id INT AUTO_INCREMENT PRIMARY KEY, k VARCHAR(255) NOT NULL, made_by VARCHAR(20),"
    " made_at DOUBLE, KEY (k)) ENGINE=InnoDB",
    "sqlite": f"CREATE TABLE {TABLE} (id INTEGER PRIMARY KEY, k TEXT NOT NULL, made_by TEXT, made_at REAL)",
}


TABLES = "chaos"
"""What the names of messaging's tables begin with; PARTS is how many ways an outbox is divided."""
PARTS = 4


class Addresses(msgspec.Struct):
    """Where the shared servers are: host, port and URL by store."""

    urls: dict[str, str] = {}
    versions: dict[str, str] = {}
    folder: str = ""

    def add_broker(self, server: services.NatsServer | services.RabbitServer) -> None:
        self.urls[server.name] = server.url
        if isinstance(server, services.RabbitServer):
            self.urls["rabbitmq-stream"] = server.stream_url
            self.versions["rabbitmq"] = Path(server.program).parent.parent.name.rpartition("-")[2]
        else:
            self.versions["nats"] = str(server.info()["version"])


@contextlib.contextmanager
def shared_servers(stores: set[str], folder: Path) -> Iterator[Addresses]:
    """Start what the chosen cells need; a program that is missing raises ServerMissing with its remedy."""
    with contextlib.ExitStack() as stack:
        found = Addresses(folder=str(folder))
        wanted = sorted(stores - {"sqlite", "memory", "outbox"})
        with ThreadPoolExecutor(
            len(wanted) or 1
        ) as threads:  # most of the time each of them waits for itself
            servers = list(threads.map(lambda store: stack.enter_context(_open(store)), wanted))
        for store, server in zip(wanted, servers, strict=True):
            if isinstance(server, services.RedisCluster):
                server.patient()  # nobody kills this one: a fail-over would be the machine's, and lose what no cell expects
            if isinstance(server, services.NatsServer | services.RabbitServer):
                found.add_broker(server)
                continue
            found.urls[store] = with_tables(store, server)
            url = coloured(found.urls[store], store, "sync")
            if "outbox" in stores and store in {"postgres", "mariadb"}:
                with Outbox(url, table=TABLES, parts=PARTS) as outbox:
                    outbox.create()
            with Semel(url, timeout=20) as once:  # a busy machine is no broken store
                found.versions[store] = once.guarantee().version
        found.versions["sqlite"] = sqlite3.sqlite_version
        yield found


def _open(store: str, *, appendonly: Appendonly = "everysec") -> Any:
    match store:
        case "redis":
            return services.redis(appendonly=appendonly)
        case "postgres":
            return services.postgres(
                config={"max_connections": 500}
            )  # each driver's two workers keep a dozen
        case "mariadb":
            return services.mariadb(config={"max-connections": 500})
        case "rabbitmq":
            return services.rabbitmq()
        case "nats":
            return services.nats()
    return services.redis_cluster(appendonly=appendonly)


def with_tables(store: str, server: Any) -> str:
    """A database with semel's tables and the callers' one; the URL without a driver."""
    if store in {"redis", "cluster"}:
        return str(server.url)
    url = str(server.database())
    server.execute(DDL[store], database=url.rpartition("/")[2])
    with Semel(coloured(url, store, "sync"), timeout=20) as once:
        once.peek("first")
    return url


def sqlite_tables(file: Path) -> str:
    """A new file with semel's tables and the callers' one; its URL."""
    with Semel(f"sqlite:///{file}") as once:
        once.peek("first")
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute(DDL["sqlite"])
        connection.commit()
    return f"sqlite:///{file}"


def coloured(url: str, store: str, colour: str) -> str:
    scheme = _SCHEMES.get((store, colour))
    return url if scheme is None else f"{scheme}://{url.partition('://')[2]}"


def node_of(cluster: Any, key: str) -> Any:
    """The node of a cluster that has the record of this key."""
    with Semel(cluster.url, tenant="chaos", timeout=20) as once:
        return cluster.master_of(once.tag(key))


def near(cluster: Any, other: str, key: str) -> str:
    """A key made from `key` that the same node has as `other`."""
    names = (f"{key}-{number}" for number in range(1000))
    node = node_of(cluster, other)
    return key if other == key else next(name for name in names if node_of(cluster, name) is node)


class Private:
    """A server that belongs to this driver alone, and may be killed."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.server: Any = _open(store, appendonly="always")
        self.url = with_tables(store, self.server)
        self._down: Server | None = None
        self._wait_for_the_dead()

    def _wait_for_the_dead(self) -> None:
        """A node of a cluster that is away for a second is not replaced by its replica: that is another fault (failover)."""
        for node in self.server.nodes if self.store == "cluster" else ():
            node.command("CONFIG", "SET", "cluster-node-timeout", 60_000)

    def near(self, other: str, key: str) -> str:
        """`key`, or one made from it that the same node of a cluster has as `other`."""
        return near(self.server, other, key) if self.store == "cluster" else key

    def kill(self, key: str) -> None:
        """SIGKILL; of a cluster the node that has the key."""
        down: Server = node_of(self.server, key) if self.store == "cluster" else self.server
        self._down = down
        down.kill()

    def start(self) -> None:
        assert self._down is not None
        self._down.start()
        if self.store == "cluster":
            self.server.wait_healthy()
            self._wait_for_the_dead()

    def close(self) -> None:
        self.server.close()


class Places:
    """Which URL a cell's workers use. One per driver; its SQLite file is its own, so that drivers do not queue for it."""

    def __init__(self, addresses: Addresses, number: int) -> None:
        self.folder = Path(addresses.folder) / f"driver-{number}"
        self.folder.mkdir()
        self._urls = addresses.urls
        self._held: dict[str, Any] = {}
        self._sqlite = ""

    def url(self, cell: Cell) -> str:
        if cell.store == "memory":
            return "memory://chaos"
        if cell.store == "sqlite" and not cell.lane:
            return self._sqlite_url()
        if cell.lane and not cell.lane.endswith("!"):
            return ""  # its schedule brings a server of its own
        base = self.private(cell).url if cell.lane else self._urls[cell.store]
        return coloured(base, cell.store, cell.colour)

    def shared(self, name: str, colour: str = "") -> str:
        """The URL of a server that nobody breaks; of a SQL store with the driver of a colour."""
        return self._sqlite_url() if name == "sqlite" else coloured(self._urls[name], name, colour)

    def private(self, cell: Cell) -> Private:
        server: Private = self.hold(cell.lane, lambda: Private(cell.store))
        return server

    def hold(self, name: str, make: Callable[[], Any]) -> Any:
        """A server of this driver's own, made when it is first asked for, closed with the driver."""
        if name not in self._held:
            self._held[name] = make()
        return self._held[name]

    def helper(self, make: Callable[[], Any], name: str = "helper") -> Any:
        """A process that runs this driver's errands; another one when it had to be ended."""
        if name in self._held and not self._held[name].alive:
            del self._held[name]
        return self.hold(name, make)

    def address(self, cell: Cell) -> tuple[str, int]:
        place = self._urls[cell.store].partition("://")[2].rpartition("@")[2].partition("/")[0]
        host, _, port = place.partition(":")
        return host, int(port)

    def through(self, cell: Cell, port: int) -> str:
        """The same database, by way of a proxy."""
        host, real = self.address(cell)
        return self.url(cell).replace(f"{host}:{real}", f"{host}:{port}")

    def _sqlite_url(self) -> str:
        if not self._sqlite:
            self._sqlite = sqlite_tables(self.folder / "semel.db")
        return self._sqlite

    def close(self) -> None:
        for server in self._held.values():
            server.close()

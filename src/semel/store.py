"""The store port: eight verbs, what a store can do, and how one is opened from a URL.

A store is a class with the attributes and methods of `Store`; it needs no base class. Every verb is a coroutine.
A *sync* store never suspends in one, so a sync caller drives it without an event loop (`runtime.run_sync`);
an *async* store may. `semel.testing.contract` is the suite that tells whether a store keeps its word.

What every verb owes its caller: an answer or `StoreUnavailable` within `timeout` seconds; never a retry of its own
with another nonce; safe to be called again with the same arguments (claim, settle and renew are idempotent per
nonce). A batch verb answers per item: one bad item fails alone, as an exception *in* the list. A store that sends a lost
claim again by itself has the attribute `losses` and tells it (`semel.losses`): the first copy may still arrive. One that
opens something for each event loop may have `leave()`, awaited: it closes what the running loop opened, and no more.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from semel.errors import ConfigurationError
from semel.guarantees import Facts
from semel.hosts import scheme_of
from semel.model import Answer, Ask, Event, Note, Record, Renewal, Settle, State, Verdict

if TYPE_CHECKING:
    from semel.keys import Scope

__all__ = [
    "Capabilities",
    "Colour",
    "Facts",
    "Page",
    "Query",
    "Settings",
    "Store",
    "Unwatch",
    "adopt",
    "open_store",
    "origin_of",
    "register",
    "schema_sql",
]

Colour = Literal["sync", "async", "both"]
Unwatch = Callable[[], Awaitable[None]]


class Capabilities(msgspec.Struct, frozen=True):
    """What a store can do. The contract suite, the faces and the docs table read the same flags."""

    durable: bool = False
    """Survives the end of every process."""
    shared: bool = False
    """Seen by other processes."""
    notifies: bool = False
    """`watch` wakes across processes; otherwise the flow polls."""
    joins_transactions: bool = False
    """`within` can bind to a caller's transaction or pipeline."""
    batches: bool = False
    """Several asks in one call are cheaper than one after the other: worth collecting a tick's calls."""
    resends: bool = False
    """A lost request or reply is sent again inside the store, with the same nonce: no retry layer is needed."""
    server_clock: bool = False
    """Time is the server's; embedded stores use the process's."""
    lists_all: bool = True
    """`scan` finds records of every state; otherwise only what needs attention, and what has an indexed ref."""


class Query(msgspec.Struct, frozen=True):
    """What `scan` looks for: by default everything that needs attention (running, unknown, failed)."""

    tenant: str | None = None
    operation: str | None = None
    states: frozenset[State] = frozenset()
    """Viewed states, e.g. {UNKNOWN}; empty means all that the index holds."""
    abandoned: bool = False
    """Only runs whose lease is over (under any policy)."""
    ref: str | None = None
    history: Scope | None = None
    """Read this scope's audit trail instead of records."""
    limit: int = 100
    cursor: str = ""


class Page(msgspec.Struct, frozen=True):
    """One page of a scan; an empty cursor means the end. `now` is the store's clock, for `model.view`."""

    records: Sequence[Record] = ()
    events: Sequence[Event] = ()
    cursor: str = ""
    now: float = 0.0


class Settings(msgspec.Struct, frozen=True):
    """What a store is told when it is opened; everything else is in its URL or client."""

    prefix: str = "semel"
    table: str = "semel"
    timeout: float = 2.0
    acks: int = 0
    readable: str = "full"
    create: bool = True
    index: frozenset[str] = frozenset()
    capacity: int = 10_000
    """Records a memory store holds at most."""


@runtime_checkable
class Store(Protocol):
    """The port. Verbs answer in the order of their arguments."""

    @property
    def colour(self) -> Colour: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        """Decide each ask atomically by `model.claim`."""
        ...

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        """Decide each end atomically by `model.settle`; an actor's word also goes to the audit trail."""
        ...

    async def renew(self, renewals: Sequence[Renewal]) -> list[Answer | Exception]:
        """Extend leases by `model.renew`."""
        ...

    async def note(self, note: Note) -> Answer:
        """Remember a step by `model.note`; durable when it returns."""
        ...

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        """The record as stored (the caller applies `model.view`) and the store's clock. Never writes."""
        ...

    async def watch(self, scope: Scope, wake: Callable[[], None]) -> Unwatch:
        """Call `wake` (from any thread) soon after the scope changed, until the returned function is awaited.

        Wake-ups may be spurious and, where `notifies` is false, come only for changes made in this process.
        """
        ...

    async def scan(self, query: Query) -> Page:
        """Find records that need attention, or read an audit trail."""
        ...

    async def purge(self, limit: int) -> int:
        """Drop up to `limit` expired records; never an unexpired, running-within-lease or unknown one."""
        ...

    async def facts(self) -> Facts:
        """Read the live settings that decide the guarantee."""
        ...

    async def aclose(self) -> None:
        """Close what this store opened (never a client handed in). May be called twice and concurrently."""
        ...


Opener = Callable[[str, Settings, Colour], Store]

# scheme (before "+") → module that has `open_url(url, settings, colour)`; imported when first used.
_SCHEMES: dict[str, str] = {
    "memory": "semel.stores.memory",
    "sqlite": "semel.stores.sqlite",
    "postgresql": "semel.stores.postgres",
    "postgres": "semel.stores.postgres",
    "mysql": "semel.stores.mysql",
    "mariadb": "semel.stores.mysql",
    "redis": "semel.stores.redis",
    "rediss": "semel.stores.redis",
    "valkey": "semel.stores.redis",
    "valkeys": "semel.stores.redis",
    "unix": "semel.stores.redis",
}
_GROUPS: Final = ("redis+cluster", "redis+sentinel")  # for people: `redis` alone is one server
_openers: dict[str, Opener] = {}
_origins: Final[weakref.WeakKeyDictionary[Any, object]] = weakref.WeakKeyDictionary()
_TABLE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)


def register(scheme: str, opener: Opener) -> None:
    """Let `Semel("scheme://…")` open a store of your own."""
    _openers[scheme] = opener


def open_store(url: str, settings: Settings, colour: Colour) -> Store:
    """Open a store by URL. Nothing is connected yet; what the URL alone shows to be wrong raises now."""
    scheme = _scheme_of(url)
    if opener := _openers.get(scheme):
        return opener(url, settings, colour)
    module: Any = import_module(_SCHEMES[scheme])
    url = scheme_of(url) + url[url.index(":") :]  # in small letters
    _check_table(module, settings)
    store: Store = module.open_url(url, settings, colour)
    _origins[store] = url
    return store


def _scheme_of(url: str) -> str:
    """One that a store answers to; ConfigurationError for whatever is no URL of one."""
    if url[:1].isspace():
        raise ConfigurationError(
            f"a store URL begins with its scheme, and this one with a space: {url.partition(':')[0]!r}"
        )
    scheme = scheme_of(url).partition("+")[0]
    if not scheme:
        raise ConfigurationError(
            f"{url!r} is not a store URL; a file is sqlite:///{url or 'semel.db'}, others begin with their scheme"
        )
    if scheme not in _SCHEMES and scheme not in _openers:
        known = ", ".join(sorted({*_SCHEMES, *_GROUPS, *_openers}))
        raise ConfigurationError(f"no store answers to the URL scheme {scheme!r}; known schemes: {known}")
    return scheme


def _check_table(module: Any, settings: Settings) -> None:
    """Stores with tables say what they take. The others would keep quiet until the URL is one of a database."""
    if not hasattr(module, "schema_sql") and not _TABLE.fullmatch(settings.table):
        raise ConfigurationError(
            f"table={settings.table!r} cannot be a table name: use letters, digits and underscores (this store has no tables)"
        )


def schema_sql(url: str, settings: Settings) -> str:
    """The statements that create a store's tables; ConfigurationError for a store that has none."""
    scheme = _scheme_of(url)
    module: Any = import_module(_SCHEMES[scheme]) if scheme in _SCHEMES else None
    if module is None or not hasattr(module, "schema_sql"):
        raise ConfigurationError(f"a {scheme} store has no tables; SQL stores have")
    driver, drivers = scheme_of(url).partition("+")[2], getattr(module, "DRIVERS", ())
    if driver and driver not in drivers:
        used = [*(f"{scheme}+{one}://" for one in sorted(drivers)), f"plain {scheme}://"]
        raise ConfigurationError(f"semel does not use the driver {driver!r}: write {' or '.join(used)}")
    text: str = module.schema_sql(settings.table)
    return text


def adopt(client: object, settings: Settings, colour: Colour) -> Store:
    """Make a store of a client, pool or engine that the caller owns; it is never closed by us."""
    root = type(client).__module__.partition(".")[0]
    by_package = {
        "sqlite3": "semel.stores.sqlite",
        "redis": "semel.stores.redis",
        "valkey": "semel.stores.redis",
        "asyncpg": "semel.stores.postgres",
        "psycopg": "semel.stores.postgres",
        "psycopg_pool": "semel.stores.postgres",
        "asyncmy": "semel.stores.mysql",
        "pymysql": "semel.stores.mysql",
        "sqlalchemy": "semel.stores.sqlalchemy",
    }
    name = by_package.get(root)
    if name is None:
        raise ConfigurationError(
            f"semel cannot use a {type(client).__module__}.{type(client).__qualname__} as a store; "
            "pass a URL, a Store, a Redis client, a database pool or an SQLAlchemy engine"
        )
    module: Any = import_module(name)
    if name != "semel.stores.sqlalchemy":  # which opens one of the others
        _check_table(module, settings)
    store: Store = module.adopt(client, settings, colour)
    _origins[store] = client
    return store


def origin_of(store: Store) -> object | None:
    """What a store was opened from: its URL, or the client, pool or engine; None for a store of somebody else's."""
    while (inner := getattr(store, "inner", None)) is not None:  # a layer
        store = inner
    return _origins.get(store)

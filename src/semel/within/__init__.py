"""`once.within(session_or_connection)`: the record and the caller's rows in one transaction, in one commit.

Which library a transaction comes from is told by the names of its classes, so that no driver is imported for nothing.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigurationError
from semel.layers.namespace import Namespace
from semel.store import Store
from semel.within.bound import Bound
from semel.within.engine import TxEngine, two_records
from semel.within.faces import AsyncWithin, Within
from semel.within.ports import Port

if TYPE_CHECKING:
    from semel.flow import Engine
    from semel.once import AsyncSemel, Semel
    from semel.within.redis import PipelineEngine

__all__ = ["AsyncWithin", "Within", "bind", "port_of"]

# (package, class) → (module, port): found among the classes that the transaction's class is made of.
_PORTS: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("sqlite3", "Connection"): ("drivers", "Sqlite3Port"),
    ("psycopg", "Connection"): ("drivers", "PsycopgPort"),
    ("psycopg", "AsyncConnection"): ("drivers", "PsycopgAsyncPort"),
    ("asyncpg", "Connection"): ("drivers", "AsyncpgPort"),
    ("asyncpg", "PoolConnectionProxy"): ("drivers", "AsyncpgPort"),
    ("pymysql", "Connection"): ("drivers", "PymysqlPort"),
    ("asyncmy", "Connection"): ("drivers", "AsyncmyPort"),
    ("sqlalchemy", "Session"): ("alchemy", "SessionPort"),
    ("sqlalchemy", "AsyncSession"): ("alchemy", "AsyncSessionPort"),
    ("sqlalchemy", "Connection"): ("alchemy", "ConnectionPort"),
    ("sqlalchemy", "AsyncConnection"): ("alchemy", "AsyncConnectionPort"),
    ("django", "ConnectionProxy"): ("django", "DjangoPort"),
    ("django", "BaseDatabaseWrapper"): ("django", "DjangoPort"),
}
_REGISTRIES: Final = frozenset({("sqlalchemy", "scoped_session"), ("sqlalchemy", "async_scoped_session")})
_PIPELINES: Final = frozenset({("redis", "Pipeline"), ("redis", "ClusterPipeline")})
_CLUSTER: Final = ("redis", "ClusterPipeline")
_ROWLESS: Final = frozenset({"Redis", "memory"})
_STORES: Final = {
    "sqlite": "sqlite",
    "postgres": "postgresql",
    "mysql": "mysql",
    "redis": "Redis",
    "memory": "memory",
}


def bind(face: Semel | AsyncSemel, transaction: Any) -> Any:
    """What `within` gives. ConfigurationError for what is no transaction, or one of the other colour."""
    engine: Engine = face._engine()  # noqa: SLF001 - our own face
    bound = Within if face._colour == "sync" else AsyncWithin  # noqa: SLF001 - our own face
    port_class: Any = _known_ports.get(type(transaction))
    if port_class is None:
        transaction = _registered(transaction)
        kind: type = type(transaction)
        names = _names(kind)
        if not _PIPELINES.isdisjoint(names):
            guarded = _pipeline(face, engine, transaction, cluster=_CLUSTER in names)
            return bound(face, guarded, None if face.enabled else guarded.unguarded())
        port_class = _port_class(kind)
    if port_class.colour != face._colour:  # noqa: SLF001 - our own face
        raise _wrong_face(face, transaction, port_class.colour)
    store = face._store  # noqa: SLF001 - our own face
    home = _home(type(store))
    table = face._settings.table  # noqa: SLF001 - our own face
    tx = Bound(port_class(transaction), table, engine.store, engine.runtime)
    dialect = tx.port.foreseen
    if home != dialect and home is not None and (dialect is not None or home in _ROWLESS) and face.enabled:
        raise two_records(home, dialect)
    file = getattr(store, "path", None) if home == "sqlite" else None
    namespace = face._namespace  # noqa: SLF001 - our own face
    plain = namespace is None and face._ring is None  # noqa: SLF001 - our own face
    return bound(face, TxEngine(engine, tx, tx if plain else _layered(face, tx), home, file, namespace))


def port_of(transaction: Any) -> Port:
    """The port on a caller's transaction, of whichever library and colour it is."""
    transaction = _registered(transaction)
    kind: type = type(transaction)
    port: Port = (_known_ports.get(kind) or _port_class(kind))(transaction)
    return port


def _registered(transaction: Any) -> Any:
    """The session that a `scoped_session` stands for at this place; everything else is itself."""
    kind: type = type(transaction)
    return transaction if _REGISTRIES.isdisjoint(_names(kind)) else transaction.registry()


# A class is looked at once: its bases and a module's import cost as much as the rest of `bind`.
_known_ports: Final[dict[type, Any]] = {}
_MOST_PORTS: Final = 256


def _port_class(kind: type) -> Any:
    known = next((_PORTS[name] for name in _names(kind) if name in _PORTS), None)
    if known is None:
        raise ConfigurationError(
            f"within() cannot use a {kind.__module__}.{kind.__qualname__}: pass a SQLAlchemy Session, AsyncSession, "
            "Connection or AsyncConnection, a connection of sqlite3, psycopg, asyncpg, PyMySQL or asyncmy, Django's "
            "connection, or a redis-py pipeline"
        )
    if len(_known_ports) >= _MOST_PORTS:
        _known_ports.clear()
    port_class = _known_ports[kind] = getattr(import_module(f"semel.within.{known[0]}"), known[1])
    return port_class


@lru_cache(maxsize=256)
def _names(kind: type) -> tuple[tuple[str, str], ...]:
    return tuple([(each.__module__.partition(".")[0], each.__name__) for each in kind.__mro__])


def _pipeline(face: Any, engine: Engine, pipe: Any, *, cluster: bool) -> PipelineEngine:
    from semel.within.pipelines import Capture, Queue
    from semel.within.redis import PipelineEngine

    colour = "async" if any(".asyncio." in f"{kind.__module__}." for kind in type(pipe).__mro__) else "sync"
    if colour != face._colour:  # noqa: SLF001 - our own face
        raise _wrong_face(face, pipe, colour)
    store: Store = face._store  # noqa: SLF001 - our own face
    if _home(type(store)) != "Redis":
        raise ConfigurationError(
            f"the records of this face live in {type(store).__name__}: a Redis pipeline can commit a record only where it is. "
            "Give the face the URL of the same Redis"
        )
    if not cluster and not (pipe.is_transaction if colour == "async" else pipe.transaction):
        raise ConfigurationError(
            "within() needs pipeline(transaction=True), so that MULTI/EXEC makes one unit of it"
        )
    capture = Capture(store)
    return PipelineEngine(engine, Queue(pipe, cluster=cluster), store, _layered(face, capture), capture)


@lru_cache(maxsize=256)
def _home(kind: type) -> str | None:
    """The database of a store of ours, by its class; None for one that we do not know."""
    home, _, path = kind.__module__.partition(".stores.")
    return _STORES.get(path.partition(".")[0]) if home == "semel" else None


def _wrong_face(face: Any, transaction: object, colour: str) -> ConfigurationError:
    right = "Semel" if colour == "sync" else "AsyncSemel"
    kind = type(transaction)
    return ConfigurationError(
        f"{kind.__module__}.{kind.__qualname__} is for {colour} code, and this is {type(face).__name__}: use {right}, or "
        f"pass a session or connection for {face._colour} code"  # noqa: SLF001 - our own face
    )


def _layered(face: Any, tx: Store) -> Store:
    """The layers that are about records, in their order (R31). The others are about a store of one's own."""
    store = tx
    if face._namespace is not None:  # noqa: SLF001 - our own face
        store = Namespace(store, face._namespace)  # noqa: SLF001 - our own face
    if face._ring is not None:  # noqa: SLF001 - our own face
        from semel.layers.encrypt import Encrypt

        store = Encrypt(store, face._ring)  # noqa: SLF001 - our own face
    return store

"""Bodies in a table of a SQL database, for programs that share one and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

from semel.bodies.store import BodyMissing, Stored
from semel.errors import ConfigurationError, StoreUnavailable
from semel.forks import survive_fork
from semel.serverclock import SERVER_CLOCK

try:
    from sqlalchemy import (
        Column,
        Connection,
        Double,
        Engine,
        LargeBinary,
        MetaData,
        String,
        Table,
        create_engine,
        delete,
        insert,
        literal_column,
        make_url,
        select,
    )
    from sqlalchemy.dialects.mysql import LONGBLOB
    from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
    from sqlalchemy.pool import NullPool
    from sqlalchemy.schema import CreateTable
except ModuleNotFoundError as missing:  # pragma: no cover - needs an environment without it
    raise ConfigurationError(
        'bodies in a table need SQLAlchemy: pip install "semel[sqlalchemy]"'
    ) from missing

__all__ = ["TableBodies"]

T = TypeVar("T")
_PAGE: Final = 500


class TableBodies:
    """A row for each body. `where` is an Engine, or the URL of one: of a driver that blocks, because the verbs do.

    The table is made on first use, over a connection of its own (`create()` does it at once). MariaDB and MySQL take no
    body that is longer than `max_allowed_packet`.
    """

    def __init__(self, where: str | Engine, *, table: str = "semel_bodies") -> None:
        self._owned = isinstance(where, str)
        self._engine = _engine(where) if isinstance(where, str) else where
        if not isinstance(self._engine, Engine):
            raise ConfigurationError(
                f"bodies in a table need a URL or an Engine that blocks, not a {type(where).__name__}"
            )
        name = String(255).with_variant(String(255, collation="ascii_bin"), "mysql", "mariadb")
        blob = LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")
        self._table = Table(
            table,
            MetaData(),
            Column("name", name, primary_key=True),
            Column("stored", Double, nullable=False),
            Column("body", blob, nullable=False),
        )
        self._is_made = False
        survive_fork(self, TableBodies._forked)

    def _forked(self) -> None:
        if self._owned:
            self._engine.dispose(close=False)

    def create(self) -> None:
        """Make the table, where it is not there."""
        self._run(lambda _: None)

    def put(self, name: str, data: bytes) -> None:
        """Keep it: committed when this returns."""
        new = insert(self._table).values(name=name, body=data, stored=self._now)
        try:
            self._run(lambda c: c.execute(new))
        except IntegrityError:
            return  # it is there: a name is given to one body only

    def get(self, name: str) -> bytes:
        """The body."""
        known = select(self._table.c.body).where(self._table.c.name == name)
        body = self._run(lambda c: c.execute(known).scalar())
        if body is None:
            raise BodyMissing(f"the body {name[:100]} is not in the table {self._table.name}")
        return bytes(body)

    def delete(self, name: str) -> None:
        """Remove it."""
        gone = delete(self._table).where(self._table.c.name == name)
        self._run(lambda c: c.execute(gone))

    def stored(self, home: str) -> Iterator[Stored]:
        """The bodies of one home, by the server's clock, a page at a time."""
        columns = self._table.c
        age = (self._now - columns.stored).label("age")
        page = (
            select(columns.name, age)
            .where(columns.name.like(f"{home}/%"))
            .order_by(columns.name)
            .limit(_PAGE)
        )
        rows = self._run(lambda c: c.execute(page).all())
        while rows:
            for name, seconds in rows:
                yield Stored(name, float(seconds))
            after = page.where(columns.name > rows[-1][0])
            rows = self._run(lambda c, q=after: c.execute(q).all())  # type: ignore[misc]  # mypy knows no lambda with a default

    def close(self) -> None:
        """Close the connections that were opened here."""
        if self._owned:
            self._engine.dispose()

    @property
    def _now(self) -> Any:
        return literal_column(SERVER_CLOCK[self._engine.dialect.name], Double)

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            if not self._is_made:
                with self._engine.begin() as connection:
                    connection.execute(CreateTable(self._table, if_not_exists=True))
                self._is_made = True
            with self._engine.begin() as connection:
                return work(connection)
        except IntegrityError:
            raise
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"the table {self._table.name} did not answer: {error}") from error


def _engine(url: str) -> Engine:
    try:
        place = make_url(url)
        if place.get_backend_name() == "sqlite" and place.database not in {None, "", ":memory:"}:
            return create_engine(place, poolclass=NullPool)  # cheap to open, and nobody has to close it
        return create_engine(place, pool_pre_ping=True)
    except (ArgumentError, NoSuchModuleError, ModuleNotFoundError) as error:
        raise ConfigurationError(
            f"bodies cannot be kept in {url.partition('@')[2] or url!r}: {error}"
        ) from error

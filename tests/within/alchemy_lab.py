"""A caller's transaction of SQLAlchemy: a session or a connection, in either colour."""

from __future__ import annotations

from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from tests.within.lab import Tx, wait


class Orm(DeclarativeBase):
    pass


class Order(Orm):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    k: Mapped[str]


class AlchemyTx(Tx):
    def __init__(self, target: Any, engine: Any) -> None:
        self.target = target
        self._engine = engine
        self._nested: Any = None

    async def run(self, sql: str) -> list[Any]:
        result = await wait(self.target.execute(text(sql)))
        return list(result.fetchall()) if result.returns_rows else []

    async def insert(self, key: str) -> None:
        if isinstance(self.target, Session | AsyncSession):
            self.target.add(Order(k=key))  # not flushed: that is the point
        else:
            await super().insert(key)

    async def savepoint(self) -> None:
        connection = self.target
        if isinstance(connection, Session | AsyncSession):
            await wait(connection.flush())
            connection = await wait(connection.connection())
        connection = getattr(connection, "sync_connection", connection)
        if connection.dialect.name == "sqlite" and not connection.connection.driver_connection.in_transaction:
            await self.run("BEGIN IMMEDIATE")
        self._nested = await wait(self.target.begin_nested())

    async def back(self) -> None:
        await wait(self._nested.rollback())

    async def close(self) -> None:
        await wait(self.target.close())
        await wait(self._engine.dispose())


async def open_alchemy(url: str, colour: str, kind: str) -> AlchemyTx:
    engine: Any = create_engine(url) if colour == "sync" else create_async_engine(url)
    if kind == "connection":
        return AlchemyTx(await wait(engine.connect()), engine)
    session: Any = Session(engine) if colour == "sync" else AsyncSession(engine)
    return AlchemyTx(session, engine)

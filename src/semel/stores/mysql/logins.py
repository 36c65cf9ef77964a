"""How connections are made: from a URL, by the two drivers themselves. An engine's way is `semel.stores.mysql.engines`."""

from __future__ import annotations

from typing import Protocol

from semel.stores.mysql.address import Address
from semel.stores.mysql.wires import AsyncmyWire, PymysqlWire, dial_asyncmy, dial_pymysql

__all__ = ["Login", "UrlLogin"]


class Login(Protocol):
    """Makes connections for a pool, which closes them. Each is in autocommit and takes several statements in one packet."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    @property
    def size(self) -> int:
        """How many there may be at a time."""
        ...

    def connect(self, patience: float) -> PymysqlWire:
        """One more, made within so many seconds, or an error that says what to do."""
        ...

    async def connect_async(self) -> AsyncmyWire:
        """The same on the running loop; its caller bounds the time."""
        ...


class UrlLogin:
    """As a URL says it. What TLS needs is read once, for all connections."""

    def __init__(self, address: Address) -> None:
        self.where = address.where
        self.size = address.pool
        self._options = address.options()
        self._prefers_tls = address.prefers_tls

    def connect(self, patience: float) -> PymysqlWire:
        return dial_pymysql(self._options, self.where, patience, prefers_tls=self._prefers_tls)

    async def connect_async(self) -> AsyncmyWire:
        return await dial_asyncmy(self._options, self.where)

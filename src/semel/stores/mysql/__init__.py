"""MariaDB and MySQL, through asyncmy or PyMySQL."""

from __future__ import annotations

from semel.stores.mysql.address import DRIVERS
from semel.stores.mysql.store import MysqlStore, adopt, open_url, schema_sql

__all__ = ["DRIVERS", "MysqlStore", "adopt", "open_url", "schema_sql"]

"""One database per driver for the whole run: tests keep apart by tenant."""

from __future__ import annotations

import pytest

from semel.testing import services


@pytest.fixture(scope="session")
def sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('sqlite') / 'semel.db'}"


@pytest.fixture(scope="session")
def asyncpg_url(postgres_server: services.PostgresServer) -> str:
    return postgres_server.database(driver="asyncpg")


@pytest.fixture(scope="session")
def psycopg_url(postgres_server: services.PostgresServer) -> str:
    return postgres_server.database(driver="psycopg")


@pytest.fixture(scope="session")
def asyncmy_url(mariadb_server: services.MariaServer) -> str:
    return mariadb_server.database(driver="asyncmy")


@pytest.fixture(scope="session")
def pymysql_url(mariadb_server: services.MariaServer) -> str:
    return mariadb_server.database(driver="pymysql")

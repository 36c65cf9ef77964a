"""Private PostgreSQL, and PgBouncer in front of it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semel.testing.services import home, template
from semel.testing.services.server import Server, ServerFailed, find_program, wait_until

Setting = str | int

REMEDY = "apt-get install postgresql"


def postgres_program(name: str = "postgres") -> str:
    """The newest installed version's program; Debian keeps it off the PATH."""
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda path: int(path.parent.name.split(".")[0]),
        reverse=True,
    )
    return find_program(name, folders=tuple(map(str, versions)), remedy=REMEDY)


def pgbouncer_program() -> str:
    """PgBouncer's program."""
    return find_program("pgbouncer", remedy="apt-get install pgbouncer")


class PostgresServer(Server):
    """One PostgreSQL server with trust authentication for the user `postgres`.

    `fsync=False` (the default) is fast and survives `kill()` of the server, but not of the machine.
    `config` takes any parameter of postgresql.conf, such as ``{"max_prepared_transactions": 10}``.
    """

    name = extra = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: SIGTERM waits until every client has gone
    user = "postgres"

    def __init__(self, *, fsync: bool = False, config: Mapping[str, Setting] | None = None) -> None:
        super().__init__()
        self.program = postgres_program()
        self._data = self.folder / "data"
        self._numbers = itertools.count(1)
        self.config: dict[str, Setting] = {
            "listen_addresses": self.host,
            "unix_socket_directories": str(self.folder),
            "fsync": "on" if fsync else "off",
            "full_page_writes": "on" if fsync else "off",
            "dynamic_shared_memory_type": "mmap",  # files in the data folder: nothing is left in /dev/shm
            "max_connections": 200,
            "timezone": "UTC",
            **(config or {}),
        }

    @property
    def url(self) -> str:
        """`postgresql://postgres@127.0.0.1:PORT/postgres`."""
        return self.url_of("postgres")

    def url_of(self, database: str, *, driver: str = "") -> str:
        """The URL of a database; `driver="asyncpg"` gives `postgresql+asyncpg://…`."""
        return f"postgresql{'+' if driver else ''}{driver}://{self.user}@{self.host}:{self.port}/{database}"

    def database(self, *, driver: str = "") -> str:
        """Create an empty database and return its URL: about 20 ms."""
        name = f"db{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        return self.url_of(name, driver=driver)

    def prepare(self) -> None:
        initdb = postgres_program("initdb")
        flags = ["-U", self.user, "-A", "trust", "-N", "-E", "UTF8", "--locale=C.UTF-8"]
        template.fill(self._data, program=self.program, argv=[initdb, "-D", "{}", *flags])
        self._data.chmod(0o700)

    def argv(self) -> list[str]:
        settings = {**self.config, "port": self.port}
        return [self.program, "-D", str(self._data), *(f"--{key}={value}" for key, value in settings.items())]

    def ping(self) -> None:
        # The data folder tells our server from a stranger's that took the port.
        if self.execute("SHOW data_directory") != [(str(self._data),)]:
            raise ConnectionError("another server answers on this port")

    def execute(self, sql: str, *, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run one statement on a connection of its own, outside a transaction, and return its rows."""
        import psycopg

        with psycopg.connect(self.url_of(database), autocommit=True, connect_timeout=5) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def terminate_connections(self, *, database: str | None = None) -> int:
        """Cut the connections of every client (of one database): what a fail-over looks like. Returns how many."""
        only = f"AND datname = '{database}'" if database else ""
        rows = self.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            f" WHERE backend_type = 'client backend' AND pid <> pg_backend_pid() {only}"
        )
        return len(rows)

    def wait_for_standby(self) -> None:
        """From now on a commit waits until a standby has it on disk."""
        self.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        self.execute("SELECT pg_reload_conf()")
        sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(
            lambda: self.execute(sql) == [(1,)], timeout=20, what="the standby is synchronous", step=0.02
        )

    def close(self) -> None:
        self.stop()
        self._remove_shared_memory()
        super().close()

    def _remove_shared_memory(self) -> None:
        """A killed server leaves a tiny System V segment, named in its pid file; the kernel has few of them."""
        with contextlib.suppress(OSError, IndexError):
            segment = (self._data / "postmaster.pid").read_text("utf-8").splitlines()[6].split()[1]
            subprocess.run(["ipcrm", "-m", segment], check=False, capture_output=True)


class PostgresStandby(PostgresServer):
    """A streaming standby of `primary`, which it must find running. It takes reads until `promote()`.

    Asynchronous, unless the primary is told to wait for it: `primary.wait_for_standby()`.
    """

    def __init__(self, primary: PostgresServer) -> None:
        # Without its primary it looks for more to read every five seconds, and a promotion waits for that.
        super().__init__(config=primary.config | {"wal_retrieve_retry_interval": "20ms"})
        self.config["unix_socket_directories"] = str(self.folder)
        self.primary = primary

    def prepare(self) -> None:
        program = postgres_program("pg_basebackup")
        place = ["-h", self.primary.host, "-p", str(self.primary.port), "-U", self.user]
        words = [program, "-D", str(self._data), *place, "-X", "stream", "-c", "fast", "-R", "-N"]
        log = self.folder / "backup.log"
        if home.spawn(words, folder=self.folder, log=log).wait() != 0:
            raise ServerFailed(f"pg_basebackup failed:\n{log.read_text('utf-8', 'replace')}")
        self._data.chmod(0o700)

    def wait_linked(self, *, timeout: float = 20.0) -> None:
        """Wait until the primary streams to it and it has all that the primary has written."""
        sql = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' AND flush_lsn >= pg_current_wal_lsn()"
        wait_until(
            lambda: self.primary.execute(sql) == [(1,)],
            timeout=timeout,
            what="the standby follows",
            step=0.02,
        )

    def promote(self) -> None:
        """Become a primary with what it has received."""
        self.execute("SELECT pg_promote(true, 30)")


class PgBouncer(Server):
    """PgBouncer in transaction mode in front of `server`: no session state, no LISTEN, no session locks."""

    name = "pgbouncer"
    extra = "postgres"
    stop_signal = signal.SIGTERM

    def __init__(self, server: PostgresServer, *, config: Mapping[str, Setting] | None = None) -> None:
        super().__init__()
        self.server = server
        self.program = pgbouncer_program()
        self.config: dict[str, Setting] = {
            "pool_mode": "transaction",
            "max_client_conn": 500,
            "default_pool_size": 20,
            **(config or {}),
        }

    @property
    def url(self) -> str:
        """`postgresql://postgres@127.0.0.1:PORT/postgres`, through PgBouncer."""
        return self.through(self.server.url)

    def through(self, url: str) -> str:
        """The same database as `url` of the server behind, reached through PgBouncer."""
        return url.replace(f":{self.server.port}/", f":{self.port}/")

    def database(self, *, driver: str = "") -> str:
        """Create an empty database on the server behind and return its URL through PgBouncer."""
        return self.through(self.server.database(driver=driver))

    def argv(self) -> list[str]:
        settings = {
            "listen_addr": self.host,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "admin_users": self.server.user,
            "ignore_startup_parameters": "extra_float_digits",
            **self.config,
        }
        behind = f"* = host={self.server.host} port={self.server.port} user={self.server.user}"
        lines = [
            "[databases]",
            behind,
            "[pgbouncer]",
            *(f"{key} = {value}" for key, value in settings.items()),
        ]
        path = self.folder / "pgbouncer.ini"
        path.write_text("\n".join(lines) + "\n", "utf-8")
        home.give(self.folder)
        return [self.program, str(path)]

    def ping(self) -> None:
        import psycopg

        # Its own console: it answers also while the server behind is down. No transaction, no prepared statement there.
        with psycopg.connect(self.url_of_console, autocommit=True, connect_timeout=5) as connection:
            connection.pgconn.exec_(b"SHOW VERSION")

    @property
    def url_of_console(self) -> str:
        """The admin console (`SHOW POOLS`, `PAUSE`, …)."""
        return f"postgresql://{self.server.user}@{self.host}:{self.port}/pgbouncer"

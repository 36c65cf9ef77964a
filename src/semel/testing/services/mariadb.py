"""Private MariaDB."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from semel.testing.services import home, template
from semel.testing.services.server import Server, ServerFailed, find_program

Setting = str | int

REMEDY = "apt-get install mariadb-server-core mariadb-client-core"


def mariadb_program(name: str = "mariadbd") -> str:
    """A program of the MariaDB server."""
    return find_program(name, remedy=REMEDY)


class MariaServer(Server):
    """One MariaDB server; the user `root` has no password on its loopback port.

    `fsync=False` (the default) leaves flushing to the kernel: fast, survives `kill()` of the server but not of the
    machine. `config` takes any server option, such as ``{"innodb_lock_wait_timeout": 2}``.
    """

    name = "mariadb"
    extra = "mysql"
    user = "root"

    def __init__(self, *, fsync: bool = False, config: Mapping[str, Setting] | None = None) -> None:
        super().__init__()
        self.program = mariadb_program()
        self._data = self.folder / "data"
        self._numbers = itertools.count(1)
        self.config: dict[str, Setting] = {
            "innodb-flush-log-at-trx-commit": 1 if fsync else 2,
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "16M",
            "max-connections": 200,
            "character-set-server": "utf8mb4",
            **(config or {}),
        }

    @property
    def url(self) -> str:
        """`mysql://root@127.0.0.1:PORT/mysql`."""
        return self.url_of("mysql")

    def url_of(self, database: str, *, driver: str = "") -> str:
        """The URL of a database; `driver="asyncmy"` gives `mysql+asyncmy://…`."""
        return f"mysql{'+' if driver else ''}{driver}://{self.user}@{self.host}:{self.port}/{database}"

    def database(self, *, driver: str = "") -> str:
        """Create an empty database and return its URL: a few milliseconds."""
        name = f"db{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return self.url_of(name, driver=driver)

    def prepare(self) -> None:
        flags = [
            "--no-defaults",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            "--skip-name-resolve",
        ]
        install = mariadb_program("mariadb-install-db")
        self._data.mkdir()
        home.give(self._data)
        template.fill(self._data, program=self.program, argv=[install, *flags, "--datadir={}"])

    def argv(self) -> list[str]:
        settings = {
            "datadir": self._data,
            "socket": self.folder / "socket",
            "pid-file": self.folder / "pid",
            "tmpdir": self.folder,  # a server that starts removes whatever another one has in a shared one
            "bind-address": self.host,
            **self.config,
            "port": self.port,
        }
        flags = [
            "--no-defaults",
            "--skip-name-resolve",
            *(() if "log-bin" in self.config else ("--skip-log-bin",)),
        ]
        return [self.program, *flags, *(f"--{key}={value}" for key, value in settings.items())]

    def ping(self) -> None:
        # The data folder tells our server from a stranger's that took the port.
        if self.execute("SELECT @@datadir") != ((f"{self._data}/",),):
            raise ConnectionError("another server answers on this port")

    def execute(self, sql: str, *, database: str = "mysql") -> tuple[tuple[Any, ...], ...]:
        """Run one statement on a connection of its own, committed, and return its rows."""
        with self._connected(database) as connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return tuple(cursor.fetchall())

    def _connected(self, database: str) -> Any:
        import pymysql

        return pymysql.connect(
            host=self.host,
            port=self.port,
            user=self.user,
            database=database,
            connect_timeout=5,
            autocommit=True,
            # Asked for TLS or not, PyMySQL reads the machine's authorities for each connection, 30 ms, if it may.
            ssl_disabled="ssl-cert" not in self.config,
        )

    def follow(self, primary: MariaServer, *, semi_sync: bool = False) -> None:
        """Become a replica of `primary` and have all that it has written.

        Both need ``{"log-bin": "binlog", "server-id": N}``. With `semi_sync` the primary acknowledges a commit when this
        replica has received it.
        """
        if semi_sync:
            self.execute("SET GLOBAL rpl_semi_sync_slave_enabled = ON")
            primary.execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")
        place = (
            f"MASTER_HOST = '{primary.host}', MASTER_PORT = {primary.port}, MASTER_USER = '{primary.user}'"
        )
        self.execute(f"CHANGE MASTER TO {place}, MASTER_USE_GTID = slave_pos")
        self.execute("START SLAVE")
        ((position,),) = primary.execute("SELECT @@gtid_binlog_pos")
        if self.execute(f"SELECT MASTER_GTID_WAIT('{position}', 20)") != ((0,),):
            raise ServerFailed(
                f"the replica has not followed its primary to {position} within 20 s\n{self.log()}"
            )

    def promote(self) -> None:
        """Apply what was received, and follow nobody any more."""
        self.execute("STOP SLAVE IO_THREAD")
        # Read from it, not from its log: what is received and not applied yet counts.
        status = self.slave_status()
        position = status["Gtid_IO_Pos"]
        if (
            status["Slave_SQL_Running"] != "Yes"
        ):  # started again, with GTIDs, it would ask its primary for everything anew
            raise ServerFailed(
                "the replica applies nothing: its SQL thread does not run. Cut it off by STOP SLAVE IO_THREAD, not by STOP SLAVE"
            )
        if self.execute(f"SELECT MASTER_GTID_WAIT('{position}', 20)") != ((0,),):
            raise ServerFailed(f"the replica has not applied what it has received within 20 s\n{self.log()}")
        self.execute("STOP SLAVE")
        self.execute("RESET SLAVE ALL")

    def slave_status(self) -> dict[str, Any]:
        """SHOW SLAVE STATUS by column."""
        import pymysql.cursors

        kind: Any = pymysql.cursors.DictCursor
        with self._connected("mysql") as connection, connection.cursor(kind) as cursor:
            cursor.execute("SHOW SLAVE STATUS")
            return dict(cursor.fetchone() or {})

    def terminate_connections(self) -> int:
        """Cut the connections of every client: what a fail-over looks like. Returns how many there were."""
        from pymysql.constants.ER import NO_SUCH_THREAD
        from pymysql.err import OperationalError

        rows = self.execute(
            "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND user = 'root'"
        )
        for (number,) in rows:
            try:
                self.execute(f"KILL CONNECTION {int(number)}")
            except OperationalError as error:
                if error.args[0] != NO_SUCH_THREAD:  # it has ended by itself meanwhile
                    raise
        return len(rows)

"""The server itself: semel's tables in it, and the settings that decide what its word is worth."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Final

from semel.errors import ConfigurationError
from semel.store import Facts
from semel.stores import unfit
from semel.stores.mysql.errors import Duplicate, Locked
from semel.stores.mysql.rows import Statements, statements
from semel.stores.mysql.session import Session

__all__ = ["SCHEMA_VERSION", "facts_of", "prepare", "read_facts", "schema_sql"]

SCHEMA_VERSION: Final = 1

_VARIABLES: Final = (
    "version",
    "version_comment",
    "innodb_flush_log_at_trx_commit",
    "innodb_flush_method",
    "innodb_doublewrite",
    "log_bin",
    "sync_binlog",
    "binlog_format",
    "read_only",
    "wsrep_on",
    "wsrep_provider",
    "rpl_semi_sync_master_enabled",
    "rpl_semi_sync_source_enabled",
    "rpl_semi_sync_master_timeout",
    "rpl_semi_sync_source_timeout",
    "rpl_semi_sync_master_wait_point",
    "rpl_semi_sync_source_wait_point",
    "rpl_semi_sync_master_wait_no_slave",
    "rpl_semi_sync_source_wait_no_replica",
    "rpl_semi_sync_master_wait_for_slave_count",
    "rpl_semi_sync_source_wait_for_replica_count",
    "max_allowed_packet",
    "wait_timeout",
)
_REPLICAS: Final = ("Slaves_connected", "Rpl_semi_sync_master_clients", "Rpl_semi_sync_source_clients")
_WAITING: Final = ("Rpl_semi_sync_master_status", "Rpl_semi_sync_source_status")
_ENGINES: Final = (
    "SELECT t.table_name, t.engine, e.transactions FROM information_schema.tables t LEFT JOIN information_schema.engines e "
    "ON e.engine = t.engine WHERE t.table_schema = DATABASE() AND t.table_name IN (%s, %s, %s) ORDER BY t.table_name"
)
_ON: Final = frozenset({"ON", "1", "YES"})
_A_DAY: Final = 86_400_000


def schema_sql(table: str = "semel") -> str:
    """The DDL, for those who may not let a program create tables."""
    words = statements(table)
    stamp = words["stamp"] % SCHEMA_VERSION
    return "".join(f"{text};\n\n" for text in (*words.schema(), stamp)).rstrip("\n") + "\n"


async def prepare(session: Session, words: Statements, *, create: bool) -> int:
    """Make sure that the tables are there and not newer than we are; returns the server's max_allowed_packet.

    Safe against any number of processes that do the same: each statement may be repeated, the version comes last.
    """
    ((limit,),) = await session.query("SELECT @@max_allowed_packet")
    found = await _version(session, words)
    if found is None and create:
        for text in words.schema():
            with contextlib.suppress(Duplicate):  # asyncmy would log the warning that IF NOT EXISTS leaves
                await session.execute(text.replace("IF NOT EXISTS ", "", 1))
        with contextlib.suppress(Locked):  # another creator writes it at this moment
            await session.write(words["stamp"], (SCHEMA_VERSION,))
        found = SCHEMA_VERSION
    if found is None:
        raise unfit.no_tables(
            f"{session.where}: semel's tables {_names(words)[0]}… are not there",
            "run the DDL of `semel schema sql URL`, or allow create=True",
        )
    if found > SCHEMA_VERSION:
        raise ConfigurationError(
            f"{session.where}: the tables have schema version {found}, this semel knows version {SCHEMA_VERSION}: "
            "upgrade semel, or name other tables with table="
        )
    return int(limit)


async def _version(session: Session, words: Statements) -> int | None:
    """The stored schema version; None when the table or its row is not there yet. Tables that keep nothing are refused."""
    names = _names(words)
    rows = await session.query(_ENGINES, names)
    if engines := unfit.other_engines(rows):
        raise ConfigurationError(f"{session.where}: {unfit.not_innodb(engines)}")
    if names[-1].lower() not in {str(name).lower() for name, *_ in rows}:
        return None
    rows = await session.query(words["version"])
    return int(rows[0][0]) if rows else None


async def read_facts(session: Session, words: Statements) -> Facts:
    """The live settings, read from the server, and what semel's tables are made of, if they are there."""
    marks = ", ".join(["%s"] * len(_VARIABLES))
    rows = await session.query(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({marks})", _VARIABLES)
    settings = {str(name).lower(): str(value) for name, value in rows}
    settings["replicas"] = str(await _replicas(session))
    if settings["replicas"] != "0":
        rows = await session.query("SHOW GLOBAL STATUS WHERE Variable_name IN (%s, %s)", _WAITING)
        settings |= {str(name).lower(): str(value) for name, value in rows}
    tables = await session.query(_ENGINES, _names(words))
    engines = {
        "not_innodb": unfit.other_engines(tables),
        "other_engines": unfit.other_engines(tables, transactional=True),
    }
    settings |= {name: told for name, told in engines.items() if told}
    return facts_of(settings, "mariadb" if session.wire.mariadb else "mysql")


def _names(words: Statements) -> list[str]:
    return [words[f"create_{table}"].split("`", 2)[1] for table in ("records", "audit", "schema")]


async def _replicas(session: Session) -> int:
    """How many replicas follow: as the server counts them, or by the threads that serve them, if they may be seen."""
    marks = ", ".join(["%s"] * len(_REPLICAS))
    rows = await session.query(f"SHOW GLOBAL STATUS WHERE Variable_name IN ({marks})", _REPLICAS)
    # MySQL warns of information_schema's list, MariaDB has no other.
    schema = "information_schema" if session.wire.mariadb else "performance_schema"
    threads = await session.query(f"SELECT command FROM {schema}.processlist")
    serving = sum(str(command).startswith("Binlog Dump") for (command,) in threads)
    return max(serving, *(int(value) for _, value in rows), 0)


def facts_of(settings: Mapping[str, str], store: str) -> Facts:
    """What settings (by lower-case name) are worth."""
    galera = _galera(settings)
    tables = not _tables(settings)
    return Facts(
        store=store,
        version=settings.get("version", ""),
        settings=settings,
        durable_writes=tables and not galera and not _durability(settings),
        survives_failover=not galera and not _failover(settings),
        coherent=tables and not galera,
        warnings=tuple(_warnings(settings)),
        transactional=tables,
    )


def _on(settings: Mapping[str, str], *names: str) -> bool:
    return any(settings.get(name, "OFF").upper() in _ON for name in names)


def _galera(settings: Mapping[str, str]) -> bool:
    return _on(settings, "wsrep_on") and settings.get("wsrep_provider", "none") not in ("none", "")


def _tables(settings: Mapping[str, str]) -> list[str]:
    found = settings.get("not_innodb", "")
    if not found:
        return []
    mend = unfit.to_innodb(found)
    return [
        f"{found}, not InnoDB: nothing is rolled back there, and what its log keeps is not what InnoDB's settings say; {mend}"
    ]


def _durability(settings: Mapping[str, str]) -> list[str]:
    found: list[str] = []
    if engines := settings.get("other_engines"):
        found.append(unfit.unknown_engines(engines))
    flush = settings.get("innodb_flush_log_at_trx_commit", "1")
    if flush not in ("1", "3"):  # 3 is MariaDB's: as 1, with the syncs of older versions
        found.append(
            f"innodb_flush_log_at_trx_commit={flush}: a power loss forgets acknowledged writes; set it to 1"
        )
    if _on(settings, "log_bin") and settings.get("sync_binlog", "1") != "1":
        found.append(
            f"sync_binlog={settings.get('sync_binlog')} with the binary log on: a power loss rolls acknowledged writes "
            "back; set sync_binlog=1"
        )
    if settings.get("innodb_flush_method", "").lower() in ("nosync", "littlesync"):
        found.append(
            "innodb_flush_method does not flush: a power loss forgets acknowledged writes; set it to fsync"
        )
    if settings.get("innodb_doublewrite", "ON").upper() in ("OFF", "0"):
        found.append(
            "innodb_doublewrite=OFF: a power loss may tear a page; set it to ON unless the file system is atomic"
        )
    return found


def _failover(settings: Mapping[str, str]) -> list[str]:
    replicas = settings.get("replicas", "0")
    if replicas == "0":
        return []
    if _on(settings, "rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled"):
        return _semi_sync(settings)
    text = (
        f"{replicas} replica(s) follow asynchronously: a failover forgets acknowledged writes; set "
        "rpl_semi_sync_master_enabled=ON (MySQL: rpl_semi_sync_source_enabled), rpl_semi_sync_master_timeout=86400000 and "
        "rpl_semi_sync_master_wait_point=AFTER_SYNC"
    )
    return [text]


def _semi_sync(settings: Mapping[str, str]) -> list[str]:
    """Semi-synchronous, but: what lets a commit be acknowledged, or seen, that no replica has (the matrix shows it)."""
    found: list[str] = []
    for role, nobody, number in (
        ("master", "wait_no_slave", "wait_for_slave_count"),
        ("source", "wait_no_replica", "wait_for_replica_count"),
    ):
        prefix = f"rpl_semi_sync_{role}"
        if _on(settings, f"{prefix}_enabled"):
            found += _not_waited_for(settings, f"{prefix}_{number}")
        timeout, point = settings.get(f"{prefix}_timeout"), settings.get(f"{prefix}_wait_point")
        if timeout is not None and int(timeout) < _A_DAY:
            found.append(
                f"{prefix}_timeout={timeout}: after so many milliseconds a commit is acknowledged although no replica has "
                f"it; set it to {_A_DAY} or more"
            )
        if point is not None and point.upper() != "AFTER_SYNC":
            found.append(
                f"{prefix}_wait_point={point}: a commit that no replica has can be seen, and is taken for recorded when "
                "its settle is repeated; set it to AFTER_SYNC"
            )
        if settings.get(f"{prefix}_{nobody}", "ON").upper() not in _ON:
            found.append(f"{prefix}_{nobody}=OFF: without a replica nothing is waited for; set it to ON")
        if settings.get(f"{prefix}_status", "ON").upper() not in _ON:
            found.append(
                f"{prefix}_status=OFF: the server has waited in vain and acknowledges commits now that no replica has; connect "
                f"a replica with rpl_semi_sync_{'slave' if role == 'master' else 'replica'}_enabled=ON, and let it catch up"
            )
    return found


def _not_waited_for(settings: Mapping[str, str], number: str) -> list[str]:
    """Nobody says which replica takes over: so a commit must wait for all of them."""
    replicas, waited = int(settings.get("replicas", "0")), int(settings.get(number, "1"))
    if replicas <= waited:
        return []
    text = (
        f"{replicas} replicas (or other readers of the binary log) follow, and a commit waits for {waited} of them: a failover to "
        "another one forgets acknowledged writes"
    )
    if number in settings:
        return [f"{text}; set {number}={replicas}"]
    text = (
        f"{text}. MariaDB cannot wait for more than one: let one replica follow this server and the others follow that one, and fail "
        "over to it. If your failover tool takes the replica that has received most (Gtid_IO_Pos), of all of them, nothing is "
        "forgotten, of which nobody can know here"
    )
    return [text]


def _warnings(settings: Mapping[str, str]) -> Sequence[str]:
    found = [*_tables(settings), *_durability(settings), *_failover(settings)]
    if _galera(settings):
        found.insert(
            0,
            "Galera (wsrep_on=ON): healthy clusters lose updates and read stale rows, so effects are at least once; "
            "give semel a single writer with replicas",
        )
    if settings.get("binlog_format") == "STATEMENT" and _on(settings, "log_bin"):
        found.append("binlog_format=STATEMENT refuses writes made at READ COMMITTED; set binlog_format=ROW")
    if _on(settings, "read_only"):
        found.append("read_only=ON: this is a replica; the URL must name the writer")
    return found

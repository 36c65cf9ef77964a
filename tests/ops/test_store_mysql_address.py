"""The MariaDB/MySQL store without a server: URLs, drivers, errors and settings, and what is said about them."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path

import pytest

from semel.errors import CodecError, ConfigurationError, StoreUnavailable
from semel.store import Colour, Facts, Settings, adopt, open_store
from semel.stores import mysql
from semel.stores.mysql.address import Address, parse
from semel.stores.mysql.errors import Duplicate, Locked, Lost, translate, unreachable
from semel.stores.mysql.server import facts_of
from semel.stores.unfit import other_engines


@pytest.mark.parametrize("dialect", ["mysql", "mariadb"])
def test_a_plain_url_picks_the_driver_by_colour(dialect: str) -> None:
    assert open_store(f"{dialect}://u@h/d", Settings(), "sync").colour == "sync"
    assert open_store(f"{dialect}://u@h/d", Settings(), "async").colour == "async"
    assert open_store(f"{dialect}+asyncmy://u@h/d", Settings(), "async").colour == "async"
    assert open_store(f"{dialect}+pymysql://u@h/d", Settings(), "sync").colour == "sync"
    assert parse(f"{dialect}+pymysql://u@h/d", "both").driver == "pymysql"


def test_a_url_is_read_whole() -> None:
    address = parse("mysql://us%40er:p%2Fw%C3%BC@db.example:3307/orders?pool=7&ssl=true", "async")
    assert (address.user, address.password) == ("us@er", "p/wü".encode())
    assert (address.host, address.port, address.database, address.pool) == ("db.example", 3307, "orders", 7)
    assert address.tls == {}
    assert "p/w" not in address.where
    plain = parse("mariadb://h/d", "sync")
    assert (plain.port, plain.user, plain.password, plain.tls) == (3306, "root", b"", None)
    local = parse("mysql:///d?unix_socket=/run/mysqld/mysqld.sock&ssl=false", "sync")
    assert local.unix_socket == "/run/mysqld/mysqld.sock"
    assert "/run/mysqld" in local.where
    assert local.tls is None


@pytest.mark.parametrize(
    "url, colour, message",
    [
        ("mysql+aiomysql://h/d", "async", "asyncmy"),
        ("mysql+pymysql://h/d", "async", r"AsyncSemel needs mysql\+asyncmy"),
        ("mysql+asyncmy://h/d", "sync", r"Semel needs mysql\+pymysql"),
        ("mysql://h", "sync", "names no database"),
        ("mysql://h/a/b", "sync", "names no database"),
        ("mysql:///d", "sync", "names no host"),
        ("mysql://h:port/d", "sync", "malformed"),
        ("mysql://h/d?charset=latin1", "sync", "cannot carry every key"),
        ("mysql://h/d?collation=x", "sync", "unknown parameters collation"),
        ("mysql://h/d?pool", "sync", "malformed"),
        ("mysql://h/d?pool=0", "sync", "from 1 to 1000"),
        ("mysql://h/d?pool=many", "sync", "from 1 to 1000"),
        ("mysql://h/d?ssl=perhaps", "sync", "true or false"),
        ("mysql://h/d?ssl_verify=maybe", "sync", "ssl_verify"),
        ("mysql://h/d?ssl_key=k.pem", "sync", "needs ssl_cert"),
        ("mysql://h/d?ssl=false&ssl_ca=ca.pem", "sync", "remove one"),
        ("mysql://h/d?ssl_ca=/nowhere/ca.pem", "sync", "cannot be used"),
        ("mysql://h/d?ssl_cert=/nowhere/c.pem", "async", "cannot be used"),
    ],
)
def test_a_wrong_url_is_refused_at_once_with_the_remedy(url: str, colour: Colour, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mysql.open_url(url, Settings(), colour)


@pytest.mark.parametrize(
    "url,prefers",
    [
        ("mysql://db.example/d", True),
        ("mysql://10.0.0.7/d", True),
        ("mysql://localhost/d", False),
        ("mysql://127.8.9.1/d", False),
        ("mysql://[::1]/d", False),
        ("mysql:///d?unix_socket=/run/mysqld/mysqld.sock", False),
        ("mysql://db.example/d?ssl=false", False),
        ("mysql://db.example/d?ssl=true", False),
        ("mysql://db.example/d?ssl_verify=ca", False),
    ],
)
def test_tls_is_preferred_where_nothing_was_said_and_the_server_is_elsewhere(url: str, prefers: bool) -> None:
    assert parse(url, "sync").prefers_tls is prefers


def test_tls_is_strict_unless_told_otherwise(tmp_path: Path) -> None:
    def context(query: str) -> ssl.SSLContext:
        made: ssl.SSLContext = parse(f"mysql://h/d?{query}", "sync").options()["ssl"]
        return made

    strict = context("ssl=true")
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    loose = context("ssl_verify=ca")
    assert (loose.verify_mode, loose.check_hostname) == (ssl.CERT_REQUIRED, False)
    blind = context("ssl_verify=none")
    assert (blind.verify_mode, blind.check_hostname) == (ssl.CERT_NONE, False)
    assert parse("mysql://h/d", "sync").options()["ssl"] is None
    (tmp_path / "c.pem").write_text("no certificate")
    with pytest.raises(ConfigurationError, match="ssl_cert"):
        context(f"ssl_cert={tmp_path / 'c.pem'}")


@pytest.mark.parametrize("driver, colour", [("asyncmy", "async"), ("pymysql", "sync")])
def test_a_missing_driver_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, driver: str, colour: Colour
) -> None:
    monkeypatch.setitem(sys.modules, driver, None)
    with pytest.raises(ConfigurationError, match=r'pip install "semel\[mysql\]"') as caught:
        open_store("mysql://h/d", Settings(), colour)
    assert isinstance(caught.value.__cause__, ImportError)


def test_nothing_connects_before_the_first_use() -> None:
    open_store("mysql://127.0.0.1:1/d", Settings(), "sync")
    open_store("mysql://127.0.0.1:1/d", Settings(), "async")


def test_a_driver_object_that_is_no_pool_is_refused() -> None:
    from asyncmy.errors import MySQLError

    with pytest.raises(ConfigurationError, match="hand in an asyncmy"):
        adopt(MySQLError(1, "x"), Settings(), "async")


@pytest.mark.parametrize(
    "number, kind",
    [
        (2013, Lost),
        (1927, Lost),
        (1205, Locked),
        (1213, Locked),
        (3572, Locked),
        (1062, Duplicate),
        (1153, CodecError),
        (1406, CodecError),
        (1142, ConfigurationError),
        (1146, ConfigurationError),
        (1290, StoreUnavailable),
        (1064, RuntimeError),
    ],
)
def test_every_error_of_the_server_has_one_meaning(number: int, kind: type[Exception]) -> None:
    assert isinstance(translate(Exception(number, "text"), "the server"), kind)


def test_an_error_without_a_number_is_a_lost_connection() -> None:
    assert isinstance(translate(ConnectionResetError(104, "reset"), "the server"), Lost)
    assert isinstance(translate(Exception("Packet sequence number wrong"), "the server"), Lost)
    assert isinstance(translate(Exception(), "the server"), Lost)


@pytest.mark.parametrize(
    "error, kind, message",
    [
        (Exception(1049, "Unknown database"), ConfigurationError, "create it"),
        (Exception(1040, "Too many connections"), StoreUnavailable, "max_connections"),
        (RuntimeError("'cryptography' package is required"), ConfigurationError, "pip install cryptography"),
        (Exception(2003, "Can't connect (SSL: certificate verify failed)"), ConfigurationError, "ssl_ca"),
        (TimeoutError(), StoreUnavailable, "TimeoutError"),
    ],
)
def test_why_a_connection_could_not_be_made(error: Exception, kind: type[Exception], message: str) -> None:
    told = unreachable(error, "the server")
    assert isinstance(told, kind)
    assert message in str(told)


def facts(**settings: str) -> Facts:
    return facts_of(settings, "mariadb")


def test_galera_is_at_least_once_and_says_so() -> None:
    found = facts(wsrep_on="ON", wsrep_provider="/usr/lib/libgalera_smm.so")
    assert not found.durable_writes
    assert not found.survives_failover
    assert "at least once" in found.warnings[0]
    assert facts(wsrep_on="ON", wsrep_provider="none").warnings == ()


def test_asynchronous_replicas_may_forget_and_semi_synchronous_ones_not() -> None:
    lazy = facts(log_bin="ON", sync_binlog="1", replicas="2")
    assert not lazy.survives_failover
    assert "rpl_semi_sync_master_enabled=ON" in lazy.warnings[0]
    assert facts(replicas="1", rpl_semi_sync_master_enabled="ON").survives_failover
    assert facts(replicas="1", rpl_semi_sync_source_enabled="1").survives_failover
    assert facts(replicas="0").survives_failover


def test_semi_synchronous_replicas_count_only_when_nothing_is_acknowledged_or_seen_without_them() -> None:
    """The crash matrix shows each of these: failover@acked.timed-out, and run.returned with AFTER_COMMIT."""
    safe = {
        "replicas": "1",
        "rpl_semi_sync_master_enabled": "ON",
        "rpl_semi_sync_master_timeout": "86400000",
        "rpl_semi_sync_master_wait_point": "AFTER_SYNC",
        "rpl_semi_sync_master_wait_no_slave": "ON",
    }
    assert facts(**safe).survives_failover
    weak = {
        "rpl_semi_sync_master_timeout": "10000",
        "rpl_semi_sync_master_wait_point": "AFTER_COMMIT",
        "rpl_semi_sync_master_wait_no_slave": "OFF",
    }
    for name, value in weak.items():
        found = facts(**{**safe, name: value})
        assert not found.survives_failover
        assert f"{name}={value}" in found.warnings[0]


def test_a_replica_that_no_commit_waits_for_may_take_over_and_is_told() -> None:
    mariadb = facts(replicas="2", rpl_semi_sync_master_enabled="ON")
    assert not mariadb.survives_failover
    assert "waits for 1 of them" in mariadb.warnings[0]
    assert "MariaDB cannot wait for more than one" in mariadb.warnings[0]
    count = "rpl_semi_sync_source_wait_for_replica_count"
    mysql = facts(**{"replicas": "3", "rpl_semi_sync_source_enabled": "ON", count: "2"})
    assert not mysql.survives_failover
    assert f"set {count}=3" in mysql.warnings[0]
    assert facts(**{"replicas": "3", "rpl_semi_sync_source_enabled": "ON", count: "3"}).warnings == ()


def test_a_server_that_waits_no_more_for_its_replica_is_told() -> None:
    found = facts(replicas="1", rpl_semi_sync_master_enabled="ON", rpl_semi_sync_master_status="OFF")
    assert not found.survives_failover
    assert "rpl_semi_sync_master_status=OFF" in found.warnings[0]


def test_settings_that_do_not_flush_are_named() -> None:
    found = facts(
        innodb_flush_method="nosync", innodb_doublewrite="OFF", binlog_format="STATEMENT", log_bin="ON"
    )
    text = " ".join(found.warnings)
    assert not found.durable_writes
    for name in ("innodb_flush_method", "innodb_doublewrite", "binlog_format=ROW"):
        assert name in text


def test_the_address_of_a_store_hides_its_password() -> None:
    address: Address = parse("mysql://user:secret@h/d", "sync")
    assert "secret" not in address.where


def test_an_engine_with_transactions_keeps_records_but_nobody_here_knows_how_durably() -> None:
    rows = [
        ("semel", "ROCKSDB", "YES"),
        ("semel_audit", "Aria", "NO"),
        ("a_view", None, None),
        ("x", "GONE", None),
    ]
    assert other_engines(rows) == "semel_audit=Aria, x=GONE"
    assert other_engines(rows, transactional=True) == "semel=ROCKSDB"
    facts = facts_of({"other_engines": "semel=ROCKSDB"}, "mariadb")
    assert (facts.transactional, facts.coherent, facts.durable_writes) == (True, True, False)
    assert any("semel=ROCKSDB" in text for text in facts.warnings)

"""A PostgreSQL URL, read and checked: which driver, which options are ours, and the rest as the driver wants it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlencode

from semel.errors import ConfigurationError
from semel.hosts import ESCAPES, apart
from semel.store import Colour
from semel.stores.postgres.link import Source

__all__ = ["Address", "parse", "source"]

DRIVERS: Final = frozenset({"asyncpg", "psycopg"})
_OURS: Final = frozenset({"pool", "pgbouncer", "prepared"})
_YES_NO: Final = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}
# What both drivers understand in a URL; `search_path` and `application_name` are turned into what each wants.
_CONNECTION: Final = frozenset(
    {
        "host", "port", "dbname", "user", "password", "passfile", "service", "sslmode", "sslcert", "sslkey",
        "sslrootcert", "sslcrl", "sslnegotiation", "sslpassword", "ssl_min_protocol_version",
        "ssl_max_protocol_version", "target_session_attrs", "krbsrvname", "application_name", "search_path",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Address:
    """Where and how to connect."""

    driver: Literal["asyncpg", "psycopg"]
    dsn: str
    where: str
    settings: dict[str, str]
    pool: int = 10
    pgbouncer: bool = False
    prepared: bool | None = None


def parse(url: str, colour: Colour) -> Address:
    """Read a URL; what it alone shows to be wrong is a ConfigurationError that says what to write instead."""
    parts = apart(url)  # the driver reads the hosts
    _, _, driver = parts.scheme.partition("+")
    chosen = _driver(driver, colour)
    if parts.fragment:
        raise ConfigurationError("a PostgreSQL URL has no #fragment: write a # in the password as %23")
    try:
        if (port := parts.port) == 0:
            raise ValueError
    except ValueError:  # whose text may have the password in it
        if "," not in parts.netloc:
            raise ConfigurationError(
                f"the port in a PostgreSQL URL must be a number from 1 to 65535; {ESCAPES}"
            ) from None
        port = None  # several hosts, each with its port: the driver reads them
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(options.keys() - _OURS - _CONNECTION):
        raise ConfigurationError(
            f"a PostgreSQL URL has no option {', '.join(unknown)}; known are {', '.join(sorted(_OURS | _CONNECTION))}"
        )
    settings = {"application_name": options.get("application_name", "semel")}
    if path := options.get("search_path"):
        settings["search_path"] = path
    passed = {name: value for name, value in options.items() if name not in _OURS and name not in settings}
    query = urlencode(passed, quote_via=quote)
    host = options.get("host") or parts.netloc.rpartition("@")[2] or "localhost"
    database = parts.path.lstrip("/") or options.get("dbname", "")
    named = parts.netloc or database or options.get("host") or options.get("service")
    if not named or "://" not in url:
        raise ConfigurationError(
            "the PostgreSQL URL names neither a host nor a database: write it as postgresql://user:password@host:5432/database"
        )
    return Address(
        driver=chosen,
        dsn=_dsn(parts.netloc, parts.path, query),
        where=f"{host}{'' if port or ':' in host else ':5432'}/{database}",
        settings=settings,
        pool=_pool(options.get("pool", "10")),
        pgbouncer=_flag("pgbouncer", options.get("pgbouncer", "0")),
        prepared=_flag("prepared", options["prepared"]) if "prepared" in options else None,
    )


def _dsn(netloc: str, path: str, query: str) -> str:
    """Both drivers end the password at the first @, and libpq shows one that it cannot decode: so it is escaped anew."""
    login, at, hosts = netloc.rpartition("@")
    user, colon, password = login.partition(":")
    dsn = f"postgresql://{_escaped(user)}{colon}{_escaped(password)}{at}{hosts}{path}{query and '?' + query}"
    if "%00" in dsn:
        raise ConfigurationError("nothing in a PostgreSQL URL can hold a zero byte: leave %00 out")
    return dsn


def _escaped(text: str) -> str:
    return quote(unquote_to_bytes(text), safe="")  # bytes: a password need not be UTF-8


def _driver(driver: str, colour: Colour) -> Literal["asyncpg", "psycopg"]:
    if not driver:
        return "psycopg" if colour == "sync" else "asyncpg"
    if driver not in DRIVERS:
        raise ConfigurationError(
            f"semel does not speak to PostgreSQL through {driver!r}: use postgresql+asyncpg:// (AsyncSemel), "
            "postgresql+psycopg:// (both), or plain postgresql://"
        )
    if driver == "asyncpg":
        if colour == "sync":
            raise ConfigurationError(
                "asyncpg works with AsyncSemel only: for Semel write postgresql+psycopg:// or plain postgresql://"
            )
        return "asyncpg"
    return "psycopg"


def _pool(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 1000:
        raise ConfigurationError(
            f"?pool={text} in a PostgreSQL URL: it is the number of connections, from 1 to 1000"
        )
    return int(text)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in _YES_NO:
        raise ConfigurationError(f"?{name}={text} in a PostgreSQL URL: write {name}=1 or {name}=0")
    return _YES_NO[text.lower()]


def source(address: Address, colour: Colour) -> Source:
    """Connections for this address. A missing driver is a ConfigurationError that names the extra."""
    prepares = False if address.pgbouncer else address.prepared
    try:
        if address.driver == "asyncpg":
            from semel.stores.postgres.asyncpg import AsyncpgSource

            return AsyncpgSource(
                address.dsn, address.where, server_settings=address.settings, prepares=prepares
            )
        from semel.stores.postgres.psycopg import PsycopgSource

        return PsycopgSource(
            address.dsn,
            address.where,
            server_settings=address.settings,
            colour="sync" if colour == "sync" else "async",
            prepares=prepares,
        )
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f'{address.driver} is not installed: pip install "semel[postgres]" brings it'
        ) from error

"""Where a MariaDB or MySQL server is, read from a URL. Whatever the URL alone shows to be wrong raises at once."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from semel.errors import ConfigurationError
from semel.hosts import ESCAPES
from semel.store import Colour

__all__ = ["DEFAULT_POOL", "DRIVERS", "Address", "driver_for", "parse"]

Driver = Literal["asyncmy", "pymysql"]
_COLOUR_OF: Final[Mapping[str, Literal["sync", "async"]]] = {"asyncmy": "async", "pymysql": "sync"}
DRIVERS: Final = frozenset(_COLOUR_OF)
_PARAMETERS: Final = frozenset(
    {"unix_socket", "pool", "ssl", "ssl_ca", "ssl_cert", "ssl_key", "ssl_verify", "charset"}
)
DEFAULT_POOL: Final = {
    "asyncmy": 10,
    "pymysql": 32,
}  # async calls travel in batches; each sync thread needs its own
_EXAMPLE: Final = "mysql://user:password@host:3306/database"


class Address(msgspec.Struct, frozen=True):
    """What both drivers need to connect."""

    driver: Driver
    host: str
    port: int
    user: str
    password: bytes
    database: str
    unix_socket: str | None
    pool: int
    tls: Mapping[str, str] | None
    """What TLS was asked for; None: not at all."""
    prefers_tls: bool
    """Nothing was said about TLS and the server is elsewhere: PyMySQL encrypts if the server can (asyncmy does not)."""

    @property
    def where(self) -> str:
        """For messages: no user, no password."""
        place = self.unix_socket or f"{self.host}:{self.port}"
        return f"MariaDB/MySQL at {place}, database {self.database!r}"

    def options(self) -> dict[str, Any]:
        """The keywords that both drivers' `connect` share."""
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            # As bytes: both drivers would encode a str as Latin-1, the server compares UTF-8.
            "password": self.password,
            "database": self.database,
            "unix_socket": self.unix_socket,
            "charset": "utf8mb4",
            "autocommit": True,
            "ssl": None if self.tls is None else _context(self.tls),
        }


def parse(url: str, colour: Colour) -> Address:
    """Read a URL for a face of this colour; a driver of the other colour is refused."""
    try:
        parts = urlsplit(url)
        port = parts.port or 3306
    except ValueError:  # whose text may have the password in it
        raise ConfigurationError(
            f"the database URL is malformed; write it as {_EXAMPLE}; {ESCAPES}"
        ) from None
    dialect, _, named = parts.scheme.partition("+")
    given = _parameters(parts.query)
    database = unquote(parts.path.removeprefix("/"))
    if not database or "/" in database:
        raise ConfigurationError(f"the database URL names no database; write it as {_EXAMPLE}")
    if not parts.hostname and "unix_socket" not in given:
        raise ConfigurationError(
            f"the database URL names no host; write it as {_EXAMPLE}, or add ?unix_socket=/path"
        )
    driver = driver_for(dialect, named, colour)
    here = "unix_socket" in given or _is_loopback(parts.hostname or "localhost")
    return Address(
        driver=driver,
        host=parts.hostname or "localhost",
        port=port,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or "").encode(),
        database=database,
        unix_socket=given.get("unix_socket"),
        pool=_pool(given.get("pool"), driver),
        tls=_tls(given),
        prefers_tls=not here and not any(name.startswith("ssl") for name in given),
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def driver_for(dialect: str, named: str, colour: Colour) -> Driver:
    """What speaks to a server for a face of this colour; a named one that does not is refused."""
    if not named:
        return "asyncmy" if colour == "async" else "pymysql"
    if named not in _COLOUR_OF:
        raise ConfigurationError(
            f"{dialect}+{named}:// names a driver that semel does not use; use {dialect}+asyncmy:// (AsyncSemel), "
            f"{dialect}+pymysql:// (Semel), or plain {dialect}://"
        )
    if colour != "both" and _COLOUR_OF[named] != colour:
        face, other = ("AsyncSemel", "asyncmy") if colour == "async" else ("Semel", "pymysql")
        raise ConfigurationError(
            f"{dialect}+{named}:// is the {_COLOUR_OF[named]} driver; {face} needs {dialect}+{other}:// "
            f"(plain {dialect}:// picks it)"
        )
    return "asyncmy" if named == "asyncmy" else "pymysql"


def _parameters(query: str) -> dict[str, str]:
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError:
        raise ConfigurationError(
            "the database URL's parameters are malformed: write ?name=value&name=value"
        ) from None
    if unknown := sorted(set(given) - _PARAMETERS):
        raise ConfigurationError(
            f"the database URL has unknown parameters {', '.join(unknown)}; known are {', '.join(sorted(_PARAMETERS))}"
        )
    if given.get("charset", "utf8mb4").lower() != "utf8mb4":
        raise ConfigurationError(
            f"charset={given['charset']} in the database URL cannot carry every key: semel speaks utf8mb4; leave it out"
        )
    return given


def _pool(text: str | None, driver: Driver) -> int:
    if text is None:
        return DEFAULT_POOL[driver]
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ConfigurationError(
            f"pool= in the database URL must be a number of connections from 1 to 1000, not {text!r}"
        )
    return int(text)


def _tls(given: Mapping[str, str]) -> Mapping[str, str] | None:
    wanted = given.get("ssl", "").lower()
    if wanted not in ("", "true", "false", "1", "0"):
        raise ConfigurationError(f"ssl= in the database URL must be true or false, not {wanted!r}")
    if given.get("ssl_verify", "identity") not in ("identity", "ca", "none"):
        raise ConfigurationError(
            "ssl_verify= in the database URL must be identity (certificate and host name, the default), ca (certificate "
            "only) or none (encrypted, but anybody may answer)"
        )
    if "ssl_key" in given and "ssl_cert" not in given:
        raise ConfigurationError("ssl_key= in the database URL needs ssl_cert= beside it")
    files = {name: value for name, value in given.items() if name.startswith("ssl_")}
    if wanted in ("false", "0"):
        if files:
            raise ConfigurationError(
                "the database URL says ssl=false and gives TLS files: remove one of them"
            )
        return None
    return files if files or wanted else None


def _context(tls: Mapping[str, str]) -> ssl.SSLContext:
    """Verifies certificate and host name unless told otherwise; the system's authorities unless `ssl_ca` names one."""
    try:
        context = ssl.create_default_context(cafile=tls.get("ssl_ca"))
        if "ssl_cert" in tls:
            context.load_cert_chain(tls["ssl_cert"], tls.get("ssl_key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"the TLS files of the database URL cannot be used ({error}): check ssl_ca, ssl_cert and ssl_key"
        ) from error
    # The certificates that MariaDB and MySQL make for themselves fail the strict form check of Python 3.13.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    verify = tls.get("ssl_verify", "identity")
    context.check_hostname = verify == "identity"
    context.verify_mode = ssl.CERT_NONE if verify == "none" else ssl.CERT_REQUIRED
    return context

"""What went wrong between us and a MariaDB or MySQL server, and what may be done about it.

Both drivers raise exceptions with the server's error number first. The number decides: `Lost` (it may have run: send it
again only if it is idempotent), `Locked` (somebody holds the row: ask again), `Duplicate` (the key is there by
now), or an error of `semel.errors` that tells the caller the remedy.
"""

from __future__ import annotations

from typing import Final

from semel.errors import CodecError, ConfigurationError, SemelError, StoreUnavailable
from semel.losses import NotConnected

__all__ = ["Duplicate", "Locked", "Lost", "lacks_tables", "too_large", "translate", "unreachable"]


class Lost(Exception):
    """The connection is gone and no answer will come: the statement may have run."""


class Locked(Exception):
    """The row is locked by somebody, or a deadlock was broken at our expense. Nothing was written."""


class Duplicate(Exception):
    """Another caller was first with this key or this table. Nothing was written."""


_LOST: Final = frozenset(
    {0, 1053, 1077, 1079, 1080, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 2006, 2013, 2014, 2055, 4031}
)
_LOCKED: Final = frozenset({1020, 1205, 1213, 1614, 3058, 3101, 3572})
_THERE: Final = frozenset({1050, 1062})
_TOO_LARGE: Final = frozenset({1153, 1162, 1301})
_BAD_VALUE: Final = frozenset({1118, 1264, 1265, 1292, 1366, 1406, 1441})

_LOGIN = (
    "the server refused the login: check user and password in the URL (and add ssl=true or ssl_ca=… if it takes "
    "encrypted connections only: MariaDB says no more than this)"
)
_GRANT = "GRANT SELECT, INSERT, UPDATE, DELETE on semel's tables (and CREATE on the database, or make them yourself)"
_CONFIGURATION: Final = {
    1044: f"this user may not use the database: {_GRANT}",
    1045: _LOGIN,
    1049: "the database does not exist: create it, or correct the URL's path",
    1054: "the table lacks a column of ours: it was made by something else; drop it, or name another with table=",
    1130: "the server does not accept this host: allow it in the user's name (user@host)",
    1142: f"this user lacks a right: {_GRANT}",
    1143: f"this user lacks a right: {_GRANT}",
    1146: "the table does not exist: let semel create it (create=True), or run the DDL of `semel schema sql URL`",
    1227: f"this user lacks a right: {_GRANT}",
    1251: "the server asks for a login method that the driver does not have",
    1524: "the server lacks the login plugin of this user",
    1665: "binlog_format=STATEMENT cannot hold writes made at READ COMMITTED: set binlog_format=ROW on the server",
    1698: _LOGIN,
    1820: "the user's password has expired: change it",
    2026: "the TLS connection could not be made: check ssl_ca, ssl_cert, ssl_key and ssl_verify in the URL",
    2059: "the driver does not have the login method that the server asks for",
    3159: "the server accepts encrypted connections only: add ssl=true or ssl_ca=… to the URL",
}
_UNAVAILABLE: Final = {
    1021: "the server's disk is full",
    1037: "the server is out of memory",
    1040: "the server has no free connection: raise max_connections, or lower pool= in the URL",
    1041: "the server is out of memory",
    1047: "this Galera node is not ready (not part of a primary component)",
    1114: "the table is full: look at the server's disk and innodb_data_file_path",
    1129: "the server blocks this host after failed connections: FLUSH HOSTS, or raise max_connect_errors",
    1180: "the server could not commit",
    1203: "this user has no free connection: raise max_user_connections, or lower pool= in the URL",
    1226: "this user is over a limit of the server",
    1290: "the server is read-only: the URL must name the writer",
    1317: "the statement was interrupted on the server",
    1792: "the transaction is read-only: the URL must name the writer",
    1836: "the server is read-only: the URL must name the writer",
    1969: "the server's max_statement_time ended the statement: raise it for this user",
    3024: "the server's max_execution_time ended the statement: raise it for this user",
}


def _number_of(error: BaseException) -> int:
    """The server's or the driver's error number; -1 when there is none: the driver lost its way, or the network did."""
    first = error.args[0] if error.args else None
    return first if isinstance(first, int) and not isinstance(error, OSError) else -1


def lacks_tables(error: BaseException) -> bool:
    """A table of ours, or a column of it, is not there: somebody has to make it, waiting does not."""
    return _number_of(error) in {1054, 1146}


def translate(error: Exception, where: str) -> Exception:
    """What a driver's error on a statement means. Its cause is set by `raise … from`."""
    number = _number_of(error)
    if number in _LOST or number < 0:
        return Lost(str(error))
    if number in _LOCKED:
        return Locked(str(error))
    if number in _THERE:
        return Duplicate(str(error))
    if number in _TOO_LARGE:
        return too_large(where)
    if number in _BAD_VALUE:
        return CodecError(f"{where} cannot store a value: {error.args[-1]}")
    return _told(number, where) or RuntimeError(
        f"{where} refused a statement of semel, which is a defect of semel: {error}"
    )


def too_large(where: str, size: int | None = None, limit: int | None = None) -> CodecError:
    sizes = f" ({size} bytes, the server takes {limit})" if size else ""
    return CodecError(
        f"a value is too large for {where}{sizes}: raise max_allowed_packet on the server, or lower max_result "
        "(a value needs twice its size)"
    )


def _told(number: int, where: str, kind: type[ConfigurationError] = ConfigurationError) -> SemelError | None:
    if number in _CONFIGURATION:
        return kind(f"{where}: {_CONFIGURATION[number]} (error {number})")
    if number in _UNAVAILABLE:
        return StoreUnavailable(f"{where}: {_UNAVAILABLE[number]} (error {number})")
    return None


def unreachable(error: BaseException, where: str) -> SemelError:
    """Why a connection could not be made."""
    told = _told(_number_of(error), where, NotConnected)
    if told is not None:
        return told
    last: BaseException = error
    while (cause := last.__cause__ or last.__context__) is not None:
        last = cause
    text = str(error.args[-1] if error.args else error) or type(last).__name__
    if "cryptography" in text:
        return NotConnected(f"{where}: the login needs a package ({text}): pip install cryptography")
    if "SSL" in text or "certificate" in text:
        return NotConnected(f"{where}: {_CONFIGURATION[2026]} ({text})")
    return StoreUnavailable(f"cannot reach {where} ({text}): is the server running, and is the URL right?")

"""What PostgreSQL's live settings mean for the guarantee."""

from __future__ import annotations

from collections.abc import Mapping

from semel.store import Facts
from semel.stores.postgres.standbys import left_out, wait_for_all

__all__ = ["facts_of"]

_OVERRIDDEN = {
    "global": "it is set for all users: ALTER ROLE ALL RESET synchronous_commit",
    "user": "it is this user's own: ALTER ROLE … RESET synchronous_commit",
    "database": "it is this database's own: ALTER DATABASE … RESET synchronous_commit",
    "database user": "it is this user's own in this database: ALTER ROLE … IN DATABASE … RESET synchronous_commit",
    "client": "it comes with the connection (options in the URL, PGOPTIONS): leave it out",
}
_WAITS_FOR_STANDBY = frozenset({"on", "remote_apply", "remote_write"})


def facts_of(settings: Mapping[str, str], *, pooled: bool) -> Facts:
    """Pure: `settings` as read by the statement `facts`."""
    warnings = [*_tables(settings), *_durability(settings), *_failover(settings), *_use(settings)]
    if pooled:
        warnings.append("a pooler sits in between: waiters poll, because notifications do not pass it")
    commit = settings["synchronous_commit"]
    logged = not settings.get("unlogged_tables")
    durable = (
        logged and settings["fsync"] == "on" and settings["full_page_writes"] == "on" and commit != "off"
    )
    return Facts(
        store="postgresql",
        version=settings["server_version"],
        settings=settings,
        durable_writes=durable,
        survives_failover=settings["standbys"] == "0" or (_replicates(settings) and not left_out(settings)),
        coherent=logged,  # the rows of a caller's transaction outlive a crash, semel's would not
        warnings=tuple(warnings),
    )


def _replicates(settings: Mapping[str, str]) -> bool:
    return (
        bool(settings["synchronous_standby_names"]) and settings["synchronous_commit"] in _WAITS_FOR_STANDBY
    )


def _tables(settings: Mapping[str, str]) -> list[str]:
    names = [name for name in settings.get("unlogged_tables", "").split(", ") if name]
    if not names:
        return []
    mend = "; ".join(f"ALTER TABLE {name} SET LOGGED" for name in names)
    return [
        f"{', '.join(names)} UNLOGGED: a crash of the server empties the table, no standby has it, and every key runs again; {mend}"
    ]


def _durability(settings: Mapping[str, str]) -> list[str]:
    found = []
    if settings["fsync"] != "on":
        found.append("fsync = off: a power loss may lose or corrupt everything; set fsync = on")
    if settings["full_page_writes"] != "on":
        found.append("full_page_writes = off: a power loss may corrupt pages; set full_page_writes = on")
    if settings["synchronous_commit"] == "off":
        found.append(
            "synchronous_commit = off: the last acknowledged writes are lost even when only the server process dies; "
            + _commit_on(settings)
        )
    return found


def _commit_on(settings: Mapping[str, str]) -> str:
    """A setting of the user's or the database's own hides that of the server."""
    remedy = _OVERRIDDEN.get(settings.get("synchronous_commit_source", ""))
    return (
        "set synchronous_commit = on"
        if remedy is None
        else f"{remedy}, and set synchronous_commit = on for the server"
    )


def _failover(settings: Mapping[str, str]) -> list[str]:
    if settings["standbys"] == "0":
        return []
    if not settings["synchronous_standby_names"]:
        return [
            (
                "a standby follows asynchronously: a failover loses the last acknowledged writes; "
                f"{wait_for_all(settings)}"
            )
        ]
    if not _replicates(settings):
        return [
            (
                f"synchronous_commit = {settings['synchronous_commit']} does not wait for the synchronous standby: "
                "set synchronous_commit = on"
            )
        ]
    found = [missing] if (missing := left_out(settings)) else []
    if settings["synchronous_commit"] == "remote_write":
        found.append(
            "synchronous_commit = remote_write: the standby may lose writes when its machine dies together with the "
            "primary; set synchronous_commit = on"
        )
    return found


def _use(settings: Mapping[str, str]) -> list[str]:
    found = []
    if settings["in_recovery"] == "true" or settings["default_transaction_read_only"] == "on":
        found.append("this server is read-only (a standby?): point the URL to the primary")
    if settings["default_transaction_isolation"] != "read committed":
        found.append(
            f"default_transaction_isolation = {settings['default_transaction_isolation']}: correct, but claims are "
            "repeated under contention; read committed is enough"
        )
    return found

"""What settings mean beyond the guarantee: what is worth knowing, what could not be read, what stops semel. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from semel.guarantees import Facts
from semel.stores import unfit
from semel.stores.sqlite.facts import has_reset_bug

__all__ = ["advice_for", "hindrances", "unread"]


def advice_for(facts: Facts) -> Iterator[str]:
    settings = facts.settings
    match facts.store:
        case "redis" | "valkey":
            yield from _redis(facts)
        case "postgresql":
            if settings.get("max_prepared_transactions") == "0":
                yield "max_prepared_transactions = 0: two-phase sinks cannot prepare here; set it to 16 if you use them"
            if int(settings.get("standbys", "0")) and settings.get("synchronous_standby_names"):
                yield "a cancelled wait for the standby is told as unknown, never as stored"
            waits = settings.get("synchronous_commit") not in ("off", "local")
            if waits and settings.get("synchronous_standby_names") and settings.get("standbys") == "0":
                yield (
                    "synchronous_standby_names is set and no standby is connected: a commit waits until one is, and so does "
                    "every call; connect it, or ALTER SYSTEM RESET synchronous_standby_names"
                )
        case "mariadb" | "mysql":
            if _waits_for_replicas(settings):
                yield (
                    "semi-synchronous: that a failover to the replica which confirmed a write keeps it is shown by the crash "
                    "matrix (failover, acked.waited)"
                )
            if settings.get("log_bin", "OFF").upper() in ("OFF", "0"):
                yield "log_bin = OFF: no replica can follow and no point in time be restored; correct for a single server"
        case "sqlite":
            if has_reset_bug(facts.version):
                yield (
                    f"SQLite {facts.version} has the WAL-reset bug, a defect that may corrupt the file. The promises are about "
                    "settings and do not count it: no setting mends it. Semel moves the log into the file under the write lock, "
                    "which makes it rarer, not impossible; other programs that write to this file may not. Upgrade SQLite to 3.51.3"
                )
            yield (
                "a within(connection) commits on your connection: keep its PRAGMA synchronous at FULL, Python's default"
            )
        case _:
            return


def _waits_for_replicas(settings: Mapping[str, str]) -> bool:
    names = ("rpl_semi_sync_master_enabled", "rpl_semi_sync_source_enabled")
    on = any(settings.get(name, "OFF").upper() in ("ON", "1") for name in names)
    return on and settings.get("replicas", "0") != "0"


def _redis(facts: Facts) -> Iterator[str]:
    settings = facts.settings
    if int(settings.get("connected-slaves", "0")) and settings.get("min-replicas-to-write", "0") == "0":
        yield (
            "min-replicas-to-write is 0: a master cut off from its replicas goes on acknowledging writes that a failover "
            "forgets; CONFIG SET min-replicas-to-write 1, CONFIG SET min-replicas-max-lag 1 and CONFIG REWRITE bound that time"
        )
    if int(settings.get("acks", "0")) and int(settings.get("connected-slaves", "0")):
        yield (
            "acks: a write that fewer replicas confirm in time is told as unknown. That a failover to a replica which "
            "confirmed it keeps it is shown by the crash matrix (failover, acked.waited); Redis itself promises nothing"
        )
    if not facts.evicts and settings.get("maxmemory-policy", "noeviction") != "noeviction":
        yield (
            f"maxmemory-policy is {settings['maxmemory-policy']}: harmless until somebody sets maxmemory; CONFIG SET "
            "maxmemory-policy noeviction and CONFIG REWRITE"
        )
    if settings.get("cluster-enabled") == "1":
        yield "cluster: tx holds within one hash slot; name your keys with once.tag(key)"
    if settings.get("aof-enabled") == "0":
        yield (
            "appendonly yes alone still loses up to a second of writes: CONFIG SET appendfsync always as well, then CONFIG "
            "REWRITE"
        )
    if facts.durable_writes:
        yield "appendfsync always: each write waits for the disk, calls in one tick share it"


def unread(facts: Facts) -> Iterator[str]:
    """Without these the promise is a guess, and the worst is assumed."""
    if facts.store in ("redis", "valkey"):
        if "aof-enabled" not in facts.settings:
            yield "this user may not run INFO; allow +info"
        elif "appendfsync" not in facts.settings and facts.settings["aof-enabled"] == "1":
            yield "this user may not run CONFIG GET; allow +config|get"
    if facts.store == "postgresql":
        yield from (text for text in facts.warnings if text.startswith("this user may not see"))


def hindrances(facts: Facts) -> Iterator[str]:
    """Settings under which semel cannot write, and tables that do not keep what is written."""
    settings = facts.settings
    if settings.get("role") == "slave" and settings.get("topology") == "standalone":
        yield unfit.REPLICA
    if "connected-slaves" in settings:
        yield from _missing_replicas(int(settings.get("acks", "0")), int(settings["connected-slaves"]))
    if names := settings.get("unlogged_tables"):
        yield unfit.unlogged(names)
    if found := settings.get("not_innodb"):
        yield unfit.not_innodb(found)
    if rights := settings.get("missing_rights"):
        yield f"this role may not write semel's tables: GRANT {rights}"
    if settings.get("in_recovery") == "true" or settings.get("default_transaction_read_only") == "on":
        yield "the server is read-only: point the URL to the primary"
    if settings.get("read_only", "OFF").upper() in ("ON", "1"):
        yield "read_only = ON: this is a replica; the URL must name the writer"


def _missing_replicas(acks: int, connected: int) -> Iterator[str]:
    if acks > connected:
        replicas = "1 replica is" if connected == 1 else f"{connected or 'no'} replicas are"
        yield (
            f"acks={acks}, but {replicas} connected: every call would fail; connect {acks - connected} more, or set "
            f"acks={connected}"
        )

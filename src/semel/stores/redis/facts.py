"""What a Redis server's live settings mean for records: the facts, and the refusal of a server that would eat them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from semel.errors import ConfigurationError, StoreUnavailable
from semel.store import Facts
from semel.stores import unfit
from semel.stores.redis.absent import Absent
from semel.stores.redis.calls import Link
from semel.stores.redis.link import ServerError

__all__ = ["check", "facts"]

_OLDEST: Final = 7
_SETTINGS: Final = (
    "appendfsync", "no-appendfsync-on-rewrite", "save", "min-replicas-to-write", "min-replicas-max-lag",
)  # fmt: skip
_KEEP: Final = "CONFIG SET maxmemory-policy noeviction"
_AND_KEEP: Final = "and CONFIG REWRITE: without it a restart undoes the setting"
_UNSEEN: Final = (
    "this Redis user may not run INFO, so nobody knows whether the server drops keys when its memory is full, or is a replica: "
    "grant +info (ACL SETUSER … +info), or say ?eviction=accept in the URL"
)


async def check(link: Link, *, accept_eviction: bool) -> str:
    """Refuse a server that is too old, that drops records by itself (R15 of the design's section 6), or a replica.

    A master that does not answer while others do is looked at before its own first use: they need not wait for it.
    Returns what its user must be warned of.
    """
    replies = await _everywhere(link, "INFO")
    for where, reply in replies.items():
        judge = partial(_judge, link, where, accept_eviction)
        if isinstance(reply, Absent):
            reply.later(judge)
        else:
            judge(reply)
    # Not refused: managed servers forbid INFO, and most of them evict nothing.
    return "" if replies or accept_eviction else _UNSEEN


def _judge(link: Link, where: str, accept_eviction: bool, reply: bytes) -> None:
    info = _read_info(reply)
    if info.get("redis_mode") == "sentinel":
        raise ConfigurationError(
            f"{where} is a Redis Sentinel, which keeps no data: write redis+sentinel://host:port/SERVICE, with the name that it has for "
            "the master (SENTINEL MASTERS tells)"
        )
    version = _version(info)
    if version and int(version.partition(".")[0]) < _OLDEST:
        raise ConfigurationError(
            f"Redis at {where} is version {version}: semel needs Redis {_OLDEST}.0 or newer, or any Valkey (sharded "
            "pub/sub, PXAT); upgrade the server"
        )
    if _is_replica(link, info):
        # A name that stands for several servers moves on in a failover: it passes, and the next call looks again.
        raise StoreUnavailable(f"Redis at {where}: {unfit.REPLICA}")
    if _evicts(info) and not accept_eviction:
        policy = info["maxmemory_policy"]
        raise ConfigurationError(
            f"Redis at {where} drops keys when its memory is full (maxmemory {info['maxmemory']}, maxmemory-policy "
            f"{policy}), so a key could run twice. Run `{_KEEP}` and `CONFIG REWRITE`, use another "
            "server, or accept the loss with ?eviction=accept in the URL"
        )


async def facts(link: Link, *, acks: int) -> Facts:
    """Read the live settings of every master; the weakest one decides."""
    infos = await _info(link)
    settings = await _settings(link)
    warnings: list[str] = []
    if not infos:
        warnings.append(
            "this user may not run INFO: nothing is known about eviction and persistence; allow +info"
        )
    if not settings:
        warnings.append("this user may not run CONFIG GET: appendfsync is unknown; allow +config|get")
    for info in infos.values():
        warnings += _warn_about(info)
    replica = any(_is_replica(link, info) for info in infos.values())
    if replica:
        warnings.append(
            "role is slave, this server is a replica: it refuses writes or, with replica-read-only no, forgets them when it "
            "next synchronises with its master; point the URL to the master"
        )
    fsync = {value for one in settings.values() if (value := one.get("appendfsync"))}
    durable = bool(infos) and all(info.get("aof_enabled") == "1" for info in infos.values())
    if durable and settings and fsync != {"always"}:
        warnings.append(
            "appendfsync is not always: a power loss takes up to a second of writes; CONFIG SET appendfsync always "
            f"{_AND_KEEP}"
        )
    # "While another child is saving, the durability of Redis is the same as appendfsync no", whatever appendfsync says.
    pausing = any(one.get("no-appendfsync-on-rewrite") == "yes" for one in settings.values())
    if durable and pausing:
        warnings.append(
            "no-appendfsync-on-rewrite is yes: while the log is rewritten nothing is synced, and a power loss takes what was "
            f"acknowledged meanwhile; CONFIG SET no-appendfsync-on-rewrite no {_AND_KEEP}"
        )
    counts = [int(info.get("connected_slaves", 0)) for info in infos.values()]
    followers = max(counts, default=0)
    replicated = link.topology != "standalone" or followers > 0
    if replicated:
        warnings += _warn_about_replicas(acks, followers)
    some: Mapping[str, str] = next(iter(infos.values()), {})
    told = _told(link, some, next(iter(settings.values()), {}), acks)
    if infos and acks > min(counts):  # the master with the fewest decides whether acks= can be had at all
        told["connected-slaves"] = str(min(counts))
    return Facts(
        store="valkey" if some.get("server_name") == "valkey" else "redis",
        version=some.get("valkey_version") or _version(some),
        settings=told,
        durable_writes=durable and fsync == {"always"} and not pausing and not replica,
        survives_failover=not replicated or 0 < acks >= followers,
        evicts=any(map(_evicts, infos.values())),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _told(link: Link, info: Mapping[str, str], settings: Mapping[str, str], acks: int) -> dict[str, str]:
    told = {"topology": link.topology, "acks": str(acks)}
    names = ("role", "maxmemory", "maxmemory_policy", "aof_enabled", "connected_slaves", "cluster_enabled")
    told |= {name.replace("_", "-"): info[name] for name in names if name in info}
    return told | {name: settings[name] for name in _SETTINGS if name in settings}


def _warn_about(info: Mapping[str, str]) -> Iterable[str]:
    policy = info.get("maxmemory_policy", "noeviction")
    if _evicts(info):
        yield f"maxmemory-policy is {policy}: Redis may drop a record before it ends, and its key runs again; {_KEEP} {_AND_KEEP}"
    if info.get("aof_enabled") == "0":
        yield (
            "appendonly is off: a restart loses what came after the last snapshot; CONFIG SET appendonly yes "
            f"{_AND_KEEP}"
        )


def _warn_about_replicas(acks: int, followers: int) -> Iterable[str]:
    if not acks:
        yield (
            "replicas follow without being waited for: a failover can lose acknowledged writes; set "
            f"acks={max(1, followers)}"
        )
    elif acks < followers:
        # What is shown (the crash matrix, failover acked.waited): a replica that acknowledged loses nothing. Which one is
        # made master Redis does not promise, so all of them must have.
        yield (
            f"acks={acks} of {followers} replicas: a failover to one that was not waited for loses acknowledged writes; set "
            f"acks={followers}"
        )


def _is_replica(link: Link, info: Mapping[str, str]) -> bool:
    """Of a URL that names one server. Sentinel and Cluster name masters; one that is being demoted is left by the next call."""
    return link.topology == "standalone" and info.get("role") == "slave"


def _evicts(info: Mapping[str, str]) -> bool:
    return info.get("maxmemory_policy", "noeviction") != "noeviction" and info.get("maxmemory", "0") != "0"


def _version(info: Mapping[str, str]) -> str:
    return info.get("redis_version", "")


async def _info(link: Link) -> dict[str, dict[str, str]]:
    return {where: _read_info(reply) for where, reply in (await _of_all(link, "INFO")).items()}


def _read_info(reply: bytes) -> dict[str, str]:
    return _pairs(line.partition(":")[::2] for line in _text(reply).splitlines())


async def _settings(link: Link) -> dict[str, dict[str, str]]:
    replies = await _of_all(link, "CONFIG", "GET", *_SETTINGS)
    return {
        where: dict(zip(map(_text, reply[::2]), map(_text, reply[1::2]), strict=True))
        for where, reply in replies.items()
    }


async def _of_all(link: Link, *words: str) -> dict[str, Any]:
    """The replies of every master; raises for the one that is down, because the weakest decides."""
    replies = await _everywhere(link, *words)
    return {
        where: await reply.again() if isinstance(reply, Absent) else reply for where, reply in replies.items()
    }


async def _everywhere(link: Link, *words: str) -> dict[str, Any]:
    """Managed servers forbid some of these commands: then nothing is known, and that is told as a warning."""
    try:
        return await link.command_everywhere(*words)
    except (ServerError, ConfigurationError) as error:
        reply = error if isinstance(error, ServerError) else error.__cause__
        told = str(
            reply
        ).lower()  # not of SENTINEL, say, which a server that is no Sentinel does not know either
        forbidden = isinstance(reply, ServerError) and (reply.code == "NOPERM" or "unknown command" in told)
        if forbidden and words[0].lower() in told:
            return {}
        raise


def _pairs(found: Iterable[tuple[str, ...]]) -> dict[str, str]:
    return {name: value for name, value in found if value}


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")

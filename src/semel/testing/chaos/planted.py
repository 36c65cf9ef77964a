"""Bugs planted in the workers of a run: a matrix that does not see a removed fence on a real store proves nothing.

`explore(jobs, mutants=[NAME])` plants them in every worker, and must find a disagreement. They are those of
`semel.testing.mutants`, and some here that the contract suite need not tell from the right ones: two owners at the same time do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from semel.testing.mutants import MUTANTS
from semel.testing.mutants.plant import Patch

__all__ = ["FENCES", "plant"]

_DROPPED: Final = "b3"


def _broken(text: str, predicate: str, instead: str) -> str:
    found, count = re.subn(predicate, instead, text)
    if not count:
        raise LookupError(f"the predicate to be left out is not there any more: {predicate}")
    return found


def _postgres(statements: str) -> Sequence[Patch]:
    from semel.stores.postgres import sql

    real = vars(sql)["_text"]
    sql.statements.cache_clear()

    def text(*args: Any) -> str:
        parts = re.split(r"(?m)^(?=-- name: )", real(*args))
        mine = [at for at, part in enumerate(parts) if part.startswith(f"-- name: {statements}")]
        for at in mine:
            # The parameter stays: a server refuses a statement that does not use one it was given.
            parts[at] = _broken(parts[at], r"r\.nonce = (\$\d+::bytea|\w+\.nonce)", r"\1 is not null")
        return "".join(parts)

    return [(sql, "_text", text)]


def _mysql(statement: str) -> Sequence[Patch]:
    from semel.stores.mysql import rows

    real = rows.Statements.__getitem__

    def broken(self: Any, name: str) -> str:
        text = real(self, name)
        return _broken(text, r"r\.`nonce` = (%\(nonce\)s)", r"\1 IS NOT NULL") if name == statement else text

    return [(rows.Statements, "__getitem__", broken)]


def _renewing() -> Sequence[Patch]:
    from semel.stores.redis import record, store
    from semel.stores.redis.calls import Script

    real = record.RENEW
    broken = Script(real.name, _broken(real.source, re.escape("if nonce ~= mine then"), "if false then"))
    return [(module, "RENEW", broken) for module in (record, store) if "RENEW" in vars(module)]


def _renewing_nothing() -> Sequence[Patch]:
    """A heartbeat is answered, and the lease ends all the same."""
    from semel.stores.postgres import sql

    real = vars(sql)["_text"]
    sql.statements.cache_clear()

    def text(*args: Any) -> str:
        extended = re.escape("lease_until = to_timestamp(date_part('epoch', now) + b.lease)")
        return _broken(real(*args), extended, "lease_until = r.lease_until")

    return [(sql, "_text", text)]


def _unsynced() -> Sequence[Patch]:
    """What is answered lies in the kernel's memory."""
    from semel.stores.sqlite import file

    full = vars(file)["_PRAGMAS"]
    return [
        (file, "_PRAGMAS", tuple(_broken(each, "FULL", "OFF") if "FULL" in each else each for each in full))
    ]


def _acknowledging_first() -> Sequence[Patch]:
    """A consumer tells its broker that it is done with a message before its transaction has committed."""
    from semel.messaging.consumer import Consumer

    real = vars(Consumer)["_deliver"]

    async def deliver(self: Any, delivery: Any) -> None:
        await delivery.ack()
        await real(self, delivery)  # it is acknowledged again, which changes nothing any more

    return [(Consumer, "_deliver", deliver)]


def _unfenced_sink() -> Sequence[Patch]:
    """A sink of Redis goes by the numbers of batches alone, whoever sends them."""
    from semel.messaging.sinks import redis

    script = _broken(vars(redis)["_SCRIPT"], re.escape("if last_epoch > epoch then"), "if false then")
    sha = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    return [(redis, "_SCRIPT", script), (redis, "_SHA", sha)]


def _dropping_sink() -> Sequence[Patch]:
    """A webhook sink says that it has delivered a message which it never sends; what it doubles hides nothing of that."""
    from semel.messaging.sinks.webhook import WebhookSink

    real = vars(WebhookSink)["publish"]

    async def publish(self: Any, part: int, epoch: int, batch: int, rows: Sequence[Any]) -> int | None:
        sent = [row for row in rows if not row.id.endswith(_DROPPED)]
        return await real(self, part, epoch, batch, sent) if sent else None

    return [(WebhookSink, "publish", publish)]


def _waiting_once() -> Sequence[Patch]:
    """One who waits is told that the store is away when his one connection is silent."""
    from semel.waiting import Bench, Seat

    return [(Bench, "asks_twice", False), (Seat, "watch_again", Seat.watch)]


def _beside_its_transaction() -> Sequence[Patch]:
    """Within a transaction of PostgreSQL the record is written on semel's own connection: it stands when the rows are rolled back."""
    from semel.within.engine import TxEngine

    real = TxEngine.execute

    async def execute(self: Any, call: Any) -> Any:
        if self.bound.port.dialect != "postgresql":
            return await real(self, call)
        return await self.outer.execute(call)

    return [(TxEngine, "execute", execute)]


def _committing() -> Sequence[Patch]:
    """Within a transaction of MariaDB semel commits as soon as the record is written, before its caller has said so."""
    from semel.within.engine import TxEngine

    real = vars(TxEngine)["_complete"]

    async def complete(self: Any, run: Any, value: Any) -> Any:
        outcome = await real(self, run, value)
        if self.bound.port.dialect == "mysql":
            await self.bound.port.run("COMMIT")
        return outcome

    return [(TxEngine, "_complete", complete)]


def _unwatched() -> Sequence[Patch]:
    """The EXEC of a pipeline goes through although the record has changed since it was looked at; a cluster's does not."""
    from semel.within.pipelines import waited
    from semel.within.redis import PipelineEngine

    real = vars(PipelineEngine)["_try"]

    async def attempt(self: Any, run: Any, end: Any, pipe: Any, queued: Any) -> Any:
        async def watch(*keys: Any) -> None:
            await waited(type(pipe).watch(pipe, *keys))
            await waited(pipe.unwatch())
            pipe.watching = True

        if self._queue.slot(run.scope.hash) is None:
            pipe.watch = watch
        return await real(self, run, end, pipe, queued)

    return [(PipelineEngine, "_try", attempt)]


def _unlooked() -> Sequence[Patch]:
    """In a cluster nobody looks whether the record is still his before a pipeline is sent; elsewhere one does."""
    from semel.within.redis import PipelineEngine

    real, tries = vars(PipelineEngine)["_is_done"], vars(PipelineEngine)["_try"]

    def in_a_cluster(self: Any, run: Any) -> bool:
        return self._queue.slot(run.scope.hash) is not None

    async def is_done(self: Any, run: Any, ends: Any, *, there: bool) -> bool:
        return False if in_a_cluster(self, run) else bool(await real(self, run, ends, there=there))

    async def attempt(self: Any, run: Any, end: Any, pipe: Any, queued: Any) -> Any:
        if in_a_cluster(self, run):
            pipe.eval = lambda *_: 1  # what the server itself has
        return await tries(self, run, end, pipe, queued)

    return [(PipelineEngine, "_is_done", is_done), (PipelineEngine, "_try", attempt)]


def _unsure() -> Sequence[Patch]:
    """Whichever server has answered the EXEC of a pipeline, the store records it as done."""
    from semel.within.redis import PipelineEngine

    async def make_sure(*_: Any) -> None:
        """Nobody is asked."""

    return [(PipelineEngine, "_make_sure", make_sure)]


def _unasked() -> Sequence[Patch]:
    """The server that gets the EXEC of a pipeline is not asked whose record it has, only the store is."""
    from semel.within.redis import PipelineEngine

    real = vars(PipelineEngine)["_try"]

    async def attempt(self: Any, run: Any, ends: Any, pipe: Any, queued: Any) -> Any:
        pipe.eval = lambda *_: 1
        return await real(self, run, ends, pipe, queued)

    return [(PipelineEngine, "_try", attempt)]


def _letting_go() -> Sequence[Patch]:
    """redis-py may replace the connection of a pipeline that watches: it pings, retries and dials anew as ever."""
    from semel.within import pipelines

    vars(pipelines)["_hold_on"]  # or it has another name by now
    return [(pipelines, "_hold_on", lambda _: None)]


def _unconfirmed() -> Sequence[Patch]:
    """Whatever acks= says, no replica is asked."""
    from semel.stores.redis.store import RedisStore

    real = RedisStore.__init__

    def opened(self: Any, source: Any, settings: Any, *args: Any, **options: Any) -> None:
        real(self, source, msgspec.structs.replace(settings, acks=0), *args, **options)

    return [(RedisStore, "__init__", opened)]


def _alone() -> Sequence[Patch]:
    """The matrix's own, too: SQL primaries that are said to wait for their replicas and do not."""
    from semel.testing.chaos import replicas

    pairs = [(name, vars(replicas)[name]) for name in ("_Postgres", "_Maria")]
    return [(replicas, name, partial(_of_one, pair)) for name, pair in pairs]


def _of_one(pair: Any, **options: Any) -> Any:
    return pair(**{**options, "waits": False})


def _strong() -> Sequence[Patch]:
    """Not a bug of the product's but of the matrix: a server that is called weak and is not."""
    from semel.testing.chaos import losses

    real = vars(losses)["ForgetfulRedis"]
    return [(losses, "ForgetfulRedis", lambda _: real("always"))]


_OWN: Final[dict[str, Callable[[], Sequence[Patch]]]] = {
    "postgres-settle-of-anybody": lambda: _postgres("settle"),
    "mariadb-settle-of-anybody": lambda: _mysql("settle"),
    "mariadb-note-of-anybody": lambda: _mysql("note"),
    "redis-renewal-of-anybody": _renewing,
    "postgres-renewal-of-nothing": _renewing_nothing,
    "sqlite-unsynced": _unsynced,
    "inbox-acks-before-its-commit": _acknowledging_first,
    "redis-sink-without-its-epoch": _unfenced_sink,
    "webhook-sink-drops-a-message": _dropping_sink,
    "waiter-gives-up-at-a-silence": _waiting_once,
    "postgres-within-beside-its-transaction": _beside_its_transaction,
    "mariadb-within-commits-for-its-caller": _committing,
    "redis-pipeline-unwatched": _unwatched,
    "cluster-pipeline-of-anybody": _unlooked,
    "redis-pipeline-of-any-master": _unsure,
    "redis-pipeline-asks-the-store-only": _unasked,
    "redis-pipeline-lets-its-connection-go": _letting_go,
    "redis-everysec-is-always": _strong,
    "redis-asks-for-no-acks": _unconfirmed,
    "sql-primary-waits-for-nobody": _alone,
}
_REDIS: Final = tuple(
    name for name in ("redis-settle-unfenced", "redis-quick-settle-unfenced") if name in MUTANTS
)
FENCES: Final[dict[str, tuple[str, ...]]] = {
    "redis": _REDIS,
    "cluster": _REDIS,
    "postgres": ("postgres-settle-of-anybody",),
    "mariadb": ("mariadb-settle-of-anybody",),
    "sqlite": ("sqlite-settle-unfenced",),
}
"""By real store: the mutants of which each way to settle compares no nonce."""


def plant(names: Sequence[str]) -> None:
    """Into this process and whatever it forks, for good."""
    for name in dict.fromkeys(names):
        patches = _OWN[name] if name in _OWN else MUTANTS[name].patches
        for owner, attribute, value in patches():
            setattr(owner, attribute, value)

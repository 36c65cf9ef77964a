"""The caller's redis-py pipeline: what a function queued on it, and which connection sends it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from inspect import isawaitable
from typing import Any, ClassVar, Final, Protocol, Self

from semel.errors import ConfigurationError, StoreUnavailable
from semel.layers.layer import Layer
from semel.model import Answer, Settle

__all__ = [
    "Astray",
    "Capture",
    "Elsewhere",
    "Guarded",
    "Held",
    "NothingApplied",
    "Queue",
    "Watched",
    "as_told",
    "give_back",
    "guard",
    "is_shut",
    "lost",
    "moved",
    "told",
    "waited",
    "watched",
]

Commands = list[tuple[Any, Any]]
_BOUNDS: Final = frozenset({"MULTI", "EXEC", "DISCARD"})
# The settle that comes after one of them in the EXEC finds no record, or there is no EXEC.
_PARTINGS: Final = frozenset(
    {"SELECT", "SWAPDB", "FLUSHDB", "FLUSHALL", "RESET", "QUIT", "REPLICAOF", "SLAVEOF"}
)
_OF_A_STRATEGY: Final = frozenset({"_validate_watch"})
_SENDING: Final = "_semel_sending"
_NOTHING: Final = object()


class Queue:
    """The caller's pipeline while a function queues commands on it."""

    # `initialize` is what `await pipe` and `async with pipe` call in a cluster, and it empties the pipeline as well;
    # `immediate_execute_command` is what a WATCH comes to that is spelt as any other command, in a cluster `_validate_watch`.
    _not_in_a_run: ClassVar[tuple[str, ...]] = (
        "watch", "immediate_execute_command", "_validate_watch", "execute", "reset", "discard", "initialize",
    )  # fmt: skip

    def __init__(self, pipe: Any, *, cluster: bool) -> None:
        self._pipe = pipe
        self._cluster = cluster
        self._refused: dict[str, tuple[Any, Any]] = {}

    @property
    def pipe(self) -> Any:
        return self._pipe

    @property
    def _strategy(self) -> Any:
        """What a cluster's pipeline gives its commands to; any other has none."""
        return getattr(self._pipe, "_execution_strategy", None)

    @property
    def moves(self) -> bool:
        """Whether somebody tells its client of another master, after a failover: a cluster, or a Sentinel."""
        return self._cluster or hasattr(self._pipe.connection_pool, "sentinel_manager")

    def slot(self, key: bytes) -> int | None:
        """Where the transaction is, in a cluster: with the record."""
        if not self._cluster:
            return None
        from redis.crc import key_slot

        return int(key_slot(key))

    async def ready(self) -> None:
        """Let an async cluster's client read its map here: left to the first command it queues, redis-py does it in another
        thread's loop, and its connections are of no use in this one."""
        client = getattr(self._pipe, "cluster_client", None)
        if client is None:
            return
        from redis.exceptions import RedisClusterException, RedisError

        try:
            await client.initialize()  # nothing, when it has been
        except (OSError, RedisError, RedisClusterException) as error:
            raise StoreUnavailable(
                f"the pipeline's Redis Cluster cannot be reached ({error}); nothing was run. Call again later"
            ) from error

    def check(self) -> None:
        """Nothing else may be under way on it, or be sent with the run's commands."""
        if _is_refused(self._pipe, "watch") or _own(self._pipe, _SENDING) is not _NOTHING:
            raise _under_way()
        # From WATCH on redis-py sends every command at once, outside of the transaction.
        if getattr(self._pipe, "watching", False) or getattr(self._strategy, "_watching", False):
            raise _no_watch()
        if len(self._pipe):
            raise _not_empty()

    def guard(self) -> None:
        """A run has begun: until it ends the pipeline is to queue only (where it lets itself be changed)."""
        self.check()  # again: whoever waited for the key was not alone
        try:
            for name in self._not_in_a_run:
                where = self._strategy if name in _OF_A_STRATEGY else self._pipe
                self._refused[name] = where, _own(where, name)
                with suppress(AttributeError):
                    setattr(where, name, _REFUSALS[name])
        except BaseException:  # a signal's handler raised
            self.open()
            raise

    def open(self) -> None:
        """The run has ended: the pipeline has its own methods again."""
        for name in tuple(self._refused):
            where, before = self._refused[name]
            _put_back(where, name, before)
            del self._refused[name]

    def check_queued(self) -> None:
        """The MULTI around what is queued is semel's, and the record is to be there at its end."""
        names = {_name(args) for args in self.queued()}
        if not names.isdisjoint(_BOUNDS):
            raise _not_theirs()
        if parting := names & _PARTINGS:
            raise _parted(min(parting))

    def left_open(self) -> Queue:
        """The same pipeline, of which only `watch` is refused."""
        return _LeftOpen(self._pipe, cluster=self._cluster)

    def queued(self) -> list[Any]:
        """The arguments of what is queued, left where they are."""
        if self._cluster:
            return [each.args for each in self._pipe._execution_strategy._command_queue]  # noqa: SLF001 - redis-py tells it nowhere else
        return [args for args, _ in self._pipe.command_stack]

    def take(self) -> tuple[list[tuple[Any, Any]], set[Any]]:
        """What was queued, as arguments and options, and the scripts that redis-py loads before; the pipeline is empty.

        The run ends with it, and the guard goes."""
        self.open()
        pipe = self._pipe
        if self._cluster:
            # redis-py shows the commands of a cluster's pipeline nowhere else.
            strategy = pipe._execution_strategy  # noqa: SLF001 - redis-py tells it nowhere else
            queue = strategy._command_queue  # noqa: SLF001 - redis-py tells it nowhere else
            commands = [
                (each.args, getattr(each, "options", None) or getattr(each, "kwargs", {})) for each in queue
            ]
            queue.clear()
            getattr(strategy, "_pipeline_slots", set()).clear()  # or it could be used in the same slot only
            strategy._explicit_transaction = False  # noqa: SLF001 - where the function called `multi`
            return commands, set()
        commands, pipe.command_stack, pipe.explicit_transaction = list(pipe.command_stack), [], False
        return commands, set(pipe.scripts)

    def send(self) -> tuple[list[tuple[Any, Any]], set[Any]]:
        """As `take`, for the EXEC: until `sent` no other run begins on the pipeline, which would lose what it queues."""
        with suppress(AttributeError):
            setattr(self._pipe, _SENDING, True)
        return self.take()

    def sent(self) -> None:
        """The run has ended, well or not, and the pipeline is empty."""
        self.take()
        _put_back(self._pipe, _SENDING, _NOTHING)

    def sender(self, key: bytes) -> Any:
        """The pipeline for the transaction: the caller's own; in a cluster, one on the node that has the record."""
        slot = self.slot(key)
        if slot is None:
            return self._pipe
        from redis.exceptions import ConnectionError as Lost
        from redis.exceptions import RedisClusterException

        try:
            return self.sender_in(slot)
        except (LookupError, RedisClusterException) as error:  # redis-py's async map raises a KeyError
            raise Lost(f"no node of the cluster is known to have slot {slot}") from error

    def sender_in(self, slot: int) -> Any:
        """A pipeline on the node of a cluster that has the slot."""
        client = getattr(self._pipe, "cluster_client", self._pipe)
        node = client.nodes_manager.get_node_from_slot(slot)
        if getattr(node, "redis_connection", None) is not None:
            return node.redis_connection.pipeline(transaction=True)
        import redis.asyncio

        pool = redis.asyncio.ConnectionPool(connection_class=node.connection_class, **node.connection_kwargs)
        return redis.asyncio.Redis.from_pool(pool).pipeline(transaction=True)

    async def look_again(self) -> None:
        """A slot was moved: read the cluster's map anew."""
        client = getattr(self._pipe, "cluster_client", self._pipe)
        await waited(client.nodes_manager.initialize())

    async def elsewhere(self, sender: Any) -> None:
        """The node does not have the slot any more, or is gone: leave it, and read the cluster's map anew. Where that cannot be
        done now, whoever tries again will come back here."""
        from redis.exceptions import RedisClusterException, RedisError

        with suppress(OSError, RedisError):
            await self.done_with(sender)
        with suppress(OSError, RedisError, RedisClusterException):
            await self.look_again()

    async def done_with(self, sender: Any) -> None:
        """`sender` may be None, where there was none."""
        if sender is None:
            return
        await give_back(sender)
        if self._cluster and hasattr(sender, "aclose"):
            await sender.connection_pool.aclose()


class _LeftOpen(Queue):
    """What is queued goes out by the pipeline's own `execute`, which resets it: an outbox must look after its messages there."""

    _not_in_a_run: ClassVar[tuple[str, ...]] = ("watch",)


class Watched(Protocol):
    """Who queues commands that must be looked after just before the EXEC, which cannot take anything back."""

    async def watch(self, pipe: Any, commands: Commands, slot: int | None) -> Commands:
        """WATCH what the commands depend on, look at it, and answer the commands as they are to be sent. What it raises
        reaches the caller, and nothing is applied. `slot` is where a cluster's transaction is, as far as it is known."""
        ...

    def told(self) -> None:
        """The EXEC went through."""


class Guarded(str):
    """The text of a script that is queued on a pipeline, with who looks after it."""

    __slots__ = ("about", "owner")

    def __new__(cls, text: str, owner: Watched, about: Any) -> Self:
        made = super().__new__(cls, text)
        made.owner, made.about = owner, about
        return made

    owner: Watched
    about: Any


def _owners(commands: Commands) -> list[Watched]:
    found = [args[1].owner for args, _ in commands if len(args) > 1 and isinstance(args[1], Guarded)]
    return list(dict.fromkeys(found))


async def watched(pipe: Any, commands: Commands, slot: int | None) -> Commands:
    """The commands as they are to be sent, when everybody who is responsible for one has looked."""
    for owner in _owners(commands):
        commands = await owner.watch(pipe, commands, slot)
    return commands


def told(commands: Commands) -> None:
    """They were applied."""
    for owner in _owners(commands):
        owner.told()


def is_shut(pipe: Any) -> bool:
    """Whether a run of `within` is queueing commands on it."""
    return _is_refused(pipe, "execute")


def _is_refused(pipe: Any, name: str) -> bool:
    return getattr(pipe, "__dict__", {}).get(name) is _REFUSALS[name]


def _own(where: Any, name: str) -> Any:
    """What somebody, a tracer say, has put there in place of the method of its class."""
    return getattr(where, "__dict__", {}).get(name, _NOTHING)


def _put_back(where: Any, name: str, before: Any) -> None:
    with suppress(AttributeError):
        delattr(where, name)
    if before is not _NOTHING:
        setattr(where, name, before)


def _name(args: Sequence[Any]) -> str:
    name = args[0]
    text = name.decode("latin-1") if isinstance(name, bytes) else str(name)
    words = text.split()  # as redis-py does: "SELECT 1"
    return words[0].upper() if words else ""


class Capture(Layer):
    """The bottom of the layers: it keeps what they made of a settle, sealed and in its namespace, instead of sending it."""

    end: Any = None

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        (self.end,) = ends
        return [Answer.OK]


async def waited(thing: Any) -> Any:
    # A pipeline is awaitable itself (asyncio's initialises): only coroutines are meant.
    return await thing if isawaitable(thing) and not hasattr(thing, "command_stack") else thing


def moved() -> tuple[type[Exception], ...]:
    """What a node of a cluster says that does not serve a slot, or not now."""
    from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, TryAgainError

    return AskError, ClusterDownError, ReadOnlyError, TryAgainError  # MOVED is an AskError


def lost() -> tuple[type[Exception], ...]:
    """A connection that broke, or is silent."""
    from redis.exceptions import ConnectionError as Lost
    from redis.exceptions import TimeoutError as Late

    return OSError, Lost, Late


class NothingApplied(Exception):
    """The server refused a command while it was queued (its arity, its slot): EXEC was discarded as a whole."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Elsewhere(Exception):
    """The node of a cluster does not serve the slot, or not now; nothing was applied."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Held(Exception):
    """The record is unknown, by an EXEC of ours."""


class Astray(Exception):
    """The server that answers an EXEC of ours, or would, and the store's disagree about the record: after a failover one of them is
    no master any more."""


async def guard(pipe: Any, key: bytes, *, anew: bool) -> None:
    """WATCH. `anew`: on another connection than the one at hand, which may lead to a server that is no master any more."""
    await waited(pipe.watch(key))
    if anew:
        await _leave(pipe)
        await waited(pipe.watch(key))
    _hold_on(pipe)


async def give_back(pipe: Any) -> None:
    """`reset`, though the server does not answer its UNWATCH: a sync pipeline would watch on, and keep its connection."""
    try:
        await waited(pipe.reset())
    except lost():
        await _leave(pipe)


async def _leave(pipe: Any) -> None:
    """Without UNWATCH, for which redis-py would dial the same server again, whatever a Sentinel says."""
    if pipe.connection is not None:
        await waited(pipe.connection.disconnect())
    pipe.watching = False
    await waited(pipe.reset())


def _hold_on(pipe: Any) -> None:
    """Until the pipeline gives it back, by `reset`, the connection that watches is the one that sends, or nothing is sent. redis-py
    dials anew without a word where a ping fails (`health_check_interval`), where somebody has closed what is in use
    (`client.close()`), and where its `retry` is for a WatchError, too: what is sent then is watched by nobody."""
    from redis.exceptions import ConnectionError as Lost

    def refused(*_: Any, **__: Any) -> Any:
        raise Lost("the connection that watched the record was closed")

    outer = pipe.connection
    line = getattr(outer, "_conn", outer)  # within one that caches
    pinged, retry, dials = line.health_check_interval, outer.retry, _own(line, "connect_check_health")
    own, put = pipe.reset, _own(pipe, "reset")

    def reset() -> Any:
        line.health_check_interval, outer.retry = pinged, retry  # before anybody else has it
        _put_back(line, "connect_check_health", dials)
        _put_back(pipe, "reset", put)
        if not line.is_connected:
            pipe.watching = False  # or redis-py dials the same server again, to tell it so
        return own()

    pipe.reset = reset  # first: a signal's handler may raise here
    once = copy(retry)
    once.update_retries(0)
    line.health_check_interval, line.connect_check_health, outer.retry = 0, refused, once


def as_told(error: Exception, slot: int | None) -> Exception:
    """A cluster's refusal of a key in another slot, with the remedy; `slot` is the record's."""
    from redis.exceptions import AskError, ClusterCrossSlotError

    crosses = isinstance(error, ClusterCrossSlotError)
    if slot is None or not (crosses or (isinstance(error, AskError) and error.slot_id != slot)):
        return error
    remedy = ConfigurationError(
        "a command on the pipeline is for a key in another slot of the Redis Cluster than the record; nothing was applied. Put "
        "the record's hash tag into the keys of this call: f'order:{once.tag(key)}'"
    )
    remedy.__cause__ = error
    return remedy


def _refused_watch(*_: Any, **__: Any) -> Any:
    raise _no_watch()


def _refused_execute(*_: Any, **__: Any) -> Any:
    raise ConfigurationError(
        "the pipeline that within() was given was executed during the run: queue commands only; they are sent together with the "
        "record's settle when the function returns, or by claim.complete()"
    )


def _refused_reset(*_: Any, **__: Any) -> Any:
    raise ConfigurationError(
        "the pipeline that within() was given was to be emptied during the run (reset, discard, close, or the end of a `with pipe:`; "
        "on an async cluster `await pipe` as well): what was queued would be lost and the key recorded as done. Queue commands "
        "only, and put `with pipe:` around the call of within() instead; to apply nothing, raise an error"
    )


_REFUSALS: Final = {
    "watch": _refused_watch,
    "immediate_execute_command": _refused_watch,
    "_validate_watch": _refused_watch,
    "execute": _refused_execute,
    "reset": _refused_reset,
    "discard": _refused_reset,
    "initialize": _refused_reset,
}


def _under_way() -> ConfigurationError:
    return ConfigurationError(
        "within() was given a pipeline on which another run of within() is under way: an EXEC settles one record, and would take "
        "the other run's commands along. Give each run a pipeline of its own, or call the inner function without within()"
    )


def _not_empty() -> ConfigurationError:
    return ConfigurationError(
        "within() needs an empty pipeline: what is queued before would be sent with the function's commands, or not at all on a "
        "replay. Execute it first, or queue everything in the function"
    )


def _not_theirs() -> ConfigurationError:
    return ConfigurationError(
        "MULTI, EXEC or DISCARD was queued on the pipeline that within() was given: it would end semel's own MULTI/EXEC early, and "
        "the record be settled without the commands. Leave it out; to apply nothing, raise an error"
    )


def _parted(name: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name} was queued on the pipeline that within() was given: the record, which is settled by the last command of the same "
        "MULTI/EXEC, would not be found there, and the commands could be applied again. Leave it out, and use keys of the record's own "
        "database; nothing was applied"
    )


def _no_watch() -> ConfigurationError:
    return ConfigurationError(
        "a WATCH on the pipeline that within() was given would not hold: semel sends what was queued in a MULTI/EXEC of its own, "
        "and from WATCH on redis-py sends every command at once, outside of it. Give within() a pipeline that watches nothing; "
        "read before, on the client, and put what must be compared into a script that is queued"
    )

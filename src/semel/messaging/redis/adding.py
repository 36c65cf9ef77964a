"""Messages on the caller's redis-py pipeline: queued where they are added, looked after just before the EXEC.

    add ──▶ EVAL … on the pipeline          execute ──▶ WATCH ids, read them ──▶ MULTI, the commands, EXEC
                                                              └──▶ a conflict: KeyMismatch, nothing is applied

EXEC rolls nothing back: a script that refused a message inside of it would leave the caller's other commands applied. So the
ids are watched and compared before. When one changes in between, EXEC applies nothing and it is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, WatchError

from semel.errors import ConfigurationError, SemelError
from semel.messaging.message import Message, part_of
from semel.messaging.redis.arriving import Arrivals
from semel.messaging.redis.bodies import RedisKeeper
from semel.messaging.redis.keys import ADD
from semel.messaging.writing import Prepared, conflict, prepared
from semel.runtime import run_sync
from semel.within.pipelines import Guarded, Queue, is_shut, told, waited, watched

if TYPE_CHECKING:
    from semel.messaging.redis.home import RedisHome

__all__ = ["Adder", "Refused"]

_TRIES: Final = 16  # of an EXEC that was aborted because somebody else adds the same ids
_REMEDY: Final = "make one (`with client.pipeline() as pipe:`), queue your commands and the message on it, then `pipe.execute()`"
Commands = list[tuple[Any, Any]]
Refused = Callable[[Exception, Sequence[Prepared]], None]


@lru_cache(maxsize=64)
def _classes(kind: type) -> frozenset[str]:
    """What a class of redis-py is made of, by name; `asyncio` among them if it is to be awaited."""
    theirs = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "redis"]
    names = {each.__name__ for each in theirs}
    return frozenset(names | {"asyncio" for each in theirs if ".asyncio." in f"{each.__module__}."})


class Adder:
    """Queues an outbox's messages on pipelines. `wake` is called when they were committed, `refused` when they were not."""

    def __init__(self, home: RedisHome, retention: float, wake: Callable[[], None], refused: Refused) -> None:
        self.home = home
        self._retention = int(retention * 1000)
        self.told = wake
        self._refused = refused
        self._keeper: RedisKeeper | None = None

    def keep_bodies(self, given: Any, *, over: int, kept: float) -> RedisKeeper:
        """From now on bodies of more than `over` bytes are kept elsewhere, for `kept` seconds at least."""
        self._keeper = RedisKeeper(given, self.home, over=over, kept=max(kept, self._retention / 1000))
        return self._keeper

    def add(self, pipe: Any, items: Sequence[Prepared]) -> None:
        """Queue the messages. ConfigurationError for what is no transaction."""
        cluster = _check(pipe, cluster=self.home.names.cluster)
        prepared(items)
        for item in items:
            item.divide(self.home.parts)
            command = self._command(item, Guarded(ADD.source, self, item))
            if cluster:
                _append(pipe, command)
            else:
                pipe.execute_command(*command)
        if not is_shut(pipe):  # within() looks by itself
            _hook(pipe, cluster=cluster)

    def arrivals(self, prepare: Callable[[Message], Prepared]) -> Arrivals:
        """Where batches of another outbox's relay arrive."""
        return Arrivals(
            self.home,
            retention=self._retention,
            keeper=self._keeper,
            prepare=prepare,
            told=self.told,
        )

    def tag(self, tenant: str, key: str) -> str:
        """The hash tag of the slot that keeps the messages of a key."""
        self.home.look()
        return self.home.names.tag(part_of(tenant, key, "", self.home.parts))

    def _command(self, item: Prepared, text: str, verb: str = "EVAL") -> tuple[Any, ...]:
        names, part, columns = self.home.names, item.part, item.columns
        after, at = columns["due_after"], columns["due_at"]
        fields = (
            columns[name] for name in ("id", "tenant", "topic", "key", "type", "schema", "headers", "body")
        )
        reference = item.reference
        body = () if reference is None else (names.body(part, reference.digest),)
        kept = () if reference is None or self._keeper is None else (self._keeper.kept,)
        return (
            verb, text, 7 + len(body),
            names.meta(part), names.seq(part), names.stream(part), names.due(part), names.counts(part), names.tenants(part),
            names.id(part, columns["tenant"], columns["id"]), *body,
            self.home.parts, item.hash.hex(), self._retention,
            "" if after is None else repr(after * 1000), "" if at is None else repr(at * 1000),
            *("" if value is None else value for value in fields), columns["raw"], *kept,
        )  # fmt: skip

    async def slot_of(self, pipe: Any, item: Prepared, slot: int | None) -> int:
        """Where a cluster's transaction is: with the caller's commands, or else with this message."""
        await self._looked(pipe)
        if slot is not None:
            return slot
        item.divide(self.home.parts)
        return self.home.names.slot(item.part)

    # -------------------------------------------------------------------------------- before the EXEC
    async def watch(self, pipe: Any, commands: Commands, slot: int | None) -> Commands:
        """See `Watched`: no id of these is known with another content, and the outbox is on this server."""
        items = [args[1].about for args, _ in commands if self._is_ours(args)]
        try:
            await self._watch(pipe, items, slot)
        except SemelError as error:
            self._refused(error, items)
            raise
        return self._spelled(commands)

    async def _watch(self, pipe: Any, items: Sequence[Prepared], slot: int | None) -> None:
        await self._looked(pipe)
        unique = prepared(items)
        self._divide(items, slot)
        names = self.home.names
        keys = [names.id(item.part, *reversed(item.identity)) for item in unique]
        meta = names.meta(unique[0].part)
        apart = self._keeper.name(items) if self._keeper is not None else []
        bodies = [
            names.body(item.part, item.reference.digest) for item in apart if item.reference is not None
        ]
        await waited(pipe.immediate_execute_command("WATCH", meta, *keys, *bodies))
        said, *known = await waited(pipe.immediate_execute_command("MGET", meta, *keys))
        self._check_meta(said)
        for item, value in zip(unique, known, strict=True):
            if value is not None and _text(value)[:64] != item.hash.hex():
                raise conflict(item)
        fresh = [item for item, value in zip(unique, known, strict=True) if value is None]
        await self._put(pipe, [item for item in fresh if item.apart])

    async def _put(self, pipe: Any, items: Sequence[Prepared]) -> None:
        """Store the bodies of messages that are new."""
        keeper = self._keeper
        if keeper is None or not items:
            return
        if _is_async(pipe):
            await self.home.aside(lambda: keeper.put(items))
        else:
            keeper.put(items)

    async def _looked(self, pipe: Any) -> None:
        if self.home.ready:
            return
        if _is_async(pipe):
            await self.home.aside(self.home.look)
        else:
            self.home.look()

    def _is_ours(self, args: Sequence[Any]) -> bool:
        return _is_guarded(args) and args[1].owner is self

    def _divide(self, items: Sequence[Prepared], slot: int | None) -> None:
        """Find the parts. In a Cluster a transaction has one slot: a message with a key must have its part there; one
        without goes to the part that is there."""
        home, names = self.home, self.home.names
        for item in items:
            item.divide(home.parts)
            if not names.cluster:
                continue
            if slot is None:
                slot = names.slot(item.part)
            here = names.slot(item.part) == slot
            if not here and item.columns["key"] is None:
                found = names.part_in(slot, home.parts)
                if found is not None:
                    item.part = item.columns["part"] = found
                    continue
            if not here:
                raise self._elsewhere(item)

    def _elsewhere(self, item: Prepared) -> ConfigurationError:
        key, tag = item.columns["key"], self.home.names.tag(item.part)
        return ConfigurationError(
            f"message {item.identity[0]} belongs into another slot of the cluster than the rest of its transaction. "
            + (
                f"Messages of the key {key!r} are kept under the hash tag {tag}: begin the names of your keys with "
                "outbox.tag(key), or leave out key= if no order is needed"
                if key is not None
                else "Begin the names of your keys with a hash tag of the outbox (outbox.tag(…)); for records of within() give "
                "the outbox their prefix as table=, and parts=1024"
            )
        )

    def _check_meta(self, said: Any) -> None:
        meta = {} if said is None else msgspec.json.decode(_text(said))
        if meta.get("identity") != self.home.identity:
            raise ConfigurationError(
                f"the pipeline talks to another Redis server or database than the outbox in {self.home.where}: make it from "
                "a client of the same one; nothing was applied"
            )
        if meta["parts"] != self.home.parts:
            raise ConfigurationError(
                f"the outbox in {self.home.where} was divided into {meta['parts']} parts since this program looked, and it knows "
                f"{self.home.parts}: make it anew, with the same parts= everywhere; nothing was applied"
            )

    def _spelled(self, commands: Commands) -> Commands:
        """Our commands for the parts as they are known now. The first one has the script's text: inside an EXEC nobody can
        take it out of the server's cache again, so a name suffices for those that follow."""
        spelled: Commands = []
        first = True
        for args, options in commands:
            if not self._is_ours(args):
                spelled.append((args, options))
                continue
            text = args[1] if first else Guarded(ADD.sha1.decode(), self, args[1].about)
            verb = "EVAL" if first else "EVALSHA"
            spelled.append((self._command(args[1].about, text, verb), options))
            first = False
        return spelled


# ------------------------------------------------------------------------------------------------ pipelines
def _check(pipe: Any, *, cluster: bool) -> bool:
    """Whether it is a cluster's. ConfigurationError for what is no pipeline, no transaction, or of another kind."""
    kind: type = type(pipe)
    names = _classes(kind)
    if names.isdisjoint({"Pipeline", "ClusterPipeline"}):
        raise ConfigurationError(
            f"an outbox in Redis takes a redis-py pipeline, whose EXEC commits your commands and the message together, not "
            f"{type(pipe).__module__}.{type(pipe).__qualname__}: {_REMEDY}"
        )
    is_cluster = "ClusterPipeline" in names
    if is_cluster != cluster:
        raise ConfigurationError(
            "this pipeline and the outbox are not of one kind: one is for a Redis Cluster, the other one is not. Open the outbox "
            f"with {'redis+cluster://' if is_cluster else 'redis://'}…, or with the pipeline's client"
        )
    strategy = pipe._execution_strategy if is_cluster else pipe  # noqa: SLF001 - redis-py shows it nowhere else
    transactional = (
        type(strategy).__name__ == "TransactionStrategy"
        if is_cluster
        else (pipe.is_transaction if _is_async(pipe) else pipe.transaction)
    )
    if not transactional and (is_cluster or not pipe.explicit_transaction):
        raise ConfigurationError(
            "this pipeline has transaction=False: the message could be sent although your commands were not applied. "
            "Use client.pipeline(transaction=True)"
        )
    if is_cluster and strategy._watching:  # noqa: SLF001 - redis-py tells it nowhere else
        raise ConfigurationError(
            "a cluster's pipeline that watches keys of its own cannot take messages: its watches are bound to a connection "
            "that semel cannot use. Leave out watch(), or check in a script"
        )
    if not is_cluster and pipe.watching and not pipe.explicit_transaction:
        raise ConfigurationError(
            "this pipeline is watching, and what is queued now would be sent at once: call pipe.multi() first, then queue your "
            "commands and the message"
        )
    return is_cluster


def _append(pipe: Any, command: tuple[Any, ...]) -> None:
    """Queue without redis-py's routing, which would read the cluster's map in another thread's loop."""
    queue = pipe._execution_strategy._command_queue  # noqa: SLF001 - as `Queue.take` reads it
    if _is_async(pipe):
        from redis.asyncio.cluster import PipelineCommand as AsyncCommand

        queue.append(AsyncCommand(len(queue), *command))
    else:
        from redis.cluster import PipelineCommand

        queue.append(PipelineCommand(command, {}, len(queue)))  # type: ignore[no-untyped-call]  # redis-py has no types there


def _hook(pipe: Any, *, cluster: bool) -> None:
    """Let `execute` look first. It is there until the pipeline was executed."""
    place = pipe._execution_strategy if cluster else pipe  # noqa: SLF001 - redis-py tells it nowhere else
    if "execute" in vars(place):
        return
    original = place.execute
    if _is_async(pipe):

        async def execute_async(*given: Any, **named: Any) -> Any:
            with suppress(AttributeError):
                del place.execute
            return await _execute(pipe, original, _raises(*given, **named), cluster=cluster)

        place.execute = execute_async
        return

    def execute(*given: Any, **named: Any) -> Any:
        with suppress(AttributeError):
            del place.execute
        return run_sync(_execute(pipe, original, _raises(*given, **named), cluster=cluster))

    place.execute = execute


def _raises(*given: Any, raise_on_error: bool = True, **_: Any) -> bool:
    """What redis-py's `execute` was told, in whichever way."""
    return bool(given[0]) if given else raise_on_error


async def _execute(pipe: Any, original: Callable[..., Any], raise_on_error: bool, *, cluster: bool) -> Any:
    """Watch, compare, MULTI and EXEC; again when an id that is watched changed, unless the caller watches as well."""
    queue = Queue(pipe, cluster=cluster)
    if not any(_is_guarded(args) for args in queue.queued()):  # it was reset meanwhile
        return await waited(original(raise_on_error))
    if cluster:
        return await _execute_in_cluster(pipe, queue, raise_on_error)
    own = pipe.watching
    commands, scripts = queue.take()
    try:
        return await _sent(
            pipe, original, commands, scripts, None, raise_on_error, tries=1 if own else _TRIES
        )
    finally:
        await waited(pipe.reset())


async def _execute_in_cluster(pipe: Any, queue: Queue, raise_on_error: bool) -> Any:
    """The same on a connection to the node that has the slot; again where it was moved to, if it was."""
    slot = _slot(pipe)
    commands, scripts = queue.take()
    await queue.ready()
    first = next(args[1] for args, _ in commands if _is_guarded(args))
    slot = await first.owner.slot_of(pipe, first.about, slot)
    moved = False
    while True:
        sender = queue.sender_in(slot)
        try:
            return await _sent(sender, sender.execute, commands, scripts, slot, raise_on_error, tries=_TRIES)
        except MovedError:  # before anything was applied
            if moved:
                raise
            moved = True
        finally:
            await queue.done_with(sender)
        await queue.look_again()


async def _sent(
    pipe: Any,
    send: Callable[..., Any],
    commands: Commands,
    scripts: set[Any],
    slot: int | None,
    raise_on_error: bool,
    *,
    tries: int,
) -> Any:
    while True:
        tries -= 1
        spelled = await watched(pipe, commands, slot)
        pipe.command_stack, pipe.scripts = list(spelled), set(scripts)
        try:
            replies = await waited(send(raise_on_error))
        except WatchError as error:
            if "changed" not in str(error):
                raise _unanswered(error) from error
            if not tries:
                raise
            continue
        told(spelled)
        return replies


def _slot(pipe: Any) -> int | None:
    """Where the caller's commands of a cluster's transaction are; they must be in one slot."""
    slots: set[int] = pipe._execution_strategy._pipeline_slots  # noqa: SLF001 - redis-py tells it nowhere else
    if len(slots) > 1:
        raise ConfigurationError(
            "the commands of this transaction are in several slots of the cluster: give their keys one hash tag, such as "
            "outbox.tag(key)"
        )
    return next(iter(slots), None)


def _is_guarded(args: Sequence[Any]) -> bool:
    return len(args) > 1 and isinstance(args[1], Guarded)


def _unanswered(error: WatchError) -> RedisConnectionError:
    return RedisConnectionError(
        f"the answer to EXEC was lost ({error}): either all of it was applied or nothing. Look at your data, or do it again with "
        "the same message ids: those that are there are not added twice"
    )


def _is_async(pipe: Any) -> bool:
    kind: type = type(pipe)
    return "asyncio" in _classes(kind)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)

"""`within(pipeline)`: the commands that a function queues and the settle of its record, in one guarded MULTI/EXEC (R28).

    claim (leased, renewed as usual) ──▶ function queues commands
    WATCH record ──▶ still ours? ──▶ MULTI, the commands, settle, EXEC ──▶ Outcome
       ▲                 └──▶ another owner: LeaseLost, nothing applied
       └── aborted (a renewal, or a takeover) or no answer: look again

EXEC does not roll back. So the guard comes first (WATCH: who lost the key applies nothing), the settle last. An error
reply inside EXEC leaves the other commands applied: the record then becomes `unknown` and the error is raised. Only
absolute, idempotent commands (SET, HSET, ZADD …) are exactly once across a torn log: a server that loses the end of its
log may keep the commands and lose the settle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

from semel import model
from semel.calls import Call, add_note, failure_of, is_lazy, name_of, not_run
from semel.errors import ConfigurationError, LeaseLost, SemelError, StoreUnavailable
from semel.flow import Engine, done_of
from semel.hooks import Executed, Unrecorded
from semel.model import Answer, Ask, Kind, Policy, Record, Settle, State, Verdict
from semel.points import reach
from semel.run import Outcome, Run, _current
from semel.runtime import Interrupt, own
from semel.store import Store
from semel.within.pipelines import Capture, Queue, told, waited, watched

__all__ = ["PipelineEngine"]

# The settle's reply carries a nonce and a hash; a client with decode_responses=True could not read it. Its letter suffices.
_LETTER_ONLY: Final = """local function settle()
%s
end
local reply = settle()
if type(reply) == 'table' then return reply end
return string.sub(reply, -1)"""
_PAUSE: Final = 0.02


class PipelineEngine(Engine):
    """The face's own engine but for the end of a run, which goes through the caller's pipeline."""

    def __init__(self, outer: Engine, queue: Queue, store: Any, layered: Store, capture: Capture) -> None:
        # Not Engine.__init__: everything of the face's engine is shared.
        self.__dict__.update(outer.__dict__)
        self._queue = queue
        self._raw = store
        self._layered = layered
        self._capture = capture

    @property
    def pipe(self) -> Any:
        """The pipeline that the function queues on: what is to commit with the record."""
        return self._queue.pipe

    def unguarded(self) -> Engine:
        """For a face that is switched off."""
        return _UnguardedEngine(self)

    async def execute(self, call: Call) -> Outcome[Any]:
        ask, verdict = await self.acquire(call)
        try:
            if isinstance(verdict, model.Replay):
                return self.replay(call, verdict.record)
            return await self._perform(self.begin(call, ask, verdict.record))
        except BaseException:
            self.disown(ask)
            raise

    async def ask_once(self, call: Call) -> tuple[Ask, Verdict]:
        self._queue.check()
        await self._queue.ready()
        return await super().ask_once(call)

    def begin(self, call: Call, ask: Ask, record: Record, interrupt: Interrupt | None = None) -> Run:
        self._queue.guard()
        try:
            return super().begin(call, ask, record, interrupt)
        except BaseException:
            self._queue.open()
            raise

    async def _perform(self, run: Run) -> Outcome[Any]:
        call = run.call
        token = _current.set(run.weak)
        try:
            run.started = True
            reach("run.started")
            value = await self.runtime.call(call.fn, call.args, call.kwargs, True)
            if is_lazy(value):
                raise not_run(call, value, self.runtime.colour)
            reach("run.returned")
        except Exception as error:
            await self.fail(run, own(error))
            raise
        except BaseException as error:
            await self.lose(run, error)
            raise
        finally:
            _current.reset(token)
        if run.interrupt.fired:
            run.interrupt.absorb()
        return await self.complete(run, value)

    async def fail(self, run: Run, error: Exception) -> None:
        self._queue.take()
        await super().fail(run, error)

    async def lose(self, run: Run, error: BaseException) -> None:
        self._queue.take()
        await super().lose(run, error)

    async def fail_for_good(self, run: Run, error: BaseException | str) -> None:
        self._queue.take()
        await super().fail_for_good(run, error)

    async def release(self, run: Run) -> None:
        self._queue.take()
        await super().release(run)

    # ------------------------------------------------------------------------------------- the one EXEC
    async def complete(self, run: Run, value: Any) -> Outcome[Any]:
        try:
            data, marker, problem = self._encode(run.call, value)
            end = done_of(run, data, marker)
            # From here on the guard tells of a lost lease: the heartbeat must not cancel the caller.
            run.settling = True
            await self.runtime.protect(self._commit_or_fail(run, end))
        finally:
            self._queue.open()
        if self.emit is not None:
            self.emit(Executed(run.scope, run.attempt, self.runtime.now() - run.won_at))
        if problem is not None:
            raise problem
        return Outcome(value, replayed=False, ref=run.ref, attempt=run.attempt, marker=marker)

    async def _commit_or_fail(self, run: Run, end: Settle) -> None:
        """Where nothing was applied the run ends as a failure, although its caller may be gone by then."""
        try:
            await self._commit(run, end)
        except _NothingApplied as refused:
            await self.fail(run, refused.error)
            raise refused.error from refused.error.__cause__

    async def _commit(self, run: Run, end: Settle) -> None:
        try:
            self._queue.check_queued()
        except ConfigurationError as error:
            raise _NothingApplied(error) from error
        await self._layered.settle((end,))
        sealed = self._capture.end
        queued = self._queue.take()
        sender = self._queue.sender(self._raw.settle_keys(sealed)[0])
        until = self.runtime.now() + self.settle_timeout
        failure: Exception | None = None
        silent = False
        try:
            while True:
                try:
                    if await self._try(run, sealed, sender, queued):
                        await self._tell(end)
                        self.debts.ended(run.ask, end)
                        break
                    # Aborted, most likely by our own heartbeat, which writes the record that we watch. Where a try takes longer than
                    # a third of the lease that would happen every time: none during the next one.
                    self.heart.remove(run)
                    silent = True
                except (OSError, StoreUnavailable, _lost()) as error:
                    failure = error
                    if silent:  # the next try may be a while away, and the lease must last until then
                        self.heart.add(run)
                        silent = False
                if self.runtime.now() >= until:
                    raise self._undecided(run, failure)
                await self.runtime.sleep(_PAUSE)
        finally:
            self.heart.remove(run)
            await self._queue.done_with(sender)

    async def _try(self, run: Run, end: Settle, pipe: Any, queued: tuple[list[Any], set[Any]]) -> bool:
        """One guarded EXEC; False when it was aborted and the reason must be looked at."""
        from redis.exceptions import ConnectionError as Lost
        from redis.exceptions import RedisError, WatchError
        from redis.exceptions import TimeoutError as Late

        await waited(pipe.reset())
        keys = self._raw.settle_keys(end)
        try:
            await waited(pipe.watch(keys[0]))
            there = await waited(pipe.exists(keys[0]))
            if await self._is_done(run, there=bool(there)):
                return True
            commands = await self._watched(pipe, queued[0], self._queue.slot(keys[0]))
        except WatchError:  # so redis-py tells of a connection that broke while it watches
            return False
        except (Lost, Late):
            raise
        except RedisError as error:  # an ACL of the pipeline's user, say
            raise _NothingApplied(_as_told(error, self._queue.slot(keys[0]))) from error
        pipe.multi()
        pipe.command_stack, pipe.scripts = list(commands), set(queued[1])
        pipe.execute_command("EVAL", _LETTER_ONLY % _source(), len(keys), *keys, *self._raw.settle_args(end))
        reach("settle.sent")
        try:
            replies = await waited(pipe.execute(raise_on_error=False))
        except WatchError:
            return False
        except (Lost, Late):
            raise
        except RedisError as error:
            raise _NothingApplied(_as_told(error, self._queue.slot(keys[0]))) from error
        reach("settle.stored")
        told(commands)
        await self._check(run, end, replies)
        return True

    async def _watched(self, pipe: Any, commands: list[Any], slot: int | None) -> list[Any]:
        try:
            return await watched(pipe, commands, slot)
        except SemelError as error:
            if isinstance(error, StoreUnavailable):
                raise
            raise _NothingApplied(error) from error

    async def _is_done(self, run: Run, *, there: bool) -> bool:
        """Read after WATCH, on a connection of our own: what changes from here on aborts the EXEC."""
        record, now = await self.store.peek(run.scope)
        seen = model.view(record, now)
        if record is not None and record.nonce == run.ask.nonce:
            if seen is State.DONE:
                return True  # an earlier EXEC of ours whose answer was lost
            if seen in (State.RUNNING, State.UNKNOWN):
                if there:
                    return False
                await self.release(run)
                raise ConfigurationError(
                    "the pipeline talks to another Redis server or database than the face's store: the record is not there. "
                    "Make the pipeline from a client of the same server; nothing was applied"
                )
        run.lease_lost = True
        self.debts.lost(run)
        raise LeaseLost(
            f"{name_of(run.call)} was taken over by another owner while attempt {run.attempt} ran: none of its commands was "
            "applied. Read the key to see the outcome that counts"
        )

    async def _check(self, run: Run, end: Settle, replies: Sequence[Any]) -> None:
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if not errors:
            return
        error = errors[0]
        word = Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=Kind.UNKNOWN,
            retention=end.retention,
            error=failure_of(error),
            policy=Policy.HOLD,
            new_nonce=os.urandom(16),
            repair=True,
        )
        try:
            answer = (await self.store.settle((word,)))[0]
        except StoreUnavailable as problem:
            answer = problem
        if answer is not Answer.OK:
            if self.emit is not None:
                self.emit(Unrecorded(run.scope, run.attempt, error))
            add_note(error, f"the record could not be made unknown ({answer}): it may read as done")
        add_note(
            error,
            f"{len(errors)} of the commands queued for {name_of(run.call)} failed inside EXEC, the others were applied: "
            "the key is unknown now. Look at the data, then call resolve(...)",
        )
        raise error

    async def _tell(self, end: Settle) -> None:
        """The same settle through the layers: the store has it already; callers that wait in this process hear of it.

        With acks= it waits for the replicas, which an EXEC cannot do: what too few of them have is not recorded yet.
        """
        try:
            answer = (await self.store.settle((end,)))[0]
        except StoreUnavailable as error:
            answer = error
        if isinstance(answer, StoreUnavailable) and self._raw.acks:
            raise answer
        # Without acks= it is recorded, and waiters look again by themselves.

    def _undecided(self, run: Run, failure: Exception | None) -> StoreUnavailable:
        error = StoreUnavailable(
            f"Redis has not answered the EXEC of {name_of(run.call)} within {self.settle_timeout:g} s: either all of it was "
            "applied, and the record says so, or nothing. Call again with the same key"
        )
        error.__cause__ = failure
        return error


class _UnguardedEngine(PipelineEngine):
    """`enabled=False` (R8): nothing guards the commands, and they are sent all the same: nobody else would execute the pipeline."""

    def __init__(self, guarded: PipelineEngine) -> None:
        self.__dict__.update(guarded.__dict__)
        self._queue = self._queue.left_open()

    async def _commit_or_fail(self, run: Run, end: Settle) -> None:
        self._queue.open()
        try:
            await waited(self.pipe.execute())
        except Exception as error:
            await self.fail(run, error)
            raise
        self.heart.remove(run)
        await self.store.settle((end,))


class _NothingApplied(Exception):
    """The server refused a command while it was queued (its arity, its slot): EXEC was discarded as a whole."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _as_told(error: Exception, slot: int | None) -> Exception:
    """A cluster's refusal of a key in another slot, with the remedy; `slot` is the record's."""
    from redis.exceptions import ClusterCrossSlotError, MovedError

    crosses = isinstance(error, ClusterCrossSlotError)
    if slot is None or not (crosses or (isinstance(error, MovedError) and error.slot_id != slot)):
        return error
    told = ConfigurationError(
        "a command on the pipeline is for a key in another slot of the Redis Cluster than the record; nothing was applied. Put "
        "the record's hash tag into the keys of this call: f'order:{once.tag(key)}'"
    )
    told.__cause__ = error
    return told


def _lost() -> type[Exception]:
    from redis.exceptions import ConnectionError as Lost

    return Lost  # its TimeoutError is an OSError


def _source() -> str:
    from semel.stores.redis.record import SETTLE

    return SETTLE.source

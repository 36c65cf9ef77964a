"""`within(pipeline)`: the commands that a function queues and the settle of its record, in one guarded MULTI/EXEC (R28).

    claim (leased, renewed as usual) ──▶ function queues commands
    WATCH record ──▶ still ours? ──▶ MULTI, a count of errors, the commands, settle, EXEC ──▶ Outcome
       ▲                 └──▶ another owner: LeaseLost, nothing applied
       └── aborted (a renewal, or a takeover), no answer, or (in a cluster) the slot is elsewhere: look again

"Still ours?" is asked twice: of the server that gets the EXEC, on the connection that watches, and of the store. After a failover
these may be two, one of them no master any more: what only one of them knows counts for nothing (`Astray`), before and after.

EXEC does not roll back. So the guard comes first (WATCH: who lost the key applies nothing), the settle last. An error
reply inside EXEC leaves the other commands applied: the record is then settled as `unknown`, in the same EXEC, and the error
is raised. (Rejected: `done` in the EXEC and `unknown` by a second call, because whoever waits, or comes after a crash in
between, is told that it went well; and the other way round, because a crash would make every good pipeline unknown.) The
same if the settle itself fails there: exec_end.lua makes the record unknown with what else it can write. (Rejected: a note
beside the record, for whoever comes next. It outlives the record, or not, and an EXEC that comes late does not see it.) Only
absolute, idempotent commands (SET, HSET, ZADD …) are exactly once across a torn log: a server that loses the end of its
log may keep the commands and lose the settle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from semel import model
from semel.calls import Call, add_note, failure_of, is_lazy, not_run
from semel.errors import SemelError, StoreUnavailable
from semel.flow import Engine
from semel.hooks import Executed, Unrecorded
from semel.model import Answer, Ask, Failure, Kind, Policy, Record, Renewal, Settle, State, Verdict
from semel.points import reach
from semel.recording import done_of
from semel.run import Outcome, Run, _current, leave
from semel.runtime import Interrupt, own
from semel.store import Store
from semel.within import execs
from semel.within.execs import Ends
from semel.within.pipelines import (
    Astray,
    Capture,
    Elsewhere,
    Held,
    NothingApplied,
    Queue,
    as_told,
    give_back,
    guard,
    lost,
    moved,
    told,
    waited,
    watched,
)

__all__ = ["PipelineEngine"]

_ABORTED: Final = "Watched variable changed."  # what redis-py says where the server has answered that EXEC
_PASSING: Final = ("NOREPLICAS", "MISCONF")  # from everybody, and not for ever
_PAUSE: Final = 0.02
_PAUSE_IN_A_CLUSTER: Final = 0.1  # where its map was read anew: all who use it do that now
_OURS, _ELSE = 1, 2  # the replies of exec_seen.lua, and 0: nothing is there


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
            leave(token)
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
            unread = await self.runtime.protect(self._commit_or_fail(run, end))
        finally:
            try:
                self._queue.sent()  # also where a signal's handler raised before it was
            finally:
                self._queue.sent()  # or in there
        if self.emit is not None:
            self.emit(Executed(run.scope, run.attempt, self.runtime.now() - run.won_at))
        if unread is not None:
            raise unread
        if problem is not None:
            raise problem
        return Outcome(value, replayed=False, ref=run.ref, attempt=run.attempt, marker=marker)

    async def _commit_or_fail(self, run: Run, end: Settle) -> Exception | None:
        """Where nothing was applied the run ends as a failure, although its caller may be gone by then."""
        try:
            return await self._commit(run, end)
        except NothingApplied as refused:
            await self.fail(run, refused.error)
            raise refused.error from refused.error.__cause__

    async def _commit(self, run: Run, end: Settle) -> Exception | None:
        """All is applied and recorded, or it raises; what redis-py made of replies that it could not read is answered."""
        try:
            self._queue.check_queued()
            ends = Ends(await self._sealed(end), await self._sealed(execs.failed(run, end)))
        except Exception as error:  # a layer of the store's may raise anything
            raise NothingApplied(error) from error
        queued = self._queue.send()
        key = self._raw.settle_keys(ends.done)[0]
        until = self.runtime.now() + self.settle_timeout
        failure: Exception | None = None
        silent = False
        sender: Any = None
        trouble: tuple[type[Exception], ...] = (StoreUnavailable, Elsewhere, Astray, *lost())
        try:
            while True:
                pause = _PAUSE
                try:
                    sender = self._queue.sender(key) if sender is None else sender
                    if await self._try(run, ends, sender, queued):
                        await self._tell(run, end, ends)
                        self.debts.ended(run.ask, end)
                        return ends.unread
                    # Aborted, most likely by our own heartbeat, which writes the record that we watch. Where a try takes longer than
                    # a third of the lease that would happen every time: none during the next one.
                    self.heart.remove(run)
                    silent = True
                except trouble as error:
                    failure = error
                    if silent:  # the next try may be a while away, and the lease must last until then
                        self.heart.add(run)
                        silent = False
                    if self._queue.slot(key) is not None and not isinstance(error, StoreUnavailable):
                        left, sender, pause = sender, None, _PAUSE_IN_A_CLUSTER
                        await self._queue.elsewhere(left)
                if self.runtime.now() >= until:
                    raise await self._too_late(run, ends, failure)
                await self.runtime.sleep(pause)
                ends.again = True
        finally:
            self.heart.remove(run)
            with suppress(*lost()):
                await self._queue.done_with(sender)

    async def _sealed(self, end: Settle) -> Settle:
        """What the layers make of it."""
        await self._layered.settle((end,))
        sealed: Settle = self._capture.end
        return sealed

    async def _try(self, run: Run, ends: Ends, pipe: Any, queued: tuple[list[Any], set[Any]]) -> bool:
        """One guarded EXEC; False when it was aborted and the reason must be looked at."""
        from redis.exceptions import MovedError, ReadOnlyError, WatchError

        from semel.stores.redis.record import EXEC_BEGIN, EXEC_END

        await give_back(pipe)
        keys = self._raw.settle_keys(ends.done)
        note, slot = keys[0] + b":e", self._queue.slot(keys[0])
        sent_before = ends.sent
        try:
            await guard(pipe, keys[0], anew=ends.again)
            there = await _seen(pipe, keys[0], note, run.ask.nonce)
            excused = not ends.again or self._queue.moves  # a replaced master may have no record, either
            applied = await self._is_applied(run, ends, there=bool(there) or excused)
            if there != (_ELSE if applied else _OURS):  # what the store says, this server does not
                raise Astray
            if applied:
                return True
            commands = await self._watched(pipe, queued[0], slot)
            pipe.multi()
            pipe.command_stack, pipe.scripts = (
                [execs.evaluated(EXEC_BEGIN.source, note), *commands],
                set(queued[1]),
            )
            args = (*self._raw.settle_args(ends.done), *self._raw.settle_args(ends.failed))
            pipe.command_stack.append(execs.evaluated(EXEC_END.source, *keys, note, args=args))
            ends.sent = True
            reach("settle.sent")
            replies = await waited(pipe.execute(raise_on_error=False))
        except WatchError as aborted:  # so redis-py tells of a connection that broke while it watches, too
            if str(aborted) == _ABORTED:
                ends.sent = sent_before
            return False
        except lost():
            raise
        except (SemelError, Astray):
            raise
        except Exception as error:  # noqa: BLE001 - an ACL of the pipeline's user, a reply that is no text, who looks after a command
            refused = error.error if isinstance(error, NothingApplied) else error
            if isinstance(refused, MovedError) and slot is None:
                add_note(refused, execs.SHARDED)
            await self._find_out(run, ends, refused, slot)
            return True
        if isinstance(
            replies[-1], ReadOnlyError
        ):  # a replica: it has refused what other scripts would write, too
            await self._find_out(run, ends, replies[-1], slot)
            return True
        reach("settle.stored")
        told(commands)
        ends.answered = True
        await self._check(run, ends, replies)
        return True

    async def _find_out(self, run: Run, ends: Ends, error: Exception, slot: int | None) -> None:
        """The server refused, or redis-py could not read what it answered: only the record tells whether it was applied. It raises
        if it was not."""
        from redis.exceptions import ReadOnlyError, ResponseError

        if isinstance(error, ReadOnlyError) and self._queue.moves and slot is None:
            raise Astray  # its Sentinel knows the master
        if not await self._is_applied_for_good(run, ends):
            said = as_told(error, slot)
            if slot is not None and isinstance(said, moved()):
                raise Elsewhere(error) from error
            raise NothingApplied(said) from error
        if isinstance(error, (ResponseError, SemelError)):
            return  # the refusal of a try after the one that was applied
        add_note(error, execs.unreadable(run))
        ends.unread = error

    async def _watched(self, pipe: Any, commands: list[Any], slot: int | None) -> list[Any]:
        try:
            return await watched(pipe, commands, slot)
        except SemelError as error:
            if isinstance(error, StoreUnavailable):
                raise
            raise NothingApplied(error) from error

    async def _is_applied_for_good(self, run: Run, ends: Ends) -> bool:
        """As `_is_applied`, and no EXEC of ours will be from here on: one that is still on its way, its answer given up, watches the
        record, which the renewal changes. Looked at without it, the record might be made unknown just before it is freed."""
        renewal = Renewal(run.scope, run.ask.nonce, run.ask.lease, run.call.options.retention)
        answer = (await self.store.renew((renewal,)))[0]
        if isinstance(answer, Exception):
            raise answer
        return await self._is_applied(run, ends, there=True)

    async def _is_applied(self, run: Run, ends: Ends, *, there: bool) -> bool:
        """Whether an EXEC of ours went through although nobody has heard its answer."""
        try:
            return await self._is_done(run, ends, there=there)
        except Held:
            if ends.well:  # its answer was heard; what came after it failed
                return True
        raise await self._held(run, ends)

    async def _held(self, run: Run, ends: Ends) -> SemelError:
        """An EXEC of ours was applied, an error in it, and nobody has heard the answer."""
        await self._hold(run, ends.done, failure_of(execs.UNREAD))
        return execs.unread(run)

    async def _is_done(self, run: Run, ends: Ends, *, there: bool) -> bool:
        """Read after WATCH, on a connection of our own: what changes from here on aborts the EXEC."""
        record, now = await self.store.peek(run.scope)
        seen = model.view(record, now)
        if record is not None and record.nonce == run.ask.nonce:
            if seen is State.DONE:
                return True  # an earlier EXEC of ours whose answer was lost
            if record.state is State.UNKNOWN:
                raise Held  # the same, and a command inside of it failed
            if seen in (State.RUNNING, State.UNKNOWN):
                if there:
                    return False
                await self.release(run)
                raise execs.another_server()
        run.lease_lost = True
        self.debts.lost(run)
        raise execs.taken_over(run, sent=ends.sent)

    async def _check(self, run: Run, ends: Ends, replies: Sequence[Any]) -> None:
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        held = replies[-1] == 1 or execs.MADE_UNKNOWN in str(replies[-1])
        if not errors:
            ends.well = held  # a script has caught an error: see exec_end.lua
            return
        error = errors[0]
        answer = await self._hold(run, ends.done, failure_of(error))
        if answer is not Answer.OK and not held:
            if self.emit is not None:
                self.emit(Unrecorded(run.scope, run.attempt, error))
            now = f"the record could not be made unknown ({answer}): it may read as done, or be run again"
        else:
            now = "the key is unknown now"
        failed = sum(isinstance(reply, Exception) for reply in replies[1:-1])
        applied = execs.applied_but(failed, run)
        add_note(error, f"{applied}: {now}. Look at the data, then call resolve(...)")
        raise error

    async def _hold(self, run: Run, end: Settle, failure: Failure) -> Answer | Exception:
        """Let the record tell the error as well, and the callers that wait in this process hear of it. Where the server did not
        count errors, this is what makes it unknown."""
        word = Settle(
            scope=run.scope,
            nonce=run.ask.nonce,
            kind=Kind.UNKNOWN,
            retention=end.retention,
            error=failure,
            policy=Policy.HOLD,
            new_nonce=os.urandom(16),
            repair=True,
        )
        try:
            answer = (await self.store.settle((word,)))[0]
            if answer is Answer.REFUSED:
                # The settle itself failed inside the EXEC: the run is live, and its owner may say so.
                own = msgspec.structs.replace(execs.failed(run, end), error=failure)
                answer = (await self.store.settle((own,)))[0]
        except SemelError as problem:  # also what is under one of the store's names, and is none of its own
            return problem
        return answer

    async def _tell(self, run: Run, end: Settle, ends: Ends) -> None:
        """The same settle through the layers: the store has it already; callers that wait in this process hear of it.
        With acks= it waits for the replicas, which an EXEC cannot do: what too few of them have is not recorded yet."""
        try:
            if ends.answered:
                await self._make_sure(run, ends)
            answer = (await self.store.settle((end,)))[0]
        except StoreUnavailable as error:
            answer = error
        if isinstance(answer, StoreUnavailable) and (ends.well or self._raw.acks):
            raise answer
        # Without acks= it is recorded, and waiters look again by themselves.

    async def _make_sure(self, run: Run, ends: Ends) -> None:
        """That it was the store's master that answered, as far as the store can be asked: one that was replaced and has not heard of
        it answers as well, and what it has applied goes with it. Recorded as done by the settle that follows, it would be lost."""
        record, _ = await self.store.peek(run.scope)
        if record is not None and record.nonce == run.ask.nonce and record.state is State.RUNNING:
            ends.answered, ends.well, ends.unread = False, False, None
            raise Astray

    async def _too_late(self, run: Run, ends: Ends, failure: Exception | None) -> SemelError:
        error: SemelError
        if ends.well:
            error = execs.unsettled(run, self.settle_timeout)
        elif isinstance(failure, Astray):
            error = execs.disagreed(run, self.settle_timeout, sent=ends.sent)
            if not ends.sent:
                await self._give_back(run, ends)
        elif isinstance(failure, Elsewhere) and await self._give_back(run, ends):
            error, failure = execs.unserved(run, self.settle_timeout), failure.error
        elif failure is not None and not ends.sent:
            error = execs.unsent(run, self.settle_timeout, failure)
            if isinstance(failure, lost()):  # else the store is away as well
                await self._give_back(run, ends)
        else:
            error = execs.unanswered(run, self.settle_timeout, failure)
        error.__cause__ = failure
        return error

    async def _give_back(self, run: Run, ends: Ends) -> bool:
        """Nothing was applied, and the function has not failed: nobody need wait for the lease. False where that is not certain."""
        end = Settle(run.scope, run.ask.nonce, Kind.RELEASED, run.call.options.retention)
        try:
            if await self._is_applied_for_good(run, ends):
                return False
        except StoreUnavailable:
            return False
        with suppress(StoreUnavailable):  # then it ends with its lease
            await self.store.settle((end,))
            self.debts.ended(run.ask, end)
        return True


async def _seen(pipe: Any, record: bytes, note: bytes, nonce: bytes) -> int:
    """What the server says that gets the EXEC, and that it would take the settle."""
    from redis.exceptions import ResponseError

    from semel.stores.redis.record import EXEC_SEEN

    try:
        return int(await waited(pipe.eval(EXEC_SEEN.source, 2, record, note, nonce)))
    except ResponseError as error:
        if str(error).startswith(_PASSING):
            raise StoreUnavailable(str(error)) from error
        add_note(error, execs.UNWRITABLE)
        raise


class _UnguardedEngine(PipelineEngine):
    """`enabled=False` (R8): nothing guards the commands, and they are sent all the same: nobody else would execute the pipeline."""

    def __init__(self, guarded: PipelineEngine) -> None:
        self.__dict__.update(guarded.__dict__)
        self._queue = self._queue.left_open()

    async def _commit_or_fail(self, run: Run, end: Settle) -> Exception | None:
        self._queue.open()
        try:
            await waited(self.pipe.execute())
        except Exception as error:
            await self.fail(run, error)
            raise
        self.heart.remove(run)
        await self.store.settle((end,))
        return None

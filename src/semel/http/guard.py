"""One route's guard over one store: requests are admitted (`admission`), run, and end in a record. One body, both colours.

    admit ──▶ Admitted ──▶ begin ──▶ (the handler runs) ──▶ settle, fail or lose

Persist the outcome before the first byte of the response; claim with the fingerprint; never free a key whose handler
may have had its effect, unless `effects` says that a failed one left nothing behind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from semel.calls import failure_of
from semel.errors import CodecError, ConfigurationError, LeaseLost, NotRecorded
from semel.face import Face
from semel.flow import Engine
from semel.hooks import Executed, Failed
from semel.http.admission import Admission, Admitted, Keyed
from semel.http.breaker import Latency
from semel.http.ending import STARTED, end_of, has_begun, is_passing, keeps_failures, unrecorded
from semel.http.head import read_head
from semel.http.keys import operation_of
from semel.http.problem import PROBLEM_TYPE, Problem
from semel.http.reply import Headers, Replies, Reply
from semel.http.rules import Rules, Word, storable
from semel.http.snapshot import Snapshot
from semel.http.stored import CODEC, not_kept
from semel.model import Failure
from semel.points import reach
from semel.run import Run

__all__ = ["Admitted", "Guard", "Keyed"]

_log = logging.getLogger("semel.http")


class Guard:
    """One route's rules over one `Semel` or `AsyncSemel`."""

    def __init__(self, once: Face, rules: Rules) -> None:
        self.once = once
        self.rules = rules
        self.replies = Replies(rules, once._emit)  # noqa: SLF001 - our own
        self.operation = operation_of(once._defaults.operation)  # noqa: SLF001 - our own
        self.sources = tuple(_source(source) for source in rules.sources)
        """Where the key comes from: kind, name, and the name as a header line has it."""
        self.takes_bare = not rules.strict and rules.min_length <= 1 and not rules.uuid7
        """Whatever is a key without quotes is one here."""
        self.keeps_failures = keeps_failures(rules)
        self.most = (
            rules.max_response if rules.spill is None else max(rules.max_response, rules.spill.max_size)
        )
        """The longest body that is kept, in bytes."""
        self._latency = Latency()
        admission = Admission(once, rules, self._latency)
        self._edge = admission.edge
        # The very methods: every keyed request goes this way, and a call in between would be a coroutine more.
        self.admit = admission.admit
        self.early = admission.early

    @property
    def engine(self) -> Engine:
        return self._edge.engine

    # --------------------------------------------------------------------------------------------- while it runs
    def begin(self, admitted: Admitted) -> Run:
        return admitted.engine.begin(admitted.call, admitted.ask, admitted.record)

    async def resumed(self, run: Run) -> Problem | None:
        """An earlier attempt had begun to answer when it died: the effect is over, its response is lost (H19)."""
        try:
            known = run.steps.get(STARTED) if run.has_steps else None
            if known is not None:
                snapshot = self._begun(run, known.value)
                problem = not_kept(snapshot)
                return await self._recorded(run, snapshot, "store") or problem
        except Exception as error:
            # Which leaves the steps: the next attempt looks at them again.
            await _engine_of(run).fail(run, error)
            raise
        reach("run.started")
        return None

    @staticmethod
    def _begun(run: Run, note: bytes) -> Snapshot:
        try:
            return Snapshot.decode(CODEC.decode(note))
        except CodecError as error:
            _log.error("what the response of %r was cannot be read: %s", run.scope, error)
            return Snapshot(0, kept=False)

    async def started(self, run: Run, status: int, headers: Headers) -> Headers | Problem:
        """The response of a stream begins: remember that the handler's effect is over before its first byte leaves.

        The headers to send. A problem: that could not be remembered, so the stream must not begin.
        """
        head = read_head(self.rules, status, headers)
        if head.kind.startswith(b"text/event-stream"):
            if head.word != "release":  # the handler has returned: what it did is not done again
                await self._recorded(run, Snapshot(status, head.stored, kept=False), "store")
            raise ConfigurationError(
                "a keyed request was answered with server-sent events: they need an event log to attach to (events=), "
                "which this version does not have; use a GET for the stream, or leave the route out (routes=)"
            )
        sent = self.replies.first(head.word, head.sent, head.retention)
        if head.word == "release":
            return sent
        snapshot = Snapshot(status, head.stored, kept=False)
        try:
            await self._noted(run, snapshot)
        except Exception as error:  # noqa: BLE001 - the effect happened: whatever it is, the key must not be freed
            _log.warning("a stream of %r could not be begun: %s", run.scope, error)
            pending = Problem.of("outcome-pending", retry_after=1.0)
            return await self._recorded(run, snapshot, "store") or pending
        return sent

    async def _noted(self, run: Run, snapshot: Snapshot) -> None:
        note = snapshot.encode()
        give = self._giver(run, note)
        await _engine_of(run).stepper.step(run, STARTED, give, (), {}, None, bytes, None)
        reach("http.responding")

    @staticmethod
    def _giver(run: Run, note: bytes) -> Callable[[], Any]:
        if run.colour == "sync":
            return lambda: note

        async def give() -> bytes:
            return note

        return give

    # ------------------------------------------------------------------------------------------------ the outcome
    async def settle(
        self, run: Run, status: int, headers: Headers, body: bytes | None, *, passing: bool = False
    ) -> Headers | Problem:
        """Record what became of the request, before its response is sent: the headers to send, or a problem in its place.

        `body` None: it was longer than `most`. `passing`: nothing of the application has run.
        """
        reach("run.returned")
        try:
            head = read_head(self.rules, status, headers)
            word = head.word
            if passing or (head.kind == PROBLEM_TYPE and is_passing(self.rules, head, body)):
                word = "release"
            kept = body is not None and len(body) <= self.rules.max_response
            snapshot = Snapshot(status, head.stored, body if kept and body else b"", kept=kept)
            if not kept and body is not None and self.rules.spill is not None and len(body) <= self.most:
                snapshot = await self._spilled(run, snapshot, body, word, head.retention)
            end = end_of(run, snapshot, word, head.retention)
        except Exception:  # of ours, or of stored=: what the handler did is not done again
            await self.replaced(run, status)
            raise
        sent, retention = head.sent, head.retention
        del (
            head,
            snapshot,
        )  # nothing of it is needed any more, and nobody is to look after it while the store is asked
        if run.settling:  # its end is recorded, and what is said in its place changes nothing
            return self.replies.first("release", sent)
        engine = run._engine  # noqa: SLF001 - our own
        self._latency.add(engine.runtime.now() - run.won_at)
        try:  # as `_recorded`, without a coroutine more around the write
            await engine.recorder.record(run, end, None)
        except (NotRecorded, LeaseLost) as error:
            problem = unrecorded(error, word)
            if problem is not None:
                return problem
        else:
            if engine.emit is not None:
                self._tell(engine, run, word)
        return self.replies.first(word, sent, retention)

    async def _spilled(
        self, run: Run, snapshot: Snapshot, body: bytes, word: Word, retention: float | None
    ) -> Snapshot:
        """A body that is too long for the record is stored beside it, before the record is written (H26)."""
        if word not in ("store", "replay") or run.settling:
            return snapshot
        wanted = run.call.options.retention if retention is None else retention
        given = (run, snapshot, body, wanted, self.once._ring)  # noqa: SLF001 - our own
        try:
            kept: Snapshot = await run._engine.runtime.call(self.rules.spill.kept, given, {}, False)  # noqa: SLF001 - our own run
        except BaseException:
            # Cancelled while the body was being stored. The handler has returned: its key must not be freed.
            if not run.lease_lost:
                await self._recorded(run, snapshot, word)
            raise
        return kept

    def word(self, status: int, headers: Headers, body: bytes | None) -> Word:
        """What a whole response means for its key; `settle` records just this."""
        head = read_head(self.rules, status, headers)
        return "release" if is_passing(self.rules, head, body) else head.word

    async def _recorded(
        self, run: Run, snapshot: Snapshot, word: Word, failure: Failure | None = None
    ) -> Problem | None:
        engine = _engine_of(run)
        try:
            await engine.recorder.record(run, end_of(run, snapshot, word, None, failure), None)
        except (NotRecorded, LeaseLost) as error:
            return unrecorded(error, word)
        self._tell(engine, run, word)
        return None

    @staticmethod
    def _tell(engine: Engine, run: Run, word: Word) -> None:
        if word == "store" and engine.emit is not None:
            engine.emit(Executed(run.scope, run.attempt, engine.runtime.now() - run.won_at))

    async def fail(self, run: Run, error: Exception) -> Reply | None:
        """The handler raised, or its stream broke: `effects` decides (H15). What is recorded already stays.

        A Reply: what every repetition will get; send it now too, if nothing has been sent (H11).
        """
        if run.settling:
            return None
        if self.rules.effects != "opaque" and has_begun(run):
            await self._recorded(run, Snapshot(500), "release")
        elif run.lease_lost or not self.keeps_failures:
            await _engine_of(run).fail(run, error)
        else:
            return await self._failed(run, error)
        return None

    async def _failed(self, run: Run, error: Exception) -> Reply:
        if (emit := _engine_of(run).emit) is not None:
            emit(Failed(run.scope, run.attempt, "replay", error))
        said = self.replies.failed()
        snapshot = Snapshot(said.status, storable(self.rules, said.headers), said.body)
        problem = await self._recorded(run, snapshot, "replay", failure_of(error))
        if problem is not None:
            return self.replies.problem(problem)
        return Reply(said.status, self.replies.first("replay", said.headers), said.body)

    async def replaced(self, run: Run, status: int, headers: Headers | None = None) -> Problem | None:
        """Another response was sent in place of the handler's: what happened is kept, what was said is not.

        Also where a handler has returned and we could not read or record its response: its key must not be freed.
        `headers`: those of a response that could be read; one that frees its key does so here too (H14, H15).
        A problem: the store has not taken it.
        """
        if run.settling:
            return None
        frees = headers is not None and self._frees(status, headers)
        return await self._recorded(run, Snapshot(status, kept=False), "release" if frees else "store")

    def _frees(self, status: int, headers: Headers) -> bool:
        try:
            return read_head(self.rules, status, headers).word == "release"
        except Exception:  # noqa: BLE001 - of stored=: what the handler did is not done again
            _log.warning("what a response of status %d means for its key is not known", status, exc_info=True)
            return False

    async def lose(self, run: Run, error: BaseException) -> Problem | None:
        """Cancelled or interrupted: nobody knows how far the handler came. A problem: because another owner has the key."""
        try:
            await _engine_of(run).lose(run, error)
        except LeaseLost:
            return Problem.of("in-progress", retry_after=1.0)
        return None


def _engine_of(run: Run) -> Engine:
    """The one that has begun it. A face that is being closed gives no other, and waits for those who run."""
    return run._engine  # noqa: SLF001 - our own


def _source(text: str) -> tuple[str, str, bytes]:
    kind, _, name = text.partition(":")
    return kind, name, name.encode("latin-1", "replace")

"""The interceptor of a grpc.aio server. Keyed handlers run detached: a client that leaves does not cancel an effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import copy_context
from inspect import isasyncgenfunction, isawaitable
from typing import Any, Final, NoReturn, Unpack

import grpc
import grpc.aio

from semel import AsyncSemel
from semel.errors import ConfigurationError, SemelError
from semel.grpc.answers import Answer, Metadata, say_trailing
from semel.grpc.callers import Caller
from semel.grpc.captures import AioCapture, AsyncCapture, Capture
from semel.grpc.handlers import Wire, behaviour_of, handler_like
from semel.grpc.policy import Options, Policy, Route, Ticket, Unstored, marker, refused
from semel.grpc.refusals import Refusal
from semel.grpc.requests import Received
from semel.grpc.rules import CUT_WITHIN
from semel.http.keys import operation_of
from semel.loop import is_async

__all__ = ["AsyncIdempotencyInterceptor"]

_END: Final = object()


class AsyncIdempotencyInterceptor(grpc.aio.ServerInterceptor):
    """Calls with an idempotency key run once; a repetition gets the recorded answer, byte for byte.

    Put it after the interceptors that authenticate: whoever stands before it is asked on replays too. grpc.aio cancels a
    handler when its client leaves or its deadline passes; a keyed one runs on, and its outcome is recorded. At shutdown
    wait for those with `drain`, or close the AsyncSemel, which waits too.
    """

    def __init__(self, *, once: AsyncSemel, **options: Unpack[Options]) -> None:
        if not isinstance(once, AsyncSemel):
            raise ConfigurationError(
                f"once must be an AsyncSemel, not {type(once).__name__}: a threaded server takes IdempotencyInterceptor "
                "and Semel"
            )
        self._once = once
        self._policy = Policy({"operation": operation_of(once._defaults.operation), **options})  # noqa: SLF001 - our own
        self._running: set[asyncio.Task[Any]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, or one around it."""
        handler = await continuation(handler_call_details)
        route = self._policy.covered(handler_call_details, handler)
        if handler is None or route is None:
            return handler
        if isinstance(route, Refusal):
            return handler_like(handler, _refusing(route))
        call = _Call(self._once, self._policy, route, handler, self._running)
        return handler_like(handler, call.stream if handler.response_streaming else call.unary)

    async def drain(self, timeout: float | None = None) -> int:
        """Wait for handlers whose clients have left; how many still run when `timeout` seconds are over."""
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=timeout)
        return sum(not task.done() for task in self._running)


def _refusing(refusal: Refusal) -> Callable[[Any, Any], Any]:
    async def refuse(_: Any, context: Any) -> Any:
        await _refuse(context, refusal)

    return refuse


class _Call:
    """One call of a covered method."""

    def __init__(
        self, once: AsyncSemel, policy: Policy, route: Route, handler: Any, running: set[asyncio.Task[Any]]
    ) -> None:
        self._once = once
        self._policy = policy
        self._route = route
        self._handler = handler
        self._running = running
        self._started = False
        self._raised: Exception | None = None
        self._left: Answer | None = None  # what a stream had said when its handler raised

    async def unary(self, request: Any, context: Any) -> Any:
        key = await self._key(request, context)
        behaviour = behaviour_of(self._handler)
        if key is None and is_async(behaviour):
            return await behaviour(request.message, context)
        if key is None:
            answer = await self._in_thread([request], context)
        else:
            answer = await self._settled(key, request, context)
        await _finish(context, answer)
        return Wire(answer.messages[0] if answer.messages else b"")

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        key = await self._key(request, context)
        behaviour = behaviour_of(self._handler)
        if key is None and isasyncgenfunction(behaviour):
            async for message in behaviour(request.message, context):
                yield message
            return
        if key is None and is_async(behaviour):
            await behaviour(request.message, context)  # it writes to the context itself
            return
        if key is None:
            async for message in self._streamed(request, context):
                yield message
            return
        try:
            answer = await self._settled(key, request, context)
        except Exception as error:
            if error is self._raised and self._left is not None:
                await context.send_initial_metadata((*self._left.initial, marker(replayed=False)))
                for left in self._left.messages:
                    yield Wire(left)
            raise
        for message in answer.messages:
            yield Wire(message)
        await _finish(context, answer)

    # --------------------------------------------------------------------------------------- the request

    async def _asked(self, request: Any) -> list[Received]:
        """The request's messages; a client stream is read to its end first, because all of it is the request."""
        if not self._handler.request_streaming:
            return [request]
        asked, size = [], 0
        async for one in request:
            asked.append(one)
            size += len(one.raw)
            if size > self._route.rules.max_request:
                raise Refusal("BODY_TOO_LARGE")
        await asyncio.sleep(CUT_WITHIN)  # cancelled here: it was cut, and a part of a request is none
        return asked

    async def _key(self, request: Any, context: Any) -> str | None:
        """The key; a client stream has one in its metadata, or would not be here, and none of it has been read."""
        message = None if self._handler.request_streaming else request.message
        try:
            return self._policy.key(self._route, tuple(context.invocation_metadata() or ()), message)
        except Refusal as refusal:
            await _refuse(context, refusal)

    # ---------------------------------------------------------------------------------------- the answer

    async def _in_thread(self, asked: list[Received], context: Any) -> Answer:
        """A plain function and no key: run as grpc.aio would run it. Its answer is what it is, nothing is stored."""
        capture, work = self._work(asked, context)
        with suppress(Unstored):
            await asyncio.to_thread(work)
        answer = capture.answer()
        if answer.initial:
            await context.send_initial_metadata(answer.initial)
        return answer

    async def _streamed(self, request: Received, context: Any) -> AsyncIterator[Any]:
        """A plain generator and no key: each message leaves when it is made, and the next one is made when it has left."""
        capture = AioCapture(context, self._handler.response_serializer)

        def said() -> Iterator[Any]:
            yield from behaviour_of(self._handler)(request.message, capture)

        messages, is_begun = said(), False
        run: Any = copy_context().run  # one for all steps: what the generator sets there stays
        loop = asyncio.get_running_loop()
        while True:
            try:
                message: Any = await loop.run_in_executor(None, run, next, messages, _END)
            except Exception as error:  # noqa: BLE001 - the policy raises again what is not an answer
                self._policy.raised(self._route, capture, error)
                message = _END
            answer = capture.answer()
            if answer.initial and not is_begun:
                is_begun = True
                await context.send_initial_metadata(answer.initial)
            if message is _END:
                break
            yield message
        await _finish(context, answer)

    async def _settled(self, key: str, request: Any, context: Any) -> Answer:
        """The answer to send, its initial metadata sent already."""
        try:
            caller = await self._caller(context)  # before anything is read for it
            asked = await self._asked(request)
            ticket = self._policy.ticket(self._route, key, caller, asked, context.time_remaining())
            answer, replayed = await self._detached(ticket, asked, context)
        except Unstored as unstored:
            if not unstored.is_all_there_is(self._handler):
                await _fail(context, unstored.answer, (marker(replayed=False),))
            answer, replayed = unstored.answer, False
        except Refusal as refusal:
            await _refuse(context, refusal)
        except SemelError as error:
            if error is self._raised:
                raise  # the handler's own: it may use semel too
            await _refuse(context, refused(error))
        said = (marker(replayed=replayed),) if self._once.enabled else ()
        await context.send_initial_metadata((*answer.initial, *said))
        return answer

    async def _caller(self, context: Any) -> Caller:
        policy = self._policy
        found: list[Any] = []
        try:
            for ask in (policy.principal, policy.tenant, policy.authorize):
                value = None if ask is None else ask(context)
                found.append(await value if isawaitable(value) else value)
        except PermissionError as error:
            raise Refusal("NOT_AUTHORIZED") from error
        return policy.caller(self._route, *found)

    async def _detached(self, ticket: Ticket, asked: list[Received], context: Any) -> tuple[Answer, bool]:
        """Run it where the client's leaving cannot cancel it. One that only waits for another's outcome may leave."""
        task = asyncio.ensure_future(self._executed(ticket, asked, context))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_looked_at)
            if not self._started:
                task.cancel()
            raise

    async def _executed(self, ticket: Ticket, asked: list[Received], context: Any) -> tuple[Answer, bool]:
        capture, work = self._work(asked, context)
        outcome = await self._once.execute(ticket.key, work, **ticket.options)
        if outcome.replayed:
            return self._policy.replayed(outcome), True
        return capture.answer(), False

    def _work(self, asked: list[Received], context: Any) -> tuple[Capture, Callable[[], Any]]:
        """The handler as a function that returns what is stored, in the handler's own colour."""
        behaviour, messages = behaviour_of(self._handler), [one.message for one in asked]
        serialize = self._handler.response_serializer
        if not is_async(behaviour) and not isasyncgenfunction(behaviour):
            plain = AioCapture(context, serialize)
            return plain, self._plain(behaviour, messages, plain)
        capture = AsyncCapture(context, serialize, messages)

        async def work() -> bytes:
            self._started = True
            argument = _later(messages) if self._handler.request_streaming else messages[0]
            try:
                if isasyncgenfunction(behaviour):
                    async for message in behaviour(argument, capture):
                        capture.keep(message)
                else:
                    said = await behaviour(argument, capture)
                    if not self._handler.response_streaming:  # a stream was written to the context
                        capture.keep(said)
            except Exception as error:  # noqa: BLE001 - the policy raises again what is not an answer
                self._raised = error
                self._left = self._policy.left(self._route, self._handler, capture)
                self._policy.raised(self._route, capture, error)
            return self._policy.ended(self._route, capture)

        return capture, work

    def _plain(self, behaviour: Any, messages: list[Any], capture: Capture) -> Callable[[], bytes]:
        def work() -> bytes:
            self._started = True
            argument: Any = iter(messages) if self._handler.request_streaming else messages[0]
            try:
                said = behaviour(argument, capture)
                for message in said if self._handler.response_streaming else (said,):
                    capture.keep(message)
            except Exception as error:  # noqa: BLE001 - the policy raises again what is not an answer
                self._raised = error
                self._left = self._policy.left(self._route, self._handler, capture)
                self._policy.raised(self._route, capture, error)
            return self._policy.ended(self._route, capture)

        return work


async def _later(messages: list[Any]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Its client has left and nobody else looks at its error; the core's hooks have reported it."""
    if not task.cancelled():
        task.exception()


# ------------------------------------------------------------------------------------------------- what is sent


async def _finish(context: Any, answer: Answer) -> None:
    if answer.status is not grpc.StatusCode.OK:
        await _fail(context, answer)
    say_trailing(context, answer.trailing)


async def _fail(context: Any, answer: Answer, more: Metadata = ()) -> NoReturn:
    say_trailing(context, (*answer.trailing, *more))
    await context.abort(answer.status, answer.details)
    raise AssertionError("abort does not return")


async def _refuse(context: Any, refusal: Refusal) -> NoReturn:
    """Without initial metadata: a client that has seen some regards the call as committed and never retries it."""
    say_trailing(context, refusal.metadata())
    await context.abort(refusal.code, refusal.text)
    raise AssertionError("abort does not return")

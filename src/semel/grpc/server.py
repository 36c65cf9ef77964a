"""The interceptor of a threaded server: `grpc.server(pool, interceptors=[IdempotencyInterceptor(once=…, principal=…)])`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any, Final, NoReturn, Unpack

import grpc

from semel import Semel
from semel.errors import ConfigurationError, SemelError
from semel.grpc.answers import Answer, Metadata, say_trailing
from semel.grpc.callers import Caller
from semel.grpc.captures import Capture
from semel.grpc.handlers import Wire, behaviour_of, handler_like
from semel.grpc.policy import Options, Policy, Route, Ticket, Unstored, marker, refused
from semel.grpc.refusals import Refusal
from semel.grpc.requests import Received
from semel.grpc.rules import CUT_WITHIN
from semel.http.keys import operation_of
from semel.http.resolving import plain
from semel.loop import is_async

__all__ = ["IdempotencyInterceptor"]

_THREADED: Final = "a threaded server cannot await it"


class IdempotencyInterceptor(grpc.ServerInterceptor):
    """Calls with an idempotency key run once; a repetition gets the recorded answer, byte for byte.

    Put it after the interceptors that authenticate: whoever stands before it is asked on replays too. A call that waits
    for another one holds a thread of the server. The handler runs to its end whatever its client does.
    """

    def __init__(self, *, once: Semel, **options: Unpack[Options]) -> None:
        if not isinstance(once, Semel):
            raise ConfigurationError(
                f"once must be a Semel, not {type(once).__name__}: a grpc.aio server takes AsyncIdempotencyInterceptor "
                "and AsyncSemel"
            )
        self._once = once
        self._policy = Policy({"operation": operation_of(once._defaults.operation), **options})  # noqa: SLF001 - our own
        for name in ("principal", "tenant", "authorize"):
            if (resolver := getattr(self._policy, name)) is not None and is_async(resolver):
                raise ConfigurationError(f"{name} is a coroutine function: a threaded server cannot await it")

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """The method's own handler, or one around it."""
        handler = continuation(handler_call_details)
        route = self._policy.covered(handler_call_details, handler)
        if handler is None or route is None:
            return handler
        if isinstance(route, Refusal):
            return handler_like(handler, _refusing(route))
        call = _Call(self._once, self._policy, route, handler)
        return handler_like(handler, call.stream if handler.response_streaming else call.unary)


def _refusing(refusal: Refusal) -> Callable[[Any, Any], Any]:
    def refuse(_: Any, context: grpc.ServicerContext) -> Any:
        _refuse(context, refusal)

    return refuse


class _Call:
    """One call of a covered method."""

    def __init__(self, once: Semel, policy: Policy, route: Route, handler: Any) -> None:
        self._once = once
        self._policy = policy
        self._route = route
        self._handler = handler
        self._raised: Exception | None = None
        self._left: Answer | None = None  # what a stream had said when its handler raised

    def unary(self, request: Any, context: grpc.ServicerContext) -> Any:
        key = self._key(request, context)
        if key is None:
            return behaviour_of(self._handler)(request.message, context)
        answer = self._settled(key, request, context)
        _finish(context, answer)
        return Wire(answer.messages[0] if answer.messages else b"")

    def stream(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        key = self._key(request, context)
        if key is None:
            yield from behaviour_of(self._handler)(request.message, context)
            return
        try:
            answer = self._settled(key, request, context)
        except Exception as error:
            if error is self._raised and self._left is not None:
                context.send_initial_metadata((*self._left.initial, marker(replayed=False)))
                yield from map(Wire, self._left.messages)
            raise
        for message in answer.messages:
            yield Wire(message)
        _finish(context, answer)

    # --------------------------------------------------------------------------------------- the request

    def _asked(self, request: Any, context: grpc.ServicerContext) -> list[Received]:
        """The request's messages; a client stream is read to its end first, because all of it is the request."""
        if not self._handler.request_streaming:
            return [request]
        asked, size = [], 0
        for one in request:
            asked.append(one)
            size += len(one.raw)
            if size > self._route.rules.max_request:
                raise Refusal("BODY_TOO_LARGE")
        left = Event()
        if not context.add_callback(left.set) or left.wait(CUT_WITHIN):
            # A part of a request is none. Nobody hears this.
            context.abort(grpc.StatusCode.CANCELLED, "the client left before its stream was whole")
        return asked

    def _argument(self, asked: list[Received]) -> Any:
        messages = [one.message for one in asked]
        return iter(messages) if self._handler.request_streaming else messages[0]

    def _key(self, request: Any, context: grpc.ServicerContext) -> str | None:
        """The key; a client stream has one in its metadata, or would not be here, and none of it has been read."""
        message = None if self._handler.request_streaming else request.message
        try:
            return self._policy.key(self._route, tuple(context.invocation_metadata() or ()), message)
        except Refusal as refusal:
            _refuse(context, refusal)

    # ---------------------------------------------------------------------------------------- the answer

    def _settled(self, key: str, request: Any, context: grpc.ServicerContext) -> Answer:
        """The answer to send, its initial metadata sent already."""
        try:
            caller = self._caller(context)  # before anything is read for it
            asked = self._asked(request, context)
            ticket = self._policy.ticket(self._route, key, caller, asked, context.time_remaining())
            answer, replayed = self._executed(ticket, asked, context)
        except Unstored as unstored:
            if not unstored.is_all_there_is(self._handler):
                _fail(context, unstored.answer, (marker(replayed=False),))
            answer, replayed = unstored.answer, False
        except Refusal as refusal:
            _refuse(context, refusal)
        except SemelError as error:
            if error is self._raised:
                raise  # the handler's own: it may use semel too
            _refuse(context, refused(error))
        said = (marker(replayed=replayed),) if self._once.enabled else ()
        context.send_initial_metadata((*answer.initial, *said))
        return answer

    def _caller(self, context: grpc.ServicerContext) -> Caller:
        policy = self._policy
        asked = (policy.principal, policy.tenant, policy.authorize)
        try:
            found = [None if ask is None else plain(ask, ask(context), where=_THREADED) for ask in asked]
        except PermissionError as error:
            raise Refusal("NOT_AUTHORIZED") from error
        return policy.caller(self._route, *found)

    def _executed(
        self, ticket: Ticket, asked: list[Received], context: grpc.ServicerContext
    ) -> tuple[Answer, bool]:
        capture = Capture(context, self._handler.response_serializer)

        def work() -> bytes:
            try:
                said = behaviour_of(self._handler)(self._argument(asked), capture)
                for message in said if self._handler.response_streaming else (said,):
                    capture.keep(message)
            except Exception as error:  # noqa: BLE001 - the policy raises again what is not an answer
                self._raised = error
                self._left = self._policy.left(self._route, self._handler, capture)
                self._policy.raised(self._route, capture, error)
            return self._policy.ended(self._route, capture)

        outcome = self._once.execute(ticket.key, work, **ticket.options)
        if outcome.replayed:
            return self._policy.replayed(outcome), True
        return capture.answer(), False


# ------------------------------------------------------------------------------------------------- what is sent


def _finish(context: grpc.ServicerContext, answer: Answer) -> None:
    """Status and trailing metadata; those of a stream come after its messages."""
    if answer.status is not grpc.StatusCode.OK:
        _fail(context, answer)
    say_trailing(context, answer.trailing)


def _fail(context: grpc.ServicerContext, answer: Answer, more: Metadata = ()) -> NoReturn:
    say_trailing(context, (*answer.trailing, *more))
    context.abort(answer.status, answer.details)


def _refuse(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
    """Without initial metadata: a client that has seen some regards the call as committed and never retries it."""
    say_trailing(context, refusal.metadata())
    context.abort(refusal.code, refusal.text)

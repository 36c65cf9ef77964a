"""One interceptor's options, checked at start-up, and what they make of a call. Both colours ask the same questions."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import grpc
import msgspec
from google.protobuf.descriptor import ServiceDescriptor

from semel.errors import CodecError, ConfigurationError, PreviousFailure, SemelError
from semel.grpc.answers import Answer, Metadata
from semel.grpc.callers import Caller, principal_of, tenant_of
from semel.grpc.captures import Aborted, Capture
from semel.grpc.methods import Methods
from semel.grpc.refusals import Refusal, of_error
from semel.grpc.requests import Fingerprint, Received, find_key, is_rehearsal
from semel.grpc.rules import (
    ATTEMPTS,
    DEFAULT_NAME,
    MARKER,
    Effects,
    Method,
    OnStatus,
    Rules,
    Word,
    checked,
    checked_fields,
    checked_names,
    more_metadata,
    patience,
    words_for,
)
from semel.hooks import emitter
from semel.http.keys import core_key
from semel.http.rules import is_allowed
from semel.options import Duration, seconds
from semel.run import Outcome
from semel.settings import checked_hooks

__all__ = ["Options", "Policy", "Route", "Ticket", "UnkeyedRetry", "Unstored", "marker", "refused"]

_log = logging.getLogger("semel")
_MOST_ROUTES: Final = 4096
_NO_ANSWER: Final = (
    "The call was processed over another carrier, or settled by hand without an answer that can be given here. "
    "It is not run again."
)


@dataclass(frozen=True, slots=True)
class UnkeyedRetry:
    """A transport repeats a call that carries no key: its effect may happen twice (G15)."""

    method: str
    attempts: int


class Options(TypedDict, total=False):
    """What both interceptors take besides `once`."""

    principal: Callable[[Any], Any] | None
    """Who calls, from the servicer context: a verified, stable id. None given: refuses to start unless `anonymous`."""
    tenant: Callable[[Any], Any] | None
    authorize: Callable[[Any], Any] | None
    """Asked before every run and every replay; only True allows, False or a PermissionError refuses."""
    anonymous: bool
    methods: Iterable[str] | Mapping[str, Method] | None
    exclude: Iterable[str]
    services: Iterable[ServiceDescriptor]
    metadata: str | Iterable[str]
    request_id: str | Iterable[str] | None
    validate_only: str | None
    required: bool
    strict: bool
    min_length: int
    effects: Effects
    on_status: OnStatus | None
    wait: Duration
    max_waiters: int
    lease: Duration
    retention: Duration | None
    tombstone: Duration
    grace: Duration
    max_response: int
    max_request: int
    replay_metadata: Iterable[str]
    operation: str
    hooks: Iterable[Callable[[object], object]]


_AS_THEY_ARE: Final = (
    "validate_only", "required", "strict", "anonymous", "min_length", "effects", "on_status", "max_waiters",
    "max_response", "max_request", "operation",
)  # fmt: skip
_DURATIONS: Final = ("wait", "lease", "retention", "tombstone", "grace")


class Ticket(msgspec.Struct, frozen=True):
    """A call that carries a key: what the core is asked."""

    key: str
    options: dict[str, Any]


class Route(msgspec.Struct, frozen=True):
    """A covered method: its rules, and what each status means for a key, worked out once."""

    name: str
    rules: Rules
    words: Mapping[grpc.StatusCode, Word]
    on_error: Callable[[Exception], str]


class Policy:
    """Everything that is decided about calls; raises ConfigurationError for options that cannot work."""

    def __init__(self, given: Options) -> None:
        if unknown := given.keys() - Options.__annotations__.keys():
            raise ConfigurationError(
                f"unknown option {min(unknown)!r}: the options are once, {', '.join(Options.__annotations__)}"
            )
        self.principal = given.get("principal")
        self.tenant = given.get("tenant")
        self.authorize = given.get("authorize")
        if self.principal is None and not given.get("anonymous"):
            raise ConfigurationError(
                "without principal= one caller would get another one's answer: pass a function of the servicer context "
                "that returns a verified, stable id of the caller, or say anonymous=True if all callers are one"
            )
        if self.principal is not None and given.get("anonymous"):
            raise ConfigurationError(
                "anonymous=True says that callers are not told apart: leave principal= out"
            )
        self._rules = checked(_rules_of(given))
        self._methods = Methods(given.get("methods"), given.get("exclude", ()), given.get("services", ()))
        for name, said in self._methods.given():
            _checked_method(name, self._rules.but(said))
        self._emit = emitter(checked_hooks(given.get("hooks", ())))
        self._routes: dict[str, Route | Refusal | None] = {}

    # ------------------------------------------------------------------------------------------ methods

    def route(self, name: str, handler: Any) -> Route | Refusal | None:
        """How a method is handled: by its rules, not at all (None), or refused because it cannot be covered."""
        try:
            return self._routes[name]
        except KeyError:
            if (
                len(self._routes) >= _MOST_ROUTES
            ):  # a generic handler may take any name that a client thinks of
                self._routes.clear()
            made = self._routes[name] = self._make_route(name, handler)
            return made

    def _make_route(self, name: str, handler: Any) -> Route | Refusal | None:
        said = self._methods.find(name)
        if said is None:
            return None
        streams = handler.request_streaming or handler.response_streaming
        both = handler.request_streaming and handler.response_streaming
        if both or (streams and not said.stream):
            if not self._methods.names(name):
                return None
            text = (
                f"{name} streams both ways: one idempotency key cannot cover it"
                if both
                else f"{name} streams, and streaming was not opted in (Method(stream=True))"
            )
            return Refusal("STREAMING_NOT_SUPPORTED", text)
        rules = self._rules.but(said)
        known = self._methods.fields(name)
        if handler.request_streaming or (known is not None and not set(rules.request_id) & set(known)):
            rules = msgspec.structs.replace(rules, request_id=())  # only metadata can carry its key
        words = words_for(rules)
        return Route(name, rules, words, _OnError(words))

    # -------------------------------------------------------------------------------------------- calls

    def covered(self, details: Any, handler: Any) -> Route | Refusal | None:
        """What stands around a call's handler. None: there is nothing to protect, or surely no key and no need of one."""
        if handler is None:
            return None
        route = self.route(details.method, handler)
        metadata = tuple(details.invocation_metadata or ())
        return None if isinstance(route, Route) and self._may_pass(route, metadata) else route

    def _may_pass(self, route: Route, metadata: Metadata) -> bool:
        rules = route.rules
        if rules.required or rules.request_id or any(name in rules.names for name, _ in metadata):
            return False
        self._look_at_attempts(route, metadata)
        return True

    def key(self, route: Route, metadata: Metadata, message: Any) -> str | None:
        """The client's key; None: run the handler unprotected. Raises Refusal."""
        rules = route.rules
        if is_rehearsal(rules, message):
            return None
        key = find_key(rules, metadata, message, time.time())
        if key is None:
            self._look_at_attempts(route, metadata)
            if rules.required:
                raise Refusal("KEY_MISSING", field=rules.names[0])
        return key

    def _look_at_attempts(self, route: Route, metadata: Metadata) -> None:
        attempts = next((value for name, value in metadata if name == ATTEMPTS), "0")
        count = int(attempts) if attempts.isdigit() else 1
        if count == 0:
            return
        _log.warning(
            "%s is retried by its transport without an idempotency key (attempt %d)", route.name, count + 1
        )
        if self._emit is not None:
            self._emit(UnkeyedRetry(route.name, count))

    def caller(self, route: Route, principal: Any, tenant: Any, allowed: Any) -> Caller:
        """Who calls, from what the resolvers said; whoever is not known, or not allowed, is refused."""
        if self.authorize is not None and not is_allowed(allowed):
            raise Refusal("NOT_AUTHORIZED")
        known = principal_of(principal)
        if not known and not route.rules.anonymous:
            raise Refusal("NOT_AUTHENTICATED")
        return Caller(known, None if self.tenant is None else tenant_of(tenant))

    def ticket(
        self, route: Route, key: str, caller: Caller, received: Sequence[Received], remaining: float | None
    ) -> Ticket:
        """What the core is asked."""
        rules = route.rules
        print_ = Fingerprint(rules, route.name)
        for one in received:
            print_.add(one)
        options = {
            "operation": rules.operation,
            "fingerprint": print_.hex(),
            "result_type": Any,  # bytes, or whatever a person said: `replayed` looks
            "wait": patience(rules, remaining),
            "lease": rules.lease,
            "retention": rules.retention,
            "tombstone": rules.tombstone,
            "max_result": rules.max_response,
            "max_waiters": rules.max_waiters,
            "on_error": route.on_error,
            "on_unknown": "hold" if rules.effects == "opaque" else "retry",
            "readable": "masked",
        }
        if caller.tenant is not None:
            options["tenant"] = caller.tenant
        return Ticket(core_key(key, caller.principal), options)

    # ------------------------------------------------------------------------------------------ answers

    def ended(self, route: Route, capture: Capture) -> bytes:
        """The stored form of what the handler said. Raises Unstored when that is not the outcome."""
        answer = capture.answer()
        word = "store" if capture.broken else route.words[answer.status]
        if word != "store":
            raise Unstored(answer, word)
        return answer.encode(route.rules)

    def raised(self, route: Route, capture: Capture, error: Exception) -> None:
        """The handler raised. Raises it again unless a status that was set before, or `on_status`, makes it an answer."""
        if isinstance(error, PreviousFailure):
            error.about = ""  # gRPC sends an error's text to the client, and the key is no business of his
        if (
            isinstance(error, Aborted)
            or capture.raised(error)
            or route.words[grpc.StatusCode.UNKNOWN] == "store"
        ):
            return
        raise error

    @staticmethod
    def left(route: Route, handler: Any, capture: Capture) -> Answer | None:
        """What a stream had said when its handler raised, if it is to be sent."""
        unstored = Unstored(capture.answer(), route.words[grpc.StatusCode.UNKNOWN])
        return unstored.answer if unstored.is_all_there_is(handler) else None

    @staticmethod
    def replayed(outcome: Outcome[Any]) -> Answer:
        """The stored answer. Raises Refusal when it was not kept, is another carrier's, or what a person said is no answer."""
        if outcome.marker:
            raise Refusal("RESPONSE_NOT_STORED", resource=outcome.ref)
        try:
            return Answer.decode(outcome.value)
        except CodecError as error:
            raise Refusal("RESPONSE_NOT_STORED", _NO_ANSWER, resource=outcome.ref) from error


class Unstored(Exception):
    """The handler's answer is sent, but is not the call's outcome."""

    def __init__(self, answer: Answer, word: str) -> None:
        super().__init__(f"{answer.status.name}: {answer.details}")
        self.answer = answer
        self.word = word
        self.code = answer.status.name

    def is_all_there_is(self, handler: Any) -> bool:
        """The messages of a stream whose key is held: no attempt will bring them again, so they are sent.

        Those of a stream that may run again are not: gRPC retries a call only as long as none of its answer has come.
        """
        return self.word == "hold" and handler.response_streaming and bool(self.answer.messages)


class _OnError:
    """A named thing, not a closure made for each call: the core keeps checked options by identity."""

    def __init__(self, words: Mapping[grpc.StatusCode, Word]) -> None:
        self._raised = words[grpc.StatusCode.UNKNOWN]

    def __call__(self, error: Exception) -> str:
        if isinstance(error, Unstored):
            return error.word
        return "hold" if self._raised == "hold" else "release"


def refused(error: SemelError) -> Refusal:
    """The core's error as an answer. Raises it again when it is a mistake in the program."""
    refusal = of_error(error)
    if refusal is None:
        raise error
    return refusal


def marker(*, replayed: bool) -> tuple[str, str]:
    """Whether the answer comes from a record. Its absence tells a client that its key was not honoured."""
    return MARKER, "true" if replayed else "false"


def _checked_method(name: str, rules: Rules) -> None:
    try:
        checked(rules)
    except ConfigurationError as error:
        raise ConfigurationError(f"methods[{name!r}]: {error}") from None


def _rules_of(given: Options) -> Rules:
    said: dict[str, Any] = {**given}
    rules: dict[str, Any] = {name: said[name] for name in _AS_THEY_ARE if name in said}
    for name in _DURATIONS:
        if name in said:
            value = said[name]
            rules[name] = float("inf") if value is None and name == "retention" else seconds(name, value)
    rules["names"] = checked_names("metadata", given.get("metadata", DEFAULT_NAME))
    if "request_id" in given:
        rules["request_id"] = checked_fields(given["request_id"])
    rules["replayed"] = more_metadata(given.get("replay_metadata", ()))
    return Rules(**rules)

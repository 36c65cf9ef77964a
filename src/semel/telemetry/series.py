"""Which events are counted under which name: the one table that both hooks read. Pure; knows no metrics library.

Labels are few and of few values: never a key, a message id or a text. A tenant is a label only where that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

__all__ = ["IN_FLIGHT", "READERS", "SERIES", "Book", "Reading", "Series", "route_of"]


class Series(NamedTuple):
    """One figure: its name as Prometheus has it, and what it counts."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str
    by_tenant: bool = False
    """Whether a tenant can be told of it."""


class Reading(NamedTuple):
    """What one event says about one series: an amount to add, to observe, or to set."""

    series: Series
    value: float
    labels: tuple[str, ...]


def _counter(name: str, labels: str, text: str, *, by_tenant: bool = False) -> Series:
    return Series(f"semel_{name}_total", "counter", tuple(labels.split()), text, by_tenant)


def _seconds(name: str, labels: str, text: str) -> Series:
    return Series(f"semel_{name}_seconds", "histogram", tuple(labels.split()), text)


def _gauge(name: str, labels: str, text: str) -> Series:
    return Series(f"semel_{name}", "gauge", tuple(labels.split()), text)


def _of_calls(name: str, labels: str, text: str) -> Series:
    return _counter(name, f"operation {labels}", text, by_tenant=True)


# -------------------------------------------------------------------------------------------------------- the core
EXECUTIONS: Final = _of_calls("executions", "", "Functions that ran here and whose outcome is recorded.")
EXECUTION_TIME: Final = _seconds("execution", "operation", "From the claim to the recorded outcome.")
REPLAYS: Final = _of_calls("replays", "", "Stored outcomes that were given back; nothing ran.")
CONTENDED: Final = _of_calls(
    "contended", "waits", "Calls that found another caller at work and waited, or were refused."
)
TAKEOVERS: Final = _of_calls("takeovers", "", "Runs that went on in place of an owner that was lost.")
FAILURES: Final = _of_calls(
    "failures", "decision", "Functions that raised, by what was decided about the key."
)
REFUSALS: Final = _of_calls(
    "refusals", "reason", "Calls that ended without running: mismatch, expired, unknown."
)
AT_RISK: Final = _of_calls("leases_at_risk", "", "Renewals without an answer; they are tried again.")
LOST: Final = _of_calls("leases_lost", "", "Leases that another owner took while the function ran.")
UNRECORDED: Final = _of_calls(
    "unrecorded", "", "ALARM: effects that happened and whose outcome the store did not take at once."
)
UNPROTECTED: Final = _of_calls("unprotected", "", "Functions that ran without protection (enabled=False).")
BACKGROUND: Final = _counter("background_errors", "error", "Errors of purges and of reconciling.")
IN_FLIGHT: Final = _gauge("in_flight", "", "Functions that run here now, of those given to watch().")
STORE_TIME: Final = _seconds("store_call", "verb outcome", "Calls to the store, with their retries.")
STORE_ITEMS: Final = _counter(
    "store_items", "verb", "Records in those calls: calls of one tick travel together."
)
# ------------------------------------------------------------------------------------------------------- the edges
PROBLEMS: Final = _counter(
    "http_problems", "problem status", "Requests that the HTTP layer answered by itself."
)
UNKEYED: Final = _counter("grpc_unkeyed_retries", "method", "Calls without a key that a transport repeated.")
# ------------------------------------------------------------------------------------------------------- messaging
NOT_ADDED: Final = _counter("outbox_refused", "topic what", "Messages that an outbox refused to add.")
SENT: Final = _counter("relay_sent", "route", "Messages that are at their sink.")
DUPLICATES: Final = _counter(
    "relay_duplicates", "route", "Messages that were sent again and were there already."
)
PUBLISH_TIME: Final = _seconds("relay_publish", "route", "Publishing one batch.")
DECLINED: Final = _counter("relay_declined", "route topic", "Messages that a sink did not take, each time.")
PARKED: Final = _counter("relay_parked", "topic", "Keys that were parked.", by_tenant=True)
GIVEN_UP: Final = _counter("relay_given_up", "topic", "Parked messages that an operator took out.")
PAUSES: Final = _counter("relay_pauses", "route", "Times that a sink was left alone because it was away.")
PAUSED: Final = _gauge("relay_paused", "route", "1 while a sink is away.")
OVERTAKEN: Final = _counter("relay_overtaken", "", "Parts that another relay took while this one had them.")
DATABASE_AWAY: Final = _counter(
    "relay_database_away_seconds", "", "For how long the outbox's database did not answer; told when it does."
)
ALARMS: Final = _counter("relay_alarms", "what", "Things that a person should look at; the log says which.")
BACKLOG: Final = _gauge("relay_backlog", "topic", "Messages that wait in the outbox.")
LAG: Final = _gauge("relay_lag_seconds", "", "The age of the oldest message that is due.")
PARKED_KEYS: Final = _gauge("relay_parked_keys", "", "Keys that wait for somebody to replay them.")
BACKING_OFF: Final = _gauge("relay_backing_off_keys", "", "Keys that wait for their next attempt.")
UNROUTABLE: Final = _gauge("relay_unroutable", "topic", "Messages that wait and that no route knows.")
PARTS: Final = _gauge("relay_parts", "", "Parts of the outbox that this relay owns.")
ADMITTED: Final = _counter("inbox_admitted", "consumer topic", "Messages that were handled.")
REPEATED: Final = _counter("inbox_duplicates", "consumer topic", "Messages that had been handled before.")
HANDLING_TIME: Final = _seconds(
    "inbox_handling", "consumer topic", "From admission to commit, duplicates included."
)
STUMBLED: Final = _counter("inbox_failures", "consumer topic error", "Handlers that raised, each time.")
CONFLICTS: Final = _counter("inbox_conflicts", "consumer topic", "Known ids that came with another body.")
DEAD: Final = _counter("inbox_dead_letters", "consumer topic what", "Messages that were given up.")

SERIES: Final = tuple(value for value in dict(globals()).values() if isinstance(value, Series))


# ----------------------------------------------------------------------------------------------------- what they say
def _once(series: Series) -> Callable[[Any], Iterable[Reading]]:
    return lambda event: (Reading(series, 1, (event.scope.operation,)),)


def _executed(event: Any) -> Iterable[Reading]:
    labels = (event.scope.operation,)
    return Reading(EXECUTIONS, 1, labels), Reading(EXECUTION_TIME, event.seconds, labels)


def _store_called(event: Any) -> Iterable[Reading]:
    outcome = "ok" if event.error is None else "error"
    return Reading(STORE_TIME, event.seconds, (event.verb, outcome)), Reading(
        STORE_ITEMS, event.items, (event.verb,)
    )


def _delivered(event: Any) -> Iterable[Reading]:
    route = (route_of(event.lane),)
    counted = DUPLICATES if event.duplicate else SENT
    return Reading(counted, event.rows, route), Reading(PUBLISH_TIME, event.seconds, route)


def _backlog(event: Any) -> Iterable[Reading]:
    yield from (Reading(BACKLOG, count, (topic,)) for topic, count in event.pending.items())
    yield from (Reading(UNROUTABLE, event.pending.get(topic, 0), (topic,)) for topic in event.unroutable)
    for series, value in (
        (LAG, event.oldest),
        (PARKED_KEYS, event.parked),
        (BACKING_OFF, event.backing_off),
        (PARTS, event.parts),
    ):
        yield Reading(series, value, ())


def _handled(event: Any) -> Iterable[Reading]:
    labels = (event.consumer, event.topic)
    counted = ADMITTED if event.admitted else REPEATED
    return Reading(counted, 1, labels), Reading(HANDLING_TIME, event.seconds, labels)


def _stumbled(event: Any) -> Iterable[Reading]:
    labels = (event.consumer, event.topic)
    yield Reading(STUMBLED, 1, (*labels, event.error))
    if event.error == "KeyMismatch":
        yield Reading(CONFLICTS, 1, labels)


def route_of(lane: str) -> str:
    """The route of a lane, which is named after it and perhaps a stream."""
    return lane.partition("/")[0].replace("%2F", "/").replace("%25", "%")


# By name, so that nobody who does not use messaging, HTTP or gRPC has to have their libraries.
READERS: Final[Mapping[str, Callable[[Any], Iterable[Reading]]]] = {
    "semel.hooks.Executed": _executed,
    "semel.hooks.Replayed": _once(REPLAYS),
    "semel.hooks.Contended": lambda e: (
        Reading(CONTENDED, 1, (e.scope.operation, "yes" if e.waits else "no")),
    ),
    "semel.hooks.TakenOver": _once(TAKEOVERS),
    "semel.hooks.Failed": lambda e: (Reading(FAILURES, 1, (e.scope.operation, e.decision)),),
    "semel.hooks.Refused": lambda e: (Reading(REFUSALS, 1, (e.scope.operation, e.reason)),),
    "semel.hooks.AtRisk": _once(AT_RISK),
    "semel.hooks.LeaseGone": _once(LOST),
    "semel.hooks.Unrecorded": _once(UNRECORDED),
    "semel.hooks.Unprotected": _once(UNPROTECTED),
    "semel.hooks.Unreconciled": lambda e: (Reading(BACKGROUND, 1, (type(e.error).__name__,)),),
    "semel.hooks.StoreCalled": _store_called,
    "semel.http.problem.Answered": lambda e: (Reading(PROBLEMS, 1, (e.problem, str(e.status))),),
    "semel.grpc.policy.UnkeyedRetry": lambda e: (Reading(UNKEYED, 1, (e.method,)),),
    "semel.messaging.events.NotAdded": lambda e: (Reading(NOT_ADDED, 1, (e.topic, e.what)),),
    "semel.messaging.events.Delivered": _delivered,
    "semel.messaging.events.SinkPaused": lambda e: (
        Reading(PAUSES, 1, (e.name,)),
        Reading(PAUSED, 1, (e.name,)),
    ),
    "semel.messaging.events.SinkBack": lambda e: (Reading(PAUSED, int(e.left > 0), (e.name,)),),
    "semel.messaging.events.Declined": lambda e: (Reading(DECLINED, 1, (route_of(e.lane), e.topic)),),
    "semel.messaging.events.Parked": lambda e: (Reading(PARKED, 1, (e.topic,)),),
    "semel.messaging.events.GivenUp": lambda e: (Reading(GIVEN_UP, 1, (e.topic,)),),
    "semel.messaging.events.Overtaken": lambda _: (Reading(OVERTAKEN, 1, ()),),
    "semel.messaging.events.DatabaseBack": lambda e: (Reading(DATABASE_AWAY, e.away, ()),),
    "semel.messaging.events.Alarm": lambda e: (Reading(ALARMS, 1, (e.what,)),),
    "semel.messaging.events.Unserved": lambda _: (Reading(ALARMS, 1, ("unserved",)),),
    "semel.messaging.events.Backlog": _backlog,
    "semel.messaging.events.Handled": _handled,
    "semel.messaging.events.HandlerFailed": _stumbled,
    "semel.messaging.events.DeadLettered": lambda e: (
        Reading(DEAD, 1, (e.consumer, e.topic, e.what or "error")),
    ),
}
# What these events tell is all there is: what they told before and do not tell any more is zero now.
_WHOLE: Final[Mapping[Callable[[Any], Iterable[Reading]], tuple[Series, ...]]] = {
    _backlog: (BACKLOG, UNROUTABLE)
}
_OTHER: Final = "other"


class Book:
    """The readings of events, with at most `most` combinations of labels for a series: what is beyond is `other`.

    A label that takes any number of values would fill the memory of whoever collects it.
    """

    def __init__(self, *, tenant: bool, most: int) -> None:
        self.tenant = tenant
        self._most = most
        self._seen: dict[Series, set[tuple[str, ...]]] = {one: set() for one in SERIES}
        self._readers: dict[type, Callable[[Any], Iterable[Reading]]] = {}

    def labels_of(self, series: Series) -> tuple[str, ...]:
        """Their names."""
        return (*series.labels, "tenant") if self.tenant and series.by_tenant else series.labels

    def read(self, event: object) -> Iterable[Reading]:
        """What an event says; nothing, if it is of a kind that is not known here."""
        kind = type(event)
        reader = self._readers.get(kind)
        if reader is None:
            reader = self._readers[kind] = _reader_of(kind)
        found = [self._bounded(reading, event) for reading in reader(event)]
        if reader in _WHOLE:
            found = _summed(found)
        for series in _WHOLE.get(reader, ()):
            told = {reading.labels for reading in found if reading.series is series}
            found += [Reading(series, 0, old) for old in self._seen[series] - told]
        return found

    def _bounded(self, reading: Reading, event: object) -> Reading:
        series, value, labels = reading
        if self.tenant and series.by_tenant:
            labels = (*labels, _tenant_of(event))
        seen = self._seen[series]
        if labels not in seen:
            if len(seen) >= self._most:
                labels = (_OTHER,) * len(labels)
            seen.add(labels)
        return Reading(series, value, labels)


def _summed(found: Iterable[Reading]) -> list[Reading]:
    """One reading of each: several that are `other` are one together."""
    values: dict[tuple[Series, tuple[str, ...]], float] = {}
    for series, value, labels in found:
        values[series, labels] = values.get((series, labels), 0) + value
    return [Reading(series, value, labels) for (series, labels), value in values.items()]


def _reader_of(kind: type) -> Callable[[Any], Iterable[Reading]]:
    if issubclass(kind, BaseException):  # what a purge or a reconciling met
        return lambda error: (Reading(BACKGROUND, 1, (type(error).__name__,)),)
    return READERS.get(f"{kind.__module__}.{kind.__qualname__}", lambda _: ())


def _tenant_of(event: object) -> str:
    """Whose event it is, where it says so."""
    return str(getattr(getattr(event, "scope", event), "tenant", ""))

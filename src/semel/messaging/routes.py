"""Which message goes where: topic patterns to sinks, with conditions, transforms and samples."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, cast

from semel.errors import ConfigurationError
from semel.messaging.message import Message
from semel.messaging.shaping import asked, transformed
from semel.messaging.sink import Row, Sink
from semel.messaging.sinks import open_sink
from semel.messaging.sinks.closing import close_now
from semel.messaging.sinks.envelope import shortened

__all__ = ["Route", "Router", "Target", "spelled"]

_TOPICS: Final = 10_000
_LANE: Final = 400  # bytes


@dataclass(frozen=True, slots=True)
class Route:
    """One way out: a sink (or its URL), and which messages take it.

    `when` says whether, `transform` gives what is sent instead, a Message or a Row (its id stays). Both are given the Message,
    decoded; or the Row, whose body is bytes, if their parameter is annotated as Row or called `row`. `sample` lets a share of the
    keys through, always the same ones. `name` is remembered in the database while a batch is under way: keep it.
    """

    sink: Sink | str | Callable[..., Any]
    name: str = ""
    when: Callable[[Message], bool] | Callable[[Row], bool] | None = None
    transform: Callable[[Message], Row | Message] | Callable[[Row], Row | Message] | None = None
    sample: float = 1.0

    @property
    def chooses(self) -> bool:
        """Whether it may leave a message out."""
        return self.when is not None or self.sample < 1.0

    def takes(self, row: Row) -> bool:
        """Whether this message takes this way."""
        if self.sample < 1.0 and _share(row) >= self.sample:
            return False
        return self.when is None or bool(asked(self.when, row))


@dataclass(frozen=True, slots=True)
class Target:
    """A route with its sink opened."""

    name: str
    pattern: str
    route: Route
    sink: Sink
    owned: bool
    way: str  # routes that lead to the same sink share their numbers: it may have one frontier for them all

    @property
    def splits(self) -> tuple[str, ...]:
        """Which of topic, tenant and key its lanes are made of, if it says so."""
        return tuple(getattr(self.sink, "splits", ()))

    def lane(self, row: Row) -> str:
        """Rows of one lane share a frontier at the sink."""
        split = getattr(self.sink, "lane", None)
        if split is None:
            return spelled(self.way)
        return _lane(self.way, split(row if self.route.transform is None else self._travelling(row)))

    def _travelling(self, row: Row) -> Row:
        """As `shaped`: where a row goes is decided by what is sent. One that cannot be made is rejected when it is sent."""
        try:
            return self.shaped(row)
        except Exception:  # noqa: BLE001 - the user's function
            return row

    def shaped(self, row: Row) -> Row:
        """The row as it is sent."""
        if self.route.transform is None:
            return row
        return transformed(self.route.transform, row)


class Router:
    """All routes of a relay. A topic may match several patterns: the message goes to each."""

    def __init__(self, routes: Mapping[str, Any]) -> None:
        told: Any = routes
        if not routes or not isinstance(told, Mapping):
            raise ConfigurationError(
                'a relay needs routes, such as {"orders": "redis://localhost/0?stream=orders"}'
            )
        self.targets: list[Target] = []
        for pattern, given in routes.items():
            many = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
            name: Any = pattern
            if not isinstance(name, str) or not name or not many:
                raise ConfigurationError(
                    f"a route leads from a topic, or a pattern of topics, to at least one sink: {pattern!r} → {given!r} does not"
                )
            for number, one in enumerate(many):
                target = _target(pattern, one, number if len(many) > 1 else None)
                first = next((t for t in self.targets if t.sink is target.sink), None)
                self.targets.append(target if first is None else replace(target, way=first.way))
        names = [target.name for target in self.targets]
        if len(set(names)) < len(names):
            raise ConfigurationError(f"two routes have the same name: {sorted(names)}; give each its own")
        self.transforms = any(target.route.transform is not None for target in self.targets)
        self._chooses = any(target.route.chooses for target in self.targets)
        self._by_topic: dict[
            str, list[Target]
        ] = {}  # patterns are matched for a topic, not for each of its messages

    @property
    def patterns(self) -> tuple[str, ...]:
        """The topics that are carried."""
        return tuple(dict.fromkeys(target.pattern for target in self.targets))

    def of(self, row: Row) -> list[Target] | None:
        """Where the row goes; None if no pattern knows its topic (an empty list: conditions let it go nowhere)."""
        matching = self._knowing(row.topic)
        if not matching:
            return None
        if not self._chooses:
            return matching
        return [target for target in matching if target.route.takes(row)]

    def ways(self, topic: str) -> set[str]:
        """The ways that messages of a topic may go."""
        return {target.way for target in self._knowing(topic)}

    def _knowing(self, topic: str) -> list[Target]:
        """The targets whose pattern knows a topic."""
        found = self._by_topic.get(topic)
        if found is None:
            if len(self._by_topic) >= _TOPICS:
                self._by_topic.clear()
            found = [target for target in self.targets if fnmatchcase(topic, target.pattern)]
            self._by_topic[topic] = found
        return found

    def shaped(self, way: str, row: Row) -> Row:
        """The row as it is sent that way."""
        if not self.transforms:
            return row
        ours = [target for target in self._knowing(row.topic) if target.way == way]
        if not ours:
            return row
        # That it goes this way is written down; the conditions only choose between routes to one sink.
        chosen = ours[0] if len(ours) == 1 else next((t for t in ours if t.route.takes(row)), ours[0])
        return chosen.shaped(row)

    def by_lane(self, lane: str) -> Target | None:
        """The target of a lane that was named by an earlier run."""
        head = lane.partition("/")[0]
        return next((target for target in self.targets if spelled(target.way) == head), None)

    def close(self) -> None:
        """As `aclose`, from outside of an event loop."""
        for target in self.targets:
            if target.owned and hasattr(target.sink, "aclose"):
                close_now(target.sink)

    async def aclose(self) -> None:
        """Close the sinks that were opened here."""
        for target in self.targets:
            close = getattr(target.sink, "aclose", None)
            if target.owned and close is not None:
                await close()


@lru_cache(maxsize=_TOPICS)  # for each message; the names are few
def _lane(way: str, inner: str) -> str:
    head = spelled(way)
    # Kept in a column: what is longer ends in a hash of itself.
    return shortened(f"{head}/{inner}", _LANE) if inner else head


@lru_cache(maxsize=_TOPICS)
def spelled(way: str) -> str:
    """A way's name in front of a lane's: without the character that parts the two."""
    return way.replace("%", "%25").replace("/", "%2F")


def _target(pattern: str, given: Any, number: int | None) -> Target:
    route = given if isinstance(given, Route) else Route(given)
    if not 0 < route.sample <= 1:
        raise ConfigurationError(f"sample must be above 0 and at most 1, not {route.sample}")
    if inspect.iscoroutinefunction(route.when):
        raise ConfigurationError(
            f"when= of the route for {pattern!r} is a coroutine function, whose answer nobody awaits: make it a plain one"
        )
    name = route.name or (pattern if number is None else f"{pattern}#{number}")
    sink = route.sink
    if isinstance(sink, str):
        return Target(name, pattern, route, open_sink(sink), owned=True, way=name)
    if hasattr(sink, "publish"):
        if getattr(sink, "guarantee", None) not in {"exact", "window", "at-least-once"}:
            raise ConfigurationError(
                f"the sink for {pattern!r} must declare guarantee = 'exact', 'window' or 'at-least-once'"
            )
        return Target(name, pattern, route, cast("Sink", sink), owned=False, way=name)
    if callable(sink):
        from semel.messaging.sinks.handler import HandlerSink

        return Target(name, pattern, route, HandlerSink(sink), owned=True, way=name)
    raise ConfigurationError(
        f"the route for {pattern!r} must be a sink URL, a sink (with publish), a Route or a function, not "
        f"{type(sink).__name__}"
    )


def _share(row: Row) -> float:
    """Where a message's key stands between 0 and 1: messages of one key are kept or left together."""
    text = f"{row.tenant}\0{row.key if row.key is not None else row.id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / (1 << 56)

"""What an outbox, a relay, an inbox or a message cannot use is told at once, by its name (DESIGN 5)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from semel import ConfigurationError
from semel.messaging import Inbox, Message, Outbox, Relay, Windows

OUTBOX: Any = Outbox
INBOX: Any = Inbox
RELAY: Any = Relay
WINDOWS: Any = Windows
URL = "sqlite:///never.db"
ROUTES = {"orders": print}

MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a pause that is no pair": (
        lambda: RELAY(Outbox(URL), ROUTES, backoff=3),
        r"backoff is \(first, longest\)",
    ),
    "a pause in the wrong order": (lambda: RELAY(Outbox(URL), ROUTES, backoff=(3, 1)), "backoff is"),
    "a pause that is text": (lambda: RELAY(Outbox(URL), ROUTES, backoff=("1", 2)), "backoff must be seconds"),
    "no poll": (lambda: RELAY(Outbox(URL), ROUTES, poll=0), r"poll is \(first, longest\)"),
    "a lease in words": (lambda: RELAY(Outbox(URL), ROUTES, lease="x"), "lease must be seconds"),
    "a lease too short": (lambda: RELAY(Outbox(URL), ROUTES, lease=0.01), "lease must be at least 0.05"),
    "a lease without an end": (lambda: RELAY(Outbox(URL), ROUTES, lease=float("inf")), "lease must end"),
    "safety without an end": (lambda: RELAY(Outbox(URL), ROUTES, sink_safety=float("inf")), "sink_safety"),
    "a relay's unknown option": (
        lambda: RELAY(Outbox(URL), ROUTES, leese=1),
        "'leese': did you mean 'lease'",
    ),
    "an outbox's unknown option": (lambda: OUTBOX(URL, retenion=1), "did you mean 'retention'"),
    "an inbox's unknown option": (lambda: INBOX(URL, consumer="c", wndows=1), "did you mean 'windows'"),
    "a relay's hook": (lambda: RELAY(Outbox(URL), ROUTES, hooks=print), "hooks is a list"),
    "an outbox's hook": (lambda: OUTBOX(URL, hooks=print), "hooks is a list"),
    "an inbox's hook": (lambda: INBOX(URL, consumer="c", hooks=[1]), "hooks is a list"),
    "no consumer": (lambda: INBOX(URL), "consumer= names who consumes"),
    "a consumer that is no text": (lambda: INBOX(URL, consumer=5), "consumer= names who consumes"),
    "an outbox's retention": (lambda: OUTBOX(URL, retention="x"), "retention must be seconds"),
    "an inbox's retention": (lambda: INBOX(URL, consumer="c", retention="x"), "retention must be seconds"),
    "a body's size": (lambda: OUTBOX(URL, max_body="x"), "max_body is a number"),
    "a timeout": (lambda: OUTBOX(URL, timeout="x"), "timeout must be seconds"),
    "a URL for an outbox": (lambda: RELAY(URL, ROUTES), "Outbox"),
    "windows that are none": (lambda: INBOX(URL, consumer="c", windows=5), "windows is Windows"),
    "a window below zero": (lambda: WINDOWS(-1, 0), "retries must be at least 0"),
    "a window in words": (lambda: WINDOWS("x", 0), "retries must be seconds"),
    "a route to nowhere": (lambda: RELAY(Outbox(URL), {"orders": ""}), "no sink answers"),
    "a route without sinks": (lambda: RELAY(Outbox(URL), {"orders": []}), "at least one sink"),
    "a route from nowhere": (lambda: RELAY(Outbox(URL), {"": print}), "at least one sink"),
    "routes that are a list": (lambda: RELAY(Outbox(URL), [("orders", print)]), "a relay needs routes"),
    "a name that is a number": (lambda: RELAY(Outbox(URL), ROUTES, name=5), "name has 1 to 120"),
    "topics that are a number": (lambda: RELAY(Outbox(URL), ROUTES, name="a", topics=5), "lists of names"),
    "a handler's attempts": (lambda: INBOX(URL, consumer="c").handler("t", max_attempts="3"), "max_attempts"),
    "a handler's pause": (lambda: INBOX(URL, consumer="c").handler("t", backoff=3), "backoff is"),
    "a consumer's option": (
        lambda: INBOX(URL, consumer="c").consuming("redis://h/0?stream=s", concurency=3),
        "did you mean 'concurrency'",
    ),
    "the name of a header": (lambda: Message("t", 1, headers={1: "a"}), "the name 1 is int"),  # type: ignore[dict-item]
    "the value of a header": (lambda: Message("t", 1, headers={"a": 1}), "'a' is int"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_it_is_refused_by_its_name(mistake: str) -> None:
    make, said = MISTAKES[mistake]
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_durations_of_a_relay_may_be_timedeltas() -> None:
    relay = Relay(Outbox(URL), ROUTES, lease=timedelta(seconds=5), sink_safety=timedelta(minutes=1))
    assert relay.lease == 5.0
    assert relay.horizon == Relay(Outbox(URL), ROUTES, lease=5, sink_safety=60).horizon

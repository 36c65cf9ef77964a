"""What can be watched: one frozen dataclass per event, given to every callable in `hooks=`.

A hook is called in the path of the caller, so it must be quick and must not raise: one that does is reported as a
warning once and the call goes on. `log_events` is the hook that writes to `logging.getLogger("semel")`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from semel.errors import SemelWarning
from semel.keys import Scope, mask
from semel.shown import shown

__all__ = [
    "AtRisk",
    "Contended",
    "Emit",
    "Executed",
    "Failed",
    "HookEvent",
    "LeaseGone",
    "Refused",
    "Replayed",
    "StoreCalled",
    "TakenOver",
    "Unprotected",
    "Unreconciled",
    "Unrecorded",
    "emitter",
    "log_events",
]


_log = logging.getLogger("semel")


@dataclass(frozen=True, slots=True)
class HookEvent:
    scope: Scope


@dataclass(frozen=True, slots=True)
class Executed(HookEvent):
    """The function ran here and its outcome is recorded."""

    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Replayed(HookEvent):
    """A stored outcome was given back; nothing ran."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Contended(HookEvent):
    """Another caller runs the key: this one waits (`waits`) or is refused."""

    waits: bool
    retry_after: float


@dataclass(frozen=True, slots=True)
class TakenOver(HookEvent):
    """The previous owner was lost; this attempt goes on in its place."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Failed(HookEvent):
    """The function raised; `decision` is release, hold or replay, or lost for a cancellation."""

    attempt: int
    decision: str
    error: BaseException


@dataclass(frozen=True, slots=True)
class Refused(HookEvent):
    """The call ended without running: mismatch, expired, unknown."""

    reason: str


@dataclass(frozen=True, slots=True)
class AtRisk(HookEvent):
    """A renewal got no answer; it is tried again."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class LeaseGone(HookEvent):
    """Another owner has the key; whatever this run writes is refused."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Unrecorded(HookEvent):
    """ALARM: the effect happened and the store does not take its outcome; the write goes on in the background."""

    attempt: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Unprotected(HookEvent):
    """`enabled=False`: the function ran without any protection."""


@dataclass(frozen=True, slots=True)
class Unreconciled(HookEvent):
    """A reconcile could not settle a lost run: its probe or its function raised, or what it gave cannot be kept."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class StoreCalled:
    """One call to the store, from the observe layer."""

    verb: str
    items: int
    seconds: float
    error: BaseException | None = None


Emit = Callable[[object], None]


def emitter(hooks: Sequence[Callable[[object], object]]) -> Emit | None:
    """One callable for all hooks; None when there are none, so that nobody builds events for nobody."""
    if not hooks:
        return None

    def emit(event: object) -> None:
        for hook in hooks:
            try:
                hook(event)
            except Exception as error:  # noqa: BLE001 - a broken hook must not break the effect
                _complain(f"the hook {shown(hook)} raised {shown(error)}; it was ignored")

    return emit


def _complain(text: str) -> None:
    try:
        warnings.warn(text, SemelWarning, stacklevel=4)
    except SemelWarning:  # warnings are errors here; an effect is not undone for that
        _log.error("%s", text)


_LEVELS: dict[type, int] = {
    Executed: logging.INFO,
    Replayed: logging.INFO,
    Contended: logging.INFO,
    TakenOver: logging.WARNING,
    Failed: logging.WARNING,
    Refused: logging.WARNING,
    AtRisk: logging.WARNING,
    LeaseGone: logging.ERROR,
    Unrecorded: logging.CRITICAL,
    Unprotected: logging.WARNING,
    Unreconciled: logging.WARNING,
    StoreCalled: logging.DEBUG,
}


def log_events(event: object) -> None:
    """Log an event with its fields in `extra`; the key is masked (a raw key is never logged whole)."""
    name = type(event).__name__
    fields = {field: getattr(event, field) for field in _fields_of(event)}
    extra = {f"semel_{field}": value for field, value in fields.items()}
    level = _LEVELS.get(type(event), logging.INFO)
    text = " ".join(f"{field}={_shown(value)}" for field, value in fields.items())
    if isinstance(
        event, BaseException
    ):  # of a purge or a reconcile in the background: nobody else tells of it
        level, text = logging.ERROR, str(event)
    if isinstance(event, HookEvent):
        scope = event.scope
        readable = mask(scope.key) if "…" not in scope.key else scope.key
        extra |= {"semel_tenant": scope.tenant, "semel_operation": scope.operation, "semel_key": readable}
        extra["semel_scope"] = scope.hex
        text = f"{scope.tenant}/{scope.operation}/{readable} [{scope.hex[:8]}] {text}".rstrip()
    _log.log(level, "%s %s", name, text, extra=extra)


def _shown(value: object) -> object:
    """An error with its type: many have no text, or one that says little without it."""
    if not isinstance(value, BaseException):
        return value
    try:
        return f"{type(value).__name__}: {value}".removesuffix(": ")
    except Exception:  # noqa: BLE001 - a broken __str__: the event is told all the same
        return f"{type(value).__name__}: <it has no readable text>"


def _fields_of(event: object) -> list[str]:
    names = getattr(event, "__dataclass_fields__", {})
    return [name for name in names if name != "scope"]

"""What came of all windows: a table that reads as the handler runs, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from semel.testing.plugin_tries import Try
from semel.testing.plugin_windows import Window

__all__ = ["Report"]

_WIDTH = 62
_SPOKEN = {
    "doubled": "DOUBLED",
    "lost": "LOST",
    "unknown": "unknown",
    "stuck": "STUCK",
    "missed": "missed",
    "once": "",
}
_ADVICE = {
    "doubled": (
        "the effect happened and its record did not: commit both in one transaction (once.within(connection), and the effect over "
        "that very connection), or give the outside service the key current_run().downstream_key(name)"
    ),
    "lost": (
        "a client was told that it succeeded, and the effect is missing. Was something marked as done before its effect? Let "
        "semel hold the mark (once.execute(key, effect)), or commit mark and effect in one transaction "
        "(once.within(connection)). Does semel hold it already? Then the function must have made its effect when it returns: "
        "committed, not left to a background task, and none of its errors swallowed"
    ),
    "unknown": (
        "the outcome is held for a person: once.resolve(key, …), or give on_unknown= a probe that looks the effect up"
    ),
    "stuck": "no client could finish: see the error; after a crash the next attempt must be able to go on",
    "missed": "the fault was not met, because the handler did not run as it did before: make it deterministic",
}
# The same, where an inbox was asked.
_INBOX_ADVICE = {
    "doubled": (
        "the effect happened and its message was not admitted: make it in the function that inbox.process runs, over the very session "
        "that process was given, and commit once, after process. An effect outside of that database is not undone with it: take "
        "inbox.handler(topic, once=…), or give the service the message's id as its key"
    ),
    "lost": (
        "the message was admitted, and the effect is missing. Make it in the function that inbox.process runs, over the very session "
        "that process was given, and commit once, after process; the function must have made it when it returns, and raise its errors"
    ),
}
_EVERY_TIME = (
    "the effect is made again by every call, even when nothing goes wrong. Is the key (of a message: its id) another one each time, "
    "made from a uuid or from the time? It must come from the request. Or is the effect made outside of the function that semel runs?"
)
_ASKED = frozenset({"claim.sent", "inbox.admitted"})
_NO_SEMEL = "no call of semel was seen in this handler: nothing remembers that the effect happened"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Every window with every fault. `holds` is the assertion to make; the report itself is its message."""

    handler: str
    expected: int
    tries: tuple[Try, ...]
    faults: tuple[str, ...]
    seconds: float
    """How long it took."""

    @property
    def holds(self) -> bool:
        """The effect happened as often as expected, whatever was killed, paused or interrupted, wherever."""
        return bool(self.tries) and not self.failures

    @property
    def never_doubles(self) -> bool:
        """At most once; something may have been lost or be unknown."""
        return bool(self.tries) and not self.doubled and not self.missed

    @property
    def never_loses(self) -> bool:
        """At least once; something may have happened twice."""
        return bool(self.tries) and all(each.verdict in ("once", "doubled") for each in self.tries)

    @property
    def failures(self) -> tuple[Try, ...]:
        return tuple(each for each in self.tries if each.verdict != "once")

    @property
    def doubled(self) -> tuple[str, ...]:
        return self.windows("doubled")

    @property
    def lost(self) -> tuple[str, ...]:
        return self.windows("lost")

    @property
    def missed(self) -> tuple[str, ...]:
        return self.windows("missed")

    def windows(self, verdict: str, *, fault: str | None = None) -> tuple[str, ...]:
        """The names of the windows that ended so, in the order in which the handler passes them."""
        names = (
            each.window.title
            for each in self.tries
            if each.verdict == verdict and fault in (None, each.fault)
        )
        return tuple(dict.fromkeys(names))

    def verdict(self, window: str, fault: str) -> str:
        """How one window ended: by its name (run.returned, shop.py:14) or by its line of source."""
        for each in self.tries:
            if each.fault == fault and window in (each.window.title, each.window.text):
                return each.verdict
        raise KeyError(f"there is no window {window!r} with the fault {fault!r} in\n{self}")

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        """Short: pytest cuts it in an assertion's message, and shows the table below."""
        return f"<{self.handler}: {self._summary()}>"

    def _lines(self) -> Iterator[str]:
        yield f"{self.handler}: {self._summary()}"
        yield ""
        heads = "".join(f"{fault:<14}" for fault in self.faults)
        yield f"  {'window':<{_WIDTH}}{heads}".rstrip()
        for window in dict.fromkeys(each.window for each in self.tries if each.fault != "none"):
            cells = "".join(f"{self._cell(window, fault):<14}" for fault in self.faults)
            yield f"  {_named(window):<{_WIDTH}}{cells}".rstrip()
        for each in self.tries:
            if each.fault == "none":
                yield f"  {_named(each.window):<{_WIDTH}}{_outcome(each)}".rstrip()
        if any(not each.overtaken for each in self.tries):
            yield "  * whoever tried meanwhile had to wait until it woke"
        yield from self._remedies()

    def _summary(self) -> str:
        if self.holds:
            often = "exactly once" if self.expected == 1 else f"exactly {self.expected} effects"
            return f"{often} in all {len(self.tries)} tries ({self.seconds:.1f} s)"
        counts = [
            f"{verdict} in {len(names)} windows" if len(names) != 1 else f"{verdict} in 1 window"
            for verdict in _ADVICE
            if (names := self.windows(verdict))
        ]
        return f"{', '.join(counts)} ({len(self.tries)} tries, {self.seconds:.1f} s)"

    def _cell(self, window: Window, fault: str) -> str:
        found = [each for each in self.tries if each.window == window and each.fault == fault]
        return _outcome(found[0]) if found else "-"

    @property
    def _asks(self) -> bool:
        """Whether semel was asked at all."""
        return any(each.window.name in _ASKED for each in self.tries)

    @property
    def _repeats(self) -> bool:
        """Whether semel was asked, and yet two calls in a row were two effects."""
        return self._asks and any(each.fault == "none" and each.verdict == "doubled" for each in self.tries)

    def _remedies(self) -> Iterator[str]:
        inbox = any(each.window.name == "inbox.admitted" for each in self.tries)
        for verdict, advice in (_ADVICE | (_INBOX_ADVICE if inbox else {})).items():
            names = self.windows(verdict)
            if names:
                yield ""
                yield f"{verdict}: {_listed(names)}"
                yield f"  {_EVERY_TIME if verdict == 'doubled' and self._repeats else advice}"
        if self.failures and not self._asks:
            yield f"  {_NO_SEMEL}"
        yield from _errors(each.error for each in self.failures if each.error)


def _errors(texts: Iterable[str]) -> Iterator[str]:
    """One line per kind, by its first text: the others differ in their key only."""
    kinds: dict[str, list[str]] = {}
    for text in texts:
        kinds.setdefault(text.partition(":")[0], []).append(text)
    for first, *more in kinds.values():
        yield f"  error: {first}" + (f" (in {len(more) + 1} tries)" if more else "")


def _named(window: Window) -> str:
    text = f"{window.title}  {window.text}"
    return text if len(text) < _WIDTH else f"{text[: _WIDTH - 2]}…"


def _outcome(one: Try) -> str:
    mark = "" if one.overtaken else " *"
    return f"{one.effects} {_SPOKEN[one.verdict]}".rstrip() + mark


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

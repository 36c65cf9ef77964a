"""What came of all windows: a table that reads as the handler runs, and what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from semel.testing.plugin_files import short_names
from semel.testing.plugin_tries import Try
from semel.testing.plugin_windows import FAULTS, Window

__all__ = ["Report", "merged"]

_WIDTH = 62
_SPOKEN = {
    "doubled": "DOUBLED",
    "lost": "LOST",
    "failed": "FAILED",
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
    "failed": (
        'a failure is the outcome for good (on_error="replay"), and every client is told so. Where the cell counts an effect, the effect is '
        "there and the next attempt recorded a failure: let the function find what the attempt before it did and return, or give "
        "on_unknown= a probe that looks the effect up"
    ),
    "unknown": (
        "the outcome is held for a person: once.resolve(key, …), or give on_unknown= a probe that looks the effect up"
    ),
    "stuck": (
        "no client could finish, or the struck worker did not end: see the error; after a crash the next attempt must be able to go on, "
        "and a worker that was paused or interrupted must come to an end"
    ),
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
    "made from a uuid or from the time? It must come from the request. Or is the effect made outside of the function that semel runs? "
    "Or is the store memory://, which each process has for itself, and which is empty in the next one? Take sqlite:/// for this test"
)
_ELSEWHERE = "  - a cancel does not strike here: the handler goes on to its next await, and the cell stands where it was met"
_TOO_LATE = "  missed: no await follows, so that a cancel cannot strike here; it shows nothing, and counts as no failure"
_NOT_OVERTAKEN = (
    "  * nobody could take over while it slept, or be seen to: a transaction or lock of its own was in the way, without a time limit or "
    "with one that is longer than half of patience="
)
_LEFT_OUT = (
    "  of files that nobody named, the lines farthest from the handler were left out: also=[module] takes a file whole, "
    "without=[module] leaves it out"
)
_UNSTRUCK = "nothing was struck: this handler never awaits anything, so that a cancel finds no place in it"
_WORST = ("doubled", "lost", "failed", "unknown", "stuck", "missed", "once")
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
    left_out: int = 0
    """Lines of other files than the handler's that were too many to be struck, at all or at each of their first passes."""

    @property
    def holds(self) -> bool:
        """The effect happened as often as expected, whatever was killed, paused or interrupted, wherever."""
        return self._struck and not self.failures

    @property
    def never_doubles(self) -> bool:
        """At most once; something may have been lost or be unknown."""
        return self._struck and not self.doubled and not self.missed

    @property
    def never_loses(self) -> bool:
        """At least once; something may have happened twice."""
        return self._struck and all(each.verdict == "doubled" for each in self.failures)

    @property
    def _struck(self) -> bool:
        """Whether any fault met the handler at all."""
        return any(not each.too_late and each.fault != "none" for each in self.tries)

    @property
    def failures(self) -> tuple[Try, ...]:
        """What did not end as it should. A cancel that came too late to strike is none."""
        return tuple(each for each in self.tries if each.verdict != "once" and not each.too_late)

    @property
    def doubled(self) -> tuple[str, ...]:
        return self.windows("doubled")

    @property
    def lost(self) -> tuple[str, ...]:
        return self.windows("lost")

    @property
    def missed(self) -> tuple[str, ...]:
        """Windows that the handler did not come to again."""
        return _titles(each for each in self.failures if each.verdict == "missed")

    @property
    def not_overtaken(self) -> tuple[str, ...]:
        """Windows in which nobody could take over from a zombie while it slept: they show nothing about one."""
        return _titles(each for each in self.tries if not each.overtaken)

    def windows(self, verdict: str, *, fault: str | None = None) -> tuple[str, ...]:
        """The names of the windows that ended so, in the order in which the handler passes them."""
        return _titles(each for each in self.tries if each.verdict == verdict and fault in (None, each.fault))

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
        if self.not_overtaken:
            yield _NOT_OVERTAKEN
        if self._has_gaps:
            yield _ELSEWHERE
        if any(each.too_late for each in self.tries):
            yield _TOO_LATE
        if self.left_out:
            yield _LEFT_OUT
        yield from self._remedies()

    def _summary(self) -> str:
        return "; ".join((self._verdicts(), *self._reservations()))

    def _verdicts(self) -> str:
        if self.holds:
            often = "exactly once" if self.expected == 1 else f"exactly {self.expected} effects"
            struck = sum(not each.too_late for each in self.tries)
            return f"{often} in all {struck} tries ({self.seconds:.1f} s)"
        counts = [
            f"{verdict} in {len(names)} windows" if len(names) != 1 else f"{verdict} in 1 window"
            for verdict in _ADVICE
            if (names := self._failed(verdict))
        ]
        return f"{', '.join(counts) or _UNSTRUCK} ({len(self.tries)} tries, {self.seconds:.1f} s)"

    def _reservations(self) -> Iterator[str]:
        """What the tries do not show."""
        if waited := sum(not each.overtaken for each in self.tries):
            zombies = sum(each.fault == "zombie" for each in self.tries)
            yield f"in {waited} of {zombies} zombie tries nobody could take over: they show nothing about a zombie"
        if self.left_out:
            yield f"{self.left_out} lines of other files were left out, or some of their passes"

    def _failed(self, verdict: str) -> tuple[str, ...]:
        return _titles(each for each in self.failures if each.verdict == verdict)

    @property
    def _has_gaps(self) -> bool:
        """Whether cancels arrived elsewhere than they were sent."""
        struck = {each.window for each in self.tries if each.fault == "interrupt"}
        return "interrupt" in self.faults and any(
            each.window not in struck and each.fault != "none" for each in self.tries
        )

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
            names = self._failed(verdict)
            if names:
                yield ""
                yield f"{verdict}: {_listed(names)}"
                yield f"  {_EVERY_TIME if verdict == 'doubled' and self._repeats else advice}"
        if not self._asks:
            yield f"  {_NO_SEMEL}"
        yield from _errors(each.error for each in self.failures if each.error)


def merged(windows: Sequence[Window], tries: Sequence[Try]) -> tuple[Try, ...]:
    """In the order in which the handler passes the windows. Cancels that were met at one and the same await are one try: the worst."""
    kept: dict[tuple[Window, str], Try] = {}
    names = short_names({each.window.file for each in tries if each.window.file})
    for each in sorted(tries, key=lambda each: (each.too_late, _WORST.index(each.verdict))):
        kept.setdefault((each.window, each.fault), each)
    order = {window: at for at, window in enumerate(windows)}
    ordered = sorted(
        kept.values(),
        key=lambda each: (order.get(each.window, len(order)), (*FAULTS, "none").index(each.fault)),
    )
    return tuple(_renamed(each, names) for each in ordered)


def _renamed(one: Try, names: Mapping[str, str]) -> Try:
    """Its window by a name that no other file's line has."""
    window = one.window
    if not window.file:
        return one
    name = f"{names[window.file]}:{window.name.rpartition(':')[2]}"
    return msgspec.structs.replace(one, window=msgspec.structs.replace(window, name=name))


def _titles(tries: Iterable[Try]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.window.title for each in tries))


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
    if one.too_late:
        return _SPOKEN["missed"]
    mark = "" if one.overtaken else " *"
    return f"{one.effects} {_SPOKEN[one.verdict]}".rstrip() + mark


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

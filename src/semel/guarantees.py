"""The guarantee table as data, and which part of it holds for a store's live settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

__all__ = ["CONDITIONS", "FAULTS", "TABLE", "Facts", "Guarantee", "Mode", "Promise", "grade"]


class Mode(StrEnum):
    """How the effect is made: this decides the guarantee, not the lock."""

    TX = "tx"
    KEYED = "keyed"
    TWO_PHASE = "2pc"
    PROBE = "probe"
    STEPS = "steps"
    RETRY = "retry"
    HOLD = "hold"


class Promise(StrEnum):
    EXACTLY_ONCE = "exactly once"
    AT_LEAST_ONCE = "at least once"
    AT_MOST_ONCE = "at most once"
    AS_STEPS = "as its steps"
    MAY_BE_LOST = "an acknowledged effect may be lost, never doubled"
    MAY_BE_EITHER = "an acknowledged effect may be lost, or doubled"
    MAY_REPEAT = "may repeat"
    NOTHING = "nothing is promised"


# What can happen: a worker is killed or a message or the store process is lost; a worker wakes up after its lease was
# taken over; the store loses writes that it had acknowledged.
FAULTS = ("crash", "zombie", "loss")

_EO, _ALO, _AMO = Promise.EXACTLY_ONCE, Promise.AT_LEAST_ONCE, Promise.AT_MOST_ONCE
TABLE: Mapping[Mode, tuple[Promise, Promise, Promise]] = {
    Mode.TX: (_EO, _EO, Promise.MAY_BE_LOST),
    Mode.KEYED: (_EO, _EO, _EO),
    Mode.TWO_PHASE: (_EO, _EO, Promise.MAY_BE_LOST),  # or left prepared, which is reported
    Mode.PROBE: (_EO, _ALO, _ALO),
    Mode.STEPS: (Promise.AS_STEPS, Promise.AS_STEPS, Promise.AS_STEPS),
    Mode.RETRY: (_ALO, _ALO, _ALO),
    Mode.HOLD: (_AMO, _AMO, Promise.MAY_REPEAT),
}
# What "exactly once" of a mode rests on, beside the store: said wherever the promise is.
CONDITIONS: Mapping[Mode, str] = {
    Mode.KEYED: "while the service remembers the key",
    Mode.PROBE: "if the probe is authoritative",
}


class Facts(msgspec.Struct, frozen=True):
    """The live settings of a store that bear on its guarantee, as read from the store itself."""

    store: str
    version: str = ""
    settings: Mapping[str, str] = {}
    durable_writes: bool = True
    """An acknowledged write survives a power loss."""
    survives_failover: bool = True
    """An acknowledged write survives a failover; True also where there is none."""
    coherent: bool = True
    """Of two claims at once one is refused, and a read sees every write before it. Not so in a Galera cluster, even a healthy one,
    nor where a restart of the server empties the table."""
    evicts: bool = False
    """The store may drop records by itself before they expire; their effects stay, and are made again."""
    warnings: tuple[str, ...] = ()
    """What weakens the guarantee, each with the exact setting that would strengthen it."""
    transactional: bool = True
    """A record is rolled back with the transaction that it was written in."""


class Guarantee(msgspec.Struct, frozen=True):
    """What holds now. `rows[mode][fault]` is the promise; `exposed` names the faults that these settings allow."""

    store: str
    version: str
    rows: Mapping[str, Mapping[str, str]]
    exposed: tuple[str, ...]
    settings: Mapping[str, str]
    warnings: tuple[str, ...]
    absent: Mapping[str, str] = {}
    """Modes that cannot be had here, and why: their rows say what they would promise."""
    conditions: Mapping[str, str] = {}
    """What the promise "exactly once" of a mode rests on, of which a store knows nothing."""

    @property
    def exactly_once(self) -> bool:
        """Whether effects in the same transaction (mode tx) are exactly once under every fault that can happen."""
        return Mode.TX not in self.absent and all(
            self.rows[Mode.TX][fault] == Promise.EXACTLY_ONCE for fault in self.exposed
        )


def grade(facts: Facts, *, enabled: bool = True) -> Guarantee:
    """The rows of the table that hold for these facts."""
    exposed = ["crash", "zombie"]
    if not facts.durable_writes or not facts.survives_failover or facts.evicts:
        exposed.append("loss")
    rows = {
        mode.value: {
            fault: _kept(promise, mode, fault, facts, enabled=enabled).value
            for fault, promise in zip(FAULTS, row, strict=True)
        }
        for mode, row in TABLE.items()
    }
    # A face that is switched off has no store to speak of: what would strengthen one is beside the point.
    warnings = facts.warnings if enabled else ("enabled=False: nothing is protected",)
    absent = _ABSENT | (_IN_MEMORY if facts.store == "memory" and enabled else {})
    if not facts.transactional:
        absent |= _NO_ROLLBACK
    conditions = {mode.value: said for mode, said in CONDITIONS.items() if _EO in rows[mode].values()}
    return Guarantee(
        facts.store, facts.version, rows, tuple(exposed), facts.settings, warnings, absent, conditions
    )


_ABSENT: dict[str, str] = {Mode.TWO_PHASE.value: "comes with streams"}
_IN_MEMORY: dict[str, str] = {Mode.TX.value: "memory has no transaction that an effect could join"}
_NO_ROLLBACK: dict[str, str] = {
    Mode.TX.value: "semel's tables are not transactional here: a record stays although its effect is rolled back"
}


# Where two callers may both be told that a key is theirs, or a key is forgotten and its effect is not, only a peer that
# knows the key keeps it to one effect.
_INCOHERENT: Mapping[Promise, Promise] = {
    _EO: _ALO,
    _AMO: Promise.MAY_REPEAT,
    Promise.MAY_BE_LOST: Promise.MAY_BE_EITHER,
}


def _kept(promise: Promise, mode: Mode, fault: str, facts: Facts, *, enabled: bool) -> Promise:
    """What is left of a row's promise on this store."""
    if not enabled:
        return Promise.NOTHING
    # Other losses take the last writes, effect and record alike. An eviction takes a record and leaves its effect.
    apart = not facts.coherent or (facts.evicts and fault == "loss")
    return _INCOHERENT.get(promise, promise) if apart and mode is not Mode.KEYED else promise

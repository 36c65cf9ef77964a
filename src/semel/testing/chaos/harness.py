"""What the matrix sets otherwise than a user would, and why: one place, from which schedules take it and pages show it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

__all__ = [
    "BACK",
    "BEATEN",
    "CUT_OFF",
    "EVERY",
    "FORWARD",
    "FULL",
    "GONE",
    "HELD",
    "KILLED",
    "NOTED",
    "PARKED",
    "QUIET",
    "QUIETER",
    "RELAYED",
    "SETTINGS",
    "SHORT",
    "SLOW",
    "SPLIT",
    "STILL",
    "WIRE",
    "Setting",
]


class Setting(NamedTuple):
    """`where` it holds, the options of `AsyncSemel` and `execute`, in seconds, and `why`."""

    where: str
    options: dict[str, Any]
    why: str

    @property
    def plan(self) -> dict[str, Any]:
        """As changes of a `Plan`: its own fields, and the face's options."""
        own = {name: value for name, value in self.options.items() if name in {"lease", "wait"}}
        return {**own, "settings": {name: value for name, value in self.options.items() if name not in own}}

    @property
    def text(self) -> str:
        return ", ".join(f"{name}={value:g}" for name, value in self.options.items())


# The core's default is a lease of 10 s, timeout 2, settle_timeout 5.
EVERY: Final = Setting(
    "every call, unless said otherwise",
    {"lease": 0.12, "timeout": 10.0, "settle_timeout": 5.0, "wait": 8.0},
    "leases end soon; a busy machine is not a fault",
)
QUIET: Final = Setting(
    "zombie, overlap, overruled on SQLite",
    {"lease": 0.6},
    "a heartbeat that is stopped inside a write would hold the only lock",
)
QUIETER: Final = Setting(
    "the same with steps, and under HTTP and gRPC", {"lease": 2.4}, "there are more writes before the point"
)
PARKED: Final = Setting(
    "owners and waiters at wait.parked, and the HTTP or gRPC server of the retries",
    {"lease": 6.0},
    "nothing waits for a lease there",
)
SLOW: Final = Setting(
    "slow",
    {"lease": 4.5, "wait": 25.0},
    "its heartbeats come in time on a busy machine, too",
)
WIRE: Final = Setting(
    "victims of reset-before, reset-after, stall",
    {"lease": 9.0, "timeout": 2.0},
    "the default time limit is the one that a stall must outlast",
)
BEATEN: Final = Setting(
    "victims of reset-before, reset-after, stall at renew.sent, and the next caller",
    {"lease": 7.5, "wait": 25.0},
    "there is time for another heartbeat after a time limit of 2 s, on a busy machine, too",
)
STILL: Final = Setting(
    "zombies that are relays or consumers",
    {"lease": 3.0},
    "a heartbeat that is stopped inside a write would hold its locks: SQLite's only one, MariaDB's for 50 s",
)
RELAYED: Final = Setting(
    "relays whose connection, database or broker is broken",
    {"lease": 0.6},
    "no heartbeat is due before the next request; the next relay need not wait long",
)
NOTED: Final = Setting(
    "relays that are killed, cut off, or asleep while their sink loses its tail: how long a round waits for its batches",
    {"slow": 20.0},
    "with the 0.25 s of a relay it would be luck which of them a busy machine has noted before the next plan",
)
KILLED: Final = Setting(
    "victims of store-kill at run.returned",
    {"lease": 9.0, "settle_timeout": 20.0},
    "one restart is shared by all modes; with the default a start that takes more than 5 s ends in NotRecorded",
)
GONE: Final = Setting(
    "victims of store-kill at claim.sent and settle.sent",
    {"lease": 9.0, "timeout": 2.0, "settle_timeout": 2.0},
    "their server stays away until they are told",
)
CUT_OFF: Final = Setting(
    "victims of failover at run.returned",
    {"lease": 1.0, "timeout": 2.0, "settle_timeout": 0.5},
    "no answer will come: it is given up soon",
)
HELD: Final = Setting(
    "victims of failover at acked.waited",
    {"lease": 9.0, "settle_timeout": 20.0},
    "one replica that stands still is shared by all modes",
)
SPLIT: Final = Setting(
    "victims of split",
    {"lease": 1.5, "settle_timeout": 0.7},
    "the two servers will not agree: it is given up soon, and its lease is over soon after",
)
FORWARD: Final = Setting("clock-forward", {"lease": 60.0}, "no heartbeat is due before the clock jumps")
BACK: Final = Setting("victims of clock-back", {"lease": 0.5}, "it is over when the clock is right again")
SHORT: Final = Setting(
    "victims of late-retry",
    {"lease": 6.0, "retention": 0.2},
    "the next caller comes when their record is over, and not before it is done, on a busy machine, too",
)
FULL: Final = Setting(
    "victims of disk-full and memory-full",
    {"timeout": 2.0, "settle_timeout": 0.5},
    "no room will be made: it is given up soon",
)
SETTINGS: Final = (
    EVERY,
    QUIET,
    QUIETER,
    PARKED,
    SLOW,
    WIRE,
    BEATEN,
    STILL,
    RELAYED,
    NOTED,
    KILLED,
    GONE,
    CUT_OFF,
    HELD,
    SPLIT,
    FORWARD,
    BACK,
    SHORT,
    FULL,
)

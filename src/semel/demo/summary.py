"""What happened, checked against the ledger and the store, and what it shows and does not show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from textwrap import fill

from semel import Semel
from semel.demo.ledger import Effect
from semel.demo.race import Race

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True)
class Verdict:
    """`faults` is empty when every key has exactly one effect, is recorded as done, and gave all callers one value."""

    text: str
    faults: tuple[str, ...]


def judge(race: Race, effects: list[Effect], once: Semel) -> Verdict:
    """Compare what the workers told with the ledger and the store."""
    faults = (*race.troubles, *_faults(race, effects, once))
    ledger = f"lines for {len({effect.key for effect in effects})} of {race.plan.keys} keys"
    calls = sum(tally.executed + tally.replayed for tally in race.tallies)
    rows = [
        ("executed", sum(t.executed for t in race.tallies), "the function ran here, to its end"),
        ("replayed", sum(t.replayed for t in race.tallies), "a stored result was given back"),
        ("waited", sum(t.waited for t in race.tallies), "calls that found the key running and waited for it"),
        ("taken over", sum(t.taken_over for t in race.tallies), _takeover(race)),
    ]
    ending = [f"FAILED: {fault}" for fault in faults]
    callers, processes = race.plan.all_callers, race.plan.workers
    lines = [
        f"{calls} calls by {callers} callers in {processes} processes over one SQLite file, {race.took:.1f} s",
        *(f"  {name:<11}{count:>6}   {meaning}" for name, count, meaning in rows),
        f"  {'ledger':<11}{len(effects):>6}   {ledger}",
        "",
        *(ending or ["Every key has exactly one effect, and all its callers got the same value."]),
        "",
        _honestly(race),
    ]
    return Verdict("\n".join(lines), faults)


def _takeover(race: Race) -> str:
    if not race.taken_over_by:
        return "nobody was"
    return (
        f"{race.victims_key}: worker-1 was killed inside the function, worker-{race.taken_over_by} finished it "
        f"{race.taken_over_after:.1f} s later"
    )


def _faults(race: Race, effects: list[Effect], once: Semel) -> list[str]:
    count = Counter(effect.key for effect in effects)
    faults = [f"{key} has {count[key]} effects in the ledger" for key in race.keys if count[key] != 1]
    written = {effect.key: effect.receipt for effect in effects}
    for key in race.keys:
        if race.receipts[key] != {written.get(key)}:
            faults.append(
                f"{key}: callers got {sorted(race.receipts[key])}, the ledger has {written.get(key)}"
            )
        record = once.peek(key)
        if record is None or record.state != "done":
            faults.append(f"{key} is {'absent' if record is None else record.state} in the store, not done")
    if not race.killed_at:
        faults.append("no worker was killed: the demo did not show what it is for")
    elif not race.taken_over_by:
        faults.append(f"nobody took {race.victims_key} over")
    return faults


def _honestly(race: Race) -> str:
    return fill(
        f"What this shows, and what not: worker-1 was killed before it made its effect, so the one who took {race.victims_key} "
        "over made it once. Killed after the effect and before its outcome was stored, no library could know that it "
        "happened: the function would run again and the ledger would get a second line. Exactly once then needs the "
        "effect in the same database transaction (once.within), or a receiver that knows the key: every line of "
        "the ledger carries run.downstream_key(), which is the same on every attempt, for that.",
        width=100,
    )

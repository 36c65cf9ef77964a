"""Writes the parts of the pages that are read from the code: `python docs/generate.py`.

Each part stands between `<!-- generated: NAME -->` and `<!-- end -->`. A test fails while a page differs from the code.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

from semel import hooks, model
from semel.guarantees import FAULTS, TABLE, Mode
from semel.keys import make_scope
from semel.model import Ask, Kind, Policy, Record, State
from semel.store import Capabilities, Settings, open_store
from semel.testing.mutants import MUTANTS
from semel.testing.mutants.plant import recorded_seeds
from semel.testing.simulation.invariants import CHECKS

ROOT = Path(__file__).resolve().parent.parent
_PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

_HOW: dict[Mode, str] = {
    Mode.TX: "effect and record in one SQL transaction, or in one guarded Redis `MULTI`/`EXEC` of absolute commands",
    Mode.KEYED: "outside effect, called with a key that semel derives (`run.downstream_key`)",
    Mode.TWO_PHASE: "outside transaction, prepared, its handle in a checkpoint (planned with the stream sinks)",
    Mode.PROBE: "outside effect that can be looked up before a retry (`on_unknown=probe`)",
    Mode.STEPS: "resumable run (`run.step`), each step made in one of these ways",
    Mode.RETRY: 'outside effect, run again when its outcome is lost (`on_unknown="retry"`, the default)',
    Mode.HOLD: 'outside effect, never run again; ends `unknown`, a person decides (`on_unknown="hold"`)',
}
_FAULT: dict[str, str] = {
    "crash": "worker killed, request or reply lost, store killed",
    "zombie": "worker paused beyond its lease",
    "loss": "store loses writes it had acknowledged",
}
_WHERE: dict[tuple[Mode, str], str] = {
    (Mode.KEYED, "crash"): " while the service remembers the key",
    (Mode.KEYED, "zombie"): " while the service remembers the key",
    (Mode.KEYED, "loss"): " while the service remembers the key",
    (Mode.PROBE, "crash"): " if the probe is authoritative",
    (Mode.TWO_PHASE, "loss"): "; may be left prepared, which is reported",
}
_EXAMPLES = {
    "memory": "memory://",
    "sqlite": "sqlite:///semel.db",
    "postgresql": "postgresql://host/db",
    "mysql, mariadb": "mysql://host/db",
    "redis, valkey": "redis://host",
}


def _guarantees(*, planned: bool) -> Iterator[str]:
    yield "| how the effect is made | " + " | ".join(_FAULT[fault] for fault in FAULTS) + " |"
    yield "|---" * (1 + len(FAULTS)) + "|"
    for mode, promises in TABLE.items():
        if mode is Mode.TWO_PHASE and not planned:
            continue
        cells = [
            f"{promise}{_WHERE.get((mode, fault), '')}"
            for fault, promise in zip(FAULTS, promises, strict=True)
        ]
        yield f"| `{mode}`: {_HOW[mode]} | " + " | ".join(cells) + " |"


# ------------------------------------------------------------------------------------------ states

_NOW = 1_000.0
_LEASE = 10.0
_ASK = Ask(make_scope("docs", "t", "o", "k"), b"new", _LEASE, 100.0)


def _record(state: State, *, policy: Policy = Policy.RETRY, lapsed: bool = False) -> Record:
    """One as a store would hold it; an ended record is seen within its retention."""
    lease_until = _NOW - 1 if lapsed else _NOW + _LEASE
    return Record(state, b"old", 1, 1, 0.0, 0.0, lease_until, inf, policy, scope=_ASK.scope)


def _edges() -> Iterator[tuple[str, str, str]]:
    """(from, to, why): asked from the model, not written down."""
    yield "[*]", _after_claim(None), "claim"
    for kind, (by_owner, by_person) in model.TRANSITIONS.items():
        for state in sorted(by_owner):
            yield state, kind, "owner settles"
        for state in sorted(by_person):
            yield state, kind, "resolve or probe"
    yield State.RELEASED, _after_claim(_record(State.RELEASED)), "claim"
    for policy in Policy:
        lapsed = _record(State.RUNNING, policy=policy, lapsed=True)
        seen = model.view(lapsed, _NOW)
        if seen is not State.RUNNING:
            yield State.RUNNING, str(seen), f"lease over ({policy})"
        else:
            yield State.RUNNING, _after_claim(lapsed), f"lease over ({policy}), claim takes over"
    for state in (State.DONE, State.FAILED, State.RELEASED):
        for tombstone in (0.0, _NOW + 1):
            ended = Record(state, b"old", 1, 1, 0.0, 0.0, 0.0, _NOW, tombstone=tombstone)
            seen = model.view(ended, _NOW)
            yield state, "[*]" if seen is None else seen, "retention over" + (", tombstone" if seen else "")
    yield State.EXPIRED, "[*]", "tombstone over"


def _after_claim(record: Record | None) -> str:
    _, written = model.claim(record, _ASK, _NOW)
    return "" if written is None else written.state


def _diagram() -> Iterator[str]:
    why: dict[tuple[str, str], list[str]] = {}
    for start, end, reason in _edges():
        if start == end and reason == "owner settles":
            continue  # a settle sent twice changes nothing
        reasons = why.setdefault((start, end), [])
        if reason not in reasons:
            reasons.append(reason)
    yield "```mermaid"
    yield "stateDiagram-v2"
    for (start, end), reasons in why.items():
        yield f"    {start} --> {end}: {' / '.join(reasons)}"
    yield "```"


def _moves() -> Iterator[str]:
    yield "| settle as | by the owner, from | by a person or a probe, from |"
    yield "|---|---|---|"
    for kind, groups in model.TRANSITIONS.items():
        cells = (", ".join(f"`{state}`" for state in sorted(group)) or "never" for group in groups)
        yield f"| `{kind}` | " + " | ".join(cells) + " |"
    yield f"| `{Kind.FORGOTTEN}` | never | everything but a live run |"


def _answers() -> Iterator[str]:
    """What a claim is answered, for each kind of record and each policy of the caller."""
    yield "| the record | the caller's `on_unknown` | verdict | the call |"
    yield "|---|---|---|---|"
    dead = Record(State.DONE, b"old", 1, 1, 0.0, 0.0, 0.0, _NOW - 1, tombstone=_NOW + 1, scope=_ASK.scope)
    scenes: list[tuple[str, Record | None]] = [
        ("absent, or its time is over", None),
        ("`running`, lease held", _record(State.RUNNING)),
        *(
            (f"`running` under `{stored}`, lease over", _record(State.RUNNING, policy=stored, lapsed=True))
            for stored in Policy
        ),
        *((f"`{state}`", _record(state)) for state in (State.DONE, State.FAILED, State.RELEASED)),
        ("`unknown`", _record(State.UNKNOWN, policy=Policy.HOLD)),
        ("`expired` (a tombstone)", dead),
    ]
    for what, record in scenes:
        answers: dict[str, list[str]] = {}
        for policy in Policy:
            ask = Ask(_ASK.scope, _ASK.nonce, _LEASE, 100.0, policy=policy)
            answers.setdefault(type(model.claim(record, ask, _NOW)[0]).__name__, []).append(f"`{policy}`")
        for verdict, policies in answers.items():
            who = "any" if len(policies) == len(Policy) else ", ".join(policies)
            yield f"| {what} | {who} | `{verdict}` | {_CALL[verdict]} |"


_CALL = {
    "Won": "runs the function",
    "Replay": "gives back the stored outcome, or raises `PreviousFailure`",
    "Busy": "waits for `wait` seconds, then raises `InProgress`",
    "Expired": "raises `KeyExpired`",
    "Unknown": "asks the caller's probe if there is one, else raises `OutcomeUnknown`",
}


# ------------------------------------------------------------------------------------------- others


def _capabilities() -> Iterator[str]:
    names = Capabilities.__struct_fields__
    yield "| store | " + " | ".join(f"`{name}`" for name in names) + " |"
    yield "|---" * (1 + len(names)) + "|"
    for store, url in _EXAMPLES.items():
        able = open_store(url, Settings(), "async").capabilities
        yield f"| {store} | " + " | ".join("yes" if getattr(able, name) else "no" for name in names) + " |"


def _events() -> Iterator[str]:
    yield "| event | fields besides `scope` | level | meaning |"
    yield "|---|---|---|---|"
    for event in hooks._LEVELS:  # noqa: SLF001 - the hook's own table
        fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(event) if field.name != "scope")
        level = logging.getLevelName(hooks._LEVELS[event])  # noqa: SLF001
        meaning = " ".join((event.__doc__ or "").split())
        yield f"| `{event.__name__}` | {fields or '–'} | {level} | {meaning} |"


def _decisions() -> Iterator[str]:
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        yield f"* [{title}](decisions/{path.name})"


def _checks() -> Iterator[str]:
    yield "| check | what it says |"
    yield "|---|---|"
    for name, meaning in CHECKS.items():
        yield f"| {name} | {meaning} |"


def _mutants() -> Iterator[str]:
    seeds = recorded_seeds()
    yield "| mutant | what is broken | caught by | seed |"
    yield "|---|---|---|---|"
    for name, mutant in MUTANTS.items():
        where = f"`{mutant.check}` ({mutant.store})" if mutant.store else mutant.check
        yield f"| `{name}` | {' '.join(mutant.what.split())} | {where} | {seeds.get(name, '–')} |"


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "guarantees": lambda: _guarantees(planned=False),
    "guarantees-all": lambda: _guarantees(planned=True),
    "state-diagram": _diagram,
    "transitions": _moves,
    "verdicts": _answers,
    "capabilities": _capabilities,
    "events": _events,
    "decisions": _decisions,
    "checks": _checks,
    "mutants": _mutants,
}


def renewed(text: str) -> str:
    """The page with its generated parts as the code has them now."""

    def part(found: re.Match[str]) -> str:
        return found[1] + "\n".join(PARTS[found[2]]()) + "\n" + found[3]

    return _PART.sub(part, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    """Rewrite every page that is out of date."""
    for page in pages():
        text = page.read_text("utf-8")
        if (new := renewed(text)) != text:
            page.write_text(new, "utf-8")
            print(f"rewritten: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

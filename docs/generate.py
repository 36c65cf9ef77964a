"""Writes the parts of the pages that are read from the code: `python docs/generate.py`.

Each part stands between `<!-- generated: NAME -->` and `<!-- end -->`. A test fails while a page differs from the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from math import inf
from pathlib import Path
from typing import get_args

from semel import hooks, model
from semel.grpc.refusals import REASONS
from semel.grpc.rules import Effects, Rules, words_for
from semel.guarantees import CONDITIONS, FAULTS, TABLE, Mode, Promise
from semel.http import rules as http_rules
from semel.http.client import DurableKeys
from semel.http.problem import PROBLEMS
from semel.keys import make_scope
from semel.messaging import Inbox, Message, Outbox, Relay, Windows
from semel.messaging import events as messaging_events
from semel.model import Ask, Kind, Policy, Record, State
from semel.store import Capabilities, Settings, open_store
from semel.telemetry.series import SERIES
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
        cells = " | ".join(_promised(mode, promise) for promise in promises)
        yield f"| `{mode}`: {_HOW[mode]} | {cells} |"


def _promised(mode: Mode, promise: Promise) -> str:
    if promise is Promise.EXACTLY_ONCE and mode in CONDITIONS:
        return f"{promise} {CONDITIONS[mode]}"
    left = mode is Mode.TWO_PHASE and promise is Promise.MAY_BE_LOST
    return f"{promise}; may be left prepared, which is reported" if left else promise.value


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


def _messaging_events() -> Iterator[str]:
    yield "| event | fields | meaning |"
    yield "|---|---|---|"
    for name in messaging_events.__all__:
        event = getattr(messaging_events, name)
        if dataclasses.is_dataclass(event) and event is not messaging_events.RelayEvent:
            fields = ", ".join(f"`{field.name}`" for field in dataclasses.fields(event))
            yield f"| `{name}` | {fields} | {' '.join((event.__doc__ or '').split())} |"


def _series() -> Iterator[str]:
    yield "| series | kind | labels | what it says |"
    yield "|---|---|---|---|"
    for one in SERIES:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        yield f"| `{one.name}` | {one.kind} | {labels or '–'} | {one.help} |"


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


def _grpc_reasons() -> Iterator[str]:
    yield "| reason | status | come again |"
    yield "|---|---|---|"
    again = {
        "ABORTED": "with the same key, after the pushback",
        "UNAVAILABLE": "with the same key, after the pushback",
    }
    for reason, code in REASONS.items():
        yield f"| `{reason}` | `{code.name}` | {again.get(code.name, 'no (pushback −1)')} |"


def _grpc_statuses() -> Iterator[str]:
    """What a handler's status means for its key, asked from the rules."""
    kinds = get_args(Effects)
    tables = [words_for(Rules(effects=effects)) for effects in kinds]
    yield "| the handler says | " + " | ".join(f'`effects="{effects}"`' for effects in kinds) + " |"
    yield "|---" * (1 + len(kinds)) + "|"
    for code in tables[0]:
        yield f"| `{code.name}` | " + " | ".join(table[code] for table in tables) + " |"


def _problem(name: str) -> Iterator[str]:
    kind = PROBLEMS[name]
    again = "retryable with the same key" if kind.retryable else "not retryable"
    yield f"`urn:semel:problem:{name}`, status {kind.status}, {again}."


def _problems() -> Iterator[str]:
    yield "| type | status | retryable | title |"
    yield "|---|---|---|---|"
    for kind in PROBLEMS.values():
        yield f"| [{kind.name}]({kind.name}.md) | {kind.status} | {'yes' if kind.retryable else 'no'} | {kind.title} |"


_OPTIONS = {
    "methods": "methods that may carry a key",
    "sources": "where the key comes from, in order: `header:NAME`, `query:NAME`, `body:FIELD.PATH`, `path:NAME`",
    "required": "refuse a request without a key",
    "strict": "take the quoted form of a key only, as the draft says",
    "min_length": "the shortest key; 16 at least with `anonymous`",
    "uuid7": "take UUIDv7 keys only",
    "anonymous": "the routes have no users: keys are shared by everybody who knows them",
    "scope": "`route`: the same key on another route is another action",
    "exclude": "fields of a JSON body that do not tell requests apart",
    "effects": "what a failed handler leaves behind: `db`, `steps`, `opaque`",
    "stored": "which responses are final: `final`, `success`, `everything`, `success-and-4xx`, or a function of the status",
    "lease": "seconds until a killed worker's key is free",
    "wait": "seconds that a repetition waits for the first request",
    "max_wait": "the most that `Prefer: wait=` may ask for",
    "max_waiters": "repetitions that may wait for one key, per process",
    "retention": "seconds for which a response is given again",
    "tombstone": "seconds after that in which a repetition is refused as expired",
    "grace": "seconds of clock difference that are forgiven",
    "expired": "`new`: run an expired key as a new action",
    "max_response": "the largest response that is kept in its record, in bytes",
    "spill": "where longer responses are kept: a URL, a `Spill` or a store of yours, see [long responses](../howto/http.md#long-responses)",
    "max_body": "the largest request with a key, in bytes",
    "quota": "new keys a second for each principal",
    "fail_open": "run without protection when the store is down",
    "store_timeout": "seconds that the store may take to answer a claim, three times as many for its first answer; then 503",
    "secret": "store responses encrypted only; needs `encrypt=` of the store",
    "markers": "names of the header that says whether a response was replayed",
    "replay_headers": "more headers to replay",
    "problem_base": "what problem types begin with",
}


def _value(value: object) -> str:
    if isinstance(value, frozenset | tuple):
        texts = sorted(part.decode() if isinstance(part, bytes) else str(part) for part in value)
        return "see below" if len(texts) > 4 else ", ".join(f"`{text}`" for text in texts)
    return "" if value is None else f"`{value!r}`"


def _http_options() -> Iterator[str]:
    plain = http_rules.Rules()
    for name in http_rules.Rules.__struct_fields__:
        if name not in ("statuses", "repeatability"):  # set by profiles only
            yield f"| `{name}` | {_value(getattr(plain, name))} | {_OPTIONS[name]} |"


def _http_profiles() -> Iterator[str]:
    yield "| profile | options |"
    yield "|---|---|"
    for name, options in http_rules.PROFILES.items():
        told = ", ".join(f"`{option}={value!r}`" for option, value in options.items())
        yield f"| `{name}` | {told} |"


def _http_headers() -> Iterator[str]:
    yield (
        "Replayed: "
        + ", ".join(f"`{name.decode()}`" for name in sorted(http_rules.Rules().replay_headers))
        + "."
    )


# ---------------------------------------------------------------------------------------- names of classes

# Public for other parts of semel only, and no word about them: they may change.
_INNER = {
    "Outbox": {"arrivals", "arrive", "channel", "home", "listen", "on_wake", "tend"},
    "DurableKeys": {"book"},
}
_MEMBERS: tuple[type, ...] = (Outbox, Relay, Inbox, Message, Windows, DurableKeys)


def members(kind: type) -> dict[str, str]:
    """What a user may call or read, by name: how it is written, and the first paragraph of what it says of itself."""
    inner = _INNER.get(kind.__name__, set())
    found = {}
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        given = getattr(member, "__func__", getattr(member, "fget", member))
        if name.startswith("_") or name in inner or not callable(given):
            continue
        written = name if isinstance(member, property) else _written(name, given)
        found[name] = f"| `{written}` | {_said(given)} |"
    return found


def _said(what: object) -> str:
    return " ".join((inspect.getdoc(what) or "").split("\n\n")[0].split()).replace("|", "\\|")


def _written(name: str, given: Callable[..., object]) -> str:
    """A call as one would write it: without self and without types."""
    bare = [one.replace(annotation=one.empty) for one in inspect.signature(given).parameters.values()]
    call = f"{name}{inspect.Signature(bare[not isinstance(given, type) :])}".replace(
        "<built-in function time>", "time.time"
    )
    return f"await {call}" if inspect.iscoroutinefunction(given) else call


def ways(package: str) -> dict[type, list[str]]:
    """The classes of `semel.messaging.sinks` or `.sources`, each with the URL schemes that open it."""
    found: dict[type, list[str]] = {}
    for scheme, (module, name) in import_module(package)._SCHEMES.items():  # noqa: SLF001 - the table of its own
        found.setdefault(getattr(import_module(f"{package}.{module}"), name), []).append(scheme)
    return found


def _ways(package: str) -> Iterator[str]:
    yield "| class | of the URL schemes | meaning |"
    yield "|---|---|---|"
    for kind, schemes in ways(package).items():
        told = ", ".join(f"`{scheme}`" for scheme in schemes)
        yield f"| `{_written(kind.__name__, kind)}` | {told} | {_said(kind)} |"


def _members(kind: type) -> Iterator[str]:
    yield "| name | meaning |"
    yield "|---|---|"
    yield from members(kind).values()


PARTS: dict[str, Callable[[], Iterator[str]]] = {
    "guarantees": lambda: _guarantees(planned=False),
    "guarantees-all": lambda: _guarantees(planned=True),
    "state-diagram": _diagram,
    "transitions": _moves,
    "verdicts": _answers,
    "capabilities": _capabilities,
    "events": _events,
    "messaging-events": _messaging_events,
    "series": _series,
    "decisions": _decisions,
    "checks": _checks,
    "mutants": _mutants,
    "problems": _problems,
    **{f"problem:{name}": partial(_problem, name) for name in PROBLEMS},
    "http-options": _http_options,
    "http-profiles": _http_profiles,
    "http-headers": _http_headers,
    "grpc-reasons": _grpc_reasons,
    "grpc-statuses": _grpc_statuses,
    **{f"names:{kind.__name__}": partial(_members, kind) for kind in _MEMBERS},
    **{f"messaging-{kind}": partial(_ways, f"semel.messaging.{kind}") for kind in ("sinks", "sources")},
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

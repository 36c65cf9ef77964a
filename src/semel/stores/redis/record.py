"""The packed record in Redis, and the packed arguments of its scripts: bytes in, bytes out, no I/O.

The layout is told once, at the head of `lua/record.lua`; each script's arguments at its own head. Everything here is on
the hot path, hence the long positional calls: a replay has about four microseconds for all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from math import inf
from struct import Struct
from struct import error as StructError  # noqa: N812 - struct spells its exception like a module
from typing import Any, Final, NoReturn

import msgspec

from semel.errors import OutcomeUnknown, StoreUnavailable
from semel.keys import Scope, mask
from semel.model import (
    Answer,
    Ask,
    Busy,
    Event,
    Expired,
    Failure,
    Kind,
    Mismatch,
    Note,
    Policy,
    Record,
    Renewal,
    Replay,
    Settle,
    State,
    Unknown,
    Verdict,
    Won,
    bury,
    view,
)
from semel.posting import Brief
from semel.stores.redis.calls import Script

__all__ = [
    "CLAIM",
    "COUNT",
    "EXEC_BEGIN",
    "EXEC_END",
    "EXEC_SEEN",
    "LARGE_SIZE",
    "NOTE",
    "PEEK",
    "RENEW",
    "SETTLE",
    "SHARD",
    "SWEEP",
    "TRAIL",
    "Large",
    "Unreadable",
    "answer",
    "ask_words",
    "pack_ask",
    "pack_end",
    "pack_note",
    "pack_peek",
    "pack_renewal",
    "pack_time",
    "read_peek",
    "read_record",
    "read_trail",
    "short_verdict",
    "unreadable",
    "verdict",
]

LARGE_SIZE: Final = 1 << 16
"""What is longer travels on a connection of its own, so that nothing small waits behind it."""


def _text(name: str) -> str:
    """A Lua file with its `--@include x` lines replaced by x.lua (why not functions: see record.lua)."""
    lines = files("semel.stores").joinpath(f"lua/{name}.lua").read_text("utf-8").splitlines()
    return "\n".join(_text(line.split()[1]) if line.startswith("--@include ") else line for line in lines)


def _script(name: str, *before: str) -> Script:
    return Script(name, "\n".join(map(_text, (*before, name))))


CLAIM: Final = _script("claim", "record")
SETTLE: Final = _script("settle", "record")
RENEW: Final = _script("renew", "record")
NOTE: Final = _script("note", "record")
PEEK: Final = _script("peek", "record")
SHARD: Final = _script("shard")
SWEEP: Final = _script("sweep")
TRAIL: Final = _script("trail")
COUNT: Final = _script("count")
EXEC_BEGIN: Final = _script("exec_begin")
EXEC_END: Final = _script("exec_end")
EXEC_SEEN: Final = _script("exec_seen")

_HEAD: Final = Struct("<BBBBIBBBHHHQddd")
_BRIEF: Final = Struct(
    "<HBBIxBBHHH24xd"
).unpack_from  # the same, without version of fingerprint, token and other times
_HEAD_SIZE: Final = _HEAD.size
_WIDE: Final = Struct("<ddIddHHHII")
_WIDE_SIZE: Final = _HEAD_SIZE + _WIDE.size
_SIZES: Final = Struct(
    "<65xI16xHHHII"
).unpack_from  # of the parts that a wide block tells of, from the record's beginning
_ASK: Final = Struct("<dddBBBBBBHHHHI")
_END: Final = Struct("<ddddBBBBBHHHHHHIII")
_RENEWAL: Final = Struct("<dddB")
_NOTE: Final = Struct("<dB")
_LINE: Final = Struct("<ddBBIHI")
_FRESH: Final = Struct("<Qddd")
_BUSY: Final = Struct("<dIB")
_TIME: Final = Struct("<d")

# Place 0 is never stored.
_STATES: Final = (
    State.EXPIRED,
    State.RUNNING,
    State.DONE,
    State.FAILED,
    State.UNKNOWN,
    State.RELEASED,
    State.EXPIRED,
)
_RUNNING: Final = 1
_DONE: Final = 2
_MAGIC: Final = 0x015E  # the first two bytes of a record: what it is, and the version of its format
_POLICIES: Final = (Policy.RETRY, Policy.PROBE, Policy.HOLD)
_POLICY_CODE: Final = {policy: code for code, policy in enumerate(_POLICIES)}
_KIND_CODE: Final = {Kind.DONE: 2, Kind.FAILED: 3, Kind.UNKNOWN: 4, Kind.RELEASED: 5, Kind.FORGOTTEN: 7}
_KINDS: Final = {code: kind for kind, code in _KIND_CODE.items()}
_STATE_RUNNING, _KIND_DONE = State.RUNNING, Kind.DONE  # asked for once: see `semel.flow`
_RESOLVED, _HAS_WIDE, _BURIED = 4, 8, 16
_UNUSUAL: Final = _RESOLVED | _BURIED
_NO_REF: Final = 0xFFFF
_AS_IT_IS: Final = 0xFF
_REPAIR, _NEW_STEPS, _INDEX_REF, _NOTED = 1, 2, 4, 8
_ECHO: Final = 8
_REPLAY: Final = ord("P")
_WON_AFRESH: Final = ord("F")
_MOST_ASKS: Final = 1024  # tenants may come from requests
_plain_asks: Final[dict[tuple[Any, ...], tuple[bytes, bytes, bytes]]] = {}
_last_ask: tuple[tuple[Any, ...], tuple[bytes, bytes, bytes]] = ((), (b"", b"", b""))

_encode: Final = msgspec.msgpack.Encoder().encode
_decode_labels: Final = msgspec.msgpack.Decoder(dict[str, str]).decode
_decode_error: Final = msgspec.msgpack.Decoder(tuple[str, str | None, str]).decode


class Unreadable(Exception):
    """Bytes under our key that are no record: damaged, foreign, or of a format that this version does not know."""


# --------------------------------------------------------------------------------------------- arguments


def ask_words(ask: Ask, skew: float) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """The ask as an argument that is written after its `$`: its length, itself and the line's end, in pieces to be joined."""
    scope, nonce = ask.scope, ask.nonce
    if ask.fingerprint or ask.takeover or ask.labels:
        packed = pack_ask(ask, skew)
        return b"%d\r\n" % len(packed), packed, b"", b"", b"\r\n"
    # Nearly every ask has names and times, and nothing else; and all but nonce and key of the one before.
    key = scope.key.encode()
    alike = (
        ask.lease, ask.retention, skew, ask.policy, ask.fingerprint_version,
        scope.tenant, scope.operation, ask.secret_id, len(nonce), len(key),
    )  # fmt: skip
    last = _last_ask
    head, names, end = last[1] if last[0] == alike else _plain_ask(alike)
    return head, nonce, names, key, end


def _plain_ask(alike: tuple[Any, ...]) -> tuple[bytes, bytes, bytes]:
    """What is the same for all asks of a call site and tenant whose keys are equally long."""
    global _last_ask  # noqa: PLW0603 - a memory of one, replaced whole
    made = _plain_asks.get(alike)
    if made is None:
        lease, retention, skew, policy, version, *names, nonce_size, key_size = alike
        tenant, operation, secret = (name.encode() for name in names)
        head = _ASK.pack(
            lease, retention, skew, _POLICY_CODE[policy], version, 0, nonce_size, 0, 0,
            len(tenant), len(operation), key_size, len(secret), 0,
        )  # fmt: skip
        size = len(head) + nonce_size + len(tenant) + len(operation) + key_size + len(secret)
        if len(_plain_asks) >= _MOST_ASKS:
            _plain_asks.clear()
        made = _plain_asks[alike] = (b"%d\r\n%b" % (size, head), tenant + operation, secret + b"\r\n")
    _last_ask = (alike, made)
    return made


def pack_ask(ask: Ask, skew: float, *, large: bool = False) -> bytes:
    scope, nonce, print_, takeover = ask.scope, ask.nonce, ask.fingerprint, ask.takeover
    tenant, operation, key = scope.tenant.encode(), scope.operation.encode(), scope.key.encode()
    secret = ask.secret_id.encode()
    labels = _encode(ask.labels) if ask.labels else b""
    head = _ASK.pack(
        ask.lease, ask.retention, skew,
        _POLICY_CODE[ask.policy], ask.fingerprint_version, len(print_), len(nonce), len(takeover), large,
        len(tenant), len(operation), len(key), len(secret), len(labels),
    )  # fmt: skip
    return b"".join((head, nonce, print_, tenant, operation, key, secret, labels, takeover))


def pack_end(end: Settle, skew: float, *, index_ref: bool = False) -> bytes:
    nonce, steps = end.nonce, end.steps
    if (
        end.kind is _KIND_DONE
        and end.ref is None
        and steps is None
        and end.policy is None
        and not (end.marker or end.error or end.new_nonce or end.actor or end.repair or index_ref)
    ):  # nearly every end: a result and nothing else
        return _plain_end(end.retention, end.tombstone, end.after, skew, len(nonce)) + nonce
    marker = end.marker.encode()
    ref = b"" if end.ref is None else end.ref.encode()
    error = b"" if end.error is None else _encode((end.error.type, end.error.code, end.error.message))
    policy = _AS_IT_IS if end.policy is None else _POLICY_CODE[end.policy]
    options = (0 if steps is None else _NEW_STEPS) | (_INDEX_REF if index_ref else 0)
    ref_size = _NO_REF if end.ref is None else _ref_size(ref)
    times = end.retention, end.tombstone, end.after, skew
    if not (end.new_nonce or end.repair or end.actor):  # an owner's own settle
        head = _END.pack(
            *times, _KIND_CODE[end.kind], policy, options, len(nonce), 0,
            len(marker), ref_size, 0, 0, 0, 0, len(error), len(steps or b""), 0,
        )  # fmt: skip
        return b"".join((head, nonce, marker, ref, error, steps or b""))
    tenant, operation, key = end.scope.tenant.encode(), end.scope.operation.encode(), end.scope.key.encode()
    actor, reason = end.actor.encode(), end.reason.encode()
    options |= (_REPAIR if end.repair else 0) | (0 if end.noted is None else _NOTED)
    head = _END.pack(
        *times, _KIND_CODE[end.kind], policy, options, len(nonce), len(end.new_nonce),
        len(marker), ref_size, len(tenant), len(operation), len(key), len(actor),
        len(error), len(steps or b""), len(reason),
    )  # fmt: skip
    parts = (
        head,
        nonce,
        end.new_nonce,
        marker,
        ref,
        error,
        steps or b"",
        tenant,
        operation,
        key,
        actor,
        reason,
        b"" if end.noted is None else _TIME.pack(end.noted),
    )
    return b"".join(parts)


@lru_cache(maxsize=64)
def _plain_end(retention: float, tombstone: float, after: float, skew: float, nonce_size: int) -> bytes:
    """The same for every call site: retentions are given, not computed."""
    times = retention, tombstone, after, skew
    return _END.pack(*times, 2, _AS_IT_IS, 0, nonce_size, 0, 0, _NO_REF, 0, 0, 0, 0, 0, 0, 0)


def _ref_size(ref: bytes) -> int:
    if len(ref) >= _NO_REF:
        raise ValueError(
            f"a ref of {len(ref)} bytes is too long, {_NO_REF - 1} is the most: store a shorter pointer"
        )
    return len(ref)


def pack_renewal(renewal: Renewal, skew: float) -> bytes:
    return _RENEWAL.pack(renewal.lease, renewal.retention, skew, len(renewal.nonce)) + renewal.nonce


def pack_note(note: Note, skew: float) -> bytes:
    return _NOTE.pack(skew, len(note.nonce)) + note.nonce


def pack_time(skew: float) -> bytes:
    return _TIME.pack(skew)


def pack_peek(skew: float, *, large: bool) -> bytes:
    return _NOTE.pack(skew, large)


# ----------------------------------------------------------------------------------------------- records


def read_record(raw: bytes, at: int, scope: Scope | None, scope_hash: bytes, now: float = inf) -> Record:
    """The record that begins at `at`. `scope` spares reading the names again; `now` ends a tombstone's retention."""
    try:
        head = _HEAD.unpack_from(raw, at)
        (
            magic, version, state, flags, attempts, print_version, print_size, nonce_size,
            tenant_size, operation_size, key_size, token, created, updated, expires,
        ) = head  # fmt: skip
        if magic != 0x5E or version != 1:
            raise Unreadable
        wide = flags & _HAS_WIDE
        nonce_at = at + (_WIDE_SIZE if wide else _HEAD_SIZE)
        print_at = nonce_at + nonce_size
        names_at = print_at + print_size
        end = names_at + tenant_size + operation_size + key_size
        if scope is None:
            operation_at = names_at + tenant_size
            key_at = operation_at + operation_size
            scope = Scope(
                scope_hash,
                raw[names_at:operation_at].decode(),
                raw[operation_at:key_at].decode(),
                raw[key_at:end].decode(),
            )
        if not wide:
            return Record(
                _STATES[state], raw[nonce_at:print_at], attempts, token, created, updated, updated, expires,
                _POLICIES[flags & 3], raw[print_at:names_at], print_version, updated, 0.0, 0.0, 0.0,
                flags & _RESOLVED != 0, "", raw[end:], None, None, None, b"", "", scope,
            )  # fmt: skip
        return _wide(raw, at, head, (nonce_at, print_at, names_at, end), scope, now)
    except (StructError, UnicodeDecodeError, IndexError, msgspec.MsgspecError) as error:
        raise Unreadable from error


def _wide(
    raw: bytes, at: int, head: tuple[Any, ...], places: tuple[int, int, int, int], scope: Scope, now: float
) -> Record:
    _, _, state, flags, attempts, print_version, _, _, _, _, _, token, created, updated, expires = head
    (
        lease_until, noted, steps_size, tombstone, not_before,
        ref_size, marker_size, secret_size, labels_size, error_size,
    ) = _WIDE.unpack_from(raw, at + 49)  # fmt: skip
    nonce_at, print_at, names_at, ref_at = places
    marker_at = ref_at + (0 if ref_size == _NO_REF else ref_size)
    secret_at = marker_at + marker_size
    labels_at = secret_at + secret_size
    error_at = labels_at + labels_size
    steps_at = error_at + error_size
    result_at = steps_at + steps_size
    if flags & _BURIED and now < expires:
        expires = now  # the body is gone, whatever a clock that was set back would say
    return Record(
        _STATES[state], raw[nonce_at:print_at], attempts, token, created, updated, lease_until, expires,
        _POLICIES[flags & 3], raw[print_at:names_at], print_version, None if state == _RUNNING else updated,
        tombstone, not_before, noted, flags & _RESOLVED != 0, raw[marker_at:secret_at].decode(), raw[result_at:],
        None if ref_size == _NO_REF else raw[ref_at:marker_at].decode(),
        Failure(*_decode_error(raw[error_at:steps_at])) if error_size else None,
        _decode_labels(raw[labels_at:error_at]) if labels_size else None,
        raw[steps_at:result_at], raw[secret_at:labels_at].decode(), scope,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- replies


class Large:
    """The record is too long for the shared connection: ask again on the other one."""


_LARGE: Final = Large()
_UNREADABLE: Final = Unknown(None, Policy.HOLD, unreadable=True)


def verdict(ask: Ask, reply: bytes) -> Verdict | Large:
    """What claim.lua answered. `StoreUnavailable` when it is the answer to another question."""
    scope, nonce = ask.scope, ask.nonce
    hashed = scope.hash
    if not reply.startswith(hashed[:_ECHO] + nonce):
        _crossed(scope)
    at = _ECHO + len(nonce) + 1
    letter = reply[at - 1 : at]
    try:
        if letter == b"P":
            return Replay(read_record(reply, at, scope, hashed))
        if letter == b"F":
            token, now, until, gone = _FRESH.unpack_from(reply, at)
            return Won(_fresh(ask, token, now, until, gone))
        if letter == b"B":
            left, attempts, delayed = _BUSY.unpack_from(reply, at)
            return Busy(left, attempts, bool(delayed))
        if letter == b"W":
            return Won(read_record(reply, at, scope, hashed))
        if letter == b"U":
            return Unknown(read_record(reply, at + 1, scope, hashed), _POLICIES[reply[at]])
    except Unreadable:
        return _UNREADABLE
    if letter == b"M":
        return Mismatch()
    if letter == b"E":
        return Expired(_TIME.unpack_from(reply, at)[0])
    return _LARGE if letter == b"L" else _UNREADABLE


def short_verdict(ask: Ask, reply: bytes) -> Verdict | Brief | Large:
    """As `verdict`, but a replay of a plain result, which nearly all are, is read no further than its caller needs."""
    nonce = ask.nonce
    at = _ECHO + len(nonce) + 1
    size = len(reply)
    letter = reply[at - 1] if size >= at else 0
    if letter == _WON_AFRESH and reply.startswith(ask.scope.hash[:_ECHO] + nonce):
        return Won(_fresh(ask, *_FRESH.unpack_from(reply, at)))
    if letter == _REPLAY and size >= at + _HEAD_SIZE:
        magic, state, flags, attempts, print_size, nonce_size, tenant, operation, key, expires = _BRIEF(
            reply, at
        )
        wide = flags & _HAS_WIDE
        end = at + (_WIDE_SIZE if wide else _HEAD_SIZE) + nonce_size + print_size + tenant + operation + key
        plain = magic == _MAGIC and state == _DONE and not flags & _UNUSUAL and end <= size
        if plain and wide:
            steps, ref, marker, secret, labels, error = _SIZES(reply, at)
            end += secret + labels
            plain = ref == _NO_REF and not (steps or marker or error) and end <= size
        if plain:
            if not reply.startswith(ask.scope.hash[:_ECHO] + nonce):
                _crossed(ask.scope)
            return Brief(attempts, expires, reply, end)
    return verdict(ask, reply)


def _fresh(ask: Ask, token: int, now: float, until: float, gone: float) -> Record:
    return Record(
        _STATE_RUNNING, ask.nonce, 1, token, now, now, until, gone,
        ask.policy, ask.fingerprint, ask.fingerprint_version, None, 0.0, 0.0, 0.0,
        False, "", b"", None, None, ask.labels or None, b"", ask.secret_id, ask.scope,
    )  # fmt: skip


_ANSWERS: Final[Mapping[bytes, Answer]] = {
    b"O": Answer.OK, b"L": Answer.LOST, b"G": Answer.GONE, b"R": Answer.REFUSED,
}  # fmt: skip


def answer(scope: Scope, nonce: bytes, reply: bytes) -> Answer:
    """What settle, renew and note answered; raises as `verdict` does, and OutcomeUnknown for an unreadable record."""
    if reply[:-1] != scope.hash[:_ECHO] + nonce:
        _crossed(scope)
    found = _ANSWERS.get(reply[-1:])
    if found is None:
        raise unreadable(scope)
    return found


def _crossed(scope: Scope) -> NoReturn:
    raise StoreUnavailable(
        f"crossed reply: Redis answered a call on {scope!r} with the reply to another one. A proxy between us and the "
        "server mixes up connections; nothing of it was used"
    )


def unreadable(scope: Scope) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"the record of key {mask(scope.key)!r} (operation {scope.operation!r}, scope {scope.hash.hex()}) cannot be read: "
        "it is damaged, or a newer version wrote it; find out what happened, then call resolve(key, …) or forget(key)",
        unreadable=True,
    )


def read_peek(scope: Scope, reply: bytes) -> tuple[Record | None, float] | Large:
    """What peek.lua answered; raises as `answer` does."""
    if reply[:_ECHO] != scope.hash[:_ECHO]:
        _crossed(scope)
    letter = reply[_ECHO : _ECHO + 1]
    (now,) = _TIME.unpack_from(reply, _ECHO + 1)
    if letter == b"N":
        return None, now
    if letter == b"L":
        return _LARGE
    if letter == b"X":
        raise unreadable(scope)
    try:
        record = read_record(reply, _ECHO + 9, None, scope.hash, now)
        # Redis removes the body within a millisecond of its end; until then it is gone all the same (R19).
        return bury(record) if view(record, now) is State.EXPIRED else record, now
    except Unreadable as error:
        raise unreadable(scope) from error.__cause__


def read_trail(reply: Sequence[bytes]) -> tuple[Sequence[Event], float]:
    """What trail.lua answered: a trail is kept or dropped whole, as long as its youngest line wants."""
    (now,) = _TIME.unpack(reply[0])
    lines = [(_TIME.unpack_from(line)[0], _read_event(line)) for line in reply[1:]]
    kept = max((until for until, _ in lines), default=0.0)
    return tuple(event for _, event in lines) if now < kept else (), now


def _read_event(line: bytes) -> Event:
    _, at, kind, state, attempt, actor_size, _ = _LINE.unpack_from(line)
    reason_at = _LINE.size + actor_size
    actor, reason = line[_LINE.size : reason_at].decode(), line[reason_at:].decode()
    return Event(at, _KINDS[kind], _STATES[state] if state else None, actor, reason, attempt)

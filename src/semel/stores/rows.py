"""A record as an SQL row: the columns that all SQL stores share, in one order, and the two conversions.

Times are float seconds here (SQL that keeps real timestamps converts in its statements); NULL stands for "never"
and "not set". The readable parts are for people and indexes; identity is the `scope` hash alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import msgspec

from semel.keys import Scope
from semel.model import Failure, Policy, Record, State

__all__ = ["COLUMNS", "LABELS", "TEXTS", "TIMES", "from_row", "to_row"]

COLUMNS = (
    "scope",
    "tenant",
    "operation",
    "key",
    "state",
    "nonce",
    "attempts",
    "token",
    "policy",
    "fingerprint",
    "fingerprint_version",
    "created",
    "updated",
    "lease_until",
    "expires",
    "settled",
    "tombstone",
    "not_before",
    "noted",
    "resolved",
    "marker",
    "result",
    "ref",
    "error_type",
    "error_code",
    "error_message",
    "labels",
    "steps",
    "secret_id",
)
TEXTS = frozenset(
    {
        "tenant", "operation", "key", "state", "policy", "marker", "ref", "error_type", "error_code", "error_message",
        "labels", "secret_id",
    }
)  # fmt: skip
TIMES = frozenset(
    {"created", "updated", "lease_until", "expires", "settled", "tombstone", "not_before", "noted"}
)

# Labels that `from_row` can read, as a regular expression that every SQL server with one understands: purge must not drop
# a record that nobody can read (R15), and decides in SQL. What is in doubt here (an escaped surrogate) is not dropped.
_TEXT = (
    r'"([^"\\[:cntrl:]]|\\(["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F][0-9a-fA-F][0-9a-fA-F][0-9a-fA-F]))*"'
)
LABELS = rf'^\s*\{{(\s*{_TEXT}\s*:\s*{_TEXT}\s*(,(?=\s*")|(?=\}})))*\s*\}}\s*$'

_STATES = {state.value: state for state in State}
_POLICIES = {policy.value: policy for policy in Policy}
_encode_labels = msgspec.json.Encoder(order="sorted").encode
_decode_labels = msgspec.json.Decoder(dict[str, str]).decode


def to_row(record: Record) -> tuple[Any, ...]:
    scope = record.scope
    if scope is None:
        raise ValueError("a record without its scope cannot be stored")
    error = record.error
    return (
        scope.hash,
        scope.tenant,
        scope.operation,
        scope.key,
        record.state.value,
        record.nonce,
        record.attempts,
        record.token,
        record.policy.value,
        record.fingerprint or None,
        record.fingerprint_version,
        record.created,
        record.updated,
        record.lease_until,
        None if record.expires == inf else record.expires,
        record.settled,
        record.tombstone or None,
        record.not_before or None,
        record.noted or None,
        record.resolved,
        record.marker or None,
        record.result or None,
        record.ref,
        None if error is None else error.type,
        None if error is None else error.code,
        None if error is None else error.message,
        _encode_labels(record.labels).decode() if record.labels else None,
        record.steps or None,
        record.secret_id or None,
    )


def from_row(row: Sequence[Any]) -> Record:
    (
        hashed, tenant, operation, key, state, nonce, attempts, token, policy, print_, print_version,
        created, updated, lease_until, expires, settled, tombstone, not_before, noted, resolved,
        marker, result, ref, error_type, error_code, error_message, labels, steps, secret_id,
    ) = row  # fmt: skip
    if type(state) is bytes:
        return from_row(_decoded(row))
    # By position, in the order of Record's fields, and without a call where a look-up does: this is half of what a
    # replay costs a store in Python.
    return Record(
        _STATES.get(state) or State(state),
        bytes(nonce),
        attempts,
        token,
        created,
        updated,
        lease_until,
        inf if expires is None else expires,
        _POLICIES.get(policy) or Policy(policy),
        bytes(print_) if print_ else b"",
        print_version,
        settled,
        tombstone or 0.0,
        not_before or 0.0,
        noted or 0.0,
        bool(resolved),
        marker or "",
        bytes(result) if result else b"",
        ref,
        None if error_type is None else Failure(error_type, error_code, error_message or ""),
        _decode_labels(labels) if labels else None,
        bytes(steps) if steps else b"",
        secret_id or "",
        Scope(bytes(hashed), tenant, operation, key),
    )


def _decoded(row: Sequence[Any]) -> list[Any]:
    """Of a caller's connection that leaves texts as they are: psycopg's, where client_encoding is SQL_ASCII."""
    return [
        value.decode() if name in TEXTS and isinstance(value, bytes) else value
        for name, value in zip(COLUMNS, row, strict=True)
    ]

"""A request as the policy sees it: where its key is, what tells it from another request. Pure.

Any serializer works: a protobuf message is compared by its deterministic form without the fields that carry the key,
anything else by its bytes on the wire.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from semel.grpc.refusals import Refusal, of_problem
from semel.grpc.rules import Rules
from semel.http.keys import minted_at, read_key
from semel.http.problem import Problem

__all__ = ["Fingerprint", "Key", "Received", "find_key", "is_rehearsal", "key_fields", "own_key"]

_DOMAIN: Final = b"semel/grpc/1\0"


class Received(msgspec.Struct, frozen=True):
    """A message as it came, and as its handler wants it."""

    raw: bytes
    message: Any


class Key(msgspec.Struct, frozen=True):
    """A key, and when its request was first sent, if the client says so."""

    text: str
    first_sent: float | None = None


def find_key(
    rules: Rules, metadata: Iterable[tuple[str, str | bytes]], message: Any, now: float
) -> str | None:
    """The key of a call, or None. Raises Refusal when it is malformed, said twice differently, or too old (G01, G02).

    `message` is None where only metadata may carry the key: the requests of a client stream.
    """
    found = [*_in_metadata(rules, metadata), *_in_message(rules, message)]
    if not found:
        return None
    (field, key), *others = found
    for other, again in others:
        if again.text != key.text:
            text = f"{field} and {other} hold two different keys: send one key"
            raise Refusal("KEY_MALFORMED", text, field=other)
        key = key if again.first_sent is None else again
    _check_age(rules, key, field, now)
    return key.text


def _in_metadata(rules: Rules, metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[tuple[str, Key]]:
    lines: dict[str, list[bytes]] = {}
    for name, value in metadata:
        if name in rules.names:
            lines.setdefault(name, []).append(_as_bytes(value))
    for name, values in lines.items():
        yield name, Key(_read(rules, values, name))


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _read(rules: Rules, lines: list[bytes], field: str) -> str:
    key = read_key(lines, strict=rules.strict, least=max(rules.min_length, 16 if rules.anonymous else 1))
    if isinstance(key, Problem):
        raise of_problem(key, field)
    return key


def _in_message(rules: Rules, message: Any) -> Iterable[tuple[str, Key]]:
    if not isinstance(message, Message):
        return
    for field in key_fields(rules.request_id, message):
        value = getattr(message, field.name)
        if isinstance(value, str):
            if value:  # text that was never set is empty
                yield field.name, Key(_read(rules, [_as_bytes(value)], field.name))
        elif message.HasField(field.name):
            yield (
                field.name,
                Key(_read(rules, [_as_bytes(value.key)], f"{field.name}.key"), _first_sent(value)),
            )


def key_fields(names: Iterable[str], message: Message) -> Iterable[Any]:
    """The fields of this request that may hold its key: text, or a message with a text `key`."""
    for name in names:
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if field is None or field.is_repeated:
            continue
        inner = field.message_type
        if field.type == FieldDescriptor.TYPE_STRING or (
            inner is not None
            and "key" in inner.fields_by_name
            and inner.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        ):
            yield field


def own_key(names: Iterable[str], message: Any) -> str | None:
    """The key that a caller has set in its request, as it stands there; None: it has set none."""
    if not isinstance(message, Message):
        return None
    for field in key_fields(names, message):
        value = getattr(message, field.name)
        text: str = value if isinstance(value, str) else value.key
        if text:
            return text
    return None


def _first_sent(value: Any) -> float | None:
    field = value.DESCRIPTOR.fields_by_name.get("first_sent")
    if field is None or field.message_type is None or not value.HasField("first_sent"):
        return None
    if field.message_type.full_name != "google.protobuf.Timestamp":
        return None
    seconds: float = value.first_sent.seconds + value.first_sent.nanos / 1e9
    return seconds


def _check_age(rules: Rules, key: Key, field: str, now: float) -> None:
    """A key older than anything that is kept: its first use, if any, is forgotten. Clients' clocks have `grace`."""
    if key.first_sent is not None and key.first_sent > now + rules.grace:
        raise Refusal("KEY_MALFORMED", "first_sent lies in the future: set the clock", field=field)
    if rules.tombstone == 0:
        return  # an expired key is a new one
    born = minted_at(key.text) if key.first_sent is None else key.first_sent
    if born is not None and born + rules.retention + rules.grace < now:
        raise Refusal("KEY_EXPIRED")


def is_rehearsal(rules: Rules, message: Any) -> bool:
    """A request that only validates has no effect to protect (G03)."""
    name = rules.validate_only
    if name is None or not isinstance(message, Message):
        return False
    field = message.DESCRIPTOR.fields_by_name.get(name)
    return field is not None and field.type == FieldDescriptor.TYPE_BOOL and getattr(message, name) is True


class Fingerprint:
    """SHA-256 over the full method, then schema and canonical bytes of each message, in order (G05).

    Deterministic within one implementation of protobuf, which is why it is made on the server only. Unknown fields count.
    """

    def __init__(self, rules: Rules, method: str) -> None:
        self._rules = rules
        self._digest = hashlib.sha256(_DOMAIN)
        self._add(method.encode())

    def add(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Message):
            self._add(message.DESCRIPTOR.full_name.encode())
            self._add(self._without_key(message).SerializePartialToString(deterministic=True))
        else:
            self._add(b"")
            self._add(received.raw)

    def hex(self) -> str:
        return self._digest.hexdigest()

    def _add(self, part: bytes) -> None:
        self._digest.update(len(part).to_bytes(8, "big"))
        self._digest.update(part)

    def _without_key(self, message: Message) -> Message:
        """`first_sent` stays: the same key with another one is another request, as AEP-155 wants it."""
        names = [field.name for field in key_fields(self._rules.request_id, message)]
        if not names:
            return message
        bare: Any = type(message)()
        bare.CopyFrom(message)
        for name in names:
            if isinstance(getattr(bare, name), str):
                bare.ClearField(name)
            elif bare.HasField(name):
                getattr(bare, name).ClearField("key")
        return bare  # type: ignore[no-any-return]  # grpc has no types

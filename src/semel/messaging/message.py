"""A message: what is said (topic, body), in which order (key), under which identity (id), with which envelope.

Its identity is (tenant, id); its content is topic, type, schema and body. The same identity with the same content is one
message however often it is added; with another content it is refused.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from importlib import import_module
from typing import Any, Final, cast
from uuid import UUID

import msgspec

from semel.errors import CodecError, ConfigurationError, InvalidKey
from semel.ids import mint

__all__ = ["PARTS", "Message", "content_hash", "new_id", "part_of"]

PARTS: Final = 64
_TEXT_LIMIT: Final = 255
_HEADERS_LIMIT: Final = 64 << 10  # bytes of all headers
_LATEST: Final = 10 * 366 * 86_400.0
_ENCODER: Final = msgspec.json.Encoder(decimal_format="string", order="deterministic")
_BUILTIN: Final = frozenset({dict, list, str, int, float, bool, type(None), msgspec.Raw})
_SHORT: Final = 512  # bytes
# Fields of the envelope that travel as headers, so that every broker and every consumer in another language sees them.
_HEADERS: Final = {
    "correlation": "correlation-id",
    "causation": "causation-id",
    "aggregate": "aggregate",
    "version": "schema-version",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `key` orders: messages of one key are delivered in the order of their commits.

    `body` is anything JSON can say (a dict, a dataclass, a msgspec struct, a pydantic model), or bytes, which stay as they
    are. `id` is a UUIDv7 unless given. `due` delays: an aware datetime, a timedelta, or seconds from the commit.
    """

    topic: str
    body: Any
    key: str | None = None
    id: str = cast("str", None)  # None asks for a new one, a UUID is spelled out; afterwards it is a str
    type: str | None = None
    schema: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    due: datetime | timedelta | float | None = None
    _: KW_ONLY
    tenant: str = "default"
    correlation: str | None = None
    causation: str | None = None
    aggregate: str | None = None
    version: int | None = None
    # How often it was handed out before, where a broker tells; 1 is the first time.
    delivery: int = 1

    def __post_init__(self) -> None:
        given = cast("str | UUID | None", self.id)
        object.__setattr__(self, "id", new_id() if given is None else str(given))
        for name in ("topic", "id", "tenant"):
            _check(name, getattr(self, name))
        if self.id != self.id.strip() or self.tenant != self.tenant.strip():
            raise InvalidKey(
                f"id and tenant of a message must not begin or end with a space, as {self.id!r} or {self.tenant!r} does: MariaDB "
                "does not tell it from the one without"
            )
        for name in ("key", "type", "schema", *_HEADERS):
            value = getattr(self, name)
            if value is not None and name != "version":
                _check(name, value)
        version: Any = self.version
        if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
            raise ConfigurationError(f"version is a number of the schema, not {self.version!r}")
        _check_due(self.due)
        object.__setattr__(self, "headers", self._headers())

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        try:
            given: dict[Any, Any] = dict(self.headers)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"headers are a dict of strings, not {type(self.headers).__name__}"
            ) from None
        for name, value in given.items():
            if not isinstance(name, str):
                raise ConfigurationError(
                    f"headers are strings: the name {name!r} is {type(name).__name__}; turn it into a str"
                )
            if not isinstance(value, str):
                raise ConfigurationError(
                    f"headers are strings: {name!r} is {type(value).__name__}; turn it into a str"
                )
            headers[name] = value
        try:
            size = sum(len(name.encode()) + len(value.encode()) for name, value in headers.items())
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"headers must be text that UTF-8 can say: {error}") from error
        if size > _HEADERS_LIMIT:
            raise ConfigurationError(
                f"the headers have {size} bytes, more than {_HEADERS_LIMIT}: put what is large into the body"
            )
        for name, header in _HEADERS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if headers.setdefault(header, str(value)) != str(value):
                raise ConfigurationError(
                    f"{name}={value!r} and the header {header!r} say two things: leave one of them out"
                )
        return headers

    @property
    def raw(self) -> bool:
        """Whether the body is bytes, to be passed on as they are."""
        return isinstance(self.body, bytes | bytearray | memoryview)

    @property
    def data(self) -> bytes:
        """The body as it travels: bytes as they are, everything else as JSON."""
        if self.raw:
            return bytes(self.body)
        try:
            data = _ENCODER.encode(_plain(self.body))
            if b"null" in data and not isinstance(
                self.body, msgspec.Raw
            ):  # JSON has no word for infinity, and would say this
                _refuse_infinite(msgspec.to_builtins(_plain(self.body)))
            return data
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise CodecError(
                f"the body of message {self.id} ({self.topic}) cannot be written as JSON: {error}; "
                "give a dict, a dataclass, a model, or bytes"
            ) from error

    def cloudevent(self, source: str = "semel") -> dict[str, Any]:
        """The message as attributes of CloudEvents 1.0, `data` included (bytes as `data_base64` is the binding's matter)."""
        event: dict[str, Any] = {
            "specversion": "1.0",
            "id": self.id,
            "source": source,
            "type": self.type or self.topic,
            "datacontenttype": "application/octet-stream" if self.raw else "application/json",
            "data": self.body if self.raw else msgspec.json.decode(self.data),
        }
        optional = {
            "subject": self.aggregate or self.key,
            "dataschema": self.schema,
            "partitionkey": self.key,
            "correlationid": self.headers.get("correlation-id"),
            "causationid": self.headers.get("causation-id"),
            "traceparent": self.headers.get("traceparent"),
            "tracestate": self.headers.get("tracestate"),
        }
        return event | {name: value for name, value in optional.items() if value is not None}

    @classmethod
    def from_cloudevent(cls, event: Mapping[str, Any], *, topic: str | None = None) -> Message:
        """The message of a CloudEvent; `topic` is its type unless given. `data_base64` is bytes."""
        if missing := [name for name in ("id", "type") if not event.get(name)]:
            raise ConfigurationError(f"a CloudEvent has {' and '.join(missing)}: this one has not")
        body = event.get("data")
        if (encoded := event.get("data_base64")) is not None:
            if body is not None:
                raise ConfigurationError("a CloudEvent has data or data_base64, not both")
            try:
                body = base64.b64decode(encoded, validate=True)
            except ValueError as error:
                raise CodecError(f"data_base64 of CloudEvent {event['id']} is not base64: {error}") from error
        headers = {n: str(event[n]) for n in ("traceparent", "tracestate") if event.get(n) is not None}
        return cls(
            topic=topic or event["type"],
            body=body,
            key=event.get("partitionkey") or event.get("subject"),
            id=event["id"],
            type=event["type"],
            schema=event.get("dataschema"),
            headers=headers,
            correlation=event.get("correlationid"),
            causation=event.get("causationid"),
        )


def content_hash(topic: str, type_: str | None, schema: str | None, data: bytes) -> bytes:
    """What a conflict compares: topic, type, schema and body, each with its length in front."""
    said = _envelope(topic, type_, schema) + len(data).to_bytes(8, "big") + data
    return (_SHORT_SHA256 if len(said) <= _SHORT else hashlib.sha256)(said).digest()


def _sha256_of_few() -> Callable[[bytes], Any]:
    """Python's own SHA-256. OpenSSL's, which `hashlib` has, is faster by the byte and slower to begin: for a message that comes alone,
    between two transactions, by 10 to 15 µs. `random` of the standard library takes its SHA-512 from the same modules."""
    for name in ("_sha2", "_sha256"):  # since Python 3.12, and before
        with suppress(ImportError, AttributeError):
            return cast("Callable[[bytes], Any]", import_module(name).sha256)
    return hashlib.sha256


_SHORT_SHA256: Final = _sha256_of_few()


@lru_cache(256)
def _envelope(topic: str, type_: str | None, schema: str | None) -> bytes:
    said = b""
    for part in (topic.encode(), type_.encode() if type_ else b"", schema.encode() if schema else b""):
        said += len(part).to_bytes(8, "big") + part
    return said


def part_of(tenant: str, key: str | None, identity: str, parts: int = PARTS) -> int:
    """Messages of one tenant and key share a part and so an order; without a key each goes where its id says."""
    text = f"k{len(tenant)}:{tenant}{key}" if key is not None else f"i{len(tenant)}:{tenant}{identity}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") % parts


def new_id() -> str:
    """A UUIDv7: sorts by time, so that the table of known ids grows at its end."""
    return str(mint("msg", time.time_ns() // 1_000_000, os.urandom(10)).uuid)


def _plain(body: Any) -> Any:
    if type(body) in _BUILTIN:
        return body
    dump = getattr(body, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) else body


def _refuse_infinite(value: Any) -> None:
    """ValueError for a float that JSON cannot say."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number of JSON")
    if isinstance(value, dict):
        for inner in value.values():
            _refuse_infinite(inner)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            _refuse_infinite(inner)


def _check_due(due: Any) -> None:
    """An aware datetime, a timedelta, or seconds that are a number; within ten years."""
    if due is None:
        return
    if isinstance(due, datetime):
        if due.tzinfo is None:
            raise ConfigurationError(
                "due must be an aware datetime, such as datetime.now(UTC): a naive one could mean any zone"
            )
        seconds = due.timestamp() - time.time()
    elif isinstance(due, timedelta):
        seconds = due.total_seconds()
    elif isinstance(due, int | float) and not isinstance(due, bool):
        seconds = float(due)
    else:
        raise ConfigurationError(
            f"due is an aware datetime, a timedelta or seconds from the commit, not {type(due).__name__}"
        )
    if not seconds < _LATEST:  # nor is it a number if it is NaN
        raise ConfigurationError(f"due must be within ten years, not {due!r}")


def _check(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or len(value) > _TEXT_LIMIT or not value.isprintable():
        shown = value if not isinstance(value, str) or len(value) < 60 else value[:57] + "…"
        raise InvalidKey(
            f"{name} of a message must be 1 to {_TEXT_LIMIT} printable characters, not {shown!r}"
        )

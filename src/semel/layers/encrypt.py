"""Results and steps are sealed before they leave the process: AES-256-GCM, bound to their scope, with a ring of keys.

The first key of the ring seals; every key of it opens. A record whose key is gone from the ring is not lost and not
re-run: it reads as unknown, unreadable (R15). Readable parts, refs, labels and error texts stay readable for people.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from semel.errors import CodecError, ConfigurationError, SemelError
from semel.keys import Scope
from semel.layers.layer import Layer
from semel.model import Answer, Ask, Kind, Note, Policy, Record, Replay, Settle, Unknown, Verdict, Won
from semel.seals import LABEL, MARK, Sealed, key_name
from semel.store import Page, Query, Store

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
except ImportError as missing:  # pragma: no cover - the message is the product here
    raise ConfigurationError('encrypt needs the extra "crypto": pip install "semel[crypto]"') from missing

__all__ = ["Encrypt", "Ring"]

_NONCE = 12
_LEAST = _NONCE + 16  # and a tag: more than that only if something was sealed
_replace = msgspec.structs.replace


class Ring:
    """Named 256-bit keys; the first one seals."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys:
            raise ConfigurationError("encrypt needs at least one key: {'2026-a': os.urandom(32)}")
        given: Any = keys  # whatever the caller wrote
        for name, key in given.items():
            fits = isinstance(key, bytes) and len(key) == 32
            if not fits or not isinstance(name, str) or not 0 < len(name.encode()) < 256:
                raise ConfigurationError(f"the encryption key {name!r} must have 32 bytes and a short name")
        self._open = {name.encode(): AESGCM(key) for name, key in keys.items()}
        self._seal_name = next(iter(self._open))
        self.name = self._seal_name.decode()
        """Of the key that seals."""

    def seal(self, data: bytes, scope: Scope) -> bytes:
        nonce = os.urandom(_NONCE)
        name = self._seal_name
        body = self._open[name].encrypt(nonce, data, scope.hash + name)
        return MARK + bytes([len(name)]) + name + nonce + body

    def open(self, data: bytes, scope: Scope) -> bytes:
        if data[:1] != MARK:
            raise CodecError(
                "it was written without encrypt=, and a face with encrypt= reads nothing else: read the key without it. resolve "
                "would overwrite it, forget removes it"
            )
        end = 2 + (data[1] if len(data) > 1 else 0)
        if len(data) < end + _LEAST:
            raise CodecError(
                f"the stored bytes were cut short: {len(data)} are fewer than any sealed value has. Put the record back from a "
                "copy, or look the effect up and repair the key with resolve(key, …), or forget(key)"
            )
        name = data[2:end]
        cipher = self._open.get(name)
        if cipher is None:
            raise CodecError(
                f"it is sealed with key {key_name(data)!r}, which is not in encrypt=: put it back; resolve would overwrite it"
            )
        try:
            return cipher.decrypt(data[end : end + _NONCE], data[end + _NONCE :], scope.hash + name)
        except InvalidTag:
            raise CodecError(
                "the stored bytes were changed, or belong to another scope. Put the record back from a copy, or look the effect "
                "up and repair the key with resolve(key, …), or forget(key)"
            ) from None


class Encrypt(Layer):
    def __init__(self, inner: Store, ring: Ring | Mapping[str, bytes]) -> None:
        super().__init__(inner)
        self._ring = ring if isinstance(ring, Ring) else Ring(ring)

    async def claim(self, asks: Sequence[Ask]) -> list[Verdict | Exception]:
        verdicts = await self.inner.claim([self._labelled(ask) for ask in asks])
        return [await self._opened_verdict(verdict, ask) for verdict, ask in zip(verdicts, asks, strict=True)]

    def _labelled(self, ask: Ask) -> Ask:
        return _replace(ask, labels={**(ask.labels or {}), LABEL: self._ring.name})

    async def _opened_verdict(self, verdict: Verdict | Exception, ask: Ask) -> Verdict | Exception:
        if not isinstance(verdict, Won | Replay | Unknown) or verdict.record is None:
            return verdict
        try:
            return _replace(verdict, record=self._opened(verdict.record, ask.scope))
        except CodecError as error:
            if isinstance(verdict, Won):
                # Granted, but its steps cannot be read here: give it back to somebody who has the key.
                try:
                    await self.inner.settle((Settle(ask.scope, ask.nonce, Kind.RELEASED, ask.retention),))
                except SemelError:
                    self.losses.tell()  # whatever it says: the claim was granted
                    raise
            return Unknown(verdict.record, Policy.HOLD, unreadable=True, reason=str(error))

    def _opened(self, record: Record, scope: Scope) -> Record:
        if LABEL in (record.labels or {}):
            labels = {name: text for name, text in (record.labels or {}).items() if name != LABEL}
            record = _replace(record, labels=labels or None)
        if not record.result and not record.steps:
            return record
        result = self._ring.open(record.result, scope) if record.result else b""
        return _replace(record, result=result, steps=self._frames(record.steps, scope, opening=True))

    def _frames(self, data: bytes, scope: Scope, *, opening: bool) -> bytes:
        """Steps are length-prefixed entries: each is sealed by itself, so that appending stays appending."""
        out, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            body = data[at + 4 : at + 4 + size]
            body = self._ring.open(body, scope) if opening else self._ring.seal(body, scope)
            out.append(len(body).to_bytes(4, "big") + body)
            at += 4 + size
        return b"".join(out)

    async def settle(self, ends: Sequence[Settle]) -> list[Answer | Exception]:
        return await self.inner.settle([self._sealed(end) for end in ends])

    def _sealed(self, end: Settle) -> Settle:
        if not end.result and not end.steps:
            return end
        result = self._ring.seal(end.result, end.scope) if end.result else b""
        steps = self._frames(end.steps, end.scope, opening=False) if end.steps else end.steps
        return _replace(end, result=result, steps=steps)

    async def note(self, note: Note) -> Answer:
        return await self.inner.note(
            _replace(note, entry=self._frames(note.entry, note.scope, opening=False))
        )

    async def peek(self, scope: Scope) -> tuple[Record | None, float]:
        record, now = await self.inner.peek(scope)
        if record is None:
            return None, now
        try:
            return self._opened(record, scope), now
        except CodecError as error:
            raise Sealed(f"the record cannot be read: {error}", record, now) from error

    async def scan(self, query: Query) -> Page:
        page = await self.inner.scan(query)
        return _replace(page, records=tuple(map(self._listed, page.records)))

    def _listed(self, record: Record) -> Record:
        """A list is not spoilt by one record that is damaged, or another program's: that one stays sealed."""
        if record.scope is None:
            return record
        try:
            return self._opened(record, record.scope)
        except CodecError:
            return record

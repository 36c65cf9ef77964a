"""Public ids: `ord_01hf7yat00fzzvzzzzzzzzzzzzq` – a kind, 16 bytes that sort by time, and a check character.

The 16 bytes are a UUIDv7, so the id is also a valid UUID column. They are written in Crockford's base 32 (no i, l, o,
u) in 26 characters that sort as the bytes do. The check character is one more symbol of the same alphabet: a weighted
sum over GF(32) with a different weight for each place, which finds *every* single wrong character and *every* swap
of two, in the check character as well (the usual mod 37 needs symbols that are no letters or digits). The kind is mixed
in: a body under another kind is found 31 times in 32, and always when `parse` is told which kind to expect.

Reading is forgiving where nothing can be confused: upper case, and o for 0, i or l for 1 in the body.
"""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

import msgspec

from semel.errors import ConfigurationError, InvalidKey

__all__ = ["PublicId", "is_kind", "mint", "parse", "public_id"]

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_BODY: Final = 26
_KIND: Final = re.compile(r"[a-z][a-z0-9]{0,19}")
_VALUES: Final = {char: value for value, char in enumerate(_ALPHABET)} | {"o": 0, "i": 1, "l": 1}


class PublicId(msgspec.Struct, frozen=True, gc=False):
    """A parsed id. `text` is its one canonical spelling: store and compare that."""

    kind: str
    bytes: bytes
    text: str

    @property
    def type(self) -> str:
        """`kind`, by the name that its prefix has elsewhere."""
        return self.kind

    @property
    def uuid(self) -> UUID:
        return UUID(bytes=self.bytes)

    @property
    def unix_ms(self) -> int:
        """When it was minted, in milliseconds since 1970 (for ids made by `mint`)."""
        return int.from_bytes(self.bytes[:6], "big")

    def __str__(self) -> str:
        return self.text


# ------------------------------------------------------------------------------------------ the check


def _times_x(value: int) -> int:
    """Multiply by x in GF(32) = GF(2)[x] / (x⁵ + x² + 1), in which x has order 31."""
    value <<= 1
    return value ^ 0b100101 if value & 32 else value


def _weights() -> list[list[int]]:
    """For each place of the body a table: symbol → symbol · x^(place + 1). The check character has weight 1."""
    row = list(range(32))
    tables = []
    for _ in range(_BODY):
        row = [_times_x(value) for value in row]
        tables.append(row)
    return tables


_WEIGHTS: Final = _weights()


def _check_symbol(kind: str, symbols: list[int]) -> int:
    total = 0
    for char in kind.encode():
        total = _times_x(total) ^ (char & 31) ^ (char >> 5)
    for table, symbol in zip(_WEIGHTS, symbols, strict=True):
        total ^= table[symbol]
    return total


# ------------------------------------------------------------------------------------- making, reading


def mint(kind: str, unix_ms: int, random: bytes) -> PublicId:
    """A new id from a time and 10 random bytes (74 bits are used). The caller brings both; this is pure."""
    if not 0 <= unix_ms < 1 << 48:
        raise ConfigurationError(f"unix_ms must be milliseconds since 1970 in 48 bits, not {unix_ms}")
    if len(random) != 10:
        raise ConfigurationError(f"random must be 10 bytes, such as os.urandom(10), not {len(random)}")
    noise = int.from_bytes(random, "big")
    value = unix_ms << 80 | 0x7 << 76 | (noise >> 62 & 0xFFF) << 64 | 0b10 << 62 | noise & (1 << 62) - 1
    return public_id(kind, value.to_bytes(16, "big"))


def public_id(kind: str, raw: bytes | UUID) -> PublicId:
    """The id of 16 bytes or a UUID that exist already."""
    _check_kind(kind)
    data = raw.bytes if isinstance(raw, UUID) else bytes(raw)
    if len(data) != 16:
        raise ConfigurationError(f"a public id has 16 bytes, not {len(data)}")
    value = int.from_bytes(data, "big")
    symbols = [value >> shift & 31 for shift in range(125, -1, -5)]
    symbols.append(_check_symbol(kind, symbols))
    return PublicId(kind, data, f"{kind}_{''.join([_ALPHABET[symbol] for symbol in symbols])}")


def parse(text: str, kind: str | None = None) -> PublicId:
    """Read and verify an id; InvalidKey says what is wrong. `kind` is the one that must be there."""
    if not isinstance(text, str):
        raise InvalidKey(f"a public id must be a str, not {type(text).__name__}")
    own_kind, mark, body = text.lower().partition("_")
    if not text.isascii() or not mark or not _KIND.fullmatch(own_kind):
        raise InvalidKey("this is no public id: it must look like ord_ and 27 letters and digits")
    if kind is not None and own_kind != kind:
        _check_kind(kind)
        raise InvalidKey(f"this public id is of kind {own_kind!r}, {kind!r} is needed here")
    if len(body) != _BODY + 1:
        raise InvalidKey(
            f"this public id has {len(body)} characters after {own_kind}_, it must have {_BODY + 1}"
        )
    symbols = [_VALUES.get(char, -1) for char in body]
    if -1 in symbols:
        at = len(own_kind) + 1 + symbols.index(-1)
        raise InvalidKey(f"this public id has a character at position {at} that no id contains")
    check = symbols.pop()
    if symbols[0] > 7 or check != _check_symbol(own_kind, symbols):
        raise InvalidKey("this public id is mistyped: its check character does not fit; copy it again")
    value = 0
    for symbol in symbols:
        value = value << 5 | symbol
    spelled = "".join([_ALPHABET[symbol] for symbol in symbols]) + _ALPHABET[check]
    return PublicId(own_kind, value.to_bytes(16, "big"), f"{own_kind}_{spelled}")


def is_kind(kind: object) -> bool:
    return isinstance(kind, str) and _KIND.fullmatch(kind) is not None


def _check_kind(kind: object) -> None:
    if not is_kind(kind):
        raise ConfigurationError(
            f"the kind of a public id has 1 to 20 characters a-z and 0-9 and begins with a letter, such as 'ord': {kind!r}"
        )

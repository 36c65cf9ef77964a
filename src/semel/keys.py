"""Identity: scopes, readable forms, downstream keys and field paths. Pure; no clock, no randomness, no I/O.

A scope is (prefix, tenant, operation, key). It is stored as SHA-256 over *length-prefixed* UTF-8 parts, so that
("ab", "c") and ("a", "bc") can never meet, and no client text reaches a storage key. Raw keys are never echoed
whole, neither in errors nor in `repr`. A fingerprint is SHA-256 of the canonical request (`semel.canonical`).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from semel.canonical import FINGERPRINT_VERSION, canonical
from semel.errors import CodecError, ConfigurationError, InvalidKey

__all__ = [
    "FINGERPRINT_VERSION",
    "FieldPath",
    "Readable",
    "Scope",
    "SecretRing",
    "check_fields",
    "check_fingerprint",
    "check_key",
    "check_name",
    "check_namespace",
    "check_operation",
    "check_ref",
    "check_tenant",
    "downstream_key",
    "field_path",
    "fingerprint",
    "make_scope",
    "mask",
    "scope_hash",
]

MAX_LENGTH: Final = 255
Readable = Literal["full", "masked", "none"]

_SCOPE_DOMAIN: Final = b"semel/scope/1\0"
_DOWNSTREAM_DOMAIN: Final = b"semel/downstream/1\0"
_NO_SECRET: Final = (
    b"semel/no-secret"  # public on purpose: without a secret the key is stable, not unguessable
)
_DEFAULTED: Final = frozenset({"tenant", "operation", "prefix"})
_MIN_SECRET: Final = 16
_log = logging.getLogger("semel")
_MAX_HEADS: Final = 4096


# ------------------------------------------------------------------------------------------- names


def check_key(key: object) -> str:
    """The key as an exact str, or InvalidKey. Ruled by R21; never echoes the key."""
    return _check("key", key)


def check_tenant(tenant: object) -> str:
    """As `check_key`."""
    return _check("tenant", tenant)


def check_namespace(namespace: object) -> str:
    """As `check_key`."""
    return _check("namespace", namespace)


def check_ref(ref: object) -> str:
    """A ref is stored after the effect, so it must be storable everywhere: the same limits as a key."""
    return _check("ref", ref)


def check_operation(operation: object) -> str:
    """As `check_key`."""
    return _check("operation", operation)


def check_name(what: str, name: object) -> str:
    """As `check_key`, for a name inside of a run: `what` says whose."""
    return _check(what, name)


def _check(part: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidKey(f"{part} must be a str, not {type(text).__name__}: {_remedy(part, text)}")
    exact = str.__str__(
        text
    )  # a subclass (StrEnum, a typed id) counts as its text, whatever its own __str__ says
    if not exact:
        raise InvalidKey(f"{part} is empty: it must have 1 to {MAX_LENGTH} printable characters")
    if len(exact) > MAX_LENGTH:
        raise InvalidKey(
            f"{part} has {len(exact)} characters, {MAX_LENGTH} is the most: use a shorter one, or a hash of it"
        )
    if not exact.isprintable():
        at = next(i for i, c in enumerate(exact) if not c.isprintable())
        raise InvalidKey(
            f"{part} has {_describe(exact[at])} at position {at}: only printable characters are allowed; "
            "remove it, or use a hash of the text"
        )
    return exact


def _remedy(part: str, text: object) -> str:
    if text is not None:
        return "pass its text form"
    if part == "key":
        return "pass the text that identifies this action"
    return "pass the text, or leave it out to have the default" if part in _DEFAULTED else "pass its text"


def _describe(char: str) -> str:
    code = ord(char)
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"a control character (U+{code:04X})"
    if 0xD800 <= code < 0xE000:
        return f"a lone surrogate (U+{code:04X})"
    return f"a character that cannot be printed (U+{code:04X})"


def mask(key: str) -> str:
    """A form for people and logs that shows at most a third of the key."""
    size = len(key)
    shown = 4 if size >= 24 else size // 6
    return f"{key[:shown]}…{key[size - shown :]}"


def _readable_form(key: str, readable: Readable) -> str:
    """What is kept of a key for people."""
    if readable == "full":
        return key
    if readable == "masked":
        return mask(key)
    if readable == "none":
        return ""
    raise ConfigurationError(f'readable must be "full", "masked" or "none", not {readable!r}')


# ------------------------------------------------------------------------------------------- scopes


class Scope(msgspec.Struct, frozen=True, gc=False):
    """What must happen once. `hash` identifies it; tenant, operation and key are the forms kept for people."""

    hash: bytes
    tenant: str
    operation: str
    key: str
    stored: bytes = b""
    """The hash under which the store has it, where `namespace=` makes another one of it."""

    @property
    def hex(self) -> str:
        """What messages tell, and the store has: `semel show … --scope` finds the record by it."""
        return (self.stored or self.hash).hex()

    def __hash__(self) -> int:
        return hash(self.hash)

    def __eq__(self, other: object) -> bool:
        # Not `stored`: a scope that messages tell otherwise is the same one.
        return self is other or (
            isinstance(other, Scope)
            and self.hash == other.hash
            and self.key == other.key
            and self.operation == other.operation
            and self.tenant == other.tenant
        )

    def __repr__(self) -> str:
        return f"<Scope {self.tenant}/{self.operation}/{mask(self.key)} {self.hex[:12]}>"


def _framed(*parts: str) -> bytes:
    framed = b""
    for part in parts:
        raw = part.encode()
        framed += len(raw).to_bytes(4, "big") + raw
    return framed


def scope_hash(prefix: str, tenant: str, operation: str, key: str) -> bytes:
    """The 32 bytes under which a scope is stored; the four names are checked by `make_scope`, not here."""
    return hashlib.sha256(_SCOPE_DOMAIN + _framed(prefix, tenant, operation, key)).digest()


# A hash fed up to the key, per (prefix, tenant, operation), to be copied. Bounded: tenants may come from requests.
_heads: dict[tuple[str, str, str], hashlib._Hash] = {}
_last: tuple[object, object, object, hashlib._Hash] = (object(), object(), object(), hashlib.sha256())
_LENGTHS: Final = tuple(size.to_bytes(4, "big") for size in range(4 * MAX_LENGTH + 1))


def _head(prefix: str, tenant: str, operation: str) -> hashlib._Hash:
    names = (_check("prefix", prefix), check_tenant(tenant), check_operation(operation))
    if len(_heads) >= _MAX_HEADS:
        _heads.clear()
    head = _heads[names] = hashlib.sha256(_SCOPE_DOMAIN + _framed(*names))
    return head


def _named(prefix: str, tenant: str, operation: str) -> tuple[hashlib._Hash, str, str]:
    """The hash up to the key, and the names as exact strings."""
    global _last  # noqa: PLW0603 - a memory of one, replaced whole
    if not type(prefix) is type(tenant) is type(operation) is str:
        head = _head(prefix, tenant, operation)
        return head, str.__str__(tenant), str.__str__(operation)
    head = _heads.get((prefix, tenant, operation)) or _head(prefix, tenant, operation)
    _last = (prefix, tenant, operation, head)
    return head, tenant, operation


def make_scope(prefix: str, tenant: str, operation: str, key: str, readable: Readable = "full") -> Scope:
    """Check the names and hash them. Raises InvalidKey that says which name is wrong, where, and what to do."""
    last = _last  # nearly every call has the names of the call before, the very same objects
    if last[0] is prefix and last[1] is tenant and last[2] is operation:
        head = last[3]
    else:
        head, tenant, operation = _named(prefix, tenant, operation)
    if not (type(key) is str and key.isprintable() and 0 < len(key) <= MAX_LENGTH):
        key = check_key(key)
    raw = key.encode()
    digest = head.copy()
    digest.update(_LENGTHS[len(raw)] + raw)
    shown = (
        key if readable == "full" else mask(key) if readable == "masked" else _readable_form(key, readable)
    )
    return Scope(digest.digest(), tenant, operation, shown)


# -------------------------------------------------------------------------------------- fingerprints


def fingerprint(obj: object, fields: Sequence[str] | None = None) -> str:
    """64 lower-case hex digits: SHA-256 of the canonical form of `obj`, or of the chosen fields of it (R22).

    Numbers count by value (1 == 1.0), integers exactly; text, bytes and numbers never meet. `fields` are paths such
    as "amount" or "customer.id"; one that is absent raises CodecError, because a request that lost the field
    which tells it apart must not be taken for another one. NaN, infinity, unknown classes and too deep or
    too large values raise CodecError naming the place.
    """
    if fields is not None:
        obj = _choose(obj, fields)
    return hashlib.sha256(canonical(obj)).hexdigest()


def check_fields(fields: Any) -> tuple[str, ...]:
    """The paths of `fields=`. Raises ConfigurationError for what holds none."""
    try:
        paths: tuple[str, ...] = () if isinstance(fields, str) else tuple(fields)
    except TypeError:
        paths = ()
    if not paths:
        given = (
            "an empty one"
            if isinstance(fields, Collection) and not isinstance(fields, str)
            else type(fields).__name__
        )
        raise ConfigurationError(
            f'fields= must be a sequence of field paths such as ("amount", "customer.id"), not {given}: name the fields that '
            "tell two requests apart, or leave it out to take the whole request"
        )
    return paths


def _choose(obj: object, fields: Sequence[str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for path in check_fields(fields):
        value: Any = obj
        for part in _path_parts(path, "fields= path"):
            try:
                value = _follow(value, part)
            except LookupError:
                raise CodecError(
                    f"the request has no field {path!r} ({part!r} is absent in a {type(value).__name__}): "
                    "send it, or leave it out of fields="
                ) from None
        chosen[path] = value
    return chosen


_FINGERPRINT: Final = re.compile(r"[0-9a-fA-F]{64}")


def check_fingerprint(text: object) -> str:
    """A fingerprint that the caller made: 64 hexadecimal digits in either case, returned in lower case."""
    if not isinstance(text, str):
        raise ConfigurationError(
            f"fingerprint= must be 64 hexadecimal digits in a str, not {type(text).__name__}; "
            "pass the request itself as request= to have it computed"
        )
    if not _FINGERPRINT.fullmatch(text):
        raise ConfigurationError(
            f"fingerprint= must be 64 hexadecimal digits (a SHA-256); got {len(text)} characters, not all of them "
            "hexadecimal or not 64; pass the request itself as request= to have it computed"
        )
    return text.lower()


# ----------------------------------------------------------------------------------- downstream keys


def downstream_key(
    tenant: str, operation: str, key: str, name: str, *, secret: bytes | str | None = None
) -> str:
    """The key under which an outside service is called: the same on every attempt, 43 URL-safe characters.

    Derived from the scope and `name` only, never from attempt or nonce (R24). Without a secret it is stable but
    can be computed by whoever knows the scope.
    """
    return _derive(_NO_SECRET if secret is None else _secret(secret), tenant, operation, key, name)


def _derive(secret: bytes, tenant: str, operation: str, key: str, name: str) -> str:
    framed = _framed(tenant, operation, key, _check("downstream name", name))
    return urlsafe_b64encode(hmac.digest(secret, _DOWNSTREAM_DOMAIN + framed, "sha256")).rstrip(b"=").decode()


def _secret(secret: object) -> bytes:
    raw = secret.encode() if isinstance(secret, str) else secret
    if not isinstance(raw, bytes):
        raise ConfigurationError(
            f"secret= must be bytes, str or a mapping of key id to those, not {type(secret).__name__}"
        )
    if not raw:
        raise ConfigurationError("secret= is empty: use secrets.token_bytes(32), or leave it out")
    if len(raw) < _MIN_SECRET:  # no worse than none, which is allowed
        _log.warning(
            "secret= has %d bytes, and can be guessed from a downstream key: use secrets.token_bytes(32)",
            len(raw),
        )
    return raw


class SecretRing:
    """Secrets for downstream keys that can be rotated without changing a key in use (R24).

    `current` is the id to store with a claim; `derive(key_id, …)` later finds that secret again. A mapping's first
    entry is the current one. A bare secret gets an id made from itself, so that it is still found after it
    has moved into a mapping under any name; "" is the id of "no secret".
    """

    __slots__ = ("_secrets", "current")

    def __init__(self, secret: bytes | str | Mapping[str, bytes | str] | None = None) -> None:
        self.current = ""
        self._secrets: dict[str, bytes] = {"": _NO_SECRET}
        if secret is None:
            return
        named = secret if isinstance(secret, Mapping) else {"": secret}
        if not named:
            raise ConfigurationError("secret= is an empty mapping: name at least one secret, or pass None")
        for key_id, value in reversed(
            list(named.items())
        ):  # the first one comes last, and stays the current one
            raw = _secret(value)
            own_id = hmac.digest(raw, b"semel/secret-id", "sha256")[:6].hex()
            self.current = _check("secret id", key_id) if key_id else own_id
            self._secrets[own_id] = self._secrets[self.current] = raw

    def derive(self, key_id: str, tenant: str, operation: str, key: str, name: str) -> str:
        """The downstream key under the secret that was current at the claim; ConfigurationError if it is gone."""
        secret = self._secrets.get(key_id)
        if secret is None:
            raise ConfigurationError(
                f"the secret {key_id!r}, current when this key was claimed, is no longer in secret=: "
                "put it back after the new one until its records have ended"
            )
        return _derive(secret, tenant, operation, key, name)

    def __repr__(self) -> str:
        return f"<SecretRing current={self.current!r} of {len(self._secrets) - 1}>"


# -------------------------------------------------------------------------------------- field paths


_PART: Final = re.compile(r"(?:^|(?<=.)\.)([^.\[\]]+)|\[(-?\d+|'[^']*'|\"[^\"]*\")\]")
_ABSENT: Final = object()


def _path_parts(path: object, what: str = "field path") -> tuple[str, ...]:
    """Split `cmd.items[0].id`; ConfigurationError when it is not a path."""
    if not isinstance(path, str):
        raise ConfigurationError(f"{what} must be a str such as 'cmd.request_id', not {type(path).__name__}")
    parts: list[str] = []
    end = 0
    for found in _PART.finditer(path):
        if found.start() != end:
            break
        end = found.end()
        parts.append(found[1] or found[2].strip("'\""))
    if not parts or end != len(path):
        raise ConfigurationError(
            f"{what} {path!r} is malformed at position {end}: write it as 'cmd.request_id' or 'cmd.items[0].id'"
        )
    return tuple(parts)


def _follow(value: Any, part: str) -> Any:
    """One step: mapping key, index or attribute; LookupError when there is none."""
    if isinstance(value, Mapping):
        found = _member(value, part)
        if found is _ABSENT and part.lstrip("-").isdecimal():
            found = _member(value, int(part))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes) and part.lstrip("-").isdecimal():
        index = int(part)
        found = value[index] if -len(value) <= index < len(value) else _ABSENT
    else:
        found = getattr(value, part, _ABSENT)
    if found is _ABSENT:
        raise LookupError(part)
    return found


def _member(value: Mapping[Any, Any], key: object) -> Any:
    """Of protobuf's mappings, too: its Struct has no `get`, and a map of numbers knows no text."""
    try:
        there = key in value
    except TypeError:
        return _ABSENT
    return value[key] if there else _ABSENT


class FieldPath:
    """A compiled path over bound arguments: `field_path("cmd.request_id")({"cmd": cmd})`."""

    __slots__ = ("_parts", "_root", "text")

    def __init__(self, path: str) -> None:
        self._root, *self._parts = _path_parts(path)
        self.text = path

    @property
    def root(self) -> str:
        """The argument the path begins with, to be compared with the function's signature."""
        return self._root

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        try:
            value = arguments[self._root]
        except KeyError:
            names = ", ".join(arguments) or "none"
            raise ConfigurationError(
                f"field path {self.text!r}: there is no argument {self._root!r}; the arguments are: {names}"
            ) from None
        for at, part in enumerate(self._parts):
            try:
                value = _follow(value, part)
            except LookupError:
                walked = ".".join((self._root, *self._parts[:at]))
                raise InvalidKey(
                    f"field path {self.text!r}: {walked} (a {type(value).__name__}) has no {part!r}; "
                    "correct the path, or pass a callable of the bound arguments"
                ) from None
        return value

    def __repr__(self) -> str:
        return f"field_path({self.text!r})"


def field_path(path: str) -> Callable[[Mapping[str, Any]], Any]:
    """A callable over bound arguments (name → value) that follows attributes, mapping keys and indexes.

    An argument that does not exist is a ConfigurationError (the program is wrong), a part that is absent in
    this call's data is InvalidKey (the request is).
    """
    return FieldPath(path)

"""Everything semel raises, in one tree. Each docstring says what the caller can do about it.

SemelError
├── ConfigurationError    the program is set up wrongly: change the code or the settings
├── InvalidKey            a key, tenant, operation or id is malformed       (also ValueError)
├── KeyMismatch           the key was used before with another request
├── InProgress            somebody else runs this key right now              (also TimeoutError)
├── KeyExpired            the key was used, its result is gone
├── OutcomeUnknown        it may or may not have happened: resolve it
├── PreviousFailure       the stored outcome is a failure
├── LeaseLost             another owner took over while this one was away
├── StoreUnavailable      the store did not answer; the function did not run (a step may have)
├── NotRecorded           the effect happened; the store did not take the result
└── CodecError            a value cannot be stored, or not be read back
SemelWarning              something is legal but weaker than it looks        (UserWarning)
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CodecError",
    "ConfigurationError",
    "InProgress",
    "InvalidKey",
    "KeyExpired",
    "KeyMismatch",
    "LeaseLost",
    "NotRecorded",
    "OutcomeUnknown",
    "PreviousFailure",
    "SemelError",
    "SemelWarning",
    "StoreUnavailable",
]


class SemelError(Exception):
    """The root: catch it to catch everything that semel itself raises."""


class ConfigurationError(SemelError):
    """The program asks for something that cannot work. The message names the setting and the remedy."""


class InvalidKey(SemelError, ValueError):
    """A key, tenant, operation or public id is malformed; nothing was stored and nothing ran."""


class KeyMismatch(SemelError):
    """The key belongs to another request: use a new key, or send the request that the key was made for."""


class InProgress(SemelError, TimeoutError):
    """Another caller runs this key now. Nothing ran here; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 0.0, attempt: int = 0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.attempt = attempt


class KeyExpired(SemelError):
    """The key was used and its result is no longer kept. Use a new key if you mean a new action."""


class OutcomeUnknown(SemelError):
    """The effect may or may not have happened and policy forbids a re-run. Look it up, then `resolve` the key.

    `nonce` is that of an unreadable record whose nonce can be read: a `forget` is fenced by it.
    """

    def __init__(
        self, message: str, *, attempt: int = 0, unreadable: bool = False, nonce: bytes = b""
    ) -> None:
        super().__init__(message)
        self.attempt = attempt
        self.unreadable = unreadable
        self.nonce = nonce


class PreviousFailure(SemelError):
    """The stored outcome of this key is a failure: the same one is raised for every caller.

    `about` names the call, with its key masked. Use a new key for a new action; `resolve` the key if the failure was a mistake.
    """

    def __init__(
        self, type_name: str, code: str | None, message: str, *, attempt: int = 0, about: str = ""
    ) -> None:
        super().__init__(f"{type_name}: {message}" if message else type_name)
        self.type_name = type_name
        self.code = code
        self.message = message
        self.attempt = attempt
        self.about = about

    def __str__(self) -> str:
        failure = super().__str__()
        if not self.about:
            return failure
        return (
            f"{self.about} failed before, and that stored outcome is replayed: {failure}. Nothing ran: use a new key for a new "
            "action, or resolve(key, …) if the failure was told by mistake"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors travel between processes (Celery, multiprocessing): this one has more arguments than its text."""
        return (
            type(self),
            (self.type_name, self.code, self.message),
            {"attempt": self.attempt, "about": self.about},
        )


class LeaseLost(SemelError):
    """Another owner took the key over. This run's result was not accepted; do not retry blindly: read the key."""


class StoreUnavailable(SemelError):
    """The store did not answer in time. The effect did not start: it is safe to try again.

    Out of `run.step` the step may have been made: asked for again by the same attempt, it is written down, and not made again.
    """


class NotRecorded(SemelError):
    """The effect happened, but the store did not take the result yet; the write goes on in the background.

    `value` is what the function returned. Do not run the effect again: call with the same key later.
    """

    def __init__(self, message: str, *, value: Any = None) -> None:
        super().__init__(message)
        self.value = value


class CodecError(SemelError):
    """A value cannot be stored so that it comes back equal and of the same type, or cannot be read back.

    `recorded` says that the effect happened and its key is done (within a transaction: when that commits), only without a result.
    """

    def __init__(self, message: str = "", *, recorded: bool = False) -> None:
        super().__init__(message)
        self.recorded = recorded


class SemelWarning(UserWarning):
    """Something is legal but protects less than it seems to."""

"""semel: side effects happen once."""

from __future__ import annotations

# the run of a coroutine
from semel.awaited import current_async_run

# errors
from semel.errors import (
    CodecError,
    ConfigurationError,
    InProgress,
    InvalidKey,
    KeyExpired,
    KeyMismatch,
    LeaseLost,
    NotRecorded,
    OutcomeUnknown,
    PreviousFailure,
    SemelError,
    SemelWarning,
    StoreUnavailable,
)
from semel.ids import PublicId
from semel.ids import parse as parse_id

# requests and ids
from semel.keys import fingerprint

# the two faces
from semel.once import AsyncSemel, Semel

# what a probe and an on_error answer
from semel.options import NOT_FOUND, UNDECIDED, Found, Release

# a run and its outcome
from semel.run import AsyncRun, Outcome, Run, current_run

__version__ = "0.1.0"

__all__ = [
    "NOT_FOUND",
    "UNDECIDED",
    "AsyncRun",
    "AsyncSemel",
    "CodecError",
    "ConfigurationError",
    "Found",
    "InProgress",
    "InvalidKey",
    "KeyExpired",
    "KeyMismatch",
    "LeaseLost",
    "NotRecorded",
    "Outcome",
    "OutcomeUnknown",
    "PreviousFailure",
    "PublicId",
    "Release",
    "Run",
    "Semel",
    "SemelError",
    "SemelWarning",
    "StoreUnavailable",
    "current_async_run",
    "current_run",
    "fingerprint",
    "parse_id",
]

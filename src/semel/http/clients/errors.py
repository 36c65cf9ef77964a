"""What the clients raise beside the errors of semel itself and of the HTTP library."""

from __future__ import annotations

import ssl

from semel.errors import KeyExpired, SemelError

__all__ = ["BodyNotRepeatable", "RetentionOver", "is_about_certificate"]


class RetentionOver(KeyExpired):
    """The server may have forgotten the key: sending it again could act twice, so it was not sent.

    Whether the action took place is not known here. Ask the server, then act under a new key (a new action name), or not
    at all. `key` is what was sent, `attempts` how often this process sent it.
    """

    def __init__(self, message: str, *, key: str = "", attempts: int = 0) -> None:
        super().__init__(message)
        self.key = key
        self.attempts = attempts


class BodyNotRepeatable(SemelError):
    """The body is a stream longer than `max_body`, so the request could be sent once only, and that failed.

    Pass the body as bytes, raise `max_body`, or make a new request with the same key (`key`) and the same content.
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


def is_about_certificate(error: BaseException | None) -> bool:
    """A certificate that is wrong now is wrong a second later. The libraries hide the reason at different depths."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False

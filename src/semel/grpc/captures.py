"""The context that a keyed handler sees. What it says is kept, and sent when the outcome has been recorded.

Claim, effect, record, send, in this order: nothing of an answer leaves before its record is written. Everything that is
no part of the answer (metadata of the request, peer, deadline, …) is the real context's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio

from semel.grpc.answers import Answer, Metadata, code_of

__all__ = ["Aborted", "AioCapture", "AsyncCapture", "Capture"]


class Aborted(Exception):
    """The handler ended by `abort`; its status is on the context."""


class _AioAborted(Aborted, grpc.aio.AbortError):
    """The same under grpc.aio, whose handlers know `except grpc.aio.AbortError: raise`."""


class Capture:
    """A `grpc.ServicerContext` of a threaded handler."""

    _aborted: type[Aborted] = Aborted

    def __init__(self, context: Any, serialize: Callable[[Any], bytes] | None) -> None:
        self._context = context
        self._serialize = serialize
        self._code: grpc.StatusCode | None = None
        self._details: str = ""
        self._initial: Metadata | None = None
        self._trailing: Metadata = ()
        self._messages: list[bytes] = []
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def keep(self, message: Any) -> None:
        """A message of the answer. One that cannot be serialized is not the handler's failure: it runs to its end."""
        try:
            self._messages.append(message if self._serialize is None else self._serialize(message))
        except Exception:  # noqa: BLE001 - whatever a serializer raises: gRPC says INTERNAL
            self._broken = True

    @property
    def broken(self) -> bool:
        """OK was meant, and its message cannot be sent. Beside any other status gRPC does not look at what was returned."""
        return self._broken and self._code in (None, grpc.StatusCode.OK)

    def answer(self) -> Answer:
        """Everything that was said, as gRPC would send it."""
        code = self._code or grpc.StatusCode.OK
        if self.broken:
            # The effect has happened, and would fail in the same way again: this is its outcome.
            return Answer(grpc.StatusCode.INTERNAL.value[0], "Failed to serialize response!")
        return Answer(code.value[0], self._details, self._messages, self._initial or (), self._trailing)

    def raised(self, error: Exception) -> bool:
        """The handler raised: True if it had set a status before, which then is its answer; UNKNOWN otherwise."""
        said = self._code not in (None, grpc.StatusCode.OK)
        if not said:
            self._code = grpc.StatusCode.UNKNOWN
        self._details = self._details or f"Exception calling application: {error}"
        return said

    # ------------------------------------------------------------------------- what both colours say alike

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code_of(code)

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._trailing = tuple((name, value) for name, value in trailing_metadata)

    def trailing_metadata(self) -> Metadata:
        return self._trailing

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> Any:
        return self._details.encode()

    def _abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        ok = code is grpc.StatusCode.OK  # which nobody can abort with: gRPC calls it UNKNOWN
        self._code = grpc.StatusCode.UNKNOWN if ok else code_of(code)
        self._details = "" if ok else details
        raise self._aborted(f"{self._code.name}: {details}")

    def _keep_initial(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        if self._initial is not None:
            raise ValueError("Initial metadata no longer allowed!")
        self._initial = tuple((name, value) for name, value in metadata)

    # ----------------------------------------------------------------------------------------- plain code

    def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> Any:
        self._keep_initial(initial_metadata)

    def abort(self, code: grpc.StatusCode, details: str) -> Any:
        self._abort(code, details)

    def abort_with_status(self, status: grpc.Status) -> Any:
        self.set_trailing_metadata(status.trailing_metadata or ())
        self._abort(status.code, status.details or "")


class AioCapture(Capture):
    """The context of a plain function under grpc.aio, where the first `abort` is the status, whatever is said after it."""

    _aborted = _AioAborted
    _is_aborted = False

    def set_code(self, code: grpc.StatusCode) -> None:
        if not self._is_aborted:
            super().set_code(code)

    def set_details(self, details: str) -> None:
        if not self._is_aborted:
            super().set_details(details)

    def set_trailing_metadata(self, trailing_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        if not self._is_aborted:
            super().set_trailing_metadata(trailing_metadata)

    def _abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        if self._is_aborted:
            raise grpc.aio.UsageError("Abort already called!")
        self._is_aborted = True
        super()._abort(code, details)


class AsyncCapture(AioCapture):
    """A `grpc.aio.ServicerContext`: what sends is awaited, and a stream may be written with `write`."""

    def __init__(
        self, context: Any, serialize: Callable[[Any], bytes] | None, requests: Iterable[Any] = ()
    ) -> None:
        super().__init__(context, serialize)
        self._requests = iter(requests)

    def details(self) -> str:
        return self._details

    async def send_initial_metadata(self, initial_metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._keep_initial(initial_metadata)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Iterable[tuple[str, str | bytes]] = (),
    ) -> NoReturn:
        if given := tuple(trailing_metadata):
            self.set_trailing_metadata(given)
        self._abort(code, details)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        self.set_trailing_metadata(status.trailing_metadata or ())
        self._abort(status.code, status.details or "")

    async def read(self) -> Any:
        return next(self._requests, grpc.aio.EOF)

    async def write(self, message: Any) -> None:
        self.keep(message)


# What it is for `isinstance`; it implements the whole of it, partly by passing it on.
grpc.ServicerContext.register(Capture)
grpc.aio.ServicerContext.register(AsyncCapture)

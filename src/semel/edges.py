"""A face as an edge sees it (HTTP): options that are checked once for a route, and calls that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from semel.calls import Call
from semel.codec import Codec
from semel.face import Face
from semel.flow import Engine
from semel.keys import Readable, make_scope
from semel.options import Options, resolve

__all__ = ["Edge"]

_MOST_OPTIONS: Final = 256  # tenants and operations come from requests


class Edge:
    """One set of options over one `Semel` or `AsyncSemel`; tenant, operation and wait may differ from call to call."""

    __slots__ = ("_codec", "_face", "_given", "_known", "_prefix", "_readable", "tenant")

    def __init__(self, face: Face, given: Mapping[str, Any], *, codec: Codec, readable: Readable) -> None:
        self._face = face
        self._given = dict(given)
        self._codec = codec
        self._readable: Readable = readable
        self._prefix = face._prefix  # noqa: SLF001 - this class is how edges see a face
        self.tenant: str = face._defaults.tenant  # noqa: SLF001 - our own face
        """Of a call that names none."""
        self._known: dict[tuple[float, str, str], Options] = {}

    @property
    def engine(self) -> Engine:
        """The running loop's engine, or the process's."""
        engine: Engine = self._face._engine()  # type: ignore[attr-defined]  # noqa: SLF001 - each colour has its own
        return engine

    def call(
        self,
        key: str,
        tenant: str,
        operation: str,
        wait: float,
        fingerprint: bytes,
        labels: Mapping[str, str],
    ) -> Call:
        """One call, with everything checked. Raises InvalidKey for names that the core does not take."""
        name = wait, tenant, operation
        options = self._known.get(name)
        if options is None:
            if len(self._known) >= _MOST_OPTIONS:
                self._known.clear()
            words = {"wait": wait, "tenant": tenant, "operation": operation}
            options = self._known[name] = resolve(self._face._defaults, self._given | words)  # noqa: SLF001 - our own face
        scope = make_scope(self._prefix, tenant, operation, key, self._readable)
        return Call(scope, key, options, codec=self._codec, fingerprint=fingerprint, labels=labels)

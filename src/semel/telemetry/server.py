"""`/metrics` and `/health` for a process that serves nothing else, such as `semel relay`."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from semel.errors import ConfigurationError

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.exposition import ThreadingWSGIServer
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        'semel.telemetry.server needs prometheus-client: pip install "semel[telemetry]" brings it'
    ) from missing

__all__ = ["MetricsServer", "address"]

Health = Callable[[], Mapping[str, Any]]
_PATIENCE: Final = 5.0


class _Quiet(WSGIRequestHandler):
    """Scrapes are no news; and a client that sends nothing does not keep its thread for ever."""

    timeout = _PATIENCE

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the inherited name
        """Not logged."""


class MetricsServer:
    """Serves from a thread of its own from `__enter__` on. `/metrics` is prometheus_client's; `/health` answers what `health()`
    says as JSON, 503 if its `status` is "failing" and 200 otherwise.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        self._metrics: WSGIApplication = make_wsgi_app(registry)
        self._health = health
        try:
            self._server = make_server(host, port, self._answer, _server_for(host, port), _Quiet)
        except OSError as error:
            raise ConfigurationError(f"metrics cannot be served at {host}:{port}: {error}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="semel-metrics", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens; a free one was taken for 0."""
        return int(self._server.server_port)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_PATIENCE)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO"):
            case "/metrics":
                return self._metrics(environ, start_response)
            case "/health":
                said = self._health()
                status = "503 Service Unavailable" if said["status"] == "failing" else "200 OK"
                return _reply(start_response, status, "application/json", json.dumps(said))
            case _:
                return _reply(
                    start_response, "404 Not Found", "text/plain", "/metrics and /health are here\n"
                )


def _server_for(host: str, port: int) -> type[ThreadingWSGIServer]:
    """Of the address's own family: the standard server speaks IPv4 unless told."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return type("Server", (ThreadingWSGIServer,), {"address_family": family})


def _reply(start_response: StartResponse, status: str, kind: str, text: str) -> Iterable[bytes]:
    body = text.encode()
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


def address(given: str) -> tuple[str, int]:
    """HOST:PORT, or PORT on this machine only."""
    host, _, port = given.rpartition(":")
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigurationError(f"--metrics is HOST:PORT, such as 0.0.0.0:9464, not {given!r}")
    return host.strip("[]") or "127.0.0.1", int(port)

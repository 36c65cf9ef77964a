"""A real server process with an application of these tests, and a client of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from semel.testing.services.home import free_port

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0


class Site:
    """One server process, its ledger and its gate."""

    def __init__(
        self,
        kind: str,
        url: str,
        folder: Path,
        *,
        workers: int = 1,
        app: str = "",
        patience: float = 20.0,
        **rules: Any,
    ) -> None:
        self.kind = kind
        self._app = app
        self.folder = folder
        self.port = free_port()
        face = {"tenant": uuid.uuid4().hex, "timeout": patience, "settle_timeout": patience}
        self._env = os.environ | {
            "SEMEL_URL": url,
            "SEMEL_OPTIONS": json.dumps(face),
            "SEMEL_RULES": json.dumps({"store_timeout": 20, **rules}),  # a busy machine is no broken store
            "SEMEL_FOLDER": str(folder),
            "PYTHONPATH": str(ROOT),
        }
        self._workers = str(workers)
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        (self.folder / "gate").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            self._command(), env=self._env, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL
        )
        self.until(self.listens, "the server starts")

    def _command(self) -> list[str]:
        python = [sys.executable, "-m"]
        if self.kind == "gunicorn":
            place = [
                "-b",
                f"127.0.0.1:{self.port}",
                "-w",
                self._workers,
                "--preload",
                "--log-level",
                "critical",
            ]
            return [*python, "gunicorn", *place, f"{self._app or 'tests.http.served:wsgi'}()"]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", self._workers]
        parser = self.kind
        if self.kind == "django":
            parser, self._app = "h11", "tests.http.served:django"
            where += ["--lifespan", "off"]
        how = ["--http", parser, "--log-level", "critical", "--factory"]
        return [*python, "uvicorn", *where, *how, self._app or "tests.http.served:asgi"]

    def listens(self) -> bool:
        assert self.process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def until(self, ready: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not ready():
            assert time.monotonic() < end, f"{what}: not within {SECONDS:g} s; {self.lines()}"
            time.sleep(0.005)

    def lines(self) -> list[str]:
        path = self.folder / "ledger"
        return path.read_text().splitlines() if path.exists() else []

    def did(self, line: str, times: int = 1) -> None:
        """Wait until the ledger says so."""
        self.until(lambda: self.lines().count(line) >= times, line)

    def open_gate(self) -> None:
        (self.folder / "gate").touch()

    def shut_gate(self) -> None:
        (self.folder / "gate").unlink(missing_ok=True)

    def post(self, path: str, key: str = "k1", **given: Any) -> httpx.Response:
        headers = {"Idempotency-Key": key, "X-User": "ada", "Prefer": "wait=20", **given.pop("headers", {})}
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", headers=headers, timeout=SECONDS, **given)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), SECONDS)

    def send(self, path: str, key: str) -> socket.socket:
        """A request whose response nobody has read yet."""
        connection = self.connect()
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: shop",
            f"Idempotency-Key: {key}",
            "X-User: ada",
            "Content-Length: 0",
        )
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        return connection

    def raw(self, data: bytes, *, then_close: bool = False) -> bytes:
        """Everything that comes back."""
        with self.connect() as connection:
            connection.sendall(data)
            if then_close:
                connection.shutdown(socket.SHUT_WR)
            return read(connection)

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        for _ in range(15):
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, number)  # a worker of gunicorn that boots does not hear the first
            else:
                return
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read(connection: socket.socket) -> bytes:
    """A whole response, or what there is of it when the server closes."""
    got = b""
    while not _is_complete(got) and (chunk := connection.recv(65536)):
        got += chunk
    return got


def _is_complete(got: bytes) -> bool:
    head, found, body = got.partition(b"\r\n\r\n")
    if not found or head.startswith(b"HTTP/1.1 100"):
        return False
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")

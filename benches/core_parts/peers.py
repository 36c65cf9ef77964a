"""Peers: the same calls through other packages, in an environment of their own that the first run makes.

Their packages are pinned with hashes in requirements/bench.txt and installed into .venv/peers, so that nothing of
theirs can change what the tests see. The measuring itself is `peers_inside`, run by that environment's Python.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benches.core_parts.measure import Effort, Figure, say
from benches.core_parts.on_postgres import durable_server
from semel.testing import services

__all__ = ["LEFT_OUT", "VERSIONS", "Result", "bench"]

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "bench.txt"
HOME = ROOT / ".venv" / "peers"

# Filled by `bench`: what the page tells beside the figures.
LEFT_OUT: dict[str, str] = {}
VERSIONS: dict[str, str] = {}


class Result(msgspec.Struct):
    """What `peers_inside` prints."""

    figures: list[Figure] = []
    left_out: dict[str, str] = {}
    versions: dict[str, str] = {}


def bench(effort: Effort) -> list[Figure]:
    python = _environment()
    with services.redis() as server, durable_server() as database, tempfile.TemporaryDirectory() as folder:
        databases = [database.database() for _ in range(3)]
        command = [
            python, "-m", "benches.core_parts.peers_inside", server.url, *databases, folder,
            "quick" if effort.quick else "full",
        ]  # fmt: skip
        ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    result = msgspec.json.decode(ran.stdout.splitlines()[-1], type=Result)
    LEFT_OUT.update(result.left_out)
    VERSIONS.update(result.versions)
    return result.figures


def _environment() -> Path:
    """The environment's Python; made anew when the lock has changed."""
    python, stamp = HOME / "bin" / "python", HOME / "stamp"
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text("utf-8") == digest:
        return python
    say("installing requirements/bench.txt into .venv/peers")
    uv = Path(sys.executable).parent / "uv"
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    install: list[str | Path] = [uv, "pip", "install", "-q", "-p", python]
    steps: list[list[str | Path]] = [
        [uv, "venv", "-q", "--clear", "-p", sys.executable, HOME],
        [*install, "--require-hashes", "-r", LOCK],
        [*install, "--no-deps", "--no-build-isolation", "-e", ROOT],
    ]
    for command in steps:
        subprocess.run(command, check=True, env=environment)
    stamp.write_text(digest, "utf-8")
    return python

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

__all__ = ["LEFT_OUT", "VERSIONS", "Result", "bench", "environment"]

ROOT = Path(__file__).resolve().parents[2]

# Filled by `bench`: what the page tells beside the figures.
LEFT_OUT: dict[str, str] = {}
VERSIONS: dict[str, str] = {}


class Result(msgspec.Struct):
    """What `peers_inside` prints."""

    figures: list[Figure] = []
    left_out: dict[str, str] = {}
    versions: dict[str, str] = {}


def bench(effort: Effort) -> list[Figure]:
    python = environment("bench", "peers")
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


def environment(lock: str, name: str) -> Path:
    """The Python of .venv/NAME, which holds requirements/LOCK.txt and semel; made anew when the lock has changed."""
    home, locked = ROOT / ".venv" / name, ROOT / "requirements" / f"{lock}.txt"
    python, stamp = home / "bin" / "python", home / "stamp"
    digest = hashlib.sha256(locked.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text("utf-8") == digest:
        return python
    say(f"installing requirements/{lock}.txt into .venv/{name}")
    uv = Path(sys.executable).parent / "uv"
    variables = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    # The lock is complete: what it overrides must not be looked into again.
    install: list[str | Path] = [uv, "pip", "install", "-q", "-p", python, "--no-deps"]
    steps: list[list[str | Path]] = [
        [uv, "venv", "-q", "--clear", "-p", sys.executable, home],
        [*install, "--require-hashes", "-r", locked],
        [*install, "--no-build-isolation", "-e", ROOT],
    ]
    for command in steps:
        subprocess.run(command, check=True, env=variables)
    stamp.write_text(digest, "utf-8")
    return python

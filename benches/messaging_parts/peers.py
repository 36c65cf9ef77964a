"""Peers: the same backlog through other packages, in an environment of their own that the first run makes.

Their packages are pinned with hashes in requirements/bench-messaging.txt and installed into .venv/peers-messaging. The
measuring itself is `peers_inside`, run by that environment's Python.
"""

from __future__ import annotations

import subprocess

import msgspec

from benches.core_parts.measure import Figure
from benches.core_parts.on_postgres import durable_server
from benches.core_parts.peers import ROOT, Result, environment
from semel.testing import services

__all__ = ["LEFT_OUT", "VERSIONS", "bench"]

# Filled by `bench`: what the page tells beside the figures.
LEFT_OUT: dict[str, str] = {}
VERSIONS: dict[str, str] = {}
_CONTENDERS = 5


def bench(*, quick: bool) -> list[Figure]:
    python = environment("bench-messaging", "peers-messaging")
    with services.redis() as broker, durable_server() as database:
        databases = [database.database() for _ in range(_CONTENDERS)]
        command = [
            python, "-m", "benches.messaging_parts.peers_inside", broker.url, *databases, "quick" if quick else "full",
        ]  # fmt: skip
        ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    result = msgspec.json.decode(ran.stdout.splitlines()[-1], type=Result)
    LEFT_OUT.update(result.left_out)
    VERSIONS.update(result.versions)
    return result.figures

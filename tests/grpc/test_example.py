"""The example's server and client, as two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_g11_the_example_places_one_order_though_its_first_reply_is_lost(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    python = [sys.executable, "-W", "error", "-m"]
    server = subprocess.Popen(
        [*python, "examples.grpc_orders.server", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        client = subprocess.run(
            [*python, "examples.grpc_orders.client", f"127.0.0.1:{port}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=environment,
        )
    finally:
        server.kill()
        server.communicate()
    assert client.returncode == 0, client.stdout + client.stderr
    assert client.stdout.splitlines() == [
        "first try: DEADLINE_EXCEEDED",
        "second try: book for 500 cents, replayed: true",
        "1 order in the books",
    ]
    assert client.stderr == ""

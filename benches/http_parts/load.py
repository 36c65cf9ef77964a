"""Servers and load: one uvicorn worker each, asked by wrk in turns; what its process used is read from /proc."""

from __future__ import annotations

import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Rate", "Target", "compare", "serving"]

ROOT = Path(__file__).resolve().parents[2]
BODY = '{"amount":1999,"currency":"eur","customer":"cus_81723"}'
_TICK = os.sysconf("SC_CLK_TCK")
_LUA = """
local run, kind = os.getenv("WRK_RUN"), os.getenv("WRK_KEYS")
local thread_number, count = 0, 0
function setup(thread) thread:set("number", thread_number); thread_number = thread_number + 1 end
wrk.method = "POST"
wrk.body = '%s'
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "user-1"
function request()
  count = count + 1
  if kind == "fresh" then wrk.headers["Idempotency-Key"] = "k-" .. run .. "-" .. number .. "-" .. count
  elseif kind == "replay" then wrk.headers["Idempotency-Key"] = "done-" .. (count %% 100) end
  return wrk.format()
end
"""


class Target(NamedTuple):
    """What is asked: a server, and which keys the requests carry (fresh, replay or none)."""

    name: str
    port: int
    pid: int
    keys: str


class Rate(NamedTuple):
    """Medians over rounds: requests per second, the server's CPU in µs per request, p50 and p99 in ms."""

    per_second: float
    cpu: float
    p50: float
    p99: float


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(kind: str, store: str = "") -> Iterator[tuple[int, int]]:
    """One uvicorn worker with one application: its port and process."""
    port = _port()
    command = [
        sys.executable, "-m", "uvicorn", "--factory", "benches.http_parts.apps:make", "--port", str(port),
        "--host", "127.0.0.1", "--log-level", "warning", "--no-access-log", "--loop", "asyncio", "--http", "httptools",
    ]  # fmt: skip
    environment = {**os.environ, "SEMEL_BENCH_KIND": kind, "SEMEL_BENCH_STORE": store}
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        _until_it_answers(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


def _until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "user-1"}
    for _ in range(200):
        try:
            made = urllib.request.Request(f"http://127.0.0.1:{port}/orders", BODY.encode(), headers)
            with urllib.request.urlopen(made, timeout=2):
                return
        except OSError:
            if process.poll() is not None:
                raise RuntimeError("uvicorn did not start") from None
            time.sleep(0.05)
    raise RuntimeError("uvicorn does not answer")


def compare(targets: Sequence[Target], rounds: int, seconds: int, script: Path) -> dict[str, Rate]:
    """Each target in turns; the first round warms up and does not count."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    script.write_text(_LUA % BODY, "utf-8")
    seen: dict[str, list[Rate]] = {target.name: [] for target in targets}
    for number in range(rounds + 1):
        at = number % len(targets)
        for target in [*targets[at:], *targets[:at]]:
            rate = _asked(target, number, seconds if number else 1, script)
            if number:
                seen[target.name].append(rate)
    return {
        name: Rate(*(statistics.median(getattr(rate, field) for rate in rates) for field in Rate._fields))
        for name, rates in seen.items()
    }


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _asked(target: Target, number: int, seconds: int, script: Path) -> Rate:
    before = _cpu(target.pid)
    command = [
        "wrk", "-t", "1", "-c", "32", "-d", f"{seconds}s", "--latency", "-s", str(script),
        f"http://127.0.0.1:{target.port}/orders",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "WRK_KEYS": target.keys,
        "WRK_RUN": f"{os.getpid()}-{target.name}-{number}".replace(" ", "_"),
    }
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in told:
        raise RuntimeError(f"{target.name} answered errors:\n{told}")
    count = int(re.search(r"(\d+) requests in", told)[1])  # type: ignore[index]
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", told)[1])  # type: ignore[index]
    cpu = (_cpu(target.pid) - before) / count * 1e6
    return Rate(rate, cpu, _latency(told, "50%"), _latency(told, "99%"))


def _latency(told: str, share: str) -> float:
    value, unit = re.search(rf"{share}\s+([\d.]+)(us|ms|s)", told).groups()  # type: ignore[union-attr]
    return float(value) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]

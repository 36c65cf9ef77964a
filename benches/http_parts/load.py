"""Servers and load: one uvicorn worker each, asked by wrk in turns; what its process used is read from /proc."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["Rate", "Target", "answer", "compare", "serving"]

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
    """Medians over rounds: requests per second, the server's CPU in µs per request, p50 and p99 in ms.

    `errors` is the share of answers that were none of 2xx or 3xx, `ran` how often the handler ran for a request.
    """

    per_second: float
    cpu: float
    p50: float
    p99: float
    errors: float
    ran: float


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    kind: str,
    store: str = "",
    python: str | Path = sys.executable,
    *,
    frozen: bool = False,
    floor: str = "",
    loop: str = "asyncio",
) -> Iterator[tuple[int, int]]:
    """One uvicorn worker with one application: its port and process. 100 keys are done when it is handed over.

    `frozen`: it has set its garbage collector as docs/howto/http.md says. `floor`: one of `floor.FLOORS` in semel's place.
    """
    port = _port()
    command = [
        python, "-m", "uvicorn", "--factory", "benches.http_parts.apps:make", "--port", str(port),
        "--host", "127.0.0.1", "--log-level", "critical", "--no-access-log", "--loop", loop, "--http", "httptools",
    ]  # fmt: skip
    environment = {**os.environ, "SEMEL_BENCH_KIND": kind, "SEMEL_BENCH_STORE": store}
    environment["SEMEL_BENCH_FREEZE"] = "yes" if frozen else ""
    environment["SEMEL_BENCH_FLOOR"] = floor
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    try:
        _until_it_answers(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(10)


def _until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        try:
            _runs(port)
        except OSError:
            if process.poll() is not None:
                raise RuntimeError("uvicorn did not start") from None
            time.sleep(0.05)
        else:
            for number in range(100):
                answer(port, f"done-{number}")
            return
    raise RuntimeError("uvicorn does not answer")


def _ask(port: int, method: str, path: str, body: str, headers: dict[str, str]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        # The headers that wrk sends, and no others: some packages compare them.
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode())
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _runs(port: int) -> int:
    return int(_ask(port, "GET", "/runs", "", {})[1])


def _settled_runs(port: int) -> int:
    """When what wrk left behind has ended, too."""
    known, runs = -1, _runs(port)
    while runs != known:
        time.sleep(0.05)
        known, runs = runs, _runs(port)
    return runs


def answer(port: int, key: str | None) -> int:
    """The status of one request."""
    headers = {"Content-Type": "application/json", "Authorization": "user-1"}
    if key is not None:
        headers["Idempotency-Key"] = key
    return _ask(port, "POST", "/orders", BODY, headers)[0]


def compare(
    targets: Sequence[Target], rounds: int, seconds: int, script: Path, *, strict: bool = True
) -> dict[str, Rate]:
    """Each target in turns; the first round warms up and does not count. `strict`: an error that is answered ends it."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: apt-get install wrk")
    script.write_text(_LUA % BODY, "utf-8")
    seen: dict[str, list[Rate]] = {target.name: [] for target in targets}
    for number in range(rounds + 1):
        at = number % len(targets)
        for target in [*targets[at:], *targets[:at]]:
            rate = _asked(target, number, seconds if number else 1, script)
            if strict and rate.errors:
                raise RuntimeError(f"{target.name} answered errors")
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
    ran = _settled_runs(target.port)
    before = _cpu(target.pid)
    command = [
        "wrk", "-t", "1", "-c", "32", "-d", f"{seconds}s", "--latency", "-s", str(script),
        f"http://127.0.0.1:{target.port}/orders",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "WRK_KEYS": target.keys,
        "WRK_RUN": re.sub(r"\W", "", f"{os.getpid()}{target.name}") + f"-{number}",
    }
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    count = int(re.search(r"(\d+) requests in", told)[1])  # type: ignore[index]
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", told)[1])  # type: ignore[index]
    cpu = (_cpu(target.pid) - before) / count * 1e6
    errors = int(wrong[1]) / count if wrong else 0.0
    ran = _settled_runs(target.port) - ran
    return Rate(rate, cpu, _latency(told, "50%"), _latency(told, "99%"), errors, ran / count)


def _latency(told: str, share: str) -> float:
    value, unit = re.search(rf"{share}\s+([\d.]+)(us|ms|s)", told).groups()  # type: ignore[union-attr]
    return float(value) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]

"""The Redis transport against redis-py's own clients, in interleaved rounds; every figure with both terms.

    python benches/redis_link.py [--url redis://127.0.0.1:6379/0] [--rounds 5] [--seconds 0.6] [--uvloop]

Without --url a private redis-server is started and stopped. Ratios count, absolute rates depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import redis
import redis.asyncio

from semel.stores.redis.link import Link, Script, open_link

# About what a claim costs: a read, a decision, a write of 1 KB with an expiry.
SCRIPT = Script(
    "bench",
    "local v = redis.call('GET', KEYS[1]) "
    "if not v then redis.call('SET', KEYS[1], ARGV[1], 'PX', 60000) end "
    "return {ARGV[2], v and #v or 0}",
)
PAYLOAD = b"x" * 1024


@contextlib.contextmanager
def private_server() -> Iterator[str]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise SystemExit("no redis-server on the PATH: pass --url")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                client = redis.Redis(port=port)
                while True:
                    with contextlib.suppress(redis.ConnectionError):
                        client.ping()
                        break
                    time.sleep(0.01)
                client.close()
                yield f"redis://127.0.0.1:{port}/0"
            finally:
                server.terminate()


class Rate:
    """Calls per second and client CPU per call, collected over rounds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rates: list[float] = []
        self.cpu: list[float] = []

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def micros(self) -> float:
        return statistics.median(self.cpu)


async def crowd(call: Callable[[int], Awaitable[Any]], callers: int, seconds: float, into: Rate) -> None:
    end = time.perf_counter() + seconds
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await call(number)
            done += 1

    cpu, start = time.process_time(), time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(callers)))
    into.rates.append(done / (time.perf_counter() - start))
    into.cpu.append((time.process_time() - cpu) / done * 1e6)


async def p50(call: Callable[[int], Awaitable[Any]], count: int) -> float:
    times = []
    for number in range(count):
        start = time.perf_counter()
        await call(number % 64)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


async def bench_async(url: str, rounds: int, seconds: float) -> None:
    link = open_link(url, colour="async")
    pool = redis.asyncio.Redis.from_url(url, max_connections=64)
    sha = await pool.script_load(SCRIPT.source)
    keys = [f"bench:{number}".encode() for number in range(64)]

    async def ours(number: int) -> Any:
        return await link.call(SCRIPT, (keys[number],), (PAYLOAD, number))

    async def theirs(number: int) -> Any:
        return await pool.evalsha(sha, 1, keys[number], PAYLOAD, number)

    async def ping(_number: int) -> Any:
        return await link.command("PING")

    await asyncio.gather(*(ours(n) for n in range(64)), *(theirs(n) for n in range(64)))
    a, b = Rate("link"), Rate("redis-py pool")
    single: dict[str, list[float]] = {"link": [], "redis-py": [], "PING": []}
    for _ in range(rounds):
        await crowd(theirs, 64, seconds, b)
        await crowd(ours, 64, seconds, a)
        single["PING"].append(await p50(ping, 300))
        single["link"].append(await p50(ours, 300))
        single["redis-py"].append(await p50(theirs, 300))
    print(
        f"async x64 throughput  link {a.rate:9,.0f}/s   redis-py pool {b.rate:9,.0f}/s   ratio {a.rate / b.rate:5.2f} (goal >= 4)"
    )
    print(
        f"async x64 client CPU  link {a.micros:7.1f} us   redis-py pool {b.micros:7.1f} us   ratio {a.micros / b.micros:5.3f} (goal <= 0.15)"
    )
    mid = {name: statistics.median(values) for name, values in single.items()}
    print(
        f"async x1 p50          link {mid['link']:7.1f} us   PING on the link {mid['PING']:7.1f} us   ratio {mid['link'] / mid['PING']:5.2f}"
    )
    print(
        f"async x1 p50          link {mid['link']:7.1f} us   redis-py {mid['redis-py']:7.1f} us   ratio {mid['link'] / mid['redis-py']:5.2f}"
    )
    await link.aclose()
    await pool.aclose()


def drive(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a sync link suspended")


def threads(call: Callable[[int], Any], count: int, seconds: float, into: Rate) -> None:
    counts = [0] * count
    end = time.perf_counter() + seconds

    def work(number: int) -> None:
        while time.perf_counter() < end:
            call(number)
            counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    cpu, start = time.process_time(), time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    into.rates.append(sum(counts) / (time.perf_counter() - start))
    into.cpu.append((time.process_time() - cpu) / sum(counts) * 1e6)


def bench_sync(url: str, rounds: int, seconds: float) -> None:
    link: Link = open_link(url, colour="sync")
    client = redis.Redis.from_url(url)
    sha = client.script_load(SCRIPT.source)
    keys = [f"bench:{number}".encode() for number in range(64)]

    def ours(number: int) -> Any:
        return drive(link.call(SCRIPT, (keys[number],), (PAYLOAD, number)))

    def theirs(number: int) -> Any:
        return client.evalsha(sha, 1, keys[number], PAYLOAD, number)

    for count, goal in ((1, 0.8), (16, 1.0)):
        a, b = Rate("link"), Rate("redis-py")
        for _ in range(rounds):
            threads(theirs, count, seconds, b)
            threads(ours, count, seconds, a)
        print(
            f"sync x{count:<2} throughput   link {a.rate:9,.0f}/s   redis-py      {b.rate:9,.0f}/s   ratio {a.rate / b.rate:5.2f} (goal >= {goal})"
        )
        print(
            f"sync x{count:<2} client CPU   link {a.micros:7.1f} us   redis-py      {b.micros:7.1f} us   ratio {a.micros / b.micros:5.3f}"
        )
    link.close()
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--uvloop", action="store_true")
    parser.add_argument("--colour", choices=["async", "sync", "both"], default="both")
    options = parser.parse_args()
    runner: Callable[[Any], Any] = asyncio.run
    if options.uvloop:
        import uvloop

        runner = uvloop.run
    with contextlib.nullcontext(options.url) if options.url else private_server() as url:
        if options.colour != "sync":
            runner(bench_async(url, options.rounds, options.seconds))
        if options.colour != "async":
            bench_sync(url, options.rounds, options.seconds)


if __name__ == "__main__":
    main()

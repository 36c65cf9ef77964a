"""A relay or a writer in a process of its own, that kills or stops itself at a named point. Run by the tests."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time

import redis
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from semel import StoreUnavailable, points
from semel.messaging import Message, Outbox, Relay


def arm(fault: str) -> None:
    """`kill:relay.planned:2`: the second time."""
    word, name, number = fault.split(":")
    left = int(number)

    def listener(reached: str) -> None:
        nonlocal left
        if reached == name:
            left -= 1
            if left == 0:
                print(f"reached {name}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL if word == "kill" else signal.SIGSTOP)

    points.listen(listener)


async def relay(options: argparse.Namespace) -> None:
    outbox = Outbox(options.url, table=options.table, parts=options.parts)
    async with Relay(
        outbox, json.loads(options.routes), lease=options.lease, batch=options.batch, loops=options.loops
    ) as made:
        if options.drain:
            report = await made.drain()
            print(
                json.dumps(
                    {"sent": report.sent, "duplicates": report.duplicates, "overtaken": report.overtaken}
                )
            )
        else:
            await made.run()
    outbox.close()


def write(options: argparse.Namespace) -> None:
    """Orders and messages in one transaction each, until it is ended; each is told after its commit."""
    outbox = Outbox(options.url, table=options.table, parts=options.parts)
    if options.url.startswith("redis"):
        write_redis(options, outbox)
        return
    engine = create_engine(options.url)
    for number in range(options.count):
        key = f"{options.name}-{number % 7}"
        with Session(engine) as session, session.begin():
            outbox.add(session, Message("orders", {"n": number}, key=key, id=f"{options.name}-{number}"))
        print(f"{options.name}-{number}", flush=True)
    outbox.close()


def write_redis(options: argparse.Namespace, outbox: Outbox) -> None:
    """The same in Redis, whose server may die meanwhile: then it is done again, with the same id."""
    client = redis.Redis.from_url(options.url)
    for number in range(options.count):
        name = f"{options.name}-{number}"
        while True:
            try:
                with client.pipeline() as pipe:
                    pipe.set(f"order:{name}", number)
                    key = f"{options.name}-{number % 7}"
                    outbox.add(pipe, Message("orders", {"n": number}, key=key, id=name))
                    pipe.execute()
                break
            except (redis.RedisError, StoreUnavailable):
                time.sleep(0.05)
        print(name, flush=True)
    outbox.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("relay", "write"))
    parser.add_argument("url")
    parser.add_argument("table")
    parser.add_argument("--routes", default="{}")
    parser.add_argument("--fault", default="")
    parser.add_argument("--lease", type=float, default=0.5)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--loops", type=int, default=2)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--name", default="w")
    parser.add_argument("--drain", action="store_true")
    options = parser.parse_args()
    if options.fault:
        arm(options.fault)
    if options.what == "write":
        write(options)
    else:
        asyncio.run(relay(options))


if __name__ == "__main__":
    main()

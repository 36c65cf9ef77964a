"""Settles one key from a process of its own: `python -m tests.contract.other_process URL COLOUR TENANT NONCE`."""

from __future__ import annotations

import asyncio
import sys

from semel.keys import make_scope
from semel.model import Answer, Kind, Settle
from semel.runtime import run_sync
from semel.store import Settings, open_store


async def main(url: str, colour: str, tenant: str, nonce: str) -> None:
    store = open_store(url, Settings(timeout=15.0), "sync" if colour == "sync" else "async")
    scope = make_scope("contract", tenant, "op", "key")
    record, _ = await store.peek(scope)
    assert record is not None, "another process must see the record"
    assert record.nonce == bytes.fromhex(nonce)
    end = Settle(scope, record.nonce, Kind.DONE, 60.0, result=b"from afar")
    assert await store.settle([end]) == [Answer.OK]
    await store.aclose()


if __name__ == "__main__":
    run = run_sync if sys.argv[2] == "sync" else asyncio.run
    run(main(*sys.argv[1:5]))

"""R23, R27 on MariaDB: what does not fit into a packet is told as too large, and costs the caller neither connection nor rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from semel import CodecError, Found, current_run
from semel.runtime import run_sync
from semel.testing import services
from tests.within.lab import Lab, wait

LIMIT = 1 << 20
LARGE = "x" * (LIMIT * 9 // 10)  # twice as long on its way
DRIVERS = ("pymysql", "session-pymysql", "django-mysql", "asyncmy")


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with services.mariadb(config={"max_allowed_packet": str(LIMIT)}) as server:
        lab = Lab("pymysql", server.database())
        lab.create()
        yield lab.place


def _in_lab(driver: str, place: str, body: Any) -> Lab:
    lab = Lab(driver, place)
    lab.clean()

    async def closing() -> None:
        try:
            await body(lab)
        finally:
            await lab.close()

    (run_sync if lab.colour == "sync" else asyncio.run)(closing())
    return lab


def _assert_too_large(outcome: Any, ref: str | None) -> None:
    assert (outcome.replayed, outcome.marker, outcome.ref) == (True, "too large for the store", ref)
    with pytest.raises(CodecError, match=r"not kept \(too large for the store\).*raise .*max_allowed_packet"):
        _ = outcome.value


@pytest.mark.parametrize("driver", DRIVERS)
def test_R27_a_result_too_large_for_a_packet_is_a_done_marker(place: str, driver: str) -> None:
    """The server ended the connection, and the caller's rows with it."""

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")

        def named() -> None:
            current_run().set_ref("order-7")

        def large(key: str) -> str:
            named()
            run_sync(tx.insert(key))
            return LARGE

        async def large_async(key: str) -> str:
            named()
            await tx.insert(key)
            return LARGE

        within = once.within(tx.target)
        made = await wait(within.execute("key", large if lab.colour == "sync" else large_async, "key"))
        assert (made.value, made.replayed) == (LARGE, False)
        assert (await wait(within.execute("small", lab.work(tx), "small"))).value == "made"
        await tx.commit()
        await tx.begin()
        for face in (once, once.within(tx.target)):
            _assert_too_large(await wait(face.execute("key", int)), "order-7")
        await tx.rollback()

    lab = _in_lab(driver, place, body)
    assert [lab.orders(key) for key in ("before", "key", "small")] == [1, 1, 1]
    assert lab.execute("SELECT marker FROM semel WHERE `key` = 'key'") == [("too large for the store",)]


def test_R27_up_to_the_last_byte_a_result_is_kept_or_told_as_too_large(place: str) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        kept = []
        for size in range(LIMIT // 2 - 2000, LIMIT // 2 + 100, 20):
            value = "x" * size
            within = once.within(tx.target)
            assert within.execute(str(size), lab.work(tx, value), "row", compress_over=None).value == value
            await tx.commit()
            try:
                kept.append(within.execute(str(size), int).value == value)
            except CodecError:
                kept.append(False)
            await tx.rollback()
        assert kept == sorted(kept, reverse=True)
        assert {True, False} == set(kept)

    _in_lab("pymysql", place, body)


@pytest.mark.parametrize("driver", DRIVERS)
def test_R27_so_is_a_probes_word(place: str, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        with pytest.raises(ZeroDivisionError):
            await wait(once.execute("key", lambda: 1 / 0, on_unknown="hold"))
        await tx.insert("before")
        _assert_too_large(
            await wait(once.within(tx.target).execute("key", int, on_unknown=lambda: Found(LARGE))), None
        )
        await tx.commit()

    lab = _in_lab(driver, place, body)
    assert lab.orders("before") == 1
    assert lab.execute("SELECT state, marker FROM semel") == [("done", "too large for the store")]


@pytest.mark.parametrize("driver", DRIVERS)
def test_R27_a_claim_of_a_record_too_large_to_be_sent_back_is_refused(place: str, driver: str) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await wait(once.execute("key", int))
        lab.execute(
            "UPDATE semel SET state = 'released', steps = REPEAT(x'00', 600000), expires = NULL, result = NULL"
        )
        await tx.insert("before")
        with pytest.raises(CodecError, match="raise max_allowed_packet"):
            await wait(once.within(tx.target).execute("key", lab.work(tx), "key"))
        await tx.insert("after")
        await tx.commit()

    lab = _in_lab(driver, place, body)
    assert [lab.orders(key) for key in ("before", "key", "after")] == [1, 0, 1]

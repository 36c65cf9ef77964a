"""R27: a claim goes back to its own savepoint, or says that it did not; never to another one, and never in silence."""

from __future__ import annotations

from typing import Any

import pytest

from semel import ConfigurationError, Found, SemelWarning
from tests.within.lab import Lab, wait
from tests.within.test_decisions import coloured
from tests.within.test_many_claims import enter, leave, opened

DJANGO = ["django-sqlite", "django-postgresql", "django-mysql"]


async def test_R27_a_function_that_peeks_at_its_own_key_is_undone_as_every_other(lab: Lab) -> None:
    once, tx = await lab.ready()
    await tx.insert("before")
    within = once.within(tx.target)
    seen: list[str] = []

    async def look(key: str) -> str:
        await tx.insert(key)
        seen.append((await wait(once.within(tx.target).peek(key))).state)
        return "made"

    async def look_and_fail(key: str) -> str:
        await look(key)
        raise LookupError("no")

    with pytest.raises(LookupError) as caught:
        await wait(within.execute("k1", coloured(lab, look_and_fail), "k1"))
    assert not hasattr(caught.value, "__notes__"), "it was undone"
    assert (await wait(within.execute("k2", coloured(lab, look), "k2"))).value == "made"
    await tx.commit()
    assert seen == ["running", "running"]
    assert [lab.orders(key) for key in ("before", "k1", "k2")] == [1, 0, 1]
    assert [lab.records(key) for key in ("k1", "k2")] == [[], ["done"]]


async def test_R27_a_probe_that_is_asked_inside_of_a_run_of_the_same_name_leaves_its_savepoint(
    make_coloured: Any,
) -> None:
    """MariaDB: two keys whose hashes begin alike are as good as one key for a savepoint that is named by them."""

    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        with pytest.raises(LookupError):
            await wait(once.execute("lost", coloured(lab, _lost), on_error="hold"))
        within, names = once.within(tx.target), []
        opening = within._tx.bound.port.savepoint

        async def savepoint(name: str) -> Any:
            names.append(name)
            return await opening(name)

        within._tx.bound.port.savepoint = savepoint
        claim = await enter(lab, within, "outer")
        assert (
            await wait(within.execute("lost", coloured(lab, _lost), on_unknown=lambda: Found(7)))
        ).value == 7
        await wait(claim.complete(1))
        await tx.commit()
        assert len(set(names)) == len(names) >= 3
        assert (lab.records("outer"), lab.records("lost")) == (["done"], ["done"])

    await make_coloured("pymysql", body)


async def _lost() -> None:
    raise LookupError("no answer")


# ---------------------------------------------------------------------------------------- what cannot be undone


@pytest.mark.parametrize("end", ["rollback", "commit"])
async def test_R27_a_failure_declared_by_hand_that_cannot_be_undone_is_told_and_not_recorded(
    few: Lab, end: str
) -> None:
    lab = few
    once, tx = await lab.ready()
    claims = await opened(lab, once, tx, "ab")
    await wait(claims["a"].complete(1))
    with pytest.raises(ConfigurationError, match="Roll the whole transaction back") as caught:
        await wait(claims["b"].fail("declined"))
    await leave(lab, claims["b"], caught.value)
    if end == "rollback":
        await tx.rollback()
        assert [lab.orders(key) + len(lab.records(key)) for key in "ab"] == [0, 0]
    else:
        await tx.commit()
        assert (lab.orders("b"), lab.records("b")) == (1, ["running"]), "not failed: its rows are in"


@pytest.mark.parametrize("how", ["fail", "left"])
@pytest.mark.parametrize("driver", ["sqlite3", "psycopg", "asyncpg", "pymysql", "asyncmy"])
async def test_R27_a_claim_by_hand_in_a_transaction_that_was_ended_says_so(
    make_coloured: Any, driver: str, how: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")
        claim = await enter(lab, once.within(tx.target), "k1")
        await tx.rollback()
        await tx.insert("new")
        with pytest.raises(ConfigurationError, match="ended the transaction"):
            await wait(claim.fail("declined") if how == "fail" else leave(lab, claim))
        await tx.rollback()
        assert lab.records("k1") == []

    await make_coloured(driver, body)


@pytest.mark.parametrize("how", ["fail", "left"])
async def test_R27_a_claim_by_hand_whose_connection_is_lost_says_what_to_do(few: Lab, how: str) -> None:
    lab = few
    once, tx = await lab.ready()
    claim = await enter(lab, once.within(tx.target), "k1")
    place = next(iter(claim._engine.bound._places.values()))
    point = place.point

    class Lost:
        alive, buffers, counted, spoilt = True, False, False, None

        async def rollback(self) -> None:
            raise OSError("the connection is gone")

    place.point = Lost()
    with pytest.raises(OSError, match="gone") as caught:
        await wait(claim.fail("declined") if how == "fail" else leave(lab, claim))
    assert "roll the whole transaction back" in caught.value.__notes__[0]
    await point.rollback()
    await tx.rollback()
    assert lab.records("k1") == []


# -------------------------------------------------------------------------------------------- Django's own books


@pytest.mark.parametrize("end", ["rollback", "commit"])
@pytest.mark.parametrize("driver", DJANGO)
async def test_R27_a_claim_that_fails_inside_a_nested_atomic_undoes_no_other_savepoint(
    make_coloured: Any, driver: str, end: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")
        claim = await enter(lab, once.within(tx.target), "k1")
        await tx.insert("k1")
        await tx.savepoint()
        await tx.insert("inner")
        with pytest.raises(ConfigurationError, match="another `atomic") as caught:
            claim.fail("declined")
        await leave(lab, claim, caught.value)
        await (tx.rollback() if end == "rollback" else tx.commit())
        assert not tx.target.in_atomic_block, "Django has ended the transaction"
        stayed = int(end == "commit")
        assert [lab.orders(key) for key in ("before", "k1", "inner")] == [stayed] * 3
        assert lab.records("k1") == ["running"] * stayed

    await make_coloured(driver, body)


@pytest.mark.parametrize("driver", DJANGO)
async def test_R27_a_claim_that_outlives_its_atomic_block_undoes_nothing(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        await tx.insert("before")
        await tx.savepoint()
        claim = await enter(lab, once.within(tx.target), "k1")
        await tx.insert("k1")
        tx._atomics.pop().__exit__(None, None, None)  # type: ignore[attr-defined]  # Django's own
        with pytest.raises(ConfigurationError, match="another `atomic"):
            await leave(lab, claim)
        await tx.rollback()
        assert not tx.target.in_atomic_block
        assert (lab.orders("before"), lab.orders("k1"), lab.records("k1")) == (0, 0, [])

    await make_coloured(driver, body)


async def test_R27_a_claim_whose_transaction_django_has_ended_undoes_nothing(make_coloured: Any) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        claim = await enter(lab, once.within(tx.target), "k1")
        await tx.insert("k1")
        tx.target.close()
        tx.target.closed_in_transaction = tx.target.in_atomic_block = False
        tx.target.connect()
        tx._atomics.clear()  # type: ignore[attr-defined]  # with the connection
        with pytest.raises(ConfigurationError, match="another `atomic"):
            claim.fail("declined")
        assert (lab.orders("k1"), lab.records("k1")) == (0, [])

    await make_coloured("django-postgresql", body)


async def test_R27_a_younger_claim_is_told_that_it_is_gone_when_an_older_one_could_not_follow(
    make_coloured: Any,
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        older = await enter(lab, once.within(tx.target), "a")
        await tx.savepoint()
        younger = await enter(lab, once.within(tx.target), "b")
        await tx.insert("b")
        with pytest.raises(ConfigurationError, match="another `atomic"):
            older.fail("declined")
        with pytest.raises(ConfigurationError, match="was undone while this one was open"):
            younger.complete(1)
        await leave(lab, younger)
        await tx.rollback()
        assert not tx.target.in_atomic_block
        assert [lab.orders("b"), *map(lab.records, "ab")] == [0, [], []]

    await make_coloured("django-postgresql", body)


@pytest.mark.parametrize("driver", DJANGO)
async def test_R27_a_claim_completed_inside_a_nested_atomic_goes_where_that_goes(
    make_coloured: Any, driver: str
) -> None:
    async def body(lab: Lab) -> None:
        once, tx = await lab.ready()
        for key, back in (("k1", False), ("k2", True)):
            claim = await enter(lab, once.within(tx.target), key)
            await tx.savepoint()
            await tx.insert(key)
            claim.complete(1)
            await tx.back() if back else tx._atomics.pop().__exit__(None, None, None)  # type: ignore[attr-defined]
            await leave(lab, claim)
        with pytest.warns(SemelWarning, match="without complete"):
            await leave(lab, await enter(lab, once.within(tx.target), "k3"))
        await tx.commit()
        assert not tx.target.in_atomic_block
        assert [lab.orders(key) for key in ("k1", "k2")] == [1, 0]
        assert [lab.records(key) for key in ("k1", "k2", "k3")] == [["done"], [], []]

    await make_coloured(driver, body)

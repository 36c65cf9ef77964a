"""R27: several claims by hand in one transaction, ended in whatever order."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from semel import ConfigurationError, SemelWarning
from tests.within.lab import Lab, wait

ORDERS = ["".join(order) for order in permutations("abc")]


async def enter(lab: Lab, bound: Any, key: str) -> Any:
    claim = bound.claim(key)
    return await wait(claim.__enter__() if lab.colour == "sync" else claim.__aenter__())


async def leave(lab: Lab, claim: Any, error: Exception | None = None) -> None:
    left = (type(error) if error else None, error, None)
    await wait(claim.__exit__(*left) if lab.colour == "sync" else claim.__aexit__(*left))


async def opened(lab: Lab, once: Any, tx: Any, keys: str) -> dict[str, Any]:
    """Claims of these keys, each with a row: the first is the oldest."""
    claims = {}
    for key in keys:
        claims[key] = await enter(lab, once.within(tx.target), key)
        await tx.insert(key)
    return claims


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_R27_two_claims_are_completed_in_either_order(lab: Lab, order: str) -> None:
    once, tx = await lab.ready()
    claims = await opened(lab, once, tx, "ab")
    for key in order:
        await tx.insert(key)
        await wait(claims[key].complete(key))
    for key in "ba":
        await leave(lab, claims[key])
    await tx.insert("after")
    await tx.commit()
    assert [lab.orders(key) for key in ("a", "b", "after")] == [2, 2, 1]
    assert [lab.records(key) for key in "ab"] == [["done"], ["done"]]
    assert [(await wait(once.execute(key, int))).value for key in "ab"] == ["a", "b"]


@pytest.mark.parametrize("order", ORDERS)
async def test_R27_three_claims_are_completed_in_any_order(few: Lab, order: str) -> None:
    lab = few
    once, tx = await lab.ready()
    await tx.insert("before")
    claims = await opened(lab, once, tx, "abc")
    for key in order:
        await wait(claims[key].complete(key))
    await tx.commit()
    assert [lab.orders(key) for key in ("before", *"abc")] == [1, 1, 1, 1]
    assert [lab.records(key) for key in "abc"] == [["done"]] * 3


@pytest.mark.parametrize("begun", [False, True], ids=["first", "begun"])
async def test_R27_an_older_claim_that_is_undone_takes_the_younger_with_it_and_says_so(
    lab: Lab, begun: bool
) -> None:
    once, tx = await lab.ready()
    if begun:
        await tx.insert("before")
    claims = await opened(lab, once, tx, "ab")
    await leave(lab, claims["a"], ValueError("no"))
    with pytest.raises(
        ConfigurationError, match=r"older claim .* was undone while this one was open"
    ) as caught:
        await wait(claims["b"].complete(1))
    assert not hasattr(caught.value, "__notes__"), "nothing more went wrong"
    await leave(lab, claims["b"])
    await tx.begin()
    again = await enter(lab, once.within(tx.target), "b")
    await tx.insert("again")
    await wait(again.complete(2))
    await tx.commit()
    assert [lab.orders(key) for key in ("before", "a", "b", "again")] == [int(begun), 0, 0, 1]
    assert [lab.records(key) for key in "ab"] == [[], ["done"]]


async def test_R27_a_younger_claim_that_is_gone_may_be_left_in_every_way(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    await tx.insert("before")
    claims = await opened(lab, once, tx, "abcd")
    with pytest.warns(SemelWarning, match="without complete"):
        await leave(lab, claims["a"])
    with pytest.warns(SemelWarning, match="without complete"):
        await leave(lab, claims["b"])
    error = ValueError("no")
    await leave(lab, claims["c"], error)
    assert not hasattr(error, "__notes__")
    fresh = await enter(lab, once.within(tx.target), "d")  # while the old one is still there
    await leave(lab, claims["d"], error)
    await tx.insert("fresh")
    await wait(fresh.complete(1))
    await tx.commit()
    assert [lab.orders(key) for key in ("before", *"abcd", "fresh")] == [1, 0, 0, 0, 0, 1]
    assert [lab.records(key) for key in "abcd"] == [[], [], [], ["done"]]


@pytest.mark.parametrize("end", ["rollback", "commit"])
async def test_R27_a_younger_claim_that_fails_after_an_older_was_completed_cannot_be_undone_alone(
    lab: Lab, end: str
) -> None:
    """Its savepoint has the older one's outcome inside: going back to it would tear that from its rows."""
    once, tx = await lab.ready()
    claims = await opened(lab, once, tx, "ab")
    await wait(claims["a"].complete(1))
    error = ValueError("no")
    await leave(lab, claims["b"], error)
    assert "can be completed, and no longer undone alone" in error.__notes__[0]
    assert "roll the whole transaction back" in error.__notes__[0]
    await leave(lab, claims["a"])
    if end == "rollback":
        await tx.rollback()
        assert [(lab.orders(key), lab.records(key)) for key in "ab"] == [(0, []), (0, [])]
    else:  # what was told was not done: the rows are in, so the key is not free
        await tx.commit()
        assert [(lab.orders(key), lab.records(key)) for key in "ab"] == [(1, ["done"]), (1, ["running"])]


async def test_R27_a_claim_that_is_merged_merges_those_that_were_made_after_it(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    claims = await opened(lab, once, tx, "ab")
    await wait(claims["a"].complete(1))
    claims |= await opened(lab, once, tx, "cd")
    await leave(lab, claims["d"], ValueError("no"))  # the latest: it can
    await wait(claims["b"].complete(2))
    with pytest.raises(ConfigurationError, match="no longer undone alone"):
        await leave(lab, claims["c"])
    await tx.rollback()
    assert [(lab.orders(key), lab.records(key)) for key in "abcd"] == [(0, [])] * 4


async def test_R27_a_merged_claim_goes_with_an_older_one_that_is_undone(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    await tx.insert("before")
    claims = await opened(lab, once, tx, "abc")
    await wait(claims["b"].complete(1))
    await leave(lab, claims["a"], ValueError("no"))
    with pytest.raises(ConfigurationError, match="was undone while this one was open"):
        await wait(claims["c"].complete(1))
    await tx.insert("after")
    await tx.commit()
    assert [lab.orders(key) for key in ("before", *"abc", "after")] == [1, 0, 0, 0, 1]
    assert [lab.records(key) for key in "abc"] == [[], [], []]


async def test_R27_a_merged_claim_whose_transaction_was_ended_is_told(few: Lab) -> None:
    lab = few
    once, tx = await lab.ready()
    claims = await opened(lab, once, tx, "ab")
    await wait(claims["a"].complete(1))
    await tx.rollback()
    with pytest.raises(ConfigurationError, match="ended the transaction"):
        await wait(claims["b"].complete(1))
    await tx.rollback()
    assert [(lab.orders(key), lab.records(key)) for key in "ab"] == [(0, [])] * 2

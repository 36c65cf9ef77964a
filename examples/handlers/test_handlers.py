"""Seven handlers, four of them wrong, each killed, paused and interrupted in every window.

Run it: `python -m pytest examples/handlers`. A test of your own would say `assert report.holds, report`; here the wrong
handlers are expected to be wrong, and in which window. The bank stands for another process, which does not die with a worker:
its lines are no windows (`without=[bank]`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from examples.handlers import (
    bank,
    check_then_act,
    downstream_key,
    mark_first,
    plain_retry,
    slow_receipt,
    steps,
    within_transaction,
)


def by_key(key: str) -> tuple[str]:
    return (key,)


@pytest.mark.exactly_once(effects=within_transaction.orders, also=[within_transaction])
def test_row_and_record_in_one_transaction(once_key: str) -> None:
    within_transaction.handle(once_key)


@pytest.mark.parametrize("handler", [downstream_key.handle, steps.handle], ids=["downstream_key", "steps"])
def test_an_outside_effect_with_a_key(exactly_once: Callable[..., Any], handler: Callable[..., Any]) -> None:
    report = exactly_once(handler, arguments=by_key, effects=bank.charges, without=[bank])
    assert report.holds, report


def test_an_outside_effect_without_a_key(exactly_once: Callable[..., Any]) -> None:
    report = exactly_once(plain_retry.handle, arguments=by_key, effects=bank.charges, without=[bank])
    print(report)
    assert report.windows("doubled", fault="kill") == ("run.returned", "settle.sent")
    assert report.verdict("return bank.charge(order)", "zombie") == "doubled"
    assert report.never_loses
    assert not report.holds


def test_a_client_that_hangs_up_after_the_effect(exactly_once: Callable[..., Any]) -> None:
    report = exactly_once(slow_receipt.handle, arguments=by_key, effects=bank.charges, without=[bank])
    print(report)
    # A cancel strikes where the handler waits: only one of the four awaits comes after the charge and before its record.
    receipt = "await asyncio.sleep(0.05)  # the receipt is on its way"
    assert report.verdict(receipt, "interrupt") == "doubled"
    assert len(report.windows("doubled", fault="interrupt")) == 1
    assert report.windows("once", fault="interrupt") == (
        "claim.sent",
        "settle.sent",
        "slow_receipt.py:12 (pass 2)",
    )
    assert report.windows("missed", fault="interrupt") == ("handler returned",)
    # A kill strikes at once, wherever it is.
    assert report.verdict("charged = bank.charge(order)", "kill") == "once"
    assert report.windows("doubled", fault="kill") == (
        "slow_receipt.py:18",
        "slow_receipt.py:19",
        "run.returned",
        "settle.sent",
    )
    assert report.never_loses
    assert not report.holds


def test_a_mark_before_the_effect(exactly_once: Callable[..., Any]) -> None:
    report = exactly_once(mark_first.handle, arguments=by_key, effects=bank.charges, without=[bank])
    print(report)
    assert report.verdict("shop.commit()", "kill") == "once"
    assert report.verdict("if marked:", "kill") == "lost"
    assert report.verdict("bank.charge(order)", "kill") == "lost"
    assert report.never_doubles
    assert not report.holds


def test_a_check_before_the_effect(exactly_once: Callable[..., Any]) -> None:
    report = exactly_once(check_then_act.handle, arguments=by_key, effects=bank.charges, without=[bank])
    print(report)
    assert report.verdict("bank.charge(order)", "kill") == "once"
    assert report.verdict("finish(order)", "kill") == "doubled"
    assert report.verdict("bank.charge(order)", "zombie") == "doubled"
    assert report.never_loses
    assert not report.holds

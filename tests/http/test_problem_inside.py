"""A handler calls the core itself (`within`, `execute`), meets an error of it, and `install` answers that as a problem."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI
from flask import Flask

from semel import InProgress, KeyMismatch, PreviousFailure
from semel.http import fastapi, flask
from tests.http.conftest import Edge


def app_of(colour: str, errors: list[Exception]) -> Any:
    """It raises each of these errors, one by one; then it succeeds."""

    def handle() -> dict[str, str]:
        if errors:
            raise errors.pop(0)
        return {"done": "yes"}

    if colour == "async":
        api = FastAPI()
        fastapi.install(api)
        api.post("/orders", status_code=201)(handle)
        return api
    app = Flask("shop")
    flask.install(app)
    app.post("/orders")(lambda: (handle(), 201))
    return app


def test_what_is_true_only_for_now_is_not_the_outcome(shop: Edge) -> None:
    busy = [InProgress("another transaction has the row"), InProgress("it still has")]
    shop.open(app=app_of(shop.colour, list(busy)))
    answers = [shop.send("/orders") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [409, 409, 201, 201]
    assert [answer.headers["idempotency-replayed"] for answer in answers] == ["false"] * 3 + ["true"]


@pytest.mark.parametrize(
    "error", [KeyMismatch("used with another request"), PreviousFailure("Declined", None, "not enough money")]
)
def test_what_stays_true_is_the_outcome(shop: Edge, error: Exception) -> None:
    shop.open(app=app_of(shop.colour, [error]))
    answers = [shop.send("/orders") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [422, 422]
    assert answers[1].headers["idempotency-replayed"] == "true"


def test_where_effects_are_opaque_the_handler_is_not_run_again(shop: Edge) -> None:
    shop.open(app=app_of(shop.colour, [InProgress("after an effect, perhaps")]), effects="opaque")
    answers = [shop.send("/orders") for _ in range(2)]
    assert [answer.headers["idempotency-replayed"] for answer in answers] == ["false", "true"]

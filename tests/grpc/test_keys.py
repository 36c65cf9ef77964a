"""Where a key comes from, what it looks like, and what tells one request from another."""

from __future__ import annotations

import logging
import time
from typing import Any

import grpc
import pytest

from semel.grpc import UnkeyedRetry, channel_options, service_config
from semel.grpc.methods import Methods
from semel.grpc.requests import Fingerprint, Received
from semel.grpc.rules import Rules
from tests.grpc.lab import KEY, SERVICE, Lab, Stop, shop

Code = grpc.StatusCode


def test_g01_the_key_may_be_a_field_of_the_request(lab: Lab) -> None:
    lab.serve()
    first = lab.call(request=shop.Order(item="book", request_id="r-1"))
    again = lab.call(request=shop.Order(item="book", request_id="r-1"))
    assert (first.replayed, again.replayed) == ("false", "true")
    assert lab.call(request=shop.Order(item="pen", request_id="r-1")).reason == "KEY_REUSED"
    by_metadata = lab.call(request=shop.Order(item="book"), key="r-1")
    assert by_metadata.replayed == "true", "the field that carries the key is no part of the request"
    assert len(lab.calls) == 1


def test_g01_two_different_keys_are_refused(light: Lab) -> None:
    light.serve()
    reply = light.call(request=shop.Order(request_id="r-1"), key="r-2")
    assert (reply.code, reply.reason) == (Code.INVALID_ARGUMENT, "KEY_MALFORMED")
    assert light.call(request=shop.Order(request_id="r-1"), key="r-1").replayed == "false"


def aep(key: str, first_sent: float | None) -> Any:
    order = shop.Order(item="book", idempotency_key=shop.IdempotencyKey(key=key))
    if first_sent is not None:
        order.idempotency_key.first_sent.FromMilliseconds(int(first_sent * 1000))
    return order


def test_g01_the_key_may_be_a_message_with_the_time_of_its_first_use(light: Lab) -> None:
    light.serve(retention=3600)
    now = time.time()
    assert light.call(request=aep("a-1", now)).replayed == "false"
    assert light.call(request=aep("a-1", now)).replayed == "true"
    assert light.call(request=aep("a-1", now - 1)).reason == "KEY_REUSED"
    assert light.call(request=aep("a-2", now + 600)).reason == "KEY_MALFORMED"
    assert light.call(request=aep("a-3", now - 7200)).reason == "KEY_EXPIRED"
    assert light.call(request=aep("a-4", None)).replayed == "false"
    assert len(light.calls) == 2


def test_g01_metadata_names_and_fields_are_options(light: Lab) -> None:
    light.serve(metadata=["x-idem-key", "idempotency-key"], request_id=None)
    assert light.call(metadata=[("x-idem-key", "k-1")]).replayed == "false"
    assert light.call(key="k-1").replayed == "true"
    assert light.call(metadata=[("x-idem-key", "k-1")], key="k-2").reason == "KEY_MALFORMED"
    assert light.call(request=shop.Order(request_id="r-1")).replayed is None


def test_g02_a_missing_key_is_refused_where_it_is_required(lab: Lab) -> None:
    lab.serve(required=True)
    reply = lab.call()
    assert (reply.code, reply.reason) == (Code.INVALID_ARGUMENT, "KEY_MISSING")
    (violation,) = reply.infos["BadRequest"].field_violations
    assert violation.field == KEY
    assert reply.infos["ErrorInfo"].metadata["retryable"] == "false"
    assert lab.calls == []


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "KEY_MALFORMED"),
        ("two words", "KEY_MALFORMED"),
        ('"open', "KEY_MALFORMED"),
        ("a,b", "KEY_MALFORMED"),
        ('"two words"', "KEY_MALFORMED"),
        ("k" * 256, "KEY_TOO_LONG"),
        ("k" * 5000, "KEY_TOO_LONG"),
    ],
)
def test_g02_a_malformed_key_is_refused(light: Lab, key: str, reason: str) -> None:
    light.serve()
    reply = light.call(key=key)
    assert (reply.code, reply.reason) == (Code.INVALID_ARGUMENT, reason)
    assert reply.infos["BadRequest"].field_violations[0].field == KEY
    assert light.calls == []


def test_g02_two_lines_are_no_key_and_255_characters_are_one(light: Lab) -> None:
    light.serve()
    assert light.call(metadata=[(KEY, "a"), (KEY, "a")]).reason == "KEY_MALFORMED"
    assert light.call(key="k" * 255).replayed == "false"
    assert light.call(key="k" * 255, user="u" * 300).replayed == "false"
    assert light.call(key="k" * 255, user="u" * 300).replayed == "true"


def test_g02_anonymous_keys_must_be_long(light: Lab) -> None:
    light.serve(anonymous=True)
    assert light.call(key="short").reason == "KEY_TOO_SHORT"
    assert light.call(key="0123456789abcdef").replayed == "false"
    assert light.call(key="0123456789abcdef").replayed == "true"


def test_g02_strict_takes_the_quoted_form_only(light: Lab) -> None:
    light.serve(strict=True)
    assert light.call(key="k-1").reason == "KEY_MALFORMED"
    assert light.call(key='"k-1"').replayed == "false"


def test_g03_a_method_without_side_effects_is_left_alone(light: Lab) -> None:
    light.serve(required=True)
    assert light.call("Get").replayed is None
    assert light.call("Get", key="k-1").replayed is None
    assert light.call("Get", key="k-1").replayed is None
    assert len(light.calls) == 3


def test_g03_a_method_that_is_declared_idempotent_needs_no_key(light: Lab) -> None:
    light.serve(required=True)
    assert light.call("Put").code is Code.OK
    assert light.call("Put", key="k-1").replayed == "false"
    assert light.call("Create").reason == "KEY_MISSING"


def test_g03_a_request_that_only_validates_is_left_alone(light: Lab) -> None:
    light.serve(required=True)
    for _ in range(2):
        assert light.call(request=shop.Order(item="book", validate_only=True), key="k-1").replayed is None
    assert light.call(key="k-1").replayed == "false"


def test_g03_excluded_methods_are_left_alone(light: Lab) -> None:
    light.serve(exclude=[f"{SERVICE}/Create"], required=True)
    assert light.call("Create", key="k-1").replayed is None
    assert light.call("Cancel").reason == "KEY_MISSING"


def print_of(request: Any, method: str = "/a.B/C") -> str:
    made = Fingerprint(Rules(), method)
    made.add(Received(b"never looked at", request))
    return made.hex()


def test_g05_a_request_is_compared_by_its_deterministic_form() -> None:
    one, two = shop.Order(item="book"), shop.Order(item="book")
    names = [f"label {number}" for number in range(50)]
    for name in names:
        one.labels[name] = "x"
    for name in reversed(names):
        two.labels[name] = "x"
    assert print_of(one) == print_of(two)
    reordered = shop.Order.FromString(
        shop.Order(count=3).SerializeToString() + shop.Order(item="a").SerializeToString()
    )
    assert print_of(reordered) == print_of(shop.Order(item="a", count=3))
    assert print_of(one) != print_of(shop.Order(item="book"))
    assert print_of(one) != print_of(one, "/a.B/D")


def test_g05_fields_that_the_server_does_not_know_count() -> None:
    def order(colour: str) -> Any:
        return shop.Order.FromString(shop.NewerOrder(item="book", colour=colour).SerializeToString())

    assert print_of(order("red")) != print_of(order("blue"))
    assert print_of(order("red")) == print_of(order("red"))


def test_g05_the_key_itself_is_no_part_of_the_request_and_the_request_is_not_changed() -> None:
    order = shop.Order(item="book", request_id="r-1", idempotency_key=shop.IdempotencyKey(key="r-1"))
    assert print_of(order) == print_of(shop.Order(item="book", idempotency_key=shop.IdempotencyKey()))
    assert (order.request_id, order.idempotency_key.key) == ("r-1", "r-1")


def test_g05_any_serializer_works(light: Lab) -> None:
    """A method of a service that protobuf knows nothing about: bytes are compared, bytes are replayed."""
    light.serve()
    create = light.channel.unary_unary(f"{SERVICE}/Create")
    raw = shop.Order(item="book").SerializeToString()
    sent = ((KEY, "k-1"),)
    assert create(raw, metadata=sent) == create(raw, metadata=sent)
    assert len(light.calls) == 1
    made = Fingerprint(Rules(), "/json.Service/Do")
    made.add(Received(b'{"a": 1}', {"a": 1}))
    other = Fingerprint(Rules(), "/json.Service/Do")
    other.add(Received(b'{"a": 2}', {"a": 2}))
    assert made.hex() != other.hex()


def test_g15_a_retry_without_a_key_is_reported(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    def act(request: Any, say: Any) -> Any:
        if len(lab.calls) % 3:
            raise Stop(Code.UNAVAILABLE)
        return shop.Made(id="third time")

    seen: list[object] = []
    lab.act = act
    lab.serve(hooks=[seen.append])
    retrying = lab.connect(channel_options(service_config([f"{SERVICE}/Create"], initial_backoff=0.01)))
    with caplog.at_level(logging.WARNING, "semel"):
        assert lab.call(channel=retrying).message.id == "third time"
    assert seen == [UnkeyedRetry(f"{SERVICE}/Create", 1), UnkeyedRetry(f"{SERVICE}/Create", 2)]
    assert "without an idempotency key" in caplog.text
    assert lab.call(channel=retrying, key="k-1").message.id == "third time"
    assert len(seen) == 2


def test_names_of_methods_are_found_by_pattern() -> None:
    methods = Methods([f"{SERVICE}/*", "/other.Service/Do"], [f"{SERVICE}/Cancel"])
    found = {
        name: methods.find(name) is not None
        for name in (f"{SERVICE}/Create", f"{SERVICE}/Cancel", "/other.Service/Do", "/third.S/Do")
    }
    assert list(found.values()) == [True, False, True, False]

"""Streaming: recorded messages of a server, a client's stream as one request, never both ways."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from semel.grpc import Method
from tests.grpc.lab import KEY, SERVICE, Lab, Loop, Stop, reply_of, shop, shop_grpc

Code = grpc.StatusCode
STREAMS = {
    f"{SERVICE}/Watch": Method(stream=True),
    f"{SERVICE}/Upload": Method(stream=True),
    f"{SERVICE}/Create": Method(),
}


def three(request: Any, say: Any) -> Iterator[Any]:
    for number in range(3):
        yield shop.Made(id=f"{request.item} {number}")


def test_g08_a_server_stream_is_replayed_message_by_message(lab: Lab) -> None:
    lab.act = three
    lab.serve(methods=STREAMS)
    first, again = lab.call("Watch", key="k-1"), lab.call("Watch", key="k-1")
    assert [one.id for one in first.messages] == ["book 0", "book 1", "book 2"]
    assert again.messages == first.messages
    assert (first.replayed, again.replayed) == ("false", "true")
    assert len(lab.calls) == 1


def test_g09_the_status_of_a_stream_comes_after_its_messages(lab: Lab) -> None:
    def act(request: Any, say: Any) -> Iterator[Any]:
        yield shop.Made(id="1")
        raise Stop(Code.OUT_OF_RANGE, "no more")

    lab.act = act
    lab.serve(methods=STREAMS)
    replies = [lab.call("Watch", key="k-1") for _ in range(2)]
    for reply in replies:
        assert [one.id for one in reply.messages] == ["1"]
        assert (reply.code, reply.details) == (Code.OUT_OF_RANGE, "no more")
    assert [reply.replayed for reply in replies] == ["false", "true"]
    assert len(lab.calls) == 1


def test_g10_a_stream_that_breaks_frees_its_key(light: Lab) -> None:
    def act(request: Any, say: Any) -> Iterator[Any]:
        yield shop.Made(id="1")
        if len(light.calls) == 1:
            raise Stop(Code.UNAVAILABLE, "broken")

    light.act = act
    light.serve(methods=STREAMS)
    broken = light.call("Watch", key="k-1")
    assert (broken.code, broken.messages) == (Code.UNAVAILABLE, []), "nothing leaves before it is recorded"
    assert [one.id for one in light.call("Watch", key="k-1").messages] == ["1"]


@pytest.mark.parametrize(
    "error", [Stop(Code.UNAVAILABLE, "broken"), LookupError("broken")], ids=["aborts", "raises"]
)
def test_g10_a_stream_whose_key_is_held_sends_what_it_had(light: Lab, error: Exception) -> None:
    """No other attempt will bring these messages: the key is held until somebody has looked."""

    def act(request: Any, say: Any) -> Iterator[Any]:
        yield shop.Made(id="1")
        yield shop.Made(id="2")
        raise error

    light.act = act
    light.serve(methods={f"{SERVICE}/Watch": Method(stream=True, effects="opaque")})
    broken = light.call("Watch", key="k-1")
    assert broken.code is (Code.UNAVAILABLE if isinstance(error, Stop) else Code.UNKNOWN)
    assert "broken" in broken.details
    assert ([one.id for one in broken.messages], broken.replayed) == (["1", "2"], "false")
    again = light.call("Watch", key="k-1")
    assert (again.messages, again.reason) == ([], "OUTCOME_UNKNOWN")
    assert len(light.calls) == 1


def test_g16_a_stream_over_the_cap_is_done_and_never_run_again(light: Lab) -> None:
    light.act = lambda request, say: [shop.Made(blob=b"x" * 400) for _ in range(3)]
    light.serve(methods={f"{SERVICE}/Watch": Method(stream=True, max_response=1000)})
    assert len(light.call("Watch", key="k-1").messages) == 3
    assert light.call("Watch", key="k-1").reason == "RESPONSE_NOT_STORED"
    assert len(light.calls) == 1


def test_g05_a_client_stream_is_one_request(lab: Lab) -> None:
    lab.act = lambda requests, say: shop.Made(id=" ".join(one.item for one in requests))
    lab.serve(methods=STREAMS)
    orders = [shop.Order(item="book"), shop.Order(item="pen")]
    first, again = lab.call("Upload", orders, key="k-1"), lab.call("Upload", orders, key="k-1")
    assert first.message.id == again.message.id == "book pen"
    assert again.replayed == "true"
    for other in ([*reversed(orders)], orders[:1], [*orders, shop.Order()], []):
        assert lab.call("Upload", other, key="k-1").reason == "KEY_REUSED", other
    assert len(lab.calls) == 1


def test_g05_a_client_who_leaves_in_the_middle_of_his_stream_has_asked_for_nothing(light: Lab) -> None:
    """gRPC ends such a stream as it ends a whole one: its part was run and recorded, and the whole one refused ever after."""
    light.act = lambda requests, say: shop.Made(id=" ".join(one.item for one in requests))
    light.serve(methods=STREAMS)
    stub = shop_grpc.ShopStub(light.channel)
    orders = [shop.Order(item="book"), shop.Order(item="pen")]

    def leave(key: str) -> None:
        sent, left = threading.Event(), threading.Event()

        def part() -> Iterator[Any]:
            yield orders[0]
            sent.set()
            left.wait(20)

        call = stub.Upload.future(part(), metadata=((KEY, key),), timeout=20)
        assert sent.wait(20)
        call.cancel()
        left.set()

    keys = [f"k-{number}" for number in range(30)]
    for key in keys:
        leave(key)
    for key in keys:
        assert light.call("Upload", orders, key=key).message.id == "book pen"
    assert [len(requests) for requests in light.calls] == [2] * len(keys)


def test_g01_a_client_stream_takes_its_key_from_metadata_only(light: Lab) -> None:
    light.act = lambda requests, say: shop.Made(id=str(len(requests)))
    light.serve(methods=STREAMS)
    for _ in range(2):
        assert light.call("Upload", [shop.Order(request_id="r-1")]).replayed is None
    assert light.call("Upload", [shop.Order(), shop.Order()]).message.id == "2"
    assert len(light.calls) == 3


def test_a_client_stream_is_bounded(light: Lab) -> None:
    light.serve(methods={f"{SERVICE}/Upload": Method(stream=True, max_request=100)})
    reply = light.call("Upload", [shop.Order(item="x" * 60)] * 2, key="k-1")
    assert (reply.code, reply.reason) == (Code.RESOURCE_EXHAUSTED, "BODY_TOO_LARGE")
    assert light.calls == []


def test_g03_streams_that_were_not_opted_in_are_left_alone(light: Lab) -> None:
    light.act = three
    light.serve(required=True)
    for _ in range(2):
        reply = light.call("Watch", key="k-1")
        assert len(reply.messages) == 3
        assert reply.replayed is None
    light.act = lambda request, say: shop.Made(id=request.item)
    assert [
        one.id for one in light.call("Chat", [shop.Order(item="a"), shop.Order(item="b")], key="k-1").messages
    ] == ["a", "b"]


def test_g03_a_stream_without_a_key_streams(light: Lab) -> None:
    light.act = three
    light.serve(methods=STREAMS)
    for _ in range(2):
        reply = light.call("Watch")
        assert len(reply.messages) == 3
        assert reply.replayed is None
    assert len(light.calls) == 2


@pytest.mark.parametrize("ending", ["end", "abort", "raise"])
def test_g03_a_plain_generator_under_grpc_aio_streams_where_it_has_no_key(
    aio_loop: Loop, request: pytest.FixtureRequest, ending: str
) -> None:
    """Each message comes before the next one is made, though the request might have carried a key."""
    lab = Lab("async", f"memory://{uuid.uuid4().hex}", aio_loop)
    request.addfinalizer(lab.close)
    seen = threading.Event()

    def watch(order: Any, context: Any) -> Iterator[Any]:
        context.send_initial_metadata((("etag", "1"),))
        yield shop.Made(id="1")
        assert seen.wait(20), "the first message has not come"
        yield shop.Made(id="2")
        context.set_trailing_metadata((("link", "2"),))
        if ending == "abort":
            context.abort(Code.NOT_FOUND, "no more")
        if ending == "raise":
            raise LookupError("no more")

    handler: Any = grpc.unary_stream_rpc_method_handler(
        watch, shop.Order.FromString, shop.Made.SerializeToString
    )
    lab.generic = (grpc.method_handlers_generic_handler("plain.Shop", {"Watch": handler}),)
    lab.serve(methods={"/plain.Shop/Watch": Method(stream=True)})
    stub: Any = lab.channel.unary_stream(
        "/plain.Shop/Watch", shop.Order.SerializeToString, shop.Made.FromString
    )
    call = stub(shop.Order(item="book"), timeout=20)
    assert next(call).id == "1"
    assert dict(call.initial_metadata()) == {"etag": "1"}
    seen.set()
    assert next(call).id == "2"
    codes = {"end": Code.OK, "abort": Code.NOT_FOUND, "raise": Code.UNKNOWN}
    with pytest.raises(StopIteration if ending == "end" else grpc.RpcError):
        next(call)
    assert call.code() is codes[ending]
    assert "raise" in ending or dict(call.trailing_metadata()) == {"link": "2"}


@pytest.mark.parametrize("method", ["Chat", "Watch"])
def test_g03_a_named_stream_of_an_unknown_service_is_refused_when_it_is_called(
    light: Lab, method: str
) -> None:
    """Without a descriptor nothing could tell at start-up; it is not passed over in silence."""

    def never(request: Any, context: Any) -> Any:
        raise AssertionError

    make = grpc.stream_stream_rpc_method_handler if method == "Chat" else grpc.unary_stream_rpc_method_handler
    light.generic = (grpc.method_handlers_generic_handler("plain.Shop", {method: make(never)}),)
    light.serve(methods=[f"/plain.Shop/{method}"])
    kind = light.channel.stream_stream if method == "Chat" else light.channel.unary_stream
    reply = reply_of(kind(f"/plain.Shop/{method}"), [b""] if method == "Chat" else b"", ((KEY, "k-1"),), 20)
    assert (reply.code, reply.reason) == (Code.UNIMPLEMENTED, "STREAMING_NOT_SUPPORTED")


def test_g02_a_client_stream_is_refused_before_it_is_read(light: Lab) -> None:
    light.serve(methods={f"{SERVICE}/Upload": Method(stream=True, required=True)})
    read: list[int] = []

    def orders() -> Iterator[Any]:
        for number in range(1_000_000):
            read.append(number)
            yield shop.Order(item="x" * 1000)

    assert light.call("Upload", orders()).reason == "KEY_MISSING"
    assert light.call("Upload", orders(), key="two words").reason == "KEY_MALFORMED"
    assert len(read) < 100_000
    light.interceptor._policy.principal = lambda context: None
    assert light.call("Upload", orders(), key="k-1").reason == "NOT_AUTHENTICATED"
    assert len(read) < 100_000

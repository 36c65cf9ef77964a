"""Client interceptors: one key for each logical call, above whatever retries it."""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest

from semel import ConfigurationError
from semel.grpc import (
    AsyncClientIdempotencyInterceptor,
    ClientIdempotencyInterceptor,
    Method,
    channel_options,
    idempotent_operation,
    service_config,
)
from semel.hooks import Contended
from tests.grpc.lab import KEY, SERVICE, Lab, Stop, shop, shop_grpc

Code = grpc.StatusCode
RETRIES = channel_options(service_config([f"{SERVICE}/*"], initial_backoff=0.01, max_backoff=0.05))
STREAMS = {f"{SERVICE}/{name}": Method(stream=True) for name in ("Watch", "Upload")} | {
    f"{SERVICE}/*": Method()
}


def keys_of(lab: Lab, answers: list[grpc.StatusCode]) -> list[str | None]:
    """The key that each attempt carried, by a behaviour that answers these codes in turn."""
    seen: list[str | None] = []

    def act(request: Any, say: Any) -> Any:
        seen.append(dict(say.invocation_metadata()).get(KEY))
        code = answers.pop(0) if answers else Code.OK
        if code is not Code.OK:
            raise Stop(code)
        return shop.Made(id="made")

    lab.act = act
    return seen


def test_g17_a_key_is_made_above_the_retries_of_the_transport(lab: Lab) -> None:
    seen = keys_of(lab, [Code.UNAVAILABLE, Code.ABORTED])
    lab.serve(required=True)
    channel = lab.connect(RETRIES, ClientIdempotencyInterceptor())
    assert lab.call(channel=channel).message.id == "made"
    assert len(seen) == 3
    assert len(set(seen)) == 1
    assert lab.call(channel=channel).message.id == "made"
    assert len(set(seen)) == 2, "another call, another key"


def test_g17_the_callers_own_key_wins(light: Lab) -> None:
    seen = keys_of(light, [])
    light.serve()
    channel = light.connect(None, ClientIdempotencyInterceptor(mint=lambda: "minted"))
    light.call(channel=channel, key="mine")
    light.call(channel=channel)
    assert seen == ["mine", "minted"]


@pytest.mark.parametrize(
    "order",
    [
        shop.Order(item="book", request_id="mine"),
        shop.Order(item="book", idempotency_key=shop.IdempotencyKey(key="mine")),
    ],
    ids=["AIP-155", "AEP-155"],
)
def test_g17_the_callers_own_key_in_a_field_of_the_request_wins(light: Lab, order: Any) -> None:
    """A second, minted key in the metadata would be refused by the server: two different keys (G01)."""
    seen = keys_of(light, [])
    light.serve(required=True)
    channel = light.connect(None, ClientIdempotencyInterceptor(mint=None))
    assert light.call(request=order, channel=channel).replayed == "false"
    with idempotent_operation("order-7"):
        assert light.call(request=order, channel=channel).replayed == "true"

    async def body(stub: Any) -> str:
        return str((await stub.Create(order)).id)

    assert on_aio(light, body, mint=None) == "made"
    assert seen == ["mine"], "and servers that read metadata only know it"


def test_g17_a_field_that_holds_no_key_is_the_servers_business(light: Lab) -> None:
    light.serve()
    channel = light.connect(None, ClientIdempotencyInterceptor())
    for text in ("two words", "żółw"):
        reply = light.call(request=shop.Order(request_id=text), channel=channel)
        assert (reply.code, reply.reason) == (Code.INVALID_ARGUMENT, "KEY_MALFORMED")


def test_g17_fields_are_named_as_on_the_server(light: Lab) -> None:
    seen = keys_of(light, [])
    light.serve(request_id=None)
    order = shop.Order(item="book", request_id="a trace, no key")
    for fields in (None, (), "item"):
        channel = light.connect(None, ClientIdempotencyInterceptor(request_id=fields, mint=lambda: "minted"))
        light.call(request=order, channel=channel, metadata=(("user", str(fields)),))
    assert seen == ["minted", "minted", "book"]
    with pytest.raises(ConfigurationError, match="request_id"):
        ClientIdempotencyInterceptor(request_id=[7])  # type: ignore[list-item]  # wrong on purpose


def test_g17_the_legs_of_an_operation_keep_their_keys_when_it_is_repeated(lab: Lab) -> None:
    lab.act = lambda request, say: shop.Made(id=str(len(lab.calls)))
    lab.serve()
    channel = lab.connect(None, ClientIdempotencyInterceptor())

    def business() -> list[str]:
        with idempotent_operation("order-7"):
            return [lab.call(method, channel=channel).message.id for method in ("Create", "Cancel")]

    assert business() == business() == ["1", "2"]
    assert lab.call("Cancel", key="order-7/2").message.id == "2"


def test_g17_a_call_without_a_key_is_refused_where_keys_are_not_made(light: Lab) -> None:
    light.serve()
    channel = light.connect(RETRIES, ClientIdempotencyInterceptor(mint=None))
    with pytest.raises(ConfigurationError, match="without a key"):
        light.call(channel=channel)
    assert light.call(channel=channel, key="k-1").code is Code.OK
    assert light.call("Get", channel=channel).code is Code.OK, "what has no effect needs no key"


def test_g17_methods_are_chosen_and_streams_both_ways_get_no_key(light: Lab) -> None:
    seen = keys_of(light, [])
    light.serve()
    channel = light.connect(
        None, ClientIdempotencyInterceptor(exclude=[f"{SERVICE}/Cancel"], metadata="idempotency-key")
    )
    light.call("Cancel", channel=channel)
    light.call("Get", channel=channel)
    light.call("Chat", [shop.Order()], channel=channel)
    assert seen == [None, None, None]


def test_g17_streams_of_one_side_get_a_key(light: Lab) -> None:
    light.act = lambda request, say: (
        [shop.Made(id="1")] if not isinstance(request, list) else shop.Made(id="2")
    )
    light.serve(methods=STREAMS, required=True)
    channel = light.connect(None, ClientIdempotencyInterceptor())
    assert light.call("Watch", channel=channel).replayed == "false"
    assert light.call("Upload", [shop.Order()], channel=channel).replayed == "false"


def test_g17_a_stream_is_chosen_by_its_name(light: Lab) -> None:
    """A server records its messages, and wants to be told so; a client only adds a key."""
    light.act = lambda request, say: [shop.Made(id="1")]
    light.serve(methods=STREAMS)
    chosen = ClientIdempotencyInterceptor(methods=[f"{SERVICE}/Watch", f"{SERVICE}/Create"])
    assert light.call("Watch", channel=light.connect(None, chosen)).replayed == "false"
    AsyncClientIdempotencyInterceptor(methods=[f"{SERVICE}/Upload"])


def test_g06_the_retries_of_the_transport_obey_the_pushback(lab: Lab) -> None:
    """The second caller is told ABORTED until the first one has ended; it sees nothing but the outcome."""
    go = threading.Event()
    asked: list[float] = []

    def act(request: Any, say: Any) -> Any:
        assert go.wait(20)
        return shop.Made(id="one")

    def principal(context: Any) -> str:
        asked.append(time.monotonic())  # by the first call, then by the second one twice
        return "ann"

    def heard(event: Any) -> None:
        if isinstance(event, Contended):  # the second one is being told that it is too early
            go.set()

    lab.act = act
    lab.serve(wait=0, principal=principal, settings={"hooks": [heard]})
    first = lab.later(key="k-1")
    lab.wait_for(lambda: lab.calls)
    second = lab.call(key="k-1", channel=lab.connect(RETRIES))
    assert first.result(20).message.id == second.message.id == "one"
    assert second.replayed == "true"
    assert len(lab.calls) == 1
    assert asked[2] - asked[1] >= 0.05, "the pushback, and not the backoff of the service config"


def test_g07_a_refusal_for_good_is_not_retried(light: Lab) -> None:
    attempts: list[str] = []

    def principal(context: Any) -> str:
        attempts.append("asked")
        return "ann"

    light.serve(principal=principal)
    codes = (Code.FAILED_PRECONDITION, Code.UNAVAILABLE)
    eager = light.connect(
        channel_options(service_config([f"{SERVICE}/Create"], codes=codes, initial_backoff=0.01))
    )
    light.call(key="k-1")
    attempts.clear()
    assert light.call(request=shop.Order(item="pen"), key="k-1", channel=eager).reason == "KEY_REUSED"
    assert attempts == ["asked"], "pushback -1"


# ------------------------------------------------------------------------------------------------------ grpc.aio


def on_aio(lab: Lab, body: Any, options: Any = None, **settings: Any) -> Any:
    """Run `body(stub)` with a grpc.aio channel on the servers' loop."""

    async def run() -> Any:
        interceptors = AsyncClientIdempotencyInterceptor(**settings).all()
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{lab.port}", options=options, interceptors=interceptors
        ) as channel:
            return await body(shop_grpc.ShopStub(channel))

    coroutine: Coroutine[Any, Any, Any] = run()
    return lab.loop.run(coroutine)


def test_g17_a_key_is_made_above_the_retries_of_an_aio_channel(lab: Lab) -> None:
    seen = keys_of(lab, [Code.UNAVAILABLE, Code.ABORTED])
    lab.serve(required=True)

    async def body(stub: Any) -> list[str]:
        made = [await stub.Create(shop.Order(item="book")) for _ in range(2)]
        mine = await stub.Create(shop.Order(item="book"), metadata=((KEY, "mine"),))
        return [one.id for one in (*made, mine)]

    assert on_aio(lab, body, RETRIES) == ["made"] * 3
    assert seen[0] == seen[1] == seen[2] != seen[3]
    assert seen[4] == "mine"
    assert len(seen) == 5


def test_g17_an_aio_channel_gives_keys_to_streams_of_one_side_and_to_legs(light: Lab) -> None:
    seen: list[str | None] = []

    def act(request: Any, say: Any) -> Any:
        seen.append(dict(say.invocation_metadata()).get(KEY))
        return shop.Made(id="2") if isinstance(request, list) else [shop.Made(id="1")]

    light.act = act
    light.serve(methods=STREAMS)

    async def body(stub: Any) -> None:
        with idempotent_operation("order-7"):
            assert [one.id async for one in stub.Watch(shop.Order())] == ["1"]
            assert (await stub.Upload(iter([shop.Order()]))).id == "2"

    on_aio(light, body)
    assert seen == ["order-7/1", "order-7/2"]


def test_g17_an_aio_call_without_a_key_is_refused_where_keys_are_not_made(light: Lab) -> None:
    light.serve()

    async def body(stub: Any) -> None:
        with pytest.raises(ConfigurationError, match="without a key"):
            await stub.Create(shop.Order())

    on_aio(light, body, mint=None)
    assert light.calls == []

"""The context that a keyed handler sees behaves as gRPC's own; what it is told is sent after the record is written."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types
from grpc_status import rpc_status

from semel.grpc import IdempotencyInterceptor
from tests.grpc.lab import KEY, Lab, Loop, Reply, reply_of

Code = grpc.StatusCode
NAME = "/plain.Shop/Do"


@pytest.fixture
def do(colour: str, aio_loop: Loop) -> Iterator[Any]:
    """`do(body)` serves a handler `async def body(context, wait)`, driven without a loop on a threaded server."""
    lab = Lab(colour, f"memory://{uuid.uuid4().hex}", aio_loop)

    def served(body: Callable[[Any, Any], Any], key: str | None = "k-1", times: int = 2) -> list[Reply]:
        if not lab.generic:
            handler: Any = grpc.unary_unary_rpc_method_handler(_coloured(colour, body))
            lab.generic = (grpc.method_handlers_generic_handler("plain.Shop", {"Do": handler}),)
            lab.serve()
        sent = () if key is None else ((KEY, key),)
        return [reply_of(lab.channel.unary_unary(NAME), b"", sent, 20) for _ in range(times)]

    yield served
    lab.close()


def _coloured(colour: str, body: Callable[[Any, Any], Any]) -> Any:
    async def wait(thing: Any) -> Any:
        return await thing if colour == "async" else thing

    def plain(request: bytes, context: Any) -> bytes:
        running = body(context, wait)
        try:
            running.send(None)
        except StopIteration as ended:
            return bytes(ended.value)
        raise AssertionError("nothing waits on a threaded server")

    async def later(request: bytes, context: Any) -> bytes:
        return bytes(await body(context, wait))

    return plain if colour == "sync" else later


def test_g09_a_rich_status_is_replayed_whole(do: Any) -> None:
    status = status_pb2.Status(code=code_pb2.NOT_FOUND, message="no such book")

    async def body(context: Any, wait: Any) -> bytes:
        await wait(context.abort_with_status(rpc_status.to_status(status)))
        raise AssertionError

    replies = do(body)
    for reply in replies:
        assert (reply.code, reply.details) == (Code.NOT_FOUND, "no such book")
        assert status_pb2.Status.FromString(reply.trailing["grpc-status-details-bin"]) == status
    assert [reply.replayed for reply in replies] == ["false", "true"]


def test_what_is_set_can_be_read_back(do: Any, colour: str) -> None:
    seen: list[Any] = []

    async def body(context: Any, wait: Any) -> bytes:
        seen.append(context.code())
        context.set_trailing_metadata((("etag", "1"),))
        context.set_details("fine")
        seen.extend([tuple(context.trailing_metadata()), context.details(), context.peer()[:5]])
        kind = grpc.ServicerContext if colour == "sync" else grpc.aio.ServicerContext
        seen.append(isinstance(context, kind))
        return b"ok"

    assert do(body)[1].messages == [b"ok"]
    assert seen == [None, (("etag", "1"),), b"fine" if colour == "sync" else "fine", "ipv4:", True]


def test_initial_metadata_is_sent_once_and_after_the_record(do: Any) -> None:
    async def body(context: Any, wait: Any) -> bytes:
        await wait(context.send_initial_metadata((("etag", "1"), ("x-trace", "7"))))
        with pytest.raises(ValueError, match="no longer allowed"):
            await wait(context.send_initial_metadata(()))
        return b"ok"

    first, again = do(body)
    assert (first.initial["etag"], first.initial["x-trace"]) == ("1", "7")
    assert again.initial["etag"] == "1"
    assert "x-trace" not in again.initial


def test_nobody_aborts_with_ok(do: Any) -> None:
    async def body(context: Any, wait: Any) -> bytes:
        await wait(context.abort(Code.OK, "well"))
        raise AssertionError

    assert do(body, times=1)[0].code is Code.UNKNOWN


def test_an_abort_that_the_handler_swallowed_counts(do: Any) -> None:
    async def body(context: Any, wait: Any) -> bytes:
        try:
            await wait(context.abort(Code.NOT_FOUND, "gone"))
        except Exception:
            return b"swallowed"
        raise AssertionError

    assert [reply.code for reply in do(body)] == [Code.NOT_FOUND] * 2


def test_g09_an_aio_abort_is_grpcs_own_error_to_the_handler(
    aio_loop: Loop, request: pytest.FixtureRequest
) -> None:
    """Handlers pass it on by its name, and turn every other error into INTERNAL."""
    lab = Lab("async", f"memory://{uuid.uuid4().hex}", aio_loop)
    request.addfinalizer(lab.close)

    async def later(request: bytes, context: Any) -> bytes:
        lab.calls.append(request)
        try:
            await context.abort(Code.NOT_FOUND, "gone")
        except grpc.aio.AbortError:
            raise
        except Exception:
            await context.abort(Code.INTERNAL, "oops")
        raise AssertionError

    def plain(request: bytes, context: Any) -> bytes:
        lab.calls.append(request)
        try:
            context.abort(Code.NOT_FOUND, "gone")
        except grpc.aio.AbortError:
            raise
        except Exception:
            context.abort(Code.INTERNAL, "oops")
        raise AssertionError

    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(body) for name, body in (("Later", later), ("Plain", plain))
    }
    lab.generic = (grpc.method_handlers_generic_handler("plain.Shop", handlers),)
    lab.serve()
    for name in handlers:
        sent = ((KEY, f"k-{name}"),)
        replies = [reply_of(lab.channel.unary_unary(f"/plain.Shop/{name}"), b"", sent, 20) for _ in range(2)]
        assert [(one.code, one.details) for one in replies] == [(Code.NOT_FOUND, "gone")] * 2, name
        assert [one.replayed for one in replies] == ["false", "true"], name
    assert len(lab.calls) == 2


def test_g09_the_first_abort_counts_where_it_does_in_grpc(do: Any, colour: str) -> None:
    """Under grpc.aio the first status has left already; a threaded server sends the last one. So without a key, too."""

    async def body(context: Any, wait: Any) -> bytes:
        try:
            await wait(context.abort(Code.NOT_FOUND, "gone"))
        except Exception:
            context.set_trailing_metadata((("etag", "2"),))
            await wait(context.abort(Code.OUT_OF_RANGE, "far"))
        raise AssertionError

    wanted = (Code.OUT_OF_RANGE, "far") if colour == "sync" else (Code.NOT_FOUND, "gone")
    keyed, unkeyed = do(body, times=2), do(body, key=None, times=1)
    assert {(one.code, one.details) for one in (*keyed, *unkeyed)} == {wanted}
    assert {"etag" in one.trailing for one in (*keyed, *unkeyed)} == {colour == "sync"}
    assert [one.replayed for one in keyed] == ["false", "true"]


def test_trailing_metadata_of_an_aio_abort_is_kept(aio_loop: Loop, request: pytest.FixtureRequest) -> None:
    lab = Lab("async", f"memory://{uuid.uuid4().hex}", aio_loop)
    request.addfinalizer(lab.close)

    async def gone(request: bytes, context: Any) -> bytes:
        await context.abort(Code.NOT_FOUND, "gone", (("etag", "1"),))
        raise AssertionError

    lab.generic = (
        grpc.method_handlers_generic_handler("plain.Shop", {"Do": grpc.unary_unary_rpc_method_handler(gone)}),
    )
    lab.serve()
    for _ in range(2):
        assert reply_of(lab.channel.unary_unary(NAME), b"", ((KEY, "k-1"),), 20).trailing["etag"] == "1"


def test_a_method_that_nobody_serves_is_grpcs_business(do: Any, light: Lab) -> None:
    light.serve(required=True)
    reply = reply_of(light.channel.unary_unary("/no.Such/Method"), b"", (), 20)
    assert reply.code is Code.UNIMPLEMENTED
    assert reply.trailing == {}


def test_g04_a_tenant_that_is_none_is_refused(light: Lab) -> None:
    light.serve(tenant=lambda context: "two\nlines")
    assert light.call(key="k-1").reason == "NOT_AUTHENTICATED"


def test_g01_one_field_may_be_named_as_text() -> None:
    from semel import ConfigurationError, Semel
    from semel.grpc import Method

    IdempotencyInterceptor(once=Semel("memory://"), anonymous=True, request_id="order_id")
    with pytest.raises(ConfigurationError, match=r"methods\['/a.B/C'\]: request_id"):
        IdempotencyInterceptor(
            once=Semel("memory://"),
            anonymous=True,
            methods={"/a.B/C": Method(request_id="order_id")},  # type: ignore[arg-type]  # wrong on purpose
        )

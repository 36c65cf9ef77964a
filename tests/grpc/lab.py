"""A shop on a real port, threaded or grpc.aio, and a client: one test body for both colours.

A behaviour is plain code, `act(request, say)`: it returns a response, raises, or raises `Stop` to abort.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # ships no types

from semel import AsyncSemel, Semel
from semel.grpc import AsyncIdempotencyInterceptor, IdempotencyInterceptor

shop: Any
shop_grpc: Any
shop, shop_grpc = grpc.protos_and_services("tests/grpc/shop.proto")

T = TypeVar("T")
SERVICE = "/semel.tests.shop.Shop"
KEY = "idempotency-key"
MARKER = "idempotency-replayed"
PUSHBACK = "grpc-retry-pushback-ms"


class Stop(Exception):
    """Abort the call with this status."""

    def __init__(
        self, code: grpc.StatusCode, details: str = "", trailing: Iterable[tuple[str, str | bytes]] = ()
    ) -> None:
        super().__init__(details)
        self.code, self.details, self.trailing = code, details, tuple(trailing)


class Loop:
    """One loop in a thread for all grpc.aio servers of a process."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="aio-servers", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


@dataclass
class Reply:
    """What a client saw."""

    code: grpc.StatusCode
    details: str
    initial: dict[str, Any]
    trailing: dict[str, Any]
    messages: list[Any] = field(default_factory=list)

    @property
    def message(self) -> Any:
        assert self.code is grpc.StatusCode.OK, f"{self.code}: {self.details}"
        return self.messages[0]

    @property
    def replayed(self) -> str | None:
        found: str | None = self.initial.get(MARKER)
        return found

    @property
    def infos(self) -> dict[str, Any]:
        """The details of a status, by the name of their type."""
        status = status_pb2.Status.FromString(self.trailing["grpc-status-details-bin"])
        assert status.code == self.code.value[0]
        assert status.message == self.details
        found = {}
        for packed in status.details:
            name = packed.TypeName().rpartition(".")[2]
            found[name] = getattr(error_details_pb2, name).FromString(packed.value)
        return found

    @property
    def reason(self) -> str:
        info = self.infos["ErrorInfo"]
        assert info.domain == "semel"
        return str(info.reason)


def who(context: Any) -> str | None:
    """The principal: what a real server would take from a verified token."""
    return next((value for name, value in context.invocation_metadata() if name == "user"), "ann")


class Lab:
    def __init__(self, colour: str, url: str, loop: Loop) -> None:
        self.colour = colour
        self.url = url
        self.loop = loop
        self.tenant = uuid.uuid4().hex
        self.calls: list[Any] = []
        self.finished: list[Any] = []
        self.act: Callable[[Any, Any], Any] = lambda request, _: shop.Made(id=f"order of {request.item}")
        self._closing: list[Callable[[], Any]] = []
        self._pool = ThreadPoolExecutor(8)
        self.once: Any = None
        self.channel: Any = None
        self.interceptor: Any = None
        self.generic: tuple[grpc.GenericRpcHandler, ...] = ()

    # ---------------------------------------------------------------------------------------- server

    def serve(
        self, *, settings: dict[str, Any] | None = None, outer: Iterable[Any] = (), **options: Any
    ) -> Lab:
        """Start a server with the interceptor; `settings` are the face's."""
        options = {"principal": who} | options
        if options.get("anonymous"):
            del options["principal"]
        kind: Any = Semel if self.colour == "sync" else AsyncSemel
        given: dict[str, Any] = {"tenant": self.tenant, "timeout": 20}  # a busy machine is no broken store
        self.once = kind(self.url, **given | (settings or {}))
        interceptor: Any = IdempotencyInterceptor if self.colour == "sync" else AsyncIdempotencyInterceptor
        self.interceptor = interceptor(once=self.once, **options)
        chain = [*outer, self.interceptor]
        port = self._sync(chain) if self.colour == "sync" else self.loop.run(self._async(chain))
        self.port = port
        self.channel = self.connect()
        return self

    def connect(self, options: Any = None, *interceptors: Any) -> grpc.Channel:
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}", options=options)
        self._closing.append(channel.close)
        return grpc.intercept_channel(channel, *interceptors) if interceptors else channel

    def _sync(self, chain: list[Any]) -> int:
        server = grpc.server(ThreadPoolExecutor(16), interceptors=chain)
        shop_grpc.add_ShopServicer_to_server(_Sync(self), server)
        server.add_generic_rpc_handlers(self.generic)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        self._closing += [self.once.close, lambda: server.stop(0).wait()]
        return port

    async def _async(self, chain: list[Any]) -> int:
        server = grpc.aio.server(interceptors=chain)
        shop_grpc.add_ShopServicer_to_server(_Async(self), server)
        server.add_generic_rpc_handlers(self.generic)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._closing += [
            lambda: self.loop.run(self.once.aclose()),
            lambda: self.loop.run(server.stop(0)),
        ]
        return port

    def do(self, thing: Any) -> Any:
        """What a face gave, awaited where it must be."""

        async def awaited() -> Any:
            return await thing

        return thing if self.colour == "sync" else self.loop.run(awaited())

    def close(self) -> None:
        for close in reversed(self._closing):
            close()
        self._pool.shutdown(wait=True)

    def perform(self, request: Any, say: Any) -> Any:
        self.calls.append(request)
        made = self.act(request, say)
        self.finished.append(request)
        return made

    # ---------------------------------------------------------------------------------------- client

    def call(
        self,
        method: str = "Create",
        request: Any = None,
        *,
        key: str | bytes | None = None,
        user: str | None = None,
        metadata: Iterable[tuple[str, str | bytes]] = (),
        timeout: float | None = 20,
        channel: Any = None,
    ) -> Reply:
        request = shop.Order(item="book") if request is None else request
        sent: list[tuple[str, str | bytes]] = [*metadata]
        if key is not None:
            sent.append((KEY, key))
        if user is not None:
            sent.append(("user", user))
        stub = shop_grpc.ShopStub(channel or self.channel)
        return reply_of(getattr(stub, method), request, tuple(sent), timeout)

    def later(self, *args: Any, **options: Any) -> Future[Reply]:
        return self._pool.submit(self.call, *args, **options)

    def leave(self, key: str) -> grpc.StatusCode:
        """Call, and leave when the handler has begun; what the leaver saw."""
        begun = len(self.calls)
        stub = shop_grpc.ShopStub(self.channel)
        call = stub.Create.future(shop.Order(item="book"), metadata=((KEY, key),), timeout=20)
        self.wait_for(lambda: len(self.calls) > begun, "the handler has begun")
        call.cancel()
        code: grpc.StatusCode = call.code()
        return code

    def wait_for(self, true: Callable[[], Any], what: str = "") -> None:
        until = time.monotonic() + 20
        while not true():
            assert time.monotonic() < until, f"never happened: {what or true}"
            time.sleep(0.002)


def reply_of(stub: Any, request: Any, metadata: Any, timeout: float | None) -> Reply:
    messages: list[Any] = []
    streaming = isinstance(stub, grpc.UnaryStreamMultiCallable | grpc.StreamStreamMultiCallable)
    if isinstance(stub, grpc.StreamUnaryMultiCallable | grpc.StreamStreamMultiCallable):
        request = iter(request)
    try:
        if streaming:
            call = stub(request, metadata=metadata, timeout=timeout)
            messages.extend(call)
        elif hasattr(stub, "with_call"):
            made, call = stub.with_call(request, metadata=metadata, timeout=timeout)
            messages.append(made)
        else:  # a generic callable of an intercepted channel
            raise AssertionError(type(stub))
    except grpc.RpcError as error:
        call = error
    code: Any = call.code()
    return Reply(
        code,
        call.details() or "",
        dict(call.initial_metadata() or ()),
        dict(call.trailing_metadata() or ()),
        messages,
    )


# --------------------------------------------------------------------------------------------------- servicers


class _Sync:
    """Every method does what the lab's behaviour says."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def _one(self, request: Any, context: Any) -> Any:
        try:
            return self._lab.perform(request, context)
        except Stop as stop:
            if stop.trailing:
                context.set_trailing_metadata(stop.trailing)
            context.abort(stop.code, stop.details)

    Create = Cancel = Get = Put = _one

    def Upload(self, requests: Iterator[Any], context: Any) -> Any:
        return self._one(list(requests), context)

    def Watch(self, request: Any, context: Any) -> Iterator[Any]:
        try:
            yield from self._lab.perform(request, context)
        except Stop as stop:
            context.abort(stop.code, stop.details)

    def Chat(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for request in requests:
            yield self._lab.perform(request, context)


class _Async:
    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    async def _one(self, request: Any, context: Any) -> Any:
        self._lab.calls.append(request)
        try:
            made = await asyncio.to_thread(self._lab.act, request, context)
        except Stop as stop:
            if stop.trailing:
                context.set_trailing_metadata(stop.trailing)
            await context.abort(stop.code, stop.details)
        else:
            self._lab.finished.append(request)  # not reached by a coroutine that was cancelled meanwhile
            return made

    Create = Cancel = Get = Put = _one

    async def Upload(self, requests: Any, context: Any) -> Any:
        return await self._one([request async for request in requests], context)

    async def Watch(self, request: Any, context: Any) -> Any:
        self._lab.calls.append(request)
        try:
            for made in self._lab.act(request, context):
                await asyncio.sleep(0)
                yield made
        except Stop as stop:
            await context.abort(stop.code, stop.details)
        self._lab.finished.append(request)

    async def Chat(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            yield await self._one(request, context)

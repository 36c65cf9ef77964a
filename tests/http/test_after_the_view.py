"""A handler has returned: whatever cannot be done with its response, its effect does not happen again. And one that raised."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from django.core.exceptions import SynchronousOnlyOperation
from django.http import HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.utils.decorators import method_decorator
from django.views import View
from flask import Response
from starlette.responses import StreamingResponse
from starlette.routing import Route, Router

from semel import AsyncSemel, CodecError, ConfigurationError, Semel
from semel.http.django import idempotent as django_idempotent
from semel.http.guard import Admitted, Guard, Keyed
from semel.http.snapshot import Snapshot
from semel.http.wsgi import IdempotencyMiddleware as Wsgi
from tests.http.conftest import Edge
from tests.http.frames import plain_user
from tests.http.test_corners import HEADERS, ask, django_site, flask_app, marks, once
from tests.http.test_frameworks import Frame, frame
from tests.http.test_rows_keys import problem

__all__ = ["django_site", "frame", "once"]  # fixtures

# The framework stands inside of the middleware and answers for its handlers: that response is the outcome.
OUTSIDE = {"flask-extension", "litestar-inside", "litestar-around", "quart", "bottle"}
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "OPTIONS": {}}]


class Context:
    """What a template asks for, as a lazy query would."""

    def __init__(self) -> None:
        self.is_broken = False

    def rows(self) -> str:
        if self.is_broken:
            raise ArithmeticError("no such row")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return "rows"
        raise SynchronousOnlyOperation("the database is asked for it")


def page(request: Any, context: Context) -> TemplateResponse:
    template = engines["django"].from_string("{{ who }} {{ context.rows }}")
    return TemplateResponse(request, template, {"who": "view", "context": context}, status=201)


def test_h11_django_renders_a_coroutine_views_template_off_the_loop(django_site: Any) -> None:
    calls: list[str] = []

    async def view(request: Any) -> Any:
        calls.append("run")
        return page(request, Context())

    guarded = django_idempotent(once=AsyncSemel("memory://"), principal=plain_user)(view)
    answers = ask(django_site(guarded, is_async=True, TEMPLATES=TEMPLATES), {}, {})
    assert [(answer.status_code, answer.text) for answer in answers] == [(201, "view rows")] * 2
    assert (calls, marks(answers)) == (["run"], ["false", "true"])


class Signed:
    """A middleware that changes what a template is given."""

    def __init__(self, get_response: Callable[..., Any]) -> None:
        self._get_response = get_response

    def __call__(self, request: Any) -> Any:
        return self._get_response(request)

    def process_template_response(self, request: Any, response: Any) -> Any:
        if "replace" in request.headers:
            return page(request, Context())
        response.context_data["who"] = "middleware"
        return response


SIGNED = {"TEMPLATES": TEMPLATES, "MIDDLEWARE": ["tests.http.test_after_the_view.Signed"]}


def test_h11_django_middlewares_see_a_template_response_before_it_is_rendered(
    django_site: Any, once: Semel
) -> None:
    guarded = django_idempotent(once=once, principal=plain_user)(lambda request: page(request, Context()))
    answers = ask(django_site(guarded, **SIGNED), {}, {})
    assert [(answer.status_code, answer.text) for answer in answers] == [(201, "middleware rows")] * 2
    assert marks(answers) == ["false", "true"]


@pytest.mark.parametrize("is_async", [False, True], ids=["wsgi", "asgi"])
def test_h15_django_a_template_that_fails_does_not_run_its_view_again(
    django_site: Any, is_async: bool
) -> None:
    calls, context = [], Context()
    context.is_broken = True

    def view(request: Any) -> Any:
        calls.append("run")
        return page(request, context)

    async def aview(request: Any) -> Any:
        return view(request)

    semel: Any = AsyncSemel("memory://") if is_async else Semel("memory://")
    guarded = django_idempotent(once=semel, principal=plain_user)(aview if is_async else view)
    first, again = ask(django_site(guarded, is_async=is_async, TEMPLATES=TEMPLATES), {}, {})
    assert (first.status_code, again.status_code, problem(again)) == (500, 422, "response-not-stored")
    assert (calls, again.json()["original_status"]) == (["run"], 201)


def test_h16_django_a_template_response_that_is_never_rendered_does_not_hold_its_key(
    django_site: Any, once: Semel
) -> None:
    guarded = django_idempotent(once=once, principal=plain_user)(lambda request: page(request, Context()))
    app = django_site(guarded, **SIGNED)
    first = ask(app, {"headers": {**HEADERS, "Replace": "1"}})[0]
    gc.collect()
    again = ask(app, {})[0]
    assert (first.status_code, again.status_code, problem(again)) == (201, 422, "response-not-stored")


def test_h32_flask_an_address_is_recorded_as_it_is_sent(once: Semel) -> None:
    calls: list[str] = []

    def view() -> Response:
        calls.append("run")
        response = Response("made", 201)
        response.location = "/orders/żółw"
        return response

    answers = ask(flask_app(view, once), {}, {})
    assert [answer.status_code for answer in answers] == [201, 201]
    assert {answer.headers["location"] for answer in answers} == {"/orders/%C5%BC%C3%B3%C5%82w"}
    assert (calls, marks(answers)) == (["run"], ["false", "true"])


def test_h15_flask_headers_that_cannot_be_sent_do_not_run_a_view_again(once: Semel) -> None:
    calls: list[str] = []

    def view() -> Response:
        calls.append("run")
        return Response("made", 201, headers={"X-Name": "żółw"})

    first, again = ask(flask_app(view, once), {}, {})
    assert (first.status_code, again.status_code, problem(again)) == (500, 422, "response-not-stored")
    assert calls == ["run"]


def test_h14_a_stored_that_raises_does_not_run_the_handler_again(shop: Edge) -> None:
    def broken(status: int) -> bool:
        raise ZeroDivisionError

    shop.open(stored=broken)
    try:
        assert shop.send("/status/404").status_code == 500
    except ZeroDivisionError:
        assert shop.colour == "sync"
    assert problem(shop.send("/status/404")) == "response-not-stored"
    assert shop.count("status") == 1


def test_h20_server_sent_events_are_not_run_again(colour: str) -> None:
    calls: list[str] = []

    async def events(_: Any) -> Any:
        calls.append("run")

        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    def plain(_: Any, start: Callable[..., Any]) -> Iterator[bytes]:
        calls.append("run")
        start("200 OK", [("Content-Type", "text/event-stream")])
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    app: Any = plain if colour == "sync" else Router([Route("/", events, methods=["POST"])])
    edge = Edge(colour, "memory://").open(app=app)
    try:
        assert edge.send("/").status_code == 500
    except ConfigurationError as error:
        assert "events=" in str(error)  # noqa: PT017 - some servers raise it, others answer
    again = edge.send("/")
    assert (again.status_code, problem(again), calls) == (422, "response-not-stored", ["run"])
    edge.close()


# ------------------------------------------------------------------------------------------- a response that was begun


def lost_stream(colour: str) -> Edge:
    """A process was killed when its handler had ended, and its response had begun."""
    edge = Edge(colour, "memory://").open(lease=0.2)
    guard: Guard = edge.plan.fallback

    async def killed() -> None:
        admitted = await guard.admit(
            Keyed("key-1", "ada", None, bytes.fromhex(edge.print_of("/stream")), 0.0, "POST /stream")
        )
        assert isinstance(admitted, Admitted)
        run = guard.begin(admitted)
        await guard._noted(run, Snapshot(201, kept=False))
        guard.engine.heart.remove(run)

    edge.drive(killed())
    return edge


def test_h16_a_begun_response_that_cannot_be_read_is_told_and_frees_nothing(
    monkeypatch: pytest.MonkeyPatch, colour: str
) -> None:
    edge = lost_stream(colour)

    def unreadable(data: bytes) -> Snapshot:
        raise CodecError("a newer version wrote it")

    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "decode", unreadable)
        first = edge.send("/stream")
    again = edge.send("/stream")
    assert [problem(answer) for answer in (first, again)] == ["response-not-stored"] * 2
    assert "original_status" not in again.json()
    assert edge.count("stream") == 0
    edge.close()


def test_h16_a_run_that_cannot_be_resumed_neither_holds_its_key_nor_runs(
    monkeypatch: pytest.MonkeyPatch, colour: str
) -> None:
    edge = lost_stream(colour)

    def broken(*_: Any) -> None:
        raise ArithmeticError("whatever it is")

    with monkeypatch.context() as patch:
        patch.setattr("semel.http.guard.not_kept", broken)
        try:
            assert edge.send("/stream").status_code == 500
        except ArithmeticError:
            assert edge.colour == "sync"
    again = edge.send("/stream")
    assert (again.status_code, problem(again)) == (422, "response-not-stored"), "and not 409 for ever"
    assert (again.json()["original_status"], edge.count("stream")) == (201, 0)
    edge.close()


# ----------------------------------------------------------------------------------------------------- class-based views


@pytest.mark.parametrize("where", ["post", "dispatch"])
def test_h38_django_a_class_based_view_has_one_guard_for_all_its_requests(
    django_site: Any, once: Semel, where: str
) -> None:
    decorated = method_decorator(django_idempotent(once=once, principal=plain_user, quota=1.0), name=where)

    @decorated
    class Orders(View):
        def post(self, request: Any) -> Any:
            return HttpResponse("made")

    app = django_site(Orders.as_view())
    sent = [{"headers": {**HEADERS, "Idempotency-Key": f"k{number}"}} for number in range(4)]
    assert 429 in [answer.status_code for answer in ask(app, *sent)]


@pytest.mark.parametrize("where", ["post", "dispatch"])
def test_h11_django_a_class_based_coroutine_view(django_site: Any, where: str) -> None:
    calls: list[str] = []
    guard = django_idempotent(once=AsyncSemel("memory://"), principal=plain_user)

    @method_decorator(guard, name=where)
    class Orders(View):
        async def post(self, request: Any) -> Any:
            calls.append("run")
            return HttpResponse("made")

    answers = ask(django_site(Orders.as_view(), is_async=True), {}, {})
    assert ([answer.text for answer in answers], marks(answers)) == (["made"] * 2, ["false", "true"])
    assert calls == ["run"]


def test_django_a_view_of_the_other_colour_is_refused_before_it_runs(django_site: Any, once: Semel) -> None:
    calls: list[str] = []
    asynchronous = django_idempotent(once=AsyncSemel("memory://"), principal=plain_user)

    async def aview(request: Any) -> None:
        calls.append("run")

    with pytest.raises(ConfigurationError, match="AsyncSemel"):
        django_idempotent(once=once, principal=plain_user)(aview)
    with pytest.raises(ConfigurationError, match="give a Semel"):
        asyncio.run(asynchronous(lambda request: calls.append("run"))(None))
    assert calls == []


# --------------------------------------------------------------------------------------------------- a handler that raised


@pytest.mark.parametrize(
    "options", [{"effects": "opaque"}, {"profile": "stripe-v1"}], ids=["opaque", "stripe"]
)
def test_h11_h15_a_failure_that_is_kept_is_the_same_wherever_semel_stands(
    frame: Frame, options: dict[str, Any]
) -> None:
    frame.open(**options)
    frame.ledger.failing = 9
    first, again = frame.post("/fail"), frame.post("/fail")
    marker = "idempotent-replayed" if "profile" in options else "idempotency-replayed"
    assert (first.status_code, again.status_code, again.headers[marker]) == (500, 500, "true")
    assert (again.content, again.headers["content-type"]) == (first.content, first.headers["content-type"])
    if frame.name not in OUTSIDE:
        assert first.headers["content-type"] == "application/problem+json"
        assert (first.json()["type"], first.json()["retryable"]) == (
            "urn:semel:problem:handler-failed",
            False,
        )
        assert first.headers["cache-control"] == again.headers["cache-control"] == "no-store"
    assert frame.count("fail") == 1


def test_h15_a_failure_that_is_kept_names_its_error(shop: Edge) -> None:
    seen: list[Any] = []

    async def app(*_: Any) -> None:
        raise ArithmeticError("no stock")

    def plain(*_: Any) -> Any:
        raise ArithmeticError("no stock")

    shop.open(app=plain if shop.colour == "sync" else app, effects="opaque", semel={"hooks": [seen.append]})
    first, again = shop.send("/"), shop.send("/")
    assert (first.status_code, first.headers["idempotency-replayed"]) == (500, "false")
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert [str(event.error) for event in seen if type(event).__name__ == "Failed"] == ["no stock"]


def test_h11_h15_a_generator_that_fails_before_its_first_piece_is_told_as_its_repetition(once: Semel) -> None:
    """A plain WSGI application may be a generator: nothing of it has run when it is called."""

    def piece() -> bytes:
        raise ArithmeticError("no stock")

    def app(environ: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        yield piece()

    guarded = Wsgi(app, once=once, principal=plain_user, authenticated_outside=True, effects="opaque")
    with httpx.Client(transport=httpx.WSGITransport(guarded), base_url="http://shop") as client:
        first, again = [client.post("/", headers=HEADERS) for _ in range(2)]
    assert (first.status_code, first.headers["idempotency-replayed"]) == (500, "false")
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")


def test_h15_flask_an_opaque_view_whose_result_is_no_response_is_not_run_again(once: Semel) -> None:
    calls: list[str] = []

    def view() -> Any:
        calls.append("run")
        return object()

    app = flask_app(view, once, effects="opaque")
    first, again = ask(app, {}, {})
    assert (first.status_code, again.status_code, problem(again)) == (500, 422, "response-not-stored")
    assert calls == ["run"]
    assert ask(app, {"headers": {}})[0].status_code == 500, "without a key as ever"


@pytest.mark.parametrize("effects", ["db", "steps"])
@pytest.mark.parametrize("is_handled", [False, True])
def test_h15_flask_what_teardown_rolls_back_after_such_a_view_is_done_by_its_repetition(
    once: Semel, effects: str, is_handled: bool
) -> None:
    results: list[Any] = [object(), "made"]
    pending: list[str] = []
    committed: list[str] = []

    def view() -> Any:
        pending.append("order")
        return results.pop(0)

    app = flask_app(view, once, effects=effects)
    if is_handled:  # the request ends as a success: what the handler says is the outcome
        app.register_error_handler(TypeError, lambda _: ("sorry", 400))

    @app.teardown_request
    def end(error: BaseException | None) -> None:
        if error is None:
            committed.extend(pending)
        pending.clear()

    first, again = ask(app, {}, {})
    expected = (400, 400, ["false", "true"]) if is_handled else (500, 200, [None, "false"])
    assert (first.status_code, again.status_code, marks([first, again])) == expected
    assert committed == ["order"]

"""Flask: an extension for whole applications, and a decorator for views, which claims after `before_request` has run.

Idempotency(app, once=once, principal=user_id, authorize=may_proceed)

@app.post("/orders")
@idempotent(once=once, principal=lambda request: g.user.id)
def create_order(): ...
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, ParamSpec, Unpack

from semel.errors import ConfigurationError
from semel.http.body import Body, TooLarge, feed_parts
from semel.http.config import Plan, configure
from semel.http.guard import Guard
from semel.http.intake import First, enter
from semel.http.options import DecoratorOptions, MiddlewareOptions
from semel.http.order import check_order, guards
from semel.http.problem import ANSWERED, DEFAULT_BASE, Problem, of_error
from semel.http.reply import Reply, problem_reply
from semel.http.views import Headers, Stream, Unmade, first_view
from semel.http.wsgi import EnvironRequest, IdempotencyMiddleware, read_body
from semel.once import Semel
from semel.run import Run
from semel.runtime import run_sync

try:
    from flask import Flask, Request, Response, current_app, make_response, request
    from werkzeug.exceptions import InternalServerError
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        f"semel.http.flask needs {missing.name!r}: pip install 'semel[flask]'"
    ) from missing

__all__ = ["Idempotency", "idempotent", "install"]

P = ParamSpec("P")
_CHUNK = 1 << 16
_WRITES = ("POST", "PATCH", "PUT", "DELETE")
_PAGE = InternalServerError().get_body().encode()


class Idempotency:
    """The WSGI middleware as an extension: `Idempotency(app, once=…)`, or `init_app(app)` later. Options as there.

    Resolvers get a Werkzeug request: no Flask context exists yet, because a replay never enters the application.
    """

    def __init__(
        self, app: Flask | None = None, *, once: Semel, **options: Unpack[MiddlewareOptions]
    ) -> None:
        self._once = once
        self._options = options
        IdempotencyMiddleware(lambda *_: (), once=once, **options)  # what is wrong is refused now
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        if "semel" in app.extensions:
            raise ConfigurationError("this Flask application has an Idempotency extension already")
        app.extensions["semel"] = self
        around = IdempotencyMiddleware(app.wsgi_app, once=self._once, **self._options)
        app.wsgi_app = around  # type: ignore[method-assign]  # as Flask asks of a WSGI middleware
        install(app)


def install(app: Flask) -> None:
    """Answer semel's own errors as problems.

    Raises ConfigurationError for a view whose decorators are in the wrong order; one that is added later is told with the
    first request.
    """
    is_checked = False

    def check() -> None:
        nonlocal is_checked
        if not is_checked:
            check_order(app.view_functions.values())
            is_checked = True

    check_order(app.view_functions.values())
    app.before_request(check)

    def answer(error: Exception) -> Response:
        problem = of_error(error)
        if problem is None:
            raise error
        return _raw(problem_reply(DEFAULT_BASE, problem))

    for kind in ANSWERED:
        app.register_error_handler(kind, answer)


def idempotent(
    *, once: Semel, **options: Unpack[DecoratorOptions]
) -> Callable[[Callable[P, Any]], Callable[P, Response]]:
    """Decorate a view, below `@app.post(...)`. Options as the middleware's; authentication has happened by now."""
    plan = configure(once, "sync", {"methods": _WRITES, **options}, guarded=True)

    def decorate(view: Callable[P, Any]) -> Callable[P, Response]:
        @wraps(view)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Response:
            return _answered(plan, lambda: current_app.ensure_sync(view)(*args, **kwargs))

        guards(wrapper, view)
        return wrapper

    return decorate


def _response(view: Callable[[], Any], *, is_opaque: bool = False) -> Response:
    """The view's response, also the one that the application's own error handler makes of what it raises.

    A result that is no response is a failure of the view: Flask shows the error to `teardown_request`, where sessions roll
    back. Only what cannot be undone stays done (`is_opaque`).
    """
    try:
        returned = view()
        if not is_opaque:
            return make_response(returned)
    except Exception as error:  # noqa: BLE001 - raised again by Flask when nobody handles it
        return make_response(current_app.handle_user_exception(error))
    try:
        return make_response(returned)
    except Exception as error:
        raise Unmade(error) from error


def _kept(guard: Guard, view: Callable[[], Response]) -> Response:
    """Where failures are kept too: also the 500 that Flask makes of what nobody handles, logged and told as always.

    Its own page says nothing of keys, so the problem stands in its place; what a handler of the application made is left alone.
    """
    try:
        return view()
    except Unmade:
        raise
    except Exception as error:  # noqa: BLE001 - raised again by Flask where it is to be seen, as in tests
        response = make_response(current_app.handle_exception(error))
        if (
            response.content_length == len(_PAGE) and response.get_data() == _PAGE
        ):  # no stream is read for that
            reply = guard.replies.failed()
            response.set_data(reply.body)
            response.headers.update({name.decode(): value.decode() for name, value in reply.headers})
        return response


def _answered(plan: Plan, view: Callable[[], Any]) -> Response:
    entered = run_sync(enter(plan, _FlaskRequest(request)))
    if isinstance(entered, Reply):
        return _raw(entered)
    if entered is None:
        return _response(view)
    if not isinstance(entered, First):
        return _closing(partial(_response, view), entered)

    async def run() -> Response:
        made = partial(_response, view, is_opaque=entered.guard.rules.effects == "opaque")
        shown = partial(_kept, entered.guard, made) if entered.guard.keeps_failures else made
        return _closing(shown, entered.body)

    response: Response = run_sync(first_view(entered.guard, entered.admitted, run, _LOOK))
    return response


def _closing(view: Callable[[], Response], body: Body) -> Response:
    """The view reads an upload from our file: it is closed when the response is over."""
    try:
        response = view()
    except BaseException:
        body.close()
        raise
    response.call_on_close(body.close)
    return response


class _FlaskRequest(EnvironRequest):
    __slots__ = ("_request",)

    def __init__(self, proxy: Request) -> None:
        super().__init__(proxy.environ)
        self._request = proxy

    def request(self) -> Any:
        return self._request

    async def read(self, limit: int) -> Body | Problem:
        return _body_of(limit)


def _body_of(limit: int) -> Body | Problem:
    """Flask keeps what is read here, or reads it again: the view sees the same request."""
    given: Any = request._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001 - the request itself
    if "form" in vars(given):
        return _parsed(limit, given)
    if given.mimetype == "multipart/form-data" and "stream" not in vars(given):
        body = read_body(limit, given.environ)
        if isinstance(body, Body):
            given.environ["wsgi.input"] = body.file()
            given.environ["CONTENT_LENGTH"] = str(body.size)
        return body
    return _read(limit, given)


def _read(limit: int, given: Any) -> Body | Problem:
    """Into memory, where Flask keeps it, but no further than to the limit (H25)."""
    body = Body(limit)
    known = vars(given).get("_cached_data")  # somebody has read it
    is_touched = "stream" in vars(given)
    if known is None and (given.content_length or 0) > limit:
        return Problem.of("body-too-large", limit=limit)
    try:
        if known is not None:
            body.feed(known)
        else:
            while chunk := given.stream.read(_CHUNK):
                body.feed(chunk)
    except TooLarge:
        return Problem.of("body-too-large", limit=limit)
    if known is None and body.size < (given.content_length or 0):
        return _incomplete(body, is_touched=is_touched)
    if known is None:
        known = body.whole if body.whole is not None else bytes(body.view())
        vars(given)["_cached_data"] = known
    vars(given)["stream"] = io.BytesIO(known)  # read anew
    return body


def _incomplete(body: Body, *, is_touched: bool) -> Problem:
    """Without all of it two requests would look the same (H05)."""
    body.close()
    if is_touched:
        raise ConfigurationError(
            "somebody has read the body from request.stream, or with get_data(cache=False), which keeps nothing: what the key "
            "stands for cannot be compared. Read it with request.get_data()"
        )
    return Problem.of("body-incomplete")


def _parsed(limit: int, given: Request) -> Body | Problem:
    """A form that somebody has looked at: its bytes are gone. Files are hashed and rewound."""
    body = Body(limit)
    try:
        for name, value in given.form.items(multi=True):
            feed_parts(body, name, value)
        for name, file in given.files.items(multi=True):
            content = hashlib.sha256()
            file.stream.seek(0)
            while chunk := file.stream.read(1 << 16):
                content.update(chunk)
            file.stream.seek(0)
            feed_parts(body, name, file.filename or "", file.content_type or "", content.hexdigest())
    except TooLarge:
        return Problem.of("body-too-large", limit=limit)
    return body


class _FlaskLook:
    def status(self, response: Response) -> int:
        return response.status_code

    def headers(self, response: Response) -> Headers:
        """As Werkzeug will send them: addresses as URIs, and no length that it would not know better."""
        sent = response.get_wsgi_headers(request.environ)
        if "content-length" not in response.headers:
            sent.pop("content-length", None)
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]

    def set_headers(self, response: Response, headers: Headers) -> None:
        response.headers.clear()
        response.headers.extend(
            [(name.decode("latin-1").title(), value.decode("latin-1")) for name, value in headers]
        )

    async def body(self, response: Response) -> bytes | None:
        if response.is_streamed:
            return None
        response.direct_passthrough = False
        return response.get_data()

    def postponed(self, response: Response, guard: Guard, run: Run) -> bool:
        del response, guard, run
        return False

    def passing(self, response: Response) -> bool:
        del response
        return False  # a decorated view has run

    def tee(self, response: Response, guard: Guard, run: Run, headers: Headers) -> None:
        response.direct_passthrough = False
        close = getattr(response.response, "close", None)
        then = () if close is None else (close,)
        response.response = Stream(guard, run, response.status_code, headers, response.iter_encoded(), then)

    def problem(self, guard: Guard, problem: Problem) -> Response:
        return _raw(guard.replies.problem(problem))


_LOOK = _FlaskLook()


def _raw(reply: Reply) -> Response:
    response = Response(reply.body, status=reply.status)
    _LOOK.set_headers(response, reply.headers)
    return response

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
from functools import wraps
from typing import Any, ParamSpec

from semel.errors import ConfigurationError
from semel.http.body import Body, TooLarge, feed_parts
from semel.http.config import Plan, configure
from semel.http.guard import Admitted, Guard
from semel.http.intake import identify, keyed_of
from semel.http.problem import ANSWERED, DEFAULT_BASE, Problem, of_error
from semel.http.reply import problem_reply, replay_reply
from semel.http.snapshot import Snapshot
from semel.http.views import Headers, Stream, first_view
from semel.http.wsgi import IdempotencyMiddleware, _Incoming
from semel.run import Run
from semel.runtime import run_sync

try:
    from flask import Flask, Request, Response, current_app, make_response, request
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        f"semel.http.flask needs {missing.name!r}: pip install 'semel[flask]'"
    ) from missing

__all__ = ["Idempotency", "idempotent", "install"]

P = ParamSpec("P")
_WRITES = ("POST", "PATCH", "PUT", "DELETE")


class Idempotency:
    """The WSGI middleware as an extension: `Idempotency(app, once=…)`, or `init_app(app)` later. Options as there.

    Resolvers get a Werkzeug request: no Flask context exists yet, because a replay never enters the application.
    """

    def __init__(self, app: Flask | None = None, *, once: Any, **options: Any) -> None:
        self._options = {"once": once, **options}
        IdempotencyMiddleware(lambda *_: (), **self._options)  # what is wrong is refused now
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        if "semel" in app.extensions:
            raise ConfigurationError("this Flask application has an Idempotency extension already")
        app.extensions["semel"] = self
        app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, **self._options)  # type: ignore[method-assign]
        install(app)


def install(app: Flask) -> None:
    """Answer semel's own errors as problems."""

    def answer(error: Exception) -> Response:
        problem = of_error(error)
        if problem is None:
            raise error
        return _raw(problem.status, *problem_reply(DEFAULT_BASE, problem))

    for kind in ANSWERED:
        app.register_error_handler(kind, answer)


def idempotent(*, once: Any, **options: Any) -> Callable[[Callable[P, Any]], Callable[P, Response]]:
    """Decorate a view, below `@app.post(...)`. Options as the middleware's; authentication has happened by now."""
    plan = configure(once, "sync", {"methods": _WRITES, **options}, guarded=True)

    def decorate(view: Callable[P, Any]) -> Callable[P, Response]:
        @wraps(view)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Response:
            return _answered(plan, lambda: _response(lambda: current_app.ensure_sync(view)(*args, **kwargs)))

        return wrapper

    return decorate


def _response(view: Callable[[], Any]) -> Response:
    """The view's response, also the one that the application's own error handler makes of what it raises."""
    try:
        return make_response(view())
    except Exception as error:  # noqa: BLE001 - raised again by Flask when nobody handles it
        return make_response(current_app.handle_user_exception(error))


def _answered(plan: Plan, view: Callable[[], Response]) -> Response:
    incoming = _FlaskIncoming(request)
    asked = identify(plan, incoming)
    if asked is None:
        return view()
    if isinstance(asked, Problem):
        assert plan.fallback is not None  # noqa: S101 - a decorated view has one
        return _LOOK.problem(plan.fallback, asked)
    guard = asked.guard

    async def read() -> Body | Problem:
        return _body_of(guard)

    known = run_sync(keyed_of(plan, asked, incoming, read))
    if isinstance(known, Problem):
        return _LOOK.problem(guard, known)
    if isinstance(known, Body):
        known.close()
        return view()
    keyed, body = known
    body.close()
    admitted = run_sync(guard.admit(keyed))
    if isinstance(admitted, Admitted):

        async def run() -> Response:
            return view()

        response: Response = run_sync(first_view(guard, admitted, run, _LOOK))
        return response
    if admitted is None:  # fail_open
        return view()
    if isinstance(admitted, Snapshot):
        return _raw(admitted.status, *replay_reply(guard.rules, admitted))
    return _LOOK.problem(guard, admitted)


class _FlaskIncoming(_Incoming):
    __slots__ = ("_request",)

    def __init__(self, proxy: Request) -> None:
        super().__init__(proxy.environ)
        self._request = proxy

    def request(self) -> Any:
        return self._request


def _body_of(guard: Guard) -> Body | Problem:
    """Flask keeps what is read here, so the view can read it again; files of a form are hashed and rewound."""
    body = Body(guard.rules.max_body)
    try:
        # A form that somebody has looked at is parsed, and its bytes are gone.
        if request.mimetype == "multipart/form-data" or "form" in vars(request._get_current_object()):  # type: ignore[attr-defined]  # noqa: SLF001
            for name, value in request.form.items(multi=True):
                feed_parts(body, name, value)
            for name, file in request.files.items(multi=True):
                content = hashlib.sha256()
                file.stream.seek(0)
                while chunk := file.stream.read(1 << 16):
                    content.update(chunk)
                file.stream.seek(0)
                feed_parts(body, name, file.filename or "", file.content_type or "", content.hexdigest())
        else:
            data = request.get_data(cache=True)
            body.feed(data)
            request._get_current_object().__dict__["stream"] = io.BytesIO(data)  # type: ignore[attr-defined]  # noqa: SLF001 - read anew
    except TooLarge:
        return Problem.of("body-too-large", limit=guard.rules.max_body)
    return body


class _FlaskLook:
    def status(self, response: Response) -> int:
        return response.status_code

    def headers(self, response: Response) -> Headers:
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.items()]

    def set_headers(self, response: Response, headers: Headers) -> None:
        response.headers.clear()
        response.headers.extend(
            [(name.decode("latin-1").title(), value.decode("latin-1")) for name, value in headers]
        )

    def body(self, response: Response) -> bytes | None:
        if response.is_streamed:
            return None
        response.direct_passthrough = False
        return response.get_data()

    def tee(self, response: Response, guard: Guard, run: Run, headers: Headers) -> None:
        response.direct_passthrough = False
        close = getattr(response.response, "close", None)
        then = () if close is None else (close,)
        response.response = Stream(guard, run, response.status_code, headers, response.iter_encoded(), then)

    def problem(self, guard: Guard, problem: Problem) -> Response:
        return _raw(problem.status, *problem_reply(guard.rules.problem_base, problem))


_LOOK = _FlaskLook()


def _raw(status: int, headers: Headers, body: bytes) -> Response:
    response = Response(body, status=status)
    _LOOK.set_headers(response, headers)
    return response
